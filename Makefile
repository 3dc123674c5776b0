# Every target works on a fresh checkout: the virtual environment is made on first use and kept up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUICKSTART_ARGS ?=
PYTEST_ARGS ?=
# Files of tests run side by side; a table of layouts stays in one process, which computes its reference once.
WORKERS ?= 2

# One thread per process: tests run several ranks side by side.
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test lint types unit unit-full parity parity-full clean

help:
	@echo "make quickstart  train, evaluate and plot a small speech language model on this machine"
	@echo "make test        lint, type check and all tests"
	@echo "make lint        ruff"
	@echo "make types       mypy --strict"
	@echo "make unit        all tests, without lint and types; PYTEST_ARGS='-k mesh' selects"
	@echo "make unit-full   the rows of all tables, beyond the covering selection too"
	@echo "make parity      train under every layout and write docs/parity.md"
	@echo "make parity-full  families under tensor- and context-parallel layouts, into docs/parity_{tensor,context}.md; ARGS=--resume"
	@echo "make clean       remove the virtual environment and caches"

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: Shoal needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1);"; \
	  echo "       set PYTHON, as in: make test PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: '$(PYTHON)' cannot create virtual environments; install its venv package"; \
	  echo "       (Debian and Ubuntu: apt-get install python3-venv) or set PYTHON"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

quickstart: $(STAMP)
	$(BIN)/python scripts/quickstart/run.py $(QUICKSTART_ARGS)

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

unit-full: $(STAMP)
	$(BIN)/python -m pytest --full -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

parity: $(STAMP)
	$(BIN)/python scripts/parity_table.py

parity-full: $(STAMP)
	$(BIN)/python scripts/parity_full.py $(ARGS)
	$(BIN)/python scripts/parity_context.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
