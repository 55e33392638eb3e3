# Everything happens in .venv, which is made when first needed. The words: run, test, test-long, test-lowest, test-newest, features, check, docs,
# mutate, simulate, bench, release, clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOME_OF_RUNS ?= trialflow-runs
# Many containers set it. Every process would compile our sources again: some hundred start in the tests.
unexport PYTHONDONTWRITEBYTECODE
export TRIALFLOW_HOME ?= $(abspath $(HOME_OF_RUNS))
PYTEST = $(BIN)/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder
PART ?= 1/1
SEEDS ?= 1000

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

.PHONY: run test test-long test-lowest test-newest features check docs mutate simulate bench release clean

# Trains the example through the whole DAG, then shows what it has learnt.
run: $(VENV)/.installed
	@echo "training examples/gpt_stdlib; the display has the time that is left"
	@$(BIN)/trialflow train examples/gpt_stdlib/experiment.yaml $(ARGS)
	@$(BIN)/python examples/gpt_stdlib/sample.py

# The default tests: one representative of each behaviour.
test: $(VENV)/.installed-dev
	@echo "the default tests; the percentage at the end of a line is the share that has run"
	@$(PYTEST) $(ARGS)

# Its variations (node providers, storages, ranks, ZeRO stages, faults), in parts with as many tests of each folder: make test-long PART=2/14.
test-long: $(VENV)/.installed-dev
	@echo "part $(PART) of the long tests; each part takes many minutes"
	@$(PYTEST) -m long --splits $(lastword $(subst /, ,$(PART))) --group $(firstword $(subst /, ,$(PART))) \
	  --splitting-algorithm least_duration $(ARGS)

# The default tests with the oldest or newest versions that pyproject.toml admits, in environments of their own: build/lowest and build/newest.
test-lowest test-newest: test-%: build/%/.installed
	@$(PYTEST) $(ARGS)
test-lowest: BIN := build/lowest/bin
# A torch 2.7 for CUDA would start processes that compile, 300 MB for each rank of the tests.
test-lowest: export TORCHINDUCTOR_COMPILE_THREADS := 1
test-newest: BIN := build/newest/bin

# Each feature of DeepSpeed, and the page of their results; make features ARGS="-k 'zero 3'" for some rows.
features: $(VENV)/.installed-dev
	-@$(PYTEST) -m "long or not long" tests/trial_core/deepspeed/features --junitxml=build/features.xml $(ARGS)
	$(BIN)/python -m tests.trial_core.deepspeed.features.page build/features.xml

# Takes the checks of a room out, one at a time, and prints those that no test near it misses: make mutate ROOM=checkpoint/retention
mutate: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.mutate $(ROOM) $(ARGS)

# Plays simulated histories of checkpoints, and prints which branches of commit, fencing, sweep and prune they reach: make simulate SEEDS=1000
simulate: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.linearizability.reach $(SEEDS) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/site. Dead links and anchors are errors.
docs: $(VENV)/.installed-docs
	@$(BIN)/python docs/hooks/configuration.py
	@$(BIN)/python docs/hooks/json_results.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@echo "documentation: build/site/index.html"

# The picture of the processes, with the digest of its source, which a test compares. Needs dot (Debian: graphviz).
docs/architecture.svg: docs/architecture.dot
	dot -Tsvg $< -o $@
	echo "<!-- sha256 of architecture.dot: $$(sha256sum < $< | cut -d' ' -f1) -->" >> $@

# make bench NAME=loop
bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

# Sdist and wheel in build/dist, checked; the wheel trains, resumes and exports in an environment of its own.
release: $(VENV)/.installed-release
	@.ci/release $(BIN)/python

clean:
	rm -rf $(VENV) build *.egg-info

UV := build/uv/bin/uv
build/lowest.txt: RESOLUTION := lowest-direct
build/newest.txt: RESOLUTION := highest

# The newest ones change without a change here: `make clean` forgets them.
build/lowest.txt build/newest.txt: pyproject.toml $(UV)
	@$(UV) pip compile -q --python $(PYTHON) --resolution $(RESOLUTION) --extra dev pyproject.toml -o $@

build/%/.installed: build/%.txt
	@echo "installing the $* versions that pyproject.toml admits into build/$*, once"
	@$(PYTHON) -m venv --clear build/$*
	@$(UV) pip install -q --python build/$*/bin/python -r $< -e .
	@touch $@

$(UV):
	@$(PYTHON) -m venv build/uv
	@build/uv/bin/pip install -q --disable-pip-version-check uv

# What pip does, in few lines: large downloads, and how far it has unpacked.
PIP_LINES := $(BIN)/python .ci/pip_lines.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trialflow needs Python 3.11 or newer, this is " + sys.version)'
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing trialflow, torch, deepspeed and prefect into $(VENV), once"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e . | $(PIP_LINES)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need, once"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' | $(PIP_LINES)
	@touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	@echo "installing what a release needs, once"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[release]' | $(PIP_LINES)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the documentation needs, once"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[docs]' | $(PIP_LINES)
	@touch $@
