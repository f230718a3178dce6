# Every target sets up what it needs; nothing has to be done by hand before.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# `python3 -m venv` needs python3-venv on Debian; without pip it does not, and the outer pip can serve the inner Python.
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
# Runs one part of the suite and says how long it took.
part = @start=$$(date +%s); echo "== $(1)"; { $(2); } || exit 1; echo "== $(1): $$(( $$(date +%s) - start )) s"

.PHONY: serve test lint types arrows unit interop bench sim mutants crash fuzz chaos security clean

serve: $(VENV)/base
	@exec $(BIN)/headrace serve

test: $(VENV)/dev
	@$(MAKE) --no-print-directory lint unit

lint: $(VENV)/dev
	$(call part,ruff,$(BIN)/ruff check . && $(BIN)/ruff format --check .)
	$(call part,mypy,$(BIN)/mypy)
	$(call part,import-linter,$(BIN)/lint-imports)

unit: $(VENV)/dev
	$(call part,pytest,$(BIN)/python -m pytest -q)

$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/base: pyproject.toml | $(BIN)/python
	$(PIP) install -q -e .
	@touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	$(PIP) install -q -e '.[dev,spark]'
	@touch $@ $(VENV)/base

clean:
	rm -rf $(VENV) dist build
