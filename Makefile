# Everything runs in a virtual environment that these targets make themselves; only Python and make are needed.
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
BIN = $(VENV)/bin

.PHONY: demo test check test-lowest benchmark clean

demo: $(VENV)/.package  ## run the main job on the example repository with the embedded offline model
	$(BIN)/osmosis test --mcp examples/calculator/mcp -d examples/calculator/test_data.jsonl --model offline/oracle

# Most tests start the command, and one that has to compile its modules each time takes a third longer.
test: $(VENV)/.dev  ## the test suite; one test: make test TESTS=tests/test_dataset.py
	$(BIN)/python -m compileall -q osmosis_ai
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

check: $(VENV)/.dev  ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-lowest: $(LOWEST)/.dev  ## the test suite on the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

benchmark: $(VENV)/.dev  ## the measured figures; see benchmarks/README.md
	$(BIN)/python benchmarks/rollouts.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(LOWEST)/.dev: pyproject.toml $(VENV)/.dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) .mypy_cache .ruff_cache .hypothesis
