# Everything needed beforehand: make and Python 3.11 to 3.13. The first target that
# needs packages makes .venv; stamp files keep it from being made twice.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
# The first interpreter of a supported version that really runs; override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	>/dev/null 2>&1 && { echo $$p; break; }; done)
export TF_CPP_MIN_LOG_LEVEL ?= 3
# uv falls back to copies anyway where its cache lies on another disk; be quiet about it.
export UV_LINK_MODE ?= copy
WORKERS ?= 2
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv found." \
		"Install one (Debian: apt-get install python3-venv) or run: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# The package and what the examples need.
$(VENV)/.run: $(VENV)/.made pyproject.toml
	$(UV) pip install --quiet --python $(PY) --editable . --group examples
	@touch $@

# And what developing needs.
$(VENV)/.dev: $(VENV)/.run
	$(UV) pip install --quiet --python $(PY) --editable '.[plot]' --group dev
	@touch $@

.PHONY: setup
setup: $(VENV)/.dev ## Make .venv with everything in it

.PHONY: demo
demo: $(VENV)/.run ## A healthy run with histograms, and a faulty one that is stopped
	$(PY) examples/digits_demo.py

.PHONY: test
test: $(VENV)/.dev ## Run the tests
	$(PYTEST) -m "not slow" --ignore tests/everywhere

.PHONY: test-replicas
test-replicas: $(VENV)/.dev ## Train on two replicas and two workers, the quick part
	$(PY) -m pytest -m "not slow" tests/everywhere

.PHONY: test-all
test-all: $(VENV)/.dev ## Run the tests with more seeds, and those of several replicas and workers
	$(PYTEST) --ignore tests/everywhere
	$(PY) -m pytest tests/everywhere

.PHONY: lint
lint: $(VENV)/.dev ## Style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.PHONY: format
format: $(VENV)/.dev ## Format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: types
types: $(VENV)/.dev ## mypy --strict
	$(PY) -m mypy

.PHONY: docs
docs: $(VENV)/.dev ## Build the site into site/, strictly
	$(PY) -m zensical build --strict --clean

.PHONY: docs-serve
docs-serve: $(VENV)/.dev ## Serve the site while writing
	$(PY) -m zensical serve

.PHONY: dist
dist: $(VENV)/.dev ## Build sdist and wheel, try both in an environment of their own
	rm -rf dist
	$(PY) -m hatchling build
	$(PY) -m zipfile -l dist/*.whl
	$(PY) -m venv --clear $(VENV)/wheel
	$(UV) pip install --quiet --python $(VENV)/wheel/bin/python dist/*.whl
	cd $(VENV)/wheel && bin/python -P ../../tests/wheel_smoke.py  # -P: tests/tensorboard is not TensorBoard
	$(UV) pip uninstall --quiet --python $(VENV)/wheel/bin/python keras-gradguard
	$(UV) pip install --quiet --no-deps --python $(VENV)/wheel/bin/python dist/*.tar.gz
	cd $(VENV)/wheel && rm -rf wheel-logs && bin/python -P ../../tests/wheel_smoke.py

.PHONY: bench
bench: $(VENV)/.dev ## All benchmarks, and docs/benchmarks.md from them: about 20 minutes
	$(PY) -m benchmarks

.PHONY: bench-quick
bench-quick: $(VENV)/.dev ## What a guard costs three models, one line of JSON each
	$(PY) -m benchmarks --quick

.PHONY: soak
soak: $(VENV)/.dev ## Random configurations, plain against guarded: SECONDS=1800 SEED=0
	$(PY) -m tests.soak $(or $(SECONDS),1800) $(or $(SEED),0)

.PHONY: matrix
matrix: $(VENV)/.made ## Tests on the oldest and newest versions, on every Python at hand
	UV=$(UV) ONLY="$(ONLY)" PYTEST_ARGS="$(PYTEST_ARGS)" bash tests/matrix.sh

.PHONY: clean
clean: ## Remove everything that the other targets made
	rm -rf $(VENV) dist site logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
