"""Planner: this rank's rows of a step, cut into microbatches."""

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
    """Cuts a step into microbatches, for scoring and for updates.

    Attributes:
        multiple: divides the number of tokens of a packed microbatch.
        max_tokens: most tokens whose logits are in memory at a time.
        share_prompts: packed responses to one prompt share its tokens.
        dtype: of the model.
        device: of this rank.
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
            micro_batch_size: rows of each.
            mb_tokens: instead of that, pack rows into microbatches of at most this many tokens.
            rows: indices of the rows to compute; None: all.
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
            (the microbatches, rows that some rank computes, rows that are left out: they have no gradient).
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
            plan: rows of each.
            mb_tokens: None: rows are padded; else they are packed.
            whole: the loss needs all rows of a microbatch at once.
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
