"""Supervised training on NeMo-RL: its own ``sft_train``, with the recipe's demonstrations and settings.

Loss, optimizer, validation and checkpoints are NeMo-RL's; the loss is the embedded engine's, a mean over the
step's response tokens. The task's stream is one pass over the data: epochs of a file task follow each other
in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.checkpoints import SideFiles
from nemo_grpo.nemorl.compat import Parts
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.host_api import SFT, SUPERVISED
from nemo_grpo.nemorl.trainer import Training
from nemo_grpo.run.demonstrations import Demonstrations
from nemo_grpo.run.groups import Group

if TYPE_CHECKING:
    from nemo_grpo.nemorl.trainer import Started

SETUP_RESULT = (
    "policy",
    "cluster",
    "dataloader",
    "val_dataloader",
    "loss_fn",
    "logger",
    "checkpointer",
    "grpo_save_state",
    "master_config",
)
"""Values that ``sft.setup`` returns, in order, by the names of GRPO's `Parts`."""


def set_up(run: ClusterRun, started: Started) -> Training:
    """Encode the demonstrations and set NeMo-RL's training up on them."""
    compat.require(SUPERVISED)
    recipe = run.recipe
    config = run.master_config
    tokenizer = started.tokenizer
    assert started.problems is not None, "recipe.host refuses it"
    demonstrations = Demonstrations(recipe, started.problems.task, tokenizer)
    demonstrations.check()
    held_out = [demonstrations.held_out(problem) for problem in started.problems.held_out]
    # `train_problem` orders the problems, by the recipe's data.shuffle.
    config.data["shuffle"] = False
    num_demonstrations = recipe.grpo.max_num_steps * recipe.grpo.num_prompts_per_step
    data = DemonstrationDataset(demonstrations.training, num_demonstrations, tokenizer)
    validation = DemonstrationDataset(held_out.__getitem__, len(held_out), tokenizer) if held_out else None
    result = compat.import_name(f"{SFT}:setup")(config, tokenizer, data, validation)
    named = dict(zip(SETUP_RESULT, result, strict=True))
    # `run_grpo.close` shuts down the generation; without rollouts the policy has the only workers.
    parts = Parts(**named, policy_generation=named["policy"])
    return Training(
        parts=parts,
        train=partial(train, parts, tokenizer),
        environments=[{}, {}],
        side_files=SideFiles(tokenizer, started.hf_config),
        last_step=recipe.grpo.max_num_steps,
    )


def train(parts: Parts, tokenizer: Any) -> None:
    """Run NeMo-RL's trainer, which asks `stop_after_step`'s checker after every step."""
    compat.import_name(f"{SFT}:sft_train")(
        parts.policy,
        parts.dataloader,
        parts.val_dataloader,
        tokenizer,
        parts.loss_fn,
        parts.master_config,
        parts.logger,
        parts.checkpointer,
        parts.grpo_save_state,
    )


class DemonstrationDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Demonstrations by number as NeMo-RL data: a conversation whose assistant's tokens carry the loss."""

    def __init__(self, demonstration: Callable[[int], Group], size: int, tokenizer: Any) -> None:
        """Set what is encoded.

        Args:
            demonstration: number -> a group of one response, the demonstration.
            size: demonstrations in one pass.
            tokenizer: decodes the messages that NeMo-RL logs.
        """
        self.demonstration = demonstration
        self.size = size
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        group = self.demonstration(index)
        response = group.responses[0].response
        log = [self._message("user", group.prompt)]
        pairs = zip(response.token_mask.tolist(), response.tokens.tolist(), strict=True)
        # One message for each run of tokens with the same mask, because NeMo-RL's loss counts all tokens of
        # an assistant's message and none of the others.
        for is_learnt, run in groupby(pairs, key=lambda pair: pair[0]):
            role = "assistant" if is_learnt else "environment"
            log.append(self._message(role, [token for _, token in run]))
        return {
            "message_log": log,
            "length": sum(len(message["token_ids"]) for message in log),
            "loss_multiplier": 1.0,
            "extra_env_info": None,
            "idx": index,
        }

    def _message(self, role: str, tokens: list[int]) -> dict[str, Any]:
        return {"role": role, "content": self.tokenizer.decode(tokens), "token_ids": torch.tensor(tokens)}
