# Each target does its own set-up: a virtual environment in .venv, and in it torch and this package.
#   make train     trains a small hybrid language model on Python's own standard library and prints a sample
#   make test      runs the tests, of long ones a sample; the rest: make test ARGS="-m whole"
#   make test-hf   runs the tests that need transformers, with another one in an environment of its own:
#                  make test-hf TRANSFORMERS="transformers==5.17.0" VENV=.venv-hf
#   make lint      checks format, style and types
#   make counts    counts what is long, repeated or badly named, beside the goals
#   make dist      builds the packages, checks them and tries each wheel in a new environment: DIST_TORCH="torch==2.6.0 torch==2.15.0",
#                  DIST_PYTHON="python3.12 python3.13"
#   make docs      builds the documentation site into build/site, plots and all; a warning is an error
#   make fuzz      runs random calls of every op: MINUTES=10, SEED=1, DEVICE=cuda, WORKERS=2; INDEX=4711 runs one case again
# For another torch: make train TORCH="torch==2.9.1"; make test TORCH="torch==2.15.0" TRITON="triton==3.9.0"
# Triton is for the tests: they compile the kernels, with -m whole for every kind of GPU, and run some in its interpreter, on the CPU.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# one of those that .github/workflows/ci.yml names; 5.20.2 is the newest for Python 3.10
TRANSFORMERS ?= transformers==$(if $(filter 3.10,$(shell $(BIN)/python -c "import sys; print('%d.%d' % sys.version_info[:2])")),5.20.2,5.23.0)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
DIST_TORCH ?= $(TORCH)
DIST_PYTHON ?= $(PYTHON)

MINUTES ?= 10
SEED ?= 1
DEVICE ?= cpu
WORKERS ?= 2

.PHONY: train test test-hf lint counts dist docs fuzz clean
.DELETE_ON_ERROR:

train: $(VENV)/has-train
	$(BIN)/flashmix train $(ARGS)

test: $(VENV)/has-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-hf: $(VENV)/has-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(shell grep -lE "hf_cases|importorskip.*transformers" tests/test_*.py) $(ARGS)

lint: $(VENV)/has-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

counts: $(VENV)/has-dev
	$(BIN)/python tests/counts.py

# A wheel for this platform, under the tag of the oldest Linux that it runs on; one without the library in C, for all others; the sources.
dist: $(VENV)/has-dist
	rm -rf build dist
	$(BIN)/python -m build --outdir dist/linux
	FLASHMIX_PURE=1 $(BIN)/python -m build --wheel --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/linux/*.whl
	mv dist/linux/*.tar.gz dist && rm -r dist/linux
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/installed.py dist/*.whl --sources dist/*.tar.gz --torch $(DIST_TORCH) --python $(DIST_PYTHON)

docs: $(VENV)/has-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html, or: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

fuzz: $(VENV)/has-dev
	cd tests && $(abspath $(BIN))/python -W ignore -m fuzz --seed $(SEED) --device $(DEVICE) \
		$(if $(INDEX),--index $(INDEX),--workers $(WORKERS) $(if $(SECONDS),--seconds $(SECONDS),--minutes $(MINUTES))) $(ARGS)

$(VENV)/has-torch: Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/has-train $(VENV)/has-dev $(VENV)/has-dist $(VENV)/has-docs: $(VENV)/has-%: $(VENV)/has-torch pyproject.toml setup.py $(wildcard flashmix/*/native/*.[ch] flashmix/ops/*/native/*.[ch])
	$(BIN)/python -m pip install --quiet --editable ".[$*]" $(if $(filter dev,$*),"$(TRITON)" "$(TRANSFORMERS)")
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
