"""What NeMo-RL's trainer is given in the tests: a policy that really learns, on rollouts that are made up."""

from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import yaml
from nemo_rl.algorithms import grpo
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl_steps import VOCAB, counts, embedding
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_grpo.nemorl import compat, sync
from nemo_grpo.nemorl.config import load_run
from nemo_grpo.nemorl.exit_status import exit_code, last_step
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.nemorl.step_context import StepContext

GRPO = "nemo_rl.algorithms.grpo"
PROMPTS, GENERATIONS = 2, 3
BASE = Path(__file__).parents[2] / "recipes" / "base" / "cluster.yaml"
RECIPE = yaml.safe_load(f"""
grpo: {{num_prompts_per_step: {PROMPTS}, num_generations_per_prompt: {GENERATIONS}, max_num_steps: 2,
        val_period: 0, val_at_start: false, val_at_end: false}}
policy:
  model_name: toy
  max_total_sequence_length: 16
  generation: {{max_new_tokens: 8, vllm_cfg: {{enable_vllm_metrics_logger: false}}}}
checkpointing: {{save_period: 1, metric_name: null}}
cluster: {{gpus_per_node: 2}}
nemo_grpo: {{run_name: toy, task: {{name: knights_knaves}}}}
""")


def toy_run(folder, loss_fn, *overrides):
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(BASE), "loss_fn": loss_fn, **RECIPE}))
    return load_run(path, [f"nemo_grpo.runs_dir={folder}", *overrides])


def character_tokenizer():
    """One token per character; the chat template adds nothing."""
    characters = {chr(code): code for code in range(32, 127)} | {"\n": 0, "<pad>": 1, "<eos>": 2}
    base = Tokenizer(models.WordLevel(characters, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


class ToyPolicy:
    """A table of logits for each token as NeMo-RL's policy; ``train`` is SGD on microbatches of 2."""

    def __init__(self, context=None):
        self.model = embedding().requires_grad_()
        self.context = context
        self.trained = []
        self.losses = []
        self.sharding_annotations = MagicMock()
        self.sharding_annotations.get_axis_size.return_value = 1

    def __getattr__(self, name):
        """Everything that only moves a real policy between devices."""
        if name.startswith(("prepare_", "offload_", "finish_", "start_", "stop_", "finalize_", "clear_")):
            return lambda *_, **__: None
        raise AttributeError(name)

    def logprobs(self, ids):
        """Of the tokens and full-vocabulary entropies, [B, S]."""
        table = self.model[ids[:, :-1]].log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1)
        chosen = table.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(chosen, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))

    def get_logprobs(self, data, timer=None):
        with torch.no_grad():
            logprobs, entropies = self.logprobs(data["input_ids"])
        if self.context is not None:
            self.context.entropies = entropies
        return BatchedDataDict(logprobs=logprobs)

    def get_reference_policy_logprobs(self, data, timer=None):
        return BatchedDataDict(reference_logprobs=self.logprobs(data["input_ids"])[0].detach() - 0.05)

    def train(self, data, loss_fn, timer=None):
        if self.context is not None:
            data.update(self.context.take_train_tensors())
        self.trained.append({name: value.clone() for name, value in data.items() if torch.is_tensor(value)})
        sizes, metrics, total = counts(data), defaultdict(list), 0.0
        for microbatch in data.make_microbatch_iterator(2):
            logprobs = self.logprobs(microbatch["input_ids"])[0][:, 1:]
            loss, numbers = loss_fn(logprobs, microbatch, **sizes)
            loss.backward()
            total += float(loss)
            for name, number in numbers.items():
                metrics[name].append(number)
        gradient = self.model.grad
        with torch.no_grad():
            self.model -= 0.5 * gradient
        self.model.grad = None
        self.losses.append(total)
        metrics |= {name: [float(size)] for name, size in sizes.items()}
        return {"loss": torch.tensor(total), "grad_norm": gradient.norm(), "all_mb_metrics": dict(metrics)}

    def save_checkpoint(self, weights_path, **_):
        Path(weights_path).mkdir(parents=True)
        torch.save(self.model.detach(), Path(weights_path) / "model.pt")


