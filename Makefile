# Two targets for a fresh machine: `make run` and `make test`. Both make their own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

IN_PARALLEL := --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: run test coverage lint peers clean

run: $(VENV)/.installed
	@if $(BIN)/kvlab fetch smollm2-135m; then \
		$(BIN)/kvlab sweep --config=attention_cache --out=runs/attention_cache; \
	else \
		echo "without smollm2-135m (the line above says why): running on shakespeare-gqa4, which comes with kvlab"; \
		$(BIN)/kvlab sweep --config=shipped --out=runs/shipped; \
	fi

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(IN_PARALLEL)

# Tracing lines makes the tests a third slower.
coverage: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(IN_PARALLEL) --cov --cov-report=term:skip-covered --cov-fail-under=90

# Other systems live in an environment of their own: torch and a compiled llama.cpp are large.
peers: $(VENV)-peers/.installed
	$(VENV)-peers/bin/kvlab fetch smollm2-135m
	$(VENV)-peers/bin/kvlab peers --out=runs/peers

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

$(VENV)-peers/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[peers]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-peers
