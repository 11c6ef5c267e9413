"""NeMo-RL's Megatron worker, correct at any temperature under pipeline parallelism, and with entropies.

Imported on the workers only. `PolicyWorker` divides only logits by the temperature. `EntropyPolicyWorker`
also returns each token's entropy from the forward pass that scores it. Entropies take the same path and the
same shift as logprobs, so they are right at any TP, CP and PP, packed or not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import ray
import torch
from megatron.core import parallel_state
from nemo_rl.distributed.model_utils import allgather_cp_sharded_tensor
from nemo_rl.models.megatron.pipeline_parallel import broadcast_tensors_from_last_stage
from nemo_rl.models.megatron.train import LogprobsPostProcessor
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers import megatron_policy_worker as stock
from torch import Tensor

from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.step_context import ENTROPIES
from nemo_grpo.nemorl.workarounds.stage_temperature import scale_logits_only

Process = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class EntropyPostProcessor(LogprobsPostProcessor):
    """NeMo-RL's logprobs, and the entropy of each token's distribution.

    Entropies are [mb, S], in nats, of the full vocabulary at temperature 1. Index t belongs to token t, and
    index 0 is 0. Vocabulary padding counts, as in NeMo-RL's logprobs.
    """

    def __call__(
        self,
        data_dict: Any,
        input_ids: Tensor,
        cu_seqlens_padded: Tensor | None,
        *arguments: Any,
        **named: Any,
    ) -> Process:
        compute_logprobs: Process = super().__call__(
            data_dict, input_ids, cu_seqlens_padded, *arguments, **named
        )
        shape = data_dict["input_ids"].shape

        def process(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            entropies = self._entropies(logits)
            if self.cfg["sequence_packing"]["enabled"]:
                assert cu_seqlens_padded is not None
                shifted = unpacked(entropies[0], cu_seqlens_padded.tolist(), shape)
            else:
                shifted = torch.nn.functional.pad(entropies[:, : shape[1] - 1], (1, 0))
            loss, scores = compute_logprobs(logits)
            # NeMo-RL may have padded the rows, whose logprobs are then narrower than input_ids.
            width = scores["logprobs"].shape[1]
            return loss, {**scores, ENTROPIES: shifted[:, :width]}

        return process

    def _entropies(self, logits: Tensor) -> Tensor:
        """Compute entropies [mb, S] at temperature 1 from vocab-parallel logits [mb, S, V / TP]."""
        # NeMo-RL has already divided the logits by the temperature; dividing by the inverse undoes it.
        temperature = self.sampling_params.temperature if self.sampling_params else 1.0
        with torch.no_grad():
            _, entropies = logprobs_and_entropy(
                logits,
                logits.new_zeros(logits.shape[:-1], dtype=torch.int64),
                temperature=1.0 / temperature,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
        return entropies.float()


def unpacked(packed: Tensor, starts: list[int], shape: tuple[int, int]) -> Tensor:
    """Split a packed row into rows, shifted by one.

    Args:
        packed: [sum of padded lengths / CP], this rank's part.
        starts: B + 1 offsets before CP.
        shape: (B, S) of the result.

    Returns:
        [B, S]; index t holds the value of position t - 1; 0 at index 0 and after a row's end.
    """
    cp = parallel_state.get_context_parallel_world_size()
    rows = packed.new_zeros(shape)
    for row, (start, end) in enumerate(pairwise(starts)):
        part = packed[start // cp : end // cp]
        if cp > 1:
            part = allgather_cp_sharded_tensor(part, parallel_state.get_context_parallel_group(), 0)
        length = min(end - start, shape[1])
        rows[row, 1:length] = part[: length - 1]
    return rows


class PolicyWorkerImpl(stock.MegatronPolicyWorkerImpl):
    """NeMo-RL's worker with `workarounds.stage_temperature`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        compat.rebind("temperature", lambda _original: scale_logits_only)
        super().__init__(*arguments, **named)


class EntropyPolicyWorkerImpl(PolicyWorkerImpl):
    """`PolicyWorkerImpl` that also returns entropies."""

    in_reference = False

    def get_reference_policy_logprobs(self, *arguments: Any, **named: Any) -> Any:
        """Score by the reference as NeMo-RL does, without entropies, which are not needed."""
        self.in_reference = True
        try:
            return super().get_reference_policy_logprobs(*arguments, **named)
        finally:
            self.in_reference = False

    def get_logprobs(self, *arguments: Any, **named: Any) -> Any:
        """Score as NeMo-RL does, with `ENTROPIES` [B, S] beside the logprobs."""
        if self.in_reference:
            return super().get_logprobs(*arguments, **named)
        with collected_entropies() as microbatches:
            scores = super().get_logprobs(*arguments, **named)
        rows = None
        # Only the last pipeline stage has logits, and so entropies. NeMo-RL has sent the logprobs to all.
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            width = scores["logprobs"].shape[1]
            padded = []
            for entropies in microbatches:
                padded.append(torch.nn.functional.pad(entropies, (0, width - entropies.shape[1])))
            rows = torch.cat(padded)
        scores[ENTROPIES] = broadcast_tensors_from_last_stage({ENTROPIES: rows})[ENTROPIES].cpu()
        return scores


@contextmanager
def collected_entropies() -> Iterator[list[Tensor]]:
    """Score with `EntropyPostProcessor` within the block; yields the microbatches' entropies.

    NeMo-RL's worker uses only the logprobs that its processor returns, so the entropies are taken out here.
    """
    collected: list[Tensor] = []

    class CollectingPostProcessor(EntropyPostProcessor):
        def __call__(self, *arguments: Any, **named: Any) -> Process:
            process = super().__call__(*arguments, **named)

            def process_and_collect(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                loss, scores = process(logits)
                collected.append(scores.pop(ENTROPIES))
                return loss, scores

            return process_and_collect

    with compat.rebound("post-processor", lambda _original: CollectingPostProcessor):
        yield collected


_as_actor = ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))


@_as_actor
class PolicyWorker(PolicyWorkerImpl):
    """`PolicyWorkerImpl` as a Ray actor, apart because a class wrapped by Ray cannot be a base class."""


@_as_actor
class EntropyPolicyWorker(EntropyPolicyWorkerImpl):
    """`EntropyPolicyWorkerImpl` as a Ray actor."""
