"""A policy worker on a CPU: NeMo-RL's sharding, packing and loss wrappers around the table of logits."""

import os

import newer_python  # noqa: F401
import ray
import torch
import torch.distributed as dist
from nemo_rl.algorithms.loss.utils import prepare_loss_input
from nemo_rl.algorithms.loss.wrapper import SequencePackingLossWrapper
from nemo_rl_steps import embedding, packed


class ToyWorkerImpl:
    """One data-parallel rank."""

    def __init__(self, config, **_):
        self.model = embedding()
        port = 29510 + int(os.environ["RANK"])  # every rank is a tensor-parallel group of its own
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)

    def is_alive(self):
        return True

    def shutdown(self):
        return True

    def train(self, data, loss_fn, eval_mode=False, **_):
        """This rank's share of the loss over the whole step, whose counts the test puts into the rows."""
        sizes = (data["global_seqs"][0], data["global_toks"][0])
        total, metrics = 0.0, {}
        for microbatch in data.make_microbatch_iterator_for_packable_sequences():
            logits, starts = packed(microbatch, self.model)
            wrapped = SequencePackingLossWrapper(
                loss_fn, prepare_loss_input, starts, None, 0, dist.group.WORLD, None
            )
            loss, numbers = wrapped(logits, microbatch, *sizes)
            total += float(loss)
            for name, number in numbers.items():
                metrics.setdefault(name, []).append(number)
        metrics |= {"rows": [len(data["input_ids"])], "is_update": [not eval_mode]}
        return {
            "global_loss": torch.tensor(total),
            "grad_norm": torch.zeros(1),
            "all_mb_metrics": metrics,
            "gpu_name": "cpu",
            "model_dtype": torch.float32,
        }


@ray.remote
class ToyWorker(ToyWorkerImpl):
    """As NeMo-RL splits them: the actor class is empty."""
