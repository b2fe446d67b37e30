# Everything runs in a virtual environment that these targets make themselves; only Python and make are needed.
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
TRAIN ?= .venv-train
RAY ?= .venv-ray
PROCESSES ?= 4
# Tests of installed commands, servers, trainers and whole runs of pytest: a sixth of the tests, and half of the time.
WHOLE = tests/e2e tests/workflow_runs tests/platform tests/pytest_plugin tests/training tests/importers \
	tests/docs/test_recording.py tests/docs/test_documented_programs.py tests/docs/test_adding.py tests/cli/test_module_names.py
BIN = $(VENV)/bin
# Without compiled tests each process of pytest compiles all of them: 10 s, whenever it starts.
export PYTHONDONTWRITEBYTECODE =

# uv needs a third of pip's time; where it is neither there nor in the package index, pip does the same.
# An environment that `uv venv` made has no pip. On a terminal both show their progress.
QUIET := $(shell test -t 2 || echo --quiet)
INSTALL = @echo "installing Osmosis and its dependencies into $(VENV), once: 400 to 800 MB" >&2; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv && \
	$(BIN)/python -m uv pip install $(QUIET) --compile-bytecode --python $(BIN)/python --editable $(1) || \
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --editable $(1)

.PHONY: demo help environment test test-whole check fuzz test-lowest test-released test-train test-browser test-ray test-pytest8 docs man release-check benchmark clean

demo: $(VENV)/.package  ## run the main job on the example repository with the embedded offline model
	$(BIN)/osmosis test --mcp examples/calculator/mcp -d examples/calculator/test_data.jsonl --model offline/oracle

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):.*  ## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "make %-14s %s\n", $$1, $$2}'

environment: $(VENV)/.dev  ## what the targets below need, installed

# Four processes on two cores: much of what the tests do is waiting; a part of the suite isn't worth starting them. Tests
# that share something expensive are a group.
# Workers and commands of the tests import the package; one that has to compile it each time takes a third longer.
test: $(VENV)/.dev  ## the test suite without make test-whole; one test: make test TESTS=tests/test_dataset.py
	$(BIN)/python -m compileall -q osmosis_ai
	$(BIN)/python -m pytest -n $(if $(TESTS),0,$(PROCESSES)) --dist loadgroup $(or $(TESTS),$(addprefix --ignore=,$(WHOLE)))

test-whole: $(VENV)/.dev  ## what make test leaves out: installed commands, the platform, training, the pytest plugin
	$(BIN)/python -m compileall -q osmosis_ai
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup $(WHOLE)

# On a machine that is too busy for them, mypy's worker processes don't start in time, which ends it with 2.
check: $(VENV)/.dev  ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }

fuzz: $(VENV)/.dev  ## replies and events with odd parts: 100 times the suite's cases, others every time
	FUZZ_CASES=150000 FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/models/test_hostile_replies.py tests/runtime/pool/test_hostile_events.py -k mutated

test-lowest: $(LOWEST)/.dev  ## the test suite on the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m compileall -q osmosis_ai
	$(LOWEST)/bin/python -m pytest -n $(PROCESSES) --dist loadgroup $(TESTS)

test-released: $(VENV)/.dev  ## workflows on released SDKs, and the platform's released clients, from the package index; skipped, with the reason, without it
	$(BIN)/python -m pytest -m released -rs -n 2 tests/runtime/worker/workflows tests/workflow_runs tests/platform

test-train: $(VENV)/.dev  ## exports, read by the trainers' libraries, and the trainer: minutes, when they are new
	$(BIN)/python -m pytest -m released -rs tests/test_trainer_exports.py
	@if $(MAKE) --no-print-directory $(TRAIN)/.dev; then \
		(cd trainers/trl && $(abspath $(TRAIN))/bin/python -m mypy && $(abspath $(TRAIN))/bin/python -m pytest) && \
		TRAINER_PYTHON=$(abspath $(TRAIN))/bin/python $(BIN)/python -m pytest -m train tests/training; \
	else echo "skipped: the trainer's packages can't be installed into $(TRAIN), for the reason above" >&2; fi

