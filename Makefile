# Common commands. PYTHON is only used to create the virtual environment.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: install train test test-all test-soak coverage reproduce bench lint docs

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint,docs]'
	@touch $@

# Train the date experiment, then predict three dates.
train: install
	$(BIN)/lightning-tfm fit date_attention_lstm
	$(BIN)/lightning-tfm generate $$(ls -td runs/date_attention_lstm/version_*/ | head -n 1)checkpoints/best.ckpt \
		'Thursday, May 3, 1979' '7/4/76' 'Fri 31, Dec 1999'

test: install
	$(BIN)/python -m pytest

# Run all tests but those of test-soak, including runs in several processes, killed and resumed runs, damaged files, the
# tutorials, the report and the explorer in browsers, which require chromium, chromiumdriver and firefox-esr (Debian packages
# chromium, chromium-driver and firefox-esr), its scripts in Node (Debian package nodejs), and runs on several machines in
# network namespaces, which require root on Linux and the command ip (Debian package iproute2).
test-all: install
	$(BIN)/python -m pytest -m "not soak" --durations=20

# Run the tests with kills that test-all leaves out: of more networks and optimizers, and of a sweep that is killed 50 times.
test-soak: install
	$(BIN)/python -m pytest -m soak

# Measure the line coverage of test-all, including their child processes, except two tests in which coverage itself fails:
# it cannot write its data to a full disk, and a signal that interrupts it can leave its lock locked.
coverage: install
	$(BIN)/python -m pytest -m "not soak" --cov --cov-report=term-missing:skip-covered \
		--deselect tests/runs/test_damaged_checkpoints.py::test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept \
		--deselect tests/runs/test_signals.py::test_two_signals_at_once_print_no_traceback

# Test the claims of all experiments with seeds 21 to 23.
reproduce: install
	$(BIN)/lightning-tfm reproduce

# Run the benchmarks against peers. FULL=1 also runs the long ones, and runs peers in full instead of shortened.
bench: $(INSTALLED)-bench
	$(BIN)/python -m benchmarks $(if $(FULL),--full)

$(INSTALLED)-bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	# without dependencies: apart from maxwell, the benchmarks need none of yoyodyne's
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps yoyodyne maxwell
	@touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/proselint check README.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md docs/*.md docs/*/*.md
	$(BIN)/mypy

# Build the documentation in docs/_build/html. Warnings are errors.
docs: install
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
