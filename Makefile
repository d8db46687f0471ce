# Stoker. `make help` lists what there is to do; `make run` shows it at work.
# Needs: Linux, Python 3.11 or newer with venv, a C++17 compiler, make.

PYTHON ?= python3
TORCH := torch==2.13.0
TRITON := triton==3.9.0
MODELS := $(or $(STOKER_MODELS_DIR),models)

BIN := .venv/bin
PIP := $(BIN)/python -m pip
STAMP := .venv/.stoker-set-up
MODEL := $(MODELS)/smollm2-135m-instruct
PACKAGES := kvcache scheduler worker cluster stoker
NATIVE := $(wildcard kvcache/native/*.cpp worker/ops/native/*.cpp worker/ops/native/kernels/*.cpp worker/ops/native/kernels/*.h)

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run setup fmt lint types walls check test test-slow chaos sanitize bench bench-peers lock clean clean-all

help:  ## say what each target does
	@echo 'You need Linux, Python 3.11 or newer with venv, a C++17 compiler and make; on Debian:'
	@echo '    apt-get install python3 python3-venv g++ make'
	@echo 'Everything else is put into .venv and $(MODELS) by the first target that needs it.'
	@echo
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

run: setup  ## answer a batch of prompts through the whole cluster, on two ranks
	$(BIN)/stoker generate --chat --prompts-file examples/prompts.txt --tensor-parallel-size 2 --temperature 0

setup: $(STAMP) $(MODEL)  ## make .venv with everything in it, build the native part, fetch the model

fmt: $(STAMP)  ## format the code, and mend what can be mended without thought
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format .

lint: $(STAMP)  ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## check types, strictly
	$(BIN)/mypy

walls: $(STAMP)  ## check who imports whom
	$(BIN)/pytest -q tests/test_architecture.py

check: lint types walls  ## all of the last three: what must hold before a commit

test: setup  ## run the tests, less the slow ones (under ten minutes on two cores)
	$(BIN)/pytest -m 'not slow'

test-slow: setup  ## run the slow tests
	$(BIN)/pytest -m slow

chaos: setup  ## break a cluster under load a thousand times, and compare every token (twenty minutes on two cores)
	$(BIN)/python -m bench.chaos

sanitize: setup  ## run the native kernels under sanitizers (two minutes; GCC, or Clang with its runtimes)
	$(BIN)/python -m scripts.sanitize

bench: setup  ## measure, and print the tables that docs/ quotes (about ten minutes)
	$(BIN)/python -m bench.scheduler_step
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.throughput b
	$(BIN)/python -m bench.throughput c
	$(BIN)/python -m bench.mixed_steps

bench-peers: setup  ## measure beside vLLM, llama.cpp and transformers, and write docs/benchmarks.md (two hours)
	$(BIN)/python -m bench.peers --page docs/benchmarks.md

lock: $(STAMP)  ## write requirements.lock anew, from what is installed
	$(BIN)/python scripts/lock.py

clean:  ## remove what set-up and tests made, but not the models
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f kvcache/native/*.so worker/ops/native/*.so
	find $(PACKAGES) tests bench scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean  ## remove the models in this folder, and the peers, too
	rm -rf models .peers

# One stamp for the environment: torch first (it decides by itself which build of it fits this
# machine), then everything else as locked, then Triton where torch brought none (its interpreter
# runs our GPU kernels in the tests), then our own packages in place, which compiles the C++.
$(STAMP): requirements.lock pyproject.toml $(NATIVE)
	@$(PIP) --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo '$(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.12' >&2; exit 1; }; \
		$(PYTHON) -c 'import ensurepip, venv' \
			|| { echo '$(PYTHON) has no venv; on Debian: apt-get install python3-venv' >&2; exit 1; }; }
	@command -v $(CXX) >/dev/null || { echo 'no C++ compiler $(CXX); on Debian: apt-get install g++' >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || { echo 'making .venv'; $(PYTHON) -m venv .venv; }
	@echo 'installing $(TORCH)'
	@$(PIP) install --quiet $(TORCH)
	@echo 'installing what requirements.lock names'
	@$(PIP) install --quiet --requirement requirements.lock
	@$(BIN)/python -c 'import triton' 2>/dev/null || { \
		echo 'installing $(TRITON)'; $(PIP) install --quiet $(TRITON); }
	@echo 'building and installing stoker in place'
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# A fetch is whole or absent, so the folder itself says whether it is done.
$(MODEL): | $(STAMP)
	@$(BIN)/stoker fetch smollm2
