# Every target sets up what it needs: a virtual environment in .venv with the pinned packages, once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
CODE := rmsnorm_onnx exporters models tests benchmarks

.PHONY: help setup demo test test-all lint bench models format clean

help:
	@echo "make demo       export, rewrite, run and measure tiny models and a real file; everything goes to build/demo/"
	@echo "make test       lint, types and one test of each kind"
	@echo "make test-all   that, then the full matrices"
	@echo "make bench      times of find + rewrite beside other tools; build/bench_fuse.json"
	@echo "make models     measures what is missing of the page of models, models/README.md; long, and resumable"

$(STAMP): requirements.txt tests/no-deps.txt tests/headers.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { echo "python3 has no working venv module (on Debian: apt install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/no-deps.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/headers.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m rmsnorm_onnx.models.demo

lint: $(STAMP)
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)
	$(BIN)/python -m mypy

test: lint
	$(PYTEST) -m "not full"

test-all: test
	@echo "make test left out these:"
	@$(BIN)/python -m pytest -m full --collect-only --no-header || [ $$? -eq 5 ]
	$(PYTEST) -m full

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_fuse.py

models: $(STAMP)
	# timm looks for torchvision, which has no build for the CPU build of torch
	PYTHONPATH=tests/standins $(BIN)/python -m rmsnorm_onnx.models.table

format: $(STAMP)
	$(BIN)/python -m ruff check --fix $(CODE)
	$(BIN)/python -m ruff format $(CODE)

clean:
	rm -rf build
