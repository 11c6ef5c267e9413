"""Remedies of a slow phase and of a part that takes too much memory, without those already in use."""

from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.workload import Workload

NOTHING = "nothing to gain"


def for_time(phase: str, setup: Setup, work: Workload) -> str:
    """Name what makes a phase of the step shorter."""
    layout = setup.layout
    remedies = {
        "decode": {
            "use more GPUs": True,
            "FP8 rollouts": not setup.vllm_fp8,
            "another tensor_parallel_size of vLLM": True,
        },
        "tail": {
            "lower policy.generation.max_new_tokens": True,
            "let rollouts run ahead (grpo.async_grpo)": not work.trajectory_age,
        },
        "scoring": {
            "raise policy.logprob_batch_size": True,
            "leave out the KL penalty": setup.has_penalty,
        },
        "forward and backward": {
            "use more GPUs": True,
            "another layout (--best)": True,
            "no recomputation": bool(setup.recompute),
        },
        "pipeline bubble": {"use fewer stages": True, "more sequences per update": True},
        "gradients": {"use a larger policy.train_global_batch_size": True},
        "optimizer": {"use more GPUs": True, "no optimizer_cpu_offload": setup.offload_fraction > 0},
        "refit": {
            "use larger steps": True,
            "fewer stages": layout.pipeline > 1,
            "fewer expert ranks": layout.expert > 1,
        },
        "swaps to the host": {"use more GPUs": True},
        "rewards, data, logs": {"use larger steps": True},
    }
    return _still_open(remedies.get(phase, {}))


def for_memory(part: str, setup: Setup) -> str:
    """Name what makes a part of the training phase smaller."""
    rows = setup.train_tokens > setup.max_length
    remedies = {
        "reference": {"leave out the KL penalty": setup.has_penalty, "train adapters": True},
        "sampler": {"use target=cluster": True},
        "weights": {"raise TP or PP": True, "EP for experts": True},
        "gradients": {"raise TP or PP": True},
        "optimizer": {
            "use the distributed optimizer": not setup.distributed_optimizer,
            "more nodes": True,
            "optimizer_cpu_offload": not setup.embedded and not setup.offload_fraction,
        },
        "activations": {
            "set activation_checkpointing=true": "full" not in setup.recompute,
            "lower train_micro_batch_size": rows,
            "raise TP or CP": True,
        },
        "logits": {
            "lower train_micro_batch_size": rows,
            "raise TP or CP": True,
            "set policy.logprob_chunk_size": not setup.logprob_chunk,
        },
    }
    return _still_open(remedies[part])


def _still_open(remedies: dict[str, bool]) -> str:
    return ", or ".join(text for text, is_open in remedies.items() if is_open) or NOTHING
