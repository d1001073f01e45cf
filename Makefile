# `make demo` and `make test` do everything on a fresh machine: Python >= 3.10 with venv is all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# A path in the environment, so that a folder called koffline where a command runs does not hide the package.
EDITABLE := --config-settings editable_mode=compat -e
DATA := datasets/cartpole.hdf5
POLICY := datasets/cartpole_policy.npz

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-slow coverage check format bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "koffline needs Python 3.10 or newer; set PYTHON=…"; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing koffline (the first time this takes some minutes)"
	@$(INSTALL) 'pip>=25,<26'  # older ones cannot settle torch's extras on Python 3.10, newer ones warn
	@$(INSTALL) $(EDITABLE) .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing the test tools"
	@$(INSTALL) $(EDITABLE) '.[dev]'
	@$(INSTALL) $(EDITABLE) '.[docs]' || echo "the tools of the site cannot be installed: the test that builds it is skipped"
	@touch $@

demo: $(VENV)/.base  ## evaluate a policy from the bundled log: a table and a report
	@$(BIN)/koffline evaluate $(DATA) --policy $(POLICY) --truth datasets/cartpole_truth.json --out out/demo --force

test: $(VENV)/.dev  ## the default tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(VENV)/.dev  ## whole jobs that take some seconds each
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slow'

test-slow: $(VENV)/.dev  ## statistical checks that take minutes
	@$(BIN)/python -m pytest -n 2 -m slow

coverage: $(VENV)/.dev  ## the default and the long tests, and which lines they reach: out/coverage/index.html
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' --cov=koffline --cov-report=term:skip-covered --cov-report=html:out/coverage

check: $(VENV)/.dev  ## lint, format and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.dev  ## reformat the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(VENV)/.dev  ## speed, as ratios measured side by side
	@$(BIN)/python scripts/bench/replay.py && $(BIN)/python scripts/bench/replicas.py && $(BIN)/python scripts/bench/online.py

$(VENV)/.docs: $(VENV)/.base
	@echo "installing the tools of the site"
	@$(INSTALL) $(EDITABLE) '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## the manual as a site, out/site/index.html
	@OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open out/site/index.html"

clean:  ## remove the environment and everything made
	rm -rf $(VENV) build dist out *.egg-info