def rollouts(draw=0):
    """One draw: 2 prompts (alike) with 3 responses each; the first group's rewards differ."""
    generator = torch.Generator().manual_seed(draw)
    rows = PROMPTS * GENERATIONS
    logs = []
    for _ in range(rows):
        length = int(torch.randint(2, 6, (1,), generator=generator))
        answer = torch.randint(0, VOCAB, (length,), generator=generator)
        asked = {"role": "user", "content": "?", "token_ids": torch.tensor([1, 2, 3])}
        said = {"role": "assistant", "content": "!", "token_ids": answer}
        logs.append([asked, said | {"generation_logprobs": torch.full((length,), -3.4)}])
    return BatchedDataDict(
        message_log=logs,
        task_name=["toy"] * rows,
        extra_env_info=[{}] * rows,
        loss_multiplier=torch.ones(rows),
        idx=[draw * PROMPTS + i // GENERATIONS for i in range(rows)],
        length=torch.full((rows,), 3),
        total_reward=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )


class Loader:
    """A data loader of empty draws; the rollouts bring what is in them."""

    def __iter__(self):
        for _ in range(len(self)):
            yield rollouts().select_indices([0, GENERATIONS])

    def __len__(self):
        return 10

    def state_dict(self):
        return {"position": 3}


class Generation(SimpleNamespace):
    LACKS = ("snapshot_step_metrics", "get_step_metrics", "requires_kv_scale_sync", "weight_synchronizer")

    def __getattr__(self, name):
        if name in self.LACKS:
            raise AttributeError(name)
        return (lambda *_, **__: {}) if name.startswith("get_") else (lambda *_, **__: None)


@contextmanager
def made_up_rollouts(draws):
    """Rollouts without an engine, and nothing to refit; ``draws`` gets a number for each."""

    def rollout(**_):
        draws.append(len(draws))
        return rollouts(draws[-1]), {"mean_gen_tokens_per_sample": 3.0}

    nothing = dict.fromkeys(("refit_policy_generation", "print_performance_metrics"), lambda *_, **__: {})
    made_up = dict.fromkeys(("run_multi_turn_rollout", "run_async_multi_turn_rollout"), rollout)
    with patch.multiple(GRPO, **nothing, **made_up):
        yield


class Run:
    def __init__(self, folder, loss_fn, *overrides, run=None):
        self.run = run or toy_run(folder, loss_fn, *overrides)
        self.context = StepContext()
        self.policy = ToyPolicy(self.context)
        self.logger = MagicMock()
        self.checkpointer = CheckpointManager(self.run.master_config.checkpointing)
        latest = self.checkpointer.get_latest_checkpoint_path()
        state = self.checkpointer.load_training_info(latest)
        make = getattr(grpo, "_get_grpo_save_state", lambda loaded: loaded or grpo._default_grpo_save_state())
        nothing = compat.Parts(*[None] * len(compat.Parts._fields))
        self.parts = nothing._replace(
            policy=self.policy,
            policy_generation=Generation(),
            dataloader=Loader(),
            logger=self.logger,
            checkpointer=self.checkpointer,
            loss_fn=ObjectiveLoss(self.run.recipe.loss_fn),
            grpo_save_state=make(state),
            master_config=self.run.master_config,
            teacher_worker_groups={},
            alias_to_group_alias={},
        )

    def install(self):
        """Our parts in NeMo-RL's trainer; returns the estimator."""
        tokenizer = MagicMock(decode=lambda ids: f"<{ids[0]}>")
        last_step(self.run, self.parts)  # refuses too little data
        return sync.install(self.run, self.context, self.parts, tokenizer)

    def run_trainer(self, environments=({}, {}), tokenizer=None):
        self.estimator = self.install()
        sync.train(self.run, self.parts, environments, tokenizer or MagicMock(pad_token_id=0))

    def train(self):
        """Returns: the draws of prompts."""
        draws = []
        with made_up_rollouts(draws):
            self.run_trainer()
        if hasattr(self.checkpointer, "shutdown"):
            self.checkpointer.shutdown()
        return draws

    def exit_code(self, ending):
        return exit_code(self.run, self.parts, last_step(self.run, self.parts), ending)

    def logged(self):
        calls = [c for c in self.logger.log_metrics.call_args_list if c.kwargs.get("prefix") == "train"]
        return calls[-1].args[0]
