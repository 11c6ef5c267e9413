# Every target makes what it needs; from a fresh clone `make quickstart` or `make test` is enough.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEMO_VENV := .venv-nemo-rl
RUN ?= quickstart

# What a cluster's modules and a user's pip settings leave in the environment must not get between us and .venv.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV

.PHONY: help venv venv-nemo-rl quickstart test test-nemo-rl test-slurm test-slurm-nemo-rl lint format bench clean

help:            ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

venv: $(STAMP)   ## create .venv with the pinned versions

$(STAMP): pyproject.toml requirements/constraints.txt scripts/find_python.sh
	@python=$$(bash scripts/find_python.sh) || exit 1; \
	 echo "creating $(VENV) with $$("$$python" --version) ($$python)"; \
	 "$$python" -m venv $(VENV) || { echo "error: '$$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -e '.[dev]'
	# Transformer Engine's Python code, for tests on a CPU; where it can be imported megatron-core would want its kernels.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c requirements/constraints.txt --target $(VENV)/transformer_engine transformer_engine
	@touch $(STAMP)

venv-nemo-rl: $(NEMO_VENV)/.installed  ## create .venv-nemo-rl, in which NeMo-RL's source runs on a CPU

$(NEMO_VENV)/.installed: requirements/nemo_rl.txt scripts/find_python.sh
	@python=$$(bash scripts/find_python.sh) || exit 1; "$$python" -m venv $(NEMO_VENV)
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/nemo_rl.txt
	# NeMo-RL's Megatron modules want a megatron-core that asks for Python 3.12, and run on 3.11 all the same.
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python megatron-core==0.19.2 triton==3.9.0
	@touch $@

quickstart: venv ## train a small policy by GRPO on this machine (RUN=name ARGS=--resume)
	$(BIN)/nemo-grpo train recipes/quickstart.yaml nemo_grpo.run_name=$(RUN) $(ARGS)

test: venv       ## the whole test suite (no GPU, no network)
	$(BIN)/python -m pytest

test-slurm: venv ## the tests marked slurm: a Slurm of several nodes on this machine (root; docs/slurm.md)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt ray
	$(BIN)/python -m pytest -m "slurm and not slow" tests/slurm

test-slurm-nemo-rl: venv venv-nemo-rl  ## the same Slurm with NeMo-RL's stack as the driver, nodes lost on the way (NEMO_RL_SRC=; half an hour)
	@[ -f "$(NEMO_RL_SRC)/nemo_rl/__init__.py" ] || { echo "error: NEMO_RL_SRC=$(NEMO_RL_SRC) is no clone of NeMo-RL" >&2; exit 2; }
	NEMO_RL_SRC="$$(realpath "$(NEMO_RL_SRC)")" $(BIN)/python -m pytest -m "slurm and slow" tests/slurm

test-nemo-rl: venv-nemo-rl  ## our adapter on NeMo-RL's source (NEMO_RL_SRC=its clone, 0.7.0 or 7ea279abf)
	@[ -f "$(NEMO_RL_SRC)/nemo_rl/__init__.py" ] || { echo "error: NEMO_RL_SRC=$(NEMO_RL_SRC) is no clone of NeMo-RL" >&2; exit 2; }
	PYTHONPATH="$(CURDIR)" NEMO_RL_SRC="$$(realpath "$(NEMO_RL_SRC)")" $(NEMO_VENV)/bin/python -m pytest -m nemo_rl -W ignore -o filterwarnings= tests/nemo_rl

lint: venv       ## ruff, mypy, shellcheck, recipe check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --external-sources slurm/*.sbatch slurm/*.sh slurm/lib/*.sh tests/slurm/*.sh
	$(BIN)/nemo-grpo recipe check recipes

format: venv     ## rewrite the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv      ## the benchmarks that take a minute or two; the others are run by hand
	@for b in benchmarks/logprob_memory.py benchmarks/convert_speed.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

clean:           ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
