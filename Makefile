# The commands people type. PYTHON is only used to make the virtual environment.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: install train test lint

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

# Trains on dates as people write them, then answers three of them.
train: install
	$(BIN)/lightning-tfm fit --config experiments/date_attention_lstm.yaml
	$(BIN)/lightning-tfm generate $$(ls -td runs/date_attention_lstm/version_*/ | head -n 1)checkpoints/best.ckpt \
		'Thursday, May 3, 1979' '7/4/76' 'Fri 31, Dec 1999'

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
