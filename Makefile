# Six words: run, test, test-long, check, bench, clean. Everything happens in .venv, made when first needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOME_OF_RUNS ?= trialflow-runs
export TRIALFLOW_HOME ?= $(abspath $(HOME_OF_RUNS))

.PHONY: run test test-long check bench clean

# Trains the example through the whole DAG, then shows what it has learnt.
run: $(VENV)/.installed
	@$(BIN)/trialflow train examples/gpt_stdlib/experiment.yaml $(ARGS)
	@$(BIN)/python examples/gpt_stdlib/sample.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

# What `test` leaves out because it takes minutes: every fault at every request, kill -9 with 20 seeds.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'faults or long' $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# make bench NAME=loop
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "trialflow needs Python 3.10 or newer, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)

# Tried first, said once: the install takes a minute or more.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)…"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need (once)…"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
