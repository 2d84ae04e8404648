# Every target does its own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Torch first and by itself: pinned, it is a CPU build where one is offered.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-gpu check format bench docs clean

# What a user has, without the tools of development.
demo: $(VENV)/installed
	$(BIN)/mesh-attention demo
	$(BIN)/mesh-attention plan --ranks 64 --seq 128k --heads 32 --kv-heads 8 --causal --save $(VENV)/demo-plan.json
	$(BIN)/mesh-attention verify $(VENV)/demo-plan.json

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

# With the Python at hand, which must have torch for CUDA, pytest and hypothesis: nothing is installed.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -rs $(ARGS)

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready
	$(BIN)/python benchmarks/how_fast_is_planning.py

docs: $(VENV)/ready
	$(BIN)/mkdocs build --strict

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --constraint constraints.txt --editable '.[charts]'
	touch $@

$(VENV)/ready: $(VENV)/installed
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
