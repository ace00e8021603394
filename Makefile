# Everything a fresh machine needs: python3 (3.11 or newer, with venv), make, and a package index.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-gpu lint format clean help

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*##/:/'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qlora-sweep needs Python 3.11 or newer, this is " + sys.version.split()[0] or 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,postgresql]'
	touch $@

demo: $(READY)   ## a real study on the CPU: summary in the terminal, report in runs/demo/report.html
	$(BIN)/sweep run cpu-demo --study demo

test: $(READY)   ## the test suite without a GPU
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(READY)  ## the tests that need a GPU; fails where there is none
	$(BIN)/python -m pytest -m gpu --require-gpu

lint: $(READY)   ## lint, format, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove the environment and every study
	rm -rf $(VENV) runs
