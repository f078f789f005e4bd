# Common commands. Each first installs what it needs. PYTHON is the Python of a new environment, or of one to replace.
SHELL := bash
BIN := .venv/bin
PYTHON ?= $(if $(wildcard .venv/installed*),$(BIN)/python,python3)
INSTALLED := .venv/installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ONNXRUNTIME_WEB := onnxruntime-web@1.30.0

.PHONY: install train test test-all test-soak coverage onnxruntime-web reproduce bench lint docs notebooks
.NOTPARALLEL: # one installation at a time
unexport PYTHONDONTWRITEBYTECODE # otherwise, each command would compile torch again, which takes half a minute

install: $(INSTALLED)

# Replace an environment of another Python, or one whose installation was interrupted.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python must be 3.11 or newer, but \
	$(PYTHON) is %d.%d; try: make install PYTHON=python3.12" % sys.version_info[:2])'
	@echo 'Installing PyTorch and the other packages for training in .venv: 0.3 GB to'
	@echo 'download, or 2.9 GB on Linux, where PyTorch includes CUDA; 1 to 3 minutes on a'
	@echo 'fast network.'
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@$(call install,--editable .)
	@# with that variable, commands that are not started by make write no bytecode
	@$(if $(PYTHONDONTWRITEBYTECODE),$(BIN)/lightning-tfm fit copy_gpt --dry-run >/dev/null)
	@touch $@

# Install an extra of pyproject.toml.
$(INSTALLED)-%: $(INSTALLED)
	@echo 'Installing the packages of lightning_tfm[$*] in .venv.'
	@$(call install,--editable '.[$*]')
	@touch $@

# Install with uv if it is on the path, otherwise with pip. Of the output of pip, show the downloads of 10 MB or more.
# Modules are compiled when they are first imported, as with uv.
install = set -o pipefail; if type uv &>/dev/null; then uv pip install --python $(BIN)/python --constraint constraints.txt $(1); \
	else $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt $(1) | awk ' \
		/(Downloading|Using cached) .*[0-9][0-9]\.[0-9] MB/ \
			{ split($$(NF - 1) "-" $$(NF - 2), part, /[(-]/); print "  " part[3] " " part[4] ": " part[2] " MB"; fflush() } \
		/^Installing collected/ { print "  unpacking"; fflush() }'; fi

# Train the date experiment, then predict three dates.
train: install
	$(BIN)/lightning-tfm fit date_attention_lstm
	$(BIN)/lightning-tfm generate date_attention_lstm 'Thursday, May 3, 1979' '7/4/76' 'Fri 31, Dec 1999'

test: $(INSTALLED)-test
	$(BIN)/python -m pytest

# Run all tests but those of test-soak, including runs in several processes, killed and resumed runs, damaged files, the
# report and the explorer in browsers, which require chromium, chromiumdriver and firefox-esr (Debian packages chromium,
# chromium-driver and firefox-esr), its scripts in Node (Debian packages nodejs and npm), and runs on several machines in
# network namespaces, which require root on Linux and the command ip (Debian package iproute2).
test-all: $(INSTALLED)-test onnxruntime-web
	$(BIN)/python -m pytest -m "not soak" --durations=20

# Run what test-all leaves out: the same tests with more networks and settings, all pages of the documentation, and tutorials
# that train for minutes.
test-soak: $(INSTALLED)-test
	$(BIN)/python -m pytest -m soak

# Measure the line coverage of test-all, including their child processes, except two tests in which coverage itself fails:
# it cannot write its data to a full disk, and a signal that interrupts it can leave its lock locked.
coverage: $(INSTALLED)-test onnxruntime-web
	$(BIN)/python -m pytest -m "not soak" --cov --cov-report=term-missing:skip-covered \
		--deselect tests/runs/test_damaged_checkpoints.py::test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept \
		--deselect tests/runs/test_signals.py::test_two_signals_at_once_print_no_traceback

# Install onnxruntime-web in .venv/node_modules. A test compares the explorer's interpreter of ONNX files with it.
onnxruntime-web: .venv/installed-$(ONNXRUNTIME_WEB)

.venv/installed-$(ONNXRUNTIME_WEB): | $(INSTALLED)
	@echo 'Installing $(ONNXRUNTIME_WEB) in .venv/node_modules.'
	@npm install --prefix .venv --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --silent \
		$(ONNXRUNTIME_WEB)
	@touch $@

# Test the claims of all experiments with seeds 21 to 23.
reproduce: install
	$(BIN)/lightning-tfm reproduce

# Run the benchmarks against peers. FULL=1 also runs the long ones, and runs peers in full instead of shortened.
bench: $(INSTALLED)-bench
	$(BIN)/python -m benchmarks $(if $(FULL),--full)

$(INSTALLED)-bench: $(INSTALLED)
	@echo 'Installing the packages of the peers in .venv.'
	@$(call install,--editable '.[bench]')
	@# without dependencies: apart from maxwell, the benchmarks need none of yoyodyne's
	@$(call install,--no-deps yoyodyne maxwell)
	@touch $@

lint: $(INSTALLED)-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/proselint check README.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md docs/*.md docs/*/*.md
	$(BIN)/mypy

# Build the documentation in docs/_build/html. Warnings are errors.
docs: $(INSTALLED)-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Open the tutorials in JupyterLab. On a machine without a browser, open the address that it prints.
notebooks: $(INSTALLED)-lab
	$(BIN)/jupyter lab docs/tutorials
