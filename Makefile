# Two commands do everything on a machine that has Python 3.11 or later, git and make:
#   make reproduce   every figure and table        make test   lint, tests, notebook checks
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORES ?= all
# Only the environment's own programs and kernel, whatever else the user has active or installed.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME JUPYTER_PATH
export PATH := $(CURDIR)/$(BIN):$(PATH)
export JUPYTER_PREFER_ENV_PATH := 1
export PYTHONNOUSERSITE := 1
# uv trusts what the system trusts, as pip does: needed behind a proxy with a certificate of its own.
export UV_SYSTEM_CERTS := 1

.PHONY: help install reproduce test test-cluster lint lab lock clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

install: $(READY)  ## make .venv with the pinned dependencies, paperlib and its kernel

# uv is fast and compiles bytecode (an uncompiled torch takes 10 s to import); pip is the fallback.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	( $(BIN)/python -m pip install --quiet uv && \
	  $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r requirements.lock ) || \
	  $(BIN)/python -m pip install --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m ipykernel install --prefix $(VENV) --name python3 --display-name "Python 3 (paperlib)" >/dev/null
	touch $@

reproduce: $(READY)  ## every figure and table (same as: snakemake --cores all)
	snakemake --cores $(CORES)

test: $(READY) lint  ## lint, unit tests, notebook checks
	pytest -q

test-cluster: $(READY)  ## profiles/slurm on a real SLURM of one node (root; apt-get install slurm-wlm munge)
	pytest -n 0 -s -rA tests/cluster

lint: $(READY)  ## ruff, check only
	ruff check .
	ruff format --check .

lab: $(READY)  ## open JupyterLab in the same environment
	jupyter lab

lock: $(READY)  ## pin the dependencies of pyproject.toml anew
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
	  --no-emit-index-url --no-annotate --no-header pyproject.toml --output-file requirements.lock

clean:  ## remove what the demo run made (released results stay)
	rm -rf results/demo figures/demo .snakemake