test-browser: $(VENV)/.browser  ## the viewer in Chromium, installed with apt-get if it can be; skipped, with the reason, without it
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 || \
		echo "Chromium isn't there, and apt-get can't install it" >&2
	$(BIN)/python -m pytest -m browser -rs tests/viewer

test-ray: $(RAY)/.dev  ## runs on a Ray cluster of this machine; skipped, with the reason, where Ray has no wheel
	$(RAY)/bin/python -m compileall -q osmosis_ai
	$(RAY)/bin/python -m pytest -m ray -rs tests/runtime/pool/test_ray.py

# Its reports and fixtures differ between the two; recordings and the browser don't know of pytest.
test-pytest8: $(VENV)/.dev  ## the pytest plugin on pytest 8, which the package index has, laid over the one that is installed
	$(BIN)/python -m uv pip install $(QUIET) --python $(BIN)/python --target $(VENV)/pytest8 'pytest<9'
	PYTHONPATH=$(abspath $(VENV)/pytest8) $(BIN)/python -m pytest tests/pytest_plugin -k "one_run or cannot_be_loaded"

# Nothing of the site comes from elsewhere, neither here nor in a reader's browser; the tests look for it.
docs: $(VENV)/.dev  ## the documentation as a site in build/site, with every link checked; skipped, with the reason, without mkdocs
	@$(BIN)/python -m uv pip install $(QUIET) --python $(BIN)/python --editable '.[dev,docs]' || \
		echo "mkdocs can't be installed here" >&2
	@! $(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python -m pytest -m site -rs tests/docs/test_site.py

man: $(VENV)/.package  ## a man page for every command, of its help, in build/man; read one with man build/man/osmosis.1
	$(BIN)/python -m osmosis_ai.cli.man build/man

# Whatever Python from 3.10 to 3.14 is there; others are skipped. An installation takes a minute without uv's cache.
release-check: $(VENV)/.dev  ## wheel and sdist, built and tried as a user would, in clean environments
	$(BIN)/python -m pytest -m release -rs -v tests/test_release.py

benchmark: $(VENV)/.dev  ## the measured figures; see benchmarks/README.md
	$(BIN)/python benchmarks/rollouts.py

$(VENV)/bin/python:
	@echo "creating the virtual environment $(VENV)" >&2
	@(command -v uv && uv venv --quiet --seed --python $(PYTHON) $(VENV)) >/dev/null || $(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml | $(VENV)/bin/python
	$(call INSTALL,.)
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(call INSTALL,'.[dev]')
	touch $@

$(VENV)/.browser: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m uv pip install $(QUIET) --python $(BIN)/python --editable '.[dev,browser]'
	touch $@

$(LOWEST)/.dev: pyproject.toml $(VENV)/.dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[dev]'
	touch $@

$(RAY)/.dev: pyproject.toml $(VENV)/.dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(RAY)
	$(BIN)/uv pip install $(QUIET) --compile-bytecode --python $(RAY)/bin/python --editable '.[dev,ray]' || { \
		echo "Ray can't be installed here" >&2; \
		$(BIN)/uv pip install $(QUIET) --python $(RAY)/bin/python --editable '.[dev]'; }
	touch $@

# With pip, whose settings may name an index that has torch's CPU build. It is a tenth as large as the one with CUDA.
$(TRAIN)/.dev: trainers/trl/pyproject.toml $(VENV)/.dev
	@echo "installing torch and TRL into $(TRAIN), once: about 1.5 GB" >&2
	@$(BIN)/uv venv --quiet --clear --seed --python $(BIN)/python $(TRAIN)
	@$(TRAIN)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0+cpu' 2>/dev/null || \
		$(TRAIN)/bin/python -m pip install --quiet --disable-pip-version-check torch
	@$(TRAIN)/bin/python -m pip install --quiet --disable-pip-version-check --editable 'trainers/trl[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) $(TRAIN) $(RAY) build .mypy_cache .ruff_cache .hypothesis
