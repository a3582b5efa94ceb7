# Two targets for a fresh machine: `make run` and `make test`. Both make their own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test lint clean

run: $(VENV)/.installed
	$(BIN)/kvlab fetch smollm2-135m
	$(BIN)/kvlab sweep --config=attention_cache --out=runs/attention_cache

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder \
		--cov --cov-report=term:skip-covered --cov-fail-under=90

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable .
	touch $@

$(VENV)/.installed-test: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV)
