# One target a task; each does its own set-up. A fresh machine needs Python >= 3.11, git, make and PyPI, nothing else.
#
#   make demo        three processes, a streamed answer, the speed-up
#   make test        the whole suite        make test-fast   without the real model
#   make lint types proto-lint manifests    what .ci/run asks besides
#   make protos      regenerate the stubs   make format      let ruff rewrite
#
# PYTHON=python3.12 chooses the interpreter of .venv, TEST="-k tree" narrows the tests, WORKERS=0 runs them in one process,
# BASE=ref chooses what the wire contract is compared with.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
, := ,

VENV := .venv
BIN := $(VENV)/bin
TEST ?=
# More than the cores of a small machine: many tests wait for processes.
WORKERS ?= 3
BASE ?= HEAD~1
NODE_CLIENT := eagle_pangu/client/node
# For its kustomize; fetched once. Where the fetched one does not run (not x86-64 Linux): KUBECTL=/path/to/kubectl.
export KUBECTL ?= $(VENV)/tools/kubectl

# Models come from a package, never from a hub; tokenizers must not fork-warn under pytest.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip's own compiling of 11,000 modules takes a minute of the install; an import compiles the few hundred in use, once.
unexport PYTHONDONTWRITEBYTECODE

# A file's tests stay in one process, in order: they share models. A thread each, or the workers' threads would fight.
# The real model has the machine to itself.
FAST_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"
SLOW_TESTS := $(BIN)/python -m pytest -m slow
OR_NONE := $(if $(TEST),|| [ $$? -eq 5 ]) # a narrowed run may find its tests in one of the two

# A registry that stumbles once should not cost the run; what was downloaded stays in pip's cache.
PIP := $(BIN)/python -m pip --retries 10 --timeout 60
define thrice
for attempt in 1 2 3; do $(1) && break; \
  [ $$attempt -lt 3 ] || { echo "gave up after 3 attempts: $(strip $(1))" >&2; exit 1; }; sleep 5; done
endef

.PHONY: help install node-client demo test test-fast lint format types protos proto-lint manifests clean

help:
	@awk '/^#/ { sub(/^# ?/, ""); print; next } { exit }' Makefile

# ---- set-up ----------------------------------------------------------------------------------------------------------

install: $(VENV)/installed

$(VENV)/bin/python:
	@python=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	[ -n "$$python" ] || { echo "no Python >= 3.11 found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	"$$python" -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(call thrice,$(PIP) install --no-compile -c constraints.txt -e '.[models$(,)http$(,)dev]')
	@echo "compiling what the services import"; $(BIN)/python -c 'from transformers import AutoTokenizer, LlamaForCausalLM'
	@touch $@

$(VENV)/tools/kubectl: deploy/kubectl.py deploy/kubectl.txt $(VENV)/installed
	@$(call thrice,$(BIN)/python -m deploy.kubectl $@)

# The Node.js example: whoever has no npm tests without it.
ifneq ($(shell command -v npm),)
node-client: $(NODE_CLIENT)/node_modules/installed
else
node-client:
	@echo "no npm on the PATH: the tests of $(NODE_CLIENT) will skip"
endif

$(NODE_CLIENT)/node_modules/installed: $(NODE_CLIENT)/package.json $(NODE_CLIENT)/package-lock.json
	@$(call thrice,npm ci --prefix $(NODE_CLIENT) --ignore-scripts --no-audit --no-fund)
	@touch $@

# ---- use -------------------------------------------------------------------------------------------------------------

demo: install
	@$(BIN)/eagle-pangu demo

# ---- checks ----------------------------------------------------------------------------------------------------------

test: install node-client $(KUBECTL)
	@$(BIN)/eagle-pangu models pull
	@$(FAST_TESTS) $(TEST) $(OR_NONE)
	@$(SLOW_TESTS) $(TEST) $(OR_NONE)

test-fast: install node-client $(KUBECTL)
	@$(FAST_TESTS) $(TEST)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: install
	@$(BIN)/mypy

protos: install
	@$(BIN)/python -m protos.generate

# The wire contract may grow but not change under a peer of the commit before. A shallow clone or a tarball has none.
proto-lint: install
	@$(BIN)/buf lint
	@if git cat-file -e $(BASE):protos/v1 2>/dev/null; then \
	  before=$$(mktemp -d); trap 'rm -rf "$$before"' EXIT; \
	  git archive $(BASE) buf.yaml protos | tar -x -C "$$before"; \
	  $(BIN)/buf breaking --against "$$before"; \
	  echo "wire contract: compatible with $(BASE)"; \
	else echo "wire contract: no $(BASE) to compare with"; fi

manifests: install $(KUBECTL)
	@$(BIN)/python -m deploy.manifests

clean:
	rm -rf $(VENV) $(NODE_CLIENT)/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
