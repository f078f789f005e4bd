# Common commands. PYTHON is only used to make the virtual environment.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: install train test test-all coverage reproduce bench lint docs

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint,docs]'
	@touch $@

# Train on dates, then predict three of them.
train: install
	$(BIN)/lightning-tfm fit --config experiments/date_attention_lstm.yaml
	$(BIN)/lightning-tfm generate $$(ls -td runs/date_attention_lstm/version_*/ | head -n 1)checkpoints/best.ckpt \
		'Thursday, May 3, 1979' '7/4/76' 'Fri 31, Dec 1999'

test: install
	$(BIN)/python -m pytest

# All tests: also whole runs in several processes, killed and resumed, damaged files, the tutorials, and the report in a
# browser, which needs Debian's packages chromium and chromium-driver, or others of these names.
test-all: install
	$(BIN)/python -m pytest -m ""

# The line coverage of all tests and their child processes.
coverage: install
	$(BIN)/python -m pytest -m "" --cov --cov-report=term-missing:skip-covered \
		--deselect tests/test_faults.py::test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept # coverage writes, too

# Test the claims of all experiments with seeds 21 to 23.
reproduce: install
	$(BIN)/lightning-tfm reproduce

# Compare with peers, side by side; FULL=1 reruns the peers that are compared by a recorded run.
bench: $(INSTALLED)-bench
	$(BIN)/python -m benchmarks $(if $(FULL),--full)

$(INSTALLED)-bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	# the only dependencies of yoyodyne that are needed here
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps yoyodyne maxwell
	@touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/proselint check README.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md docs/*.md docs/*/*.md
	$(BIN)/mypy

# The documentation, in docs/_build/html. A warning is an error.
docs: install
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
