# Every target except test-gpu sets up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPES := .venv-recipes
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Torch is installed first, as a CPU build where one is offered. To use another version:
# make test TORCH=torch==2.10.0
TORCH := $(shell grep '^torch==' constraints.txt)
# Another torch brings its own triton.
UNPINNED := ^torch==$(if $(filter command line,$(origin TORCH)),|^triton==)

.PHONY: demo test quick fuzz lives plans files families faults nccl-faults soak recipes test-gpu test-gpu-kernels test-gpu-attention test-nccl check check-schemas format bench docs dist clean

# Tests start many interpreters; let them share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

# What a user installs, without development tools.
demo: $(VENV)/installed
	$(BIN)/mesh-attention demo
	$(BIN)/mesh-attention plan --ranks 64 --seq 128k --heads 32 --kv-heads 8 --causal --save $(VENV)/demo-plan.txt
	$(BIN)/mesh-attention verify $(VENV)/demo-plan.txt

# A worker runs whole files, so their fixtures are set up once; the longest first, as conftest.py says. The recipes
# have a target of their own. How long each test took is in build/durations, which CI keeps.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/recipes \
		--junit-xml=build/durations/test.xml $(ARGS)

# The core tests, to run while editing: they start no ranks and take less than a minute.
QUICK := api_refusals attention_local bands bytes choice clusters cuda_kernels errors greedy imports \
	kernel_conformance kernels layout lowering mutations plans_verify public_names text
quick: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(QUICK:%=tests/test_%.py) $(ARGS)

# The recipes for other stacks, each with the real package on 4 processes, compared with one process.
recipes: $(RECIPES)/ready
	$(RECIPES)/bin/python -m pytest tests/recipes $(ARGS)

# Random calls against a dense reference, on two cores; a failure prints a script of a few lines.
fuzz: SECONDS ?= 60
fuzz: $(VENV)/ready
	$(BIN)/python tests/campaign/fuzz.py --seconds $(SECONDS) --processes 2 $(ARGS)

# Random lives of caches, on local ranks and on processes.
lives: COUNT ?= 2000
lives: $(VENV)/ready
	$(BIN)/python tests/campaign/lives.py --count $(COUNT) $(ARGS)

# Mutated plans: what `verify` accepts is executed, and must be right.
plans: COUNT ?= 20000
plans: $(VENV)/ready
	$(BIN)/python tests/campaign/plans.py --count $(COUNT) --processes 2 $(ARGS)

# Mutated plan, tuning and cluster files: each is read, or refused by one clear error.
files: COUNT ?= 3000
files: $(VENV)/ready
	$(BIN)/python tests/campaign/files.py $(COUNT) $(ARGS)

# Uses your own Python, which needs torch for CUDA, pytest and hypothesis; installs nothing. Three processes side by
# side: some compile kernels while ranks wait for each other. ARGS may leave one of them without tests, which is 5.
test-gpu:
	$(MAKE) --jobs 3 --keep-going test-nccl test-gpu-kernels test-gpu-attention

ON_GPU = PYTHONPATH=src $(PYTHON) -m pytest -p no:cacheprovider -rs --junit-xml=build/durations/$@.xml
KERNEL_TESTS := tests/gpu/test_kernels.py tests/gpu/test_fused.py tests/gpu/test_decode.py
test-nccl:
	$(ON_GPU) tests/nccl $(ARGS) || [ $$? = 5 ]

test-gpu-kernels:
	$(ON_GPU) $(KERNEL_TESTS) $(ARGS) || [ $$? = 5 ]

test-gpu-attention:
	$(ON_GPU) tests/gpu $(KERNEL_TESTS:%=--ignore=%) $(ARGS) || [ $$? = 5 ]

# Tries every model class of transformers on 4 ranks, and writes docs/transformers-families.md; takes about 6 minutes.
families: $(VENV)/ready
	$(BIN)/python tests/campaign/families.py --jobs 2 --write docs/transformers-families.md $(ARGS)

# Every fault at every moment on 4 processes, and writes docs/faults.md; takes about 2 minutes.
faults: $(VENV)/ready
	$(BIN)/python tests/campaign/faults.py --jobs 2 --write docs/faults.md $(ARGS)

# The same over NCCL, on one GPU; takes less than a minute. The second table of docs/faults.md.
nccl-faults:
	PYTHONPATH=src $(PYTHON) tests/campaign/nccl_faults.py --write docs/faults.md $(ARGS)

# Random calls on 4 processes: results right; memory, descriptors and threads flat.
soak: SECONDS ?= 3600
soak: $(VENV)/ready
	$(BIN)/python tests/campaign/soak.py --seconds $(SECONDS) $(ARGS)

check: check-schemas
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check-schemas: $(VENV)/ready
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready
	$(BIN)/python benchmarks/how_fast_is_planning.py

docs: $(VENV)/ready
	$(BIN)/mkdocs build --strict

# Builds the sdist and the wheel, checks them, and tries the wheel in an empty environment.
dist: $(VENV)/installed
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[dist]'
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/try_dist.py dist

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	grep -vE '$(UNPINNED)' constraints.txt > $(VENV)/constraints.txt && echo '$(TORCH)' >> $(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[charts]'
	touch $@

$(VENV)/ready: $(VENV)/installed
	$(PIP) --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $@

# Where both files pin a package, the recipes' version is taken.
$(RECIPES)/ready: pyproject.toml constraints.txt examples/recipes/constraints.txt
	$(PYTHON) -m venv $(RECIPES)
	$(RECIPES)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	awk -F== '!seen[tolower($$1)]++' examples/recipes/constraints.txt constraints.txt > $(RECIPES)/constraints.txt
	$(RECIPES)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(RECIPES)/constraints.txt --editable '.[recipes]'
	touch $@

clean:
	rm -rf $(VENV) $(RECIPES) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
