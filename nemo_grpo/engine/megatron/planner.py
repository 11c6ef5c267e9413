"""Planner: divides this rank's rows of a step into microbatches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch, Sequences
from nemo_grpo.core.objective import Objective
from nemo_grpo.engine.megatron.microbatches import (
    Microbatch,
    Part,
    by_gradient,
    data_parallel_share,
    plan_bins,
    plan_groups,
    plan_parts,
    plan_rows,
)
from nemo_grpo.engine.megatron.packing import pack


@dataclass(frozen=True)
class Planner:
    """Divides a step into microbatches, for scoring and for updates.

    Attributes:
        multiple: Divisor of the number of tokens in a packed microbatch.
        max_tokens: Largest number of tokens whose logits are in memory at a time.
        share_prompts: True if packed responses to the same prompt share its tokens.
        dtype: Precision of the model.
        device: Device of this rank.
    """

    multiple: int
    max_tokens: int
    share_prompts: bool
    dtype: torch.dtype
    device: torch.device

    def plan(
        self,
        sequences: Sequences,
        micro_batch_size: int,
        mb_tokens: int | None,
        rows: Tensor | None = None,
    ) -> list[Microbatch]:
        """Plan this rank's microbatches.

        Args:
            sequences: All rows of the step.
            micro_batch_size: Number of rows in a microbatch, if sequences are not packed.
            mb_tokens: Largest number of tokens in a microbatch, to pack sequences; None to pad them.
            rows: Indices of the rows to compute. By default all rows are computed.
        """
        if rows is None:
            rows = torch.arange(len(sequences.lengths))
        if not len(rows):
            return []
        to_compute = sequences.select(rows)
        share = data_parallel_share()
        if mb_tokens is None:
            plan = plan_rows(to_compute.lengths, micro_batch_size, share)
        else:
            plan = plan_bins(to_compute, mb_tokens, share, share_prompts=self.share_prompts)
        return self._microbatches(sequences, [rows[indices] for indices in plan], mb_tokens)

    def plan_update(
        self,
        objective: Objective,
        prepared: PreparedBatch,
        sequences: Sequences,
        micro_batch_size: int,
        mb_tokens: int | None,
    ) -> tuple[list[Microbatch], Tensor, Tensor]:
        """Plan this rank's microbatches of an update.

        Returns:
            (microbatches of this rank, rows that all ranks together compute, rows that all ranks leave out
            because they have no gradient).
        """
        share = data_parallel_share()
        if objective.whole_groups_per_loss_call:
            all_rows = torch.arange(len(sequences.lengths))
            groups = plan_groups(prepared.batch.group_ids, share)
            plan = self._microbatches(sequences, groups, mb_tokens, whole=True)
            return plan, all_rows, all_rows[:0]
        has_gradient = objective.rows_with_gradient(prepared.advantages, prepared.batch.mask)
        computed_rows, skipped_rows = by_gradient(has_gradient, share)
        plan = self.plan(sequences, micro_batch_size, mb_tokens, computed_rows)
        return plan, computed_rows, skipped_rows

    def _microbatches(
        self, sequences: Sequences, plan: list[Tensor], mb_tokens: int | None, *, whole: bool = False
    ) -> list[Microbatch]:
        """Build the planned microbatches.

        Args:
            sequences: All rows of the step.
            plan: Rows of each microbatch.
            mb_tokens: None to pad the rows; any number to pack them.
            whole: True if the loss needs all rows of a microbatch at once, in a single part.
        """
        microbatches = []
        for rows in plan:
            lengths = sequences.lengths[rows]
            length = int(lengths.max())
            packed = None
            num_tokens = [length - 1] * len(rows)
            if mb_tokens is not None:
                packed = pack(
                    sequences.select(rows),
                    multiple=self.multiple,
                    share_prompts=self.share_prompts,
                    dtype=self.dtype,
                    device=self.device,
                )
                # A packed row has logits only where a token of its response is predicted.
                num_tokens = (lengths - sequences.prompt_lengths[rows]).tolist()
            sizes = [len(rows)] if whole else plan_parts(num_tokens, self.max_tokens)
            rows = rows.to(self.device)
            parts = [Part(rows_of_part, length) for rows_of_part in rows.split(sizes)]
            microbatches.append(Microbatch(rows, length, parts, packed))
        return microbatches
