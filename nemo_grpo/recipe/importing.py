"""A GRPO configuration of TRL or verl as a recipe: what carries over, and what does not.

`nemo_grpo.aliases` says which key is which; here stands where a value means something else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_grpo import shipped
from nemo_grpo.aliases import TABLE
from nemo_grpo.dotted import leaves, set_value
from nemo_grpo.errors import UserError, reading
from nemo_grpo.recipe.keys import shown
from nemo_grpo.variants import OBJECTIVES

VERL_SECTIONS = (
    *("data", "algorithm", "trainer", "actor_rollout_ref.model", "actor_rollout_ref.rollout"),
    *("actor_rollout_ref.actor", "actor_rollout_ref.actor.optim"),
)
"""Where verl's names mean what `aliases` says; a critic has a learning rate of its own."""
VERL_MEGATRON = "actor_rollout_ref.actor.megatron."
PARALLEL = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("context_parallel_size", "expert_tensor_parallel_size"),
}
VERL_FILTER = "algorithm.filter_groups.enable"
SCHEDULES = {"constant_with_warmup": "constant"} | {name: name for name in ("constant", "linear", "cosine")}
KL_TYPES = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"} | {name: name for name in ("k1", "k2", "k3")}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
TOKEN_MEAN = ("bnpo",)
"""TRL's losses that differ from GRPO's in the aggregation alone."""
VANILLA = ("vanilla", "grpo")
_TRL_CORRECTION = (
    "TRL leaves out responses by their ratio to vLLM; loss_fn.use_importance_sampling_correction weights "
    "tokens, and truncated_importance_sampling_type bounds that"
)


class Imported(NamedTuple):
    """Attributes: library: whose file it was.  recipe: nested.  left: values that do not carry over, and why.
    unknown: section -> names of keys that have no counterpart.
    """

    library: str
    recipe: dict[str, Any]
    left: list[str]
    unknown: dict[str, list[str]]


class NotCarried(Exception):
    """Why a value has no counterpart."""


class _Given:
    """The values of a file by the library's own names."""

    def __init__(self, library: str, values: Mapping[str, Any], num_gpus: int) -> None:
        self.library, self.values, self.num_gpus = library, values, num_gpus

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def import_recipe(path: Path, overrides: Iterable[str] = (), num_gpus: int = 8) -> Imported:
    """Read a file of TRL's `GRPOConfig` and script arguments, or one of verl's PPO trainer.

    Args:   overrides: ``key=value`` of verl's command line, over the file.
            num_gpus: processes of a TRL run, whose file counts batches by process.
    Raises: UserError: it cannot be read, or is neither.
    """
    remedy = "give a configuration of TRL or verl"
    with reading(path, "valid YAML", remedy, yaml.YAMLError, OmegaConfBaseException):
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded) or not loaded:
            raise UserError(f"{path} holds no mapping of keys; {remedy}")
        over = OmegaConf.from_dotlist([one.lstrip("+") for one in overrides])
        tree: Any = OmegaConf.to_container(OmegaConf.merge(loaded, over), resolve=True)
    if "grpo" in tree and "policy" in tree:
        raise UserError(f"{path} is a recipe already; `nemo-grpo recipe check {path}` reads it as it is")
    library = "verl" if {"actor_rollout_ref", "algorithm"} & set(tree) else "TRL"
    given, keys = _names(library, dict(leaves(tree)), num_gpus)
    recipe: dict[str, Any] = {"defaults": f"{shipped.SCHEME}base/cluster.yaml"}
    left, unknown = list[str](), dict[str, list[str]]()
    for name, (there, value) in keys.items():
        if value in (None, {}, []):
            continue
        try:
            if (carried := _carried(given, name, value)) is None:
                section, _, last = there.rpartition(".")
                unknown.setdefault(section, []).append(last)
            for key, ours in (carried or {}).items():
                set_value(recipe, key, ours)
        except NotCarried as reason:
            left.append(f"{there}={shown(value)}: {reason}")
    for key, value in _whole(given, path).items():
        set_value(recipe, key, value)
    left.extend(_silent(given) if library == "TRL" else ())
    return Imported(library, recipe, left, unknown)


def _silent(given: _Given) -> Iterator[str]:
    """Defaults of TRL's that have no counterpart."""
    if not given("loss_type"):
        yield "loss_type is not given: the token mean of TRL's newer releases is taken"
    if not _trl_clip(given):
        yield "epsilon_high is not above 1, and bounds the weight itself in TRL's CISPO; the default is taken"
    if given("use_vllm") and "vllm_importance_sampling_correction" not in given.values:
        yield f"vllm_importance_sampling_correction is not given: {_TRL_CORRECTION}"


def _names(library: str, flat: Mapping[str, Any], num_gpus: int) -> tuple[_Given, dict[str, tuple[str, Any]]]:
    """The values, and (their key, value) by name, of a file's leaves."""
    keys = {}
    for key, value in flat.items():
        section, _, last = key.rpartition(".")
        name = last if library == "verl" and section in VERL_SECTIONS else key
        keys["filter_groups" if key == VERL_FILTER else name] = (key, value)
    return _Given(library, {name: value for name, (_, value) in keys.items()}, num_gpus), keys


def _carried(given: _Given, name: str, value: Any) -> dict[str, Any] | None:
    """Our keys for one of theirs; None: there is none.

    Raises: NotCarried: there is one, but not for this value.
    """
    if name.startswith(VERL_MEGATRON) and name.removeprefix(VERL_MEGATRON) in PARALLEL:
        key = f"policy.megatron_cfg.{name.removeprefix(VERL_MEGATRON)}"
        splits = key.endswith("tensor_model_parallel_size") and "expert" not in key and value > 1
        return {key: value} | ({"policy.megatron_cfg.sequence_parallel": True} if splits else {})
    column = 1 if given.library == "TRL" else 2
    alias = next((one for one in TABLE if name in one[column].split()), None)
    if alias is None:
        return None
    convert = CONVERSIONS.get(alias.key)
    if convert is None:
        return {alias.key: value}
    found = convert(given, value)
    return found if isinstance(found, dict) else {alias.key: found}


def _whole(given: _Given, path: Path) -> dict[str, Any]:
    """What follows from several of their keys, or stands in none of them."""
    found = _trl(given) if given.library == "TRL" else _verl(given)
    prompt, response = found["data.max_input_seq_length"], found["policy.generation.max_new_tokens"]
    name = given("run_name", given("experiment_name", path.stem))
    return found | {
        "policy.max_total_sequence_length": prompt + response,
        "nemo_grpo.run_name": str(name),
        "checkpointing.metric_name": None,
        "nemo_grpo.task.name": "???",
    }


def _trl(given: _Given) -> dict[str, Any]:
    """With TRL 1.16's defaults. A batch is that of one process, several times accumulated."""
    size, rows = given("num_generations", 8), given("per_device_train_batch_size", 8) * given.num_gpus
    accumulated = given("gradient_accumulation_steps", 1)
    return {
        "grpo.num_prompts_per_step": rows * given("steps_per_generation", accumulated) // size,
        "grpo.num_generations_per_prompt": size,
        "policy.train_global_batch_size": rows * accumulated,
        "data.max_input_seq_length": given("max_prompt_length", 512),
        "policy.generation.max_new_tokens": given("max_completion_length", 512),
        **_trl_clip(given),
        "loss_fn.advantage_eps": 1e-4,
        **({} if given("lr_scheduler_type") else {"policy.megatron_cfg.scheduler.lr_decay_style": "linear"}),
        "loss_fn.normalize_rewards": _is_scaled(given("scale_rewards", True)),
        "cluster.gpus_per_node": min(given.num_gpus, 8),
        "cluster.num_nodes": -(-given.num_gpus // 8),
        **({} if given("loss_type") else {"loss_fn.variant": "grpo"}),
    }


def _trl_clip(given: _Given) -> dict[str, Any]:
    """The ratio's bounds; CISPO has one of the weight itself, from above, and not above 1 it is left out."""
    lower = given("epsilon", 0.2)
    upper = given("epsilon_high", lower)
    if given("loss_type") == "cispo":
        lower, upper = 1.0, upper - 1
        if upper <= 0:
            return {}
    return {"loss_fn.ratio_clip_min": lower, "loss_fn.ratio_clip_max": upper}


def _verl(given: _Given) -> dict[str, Any]:
    """With verl's defaults. A batch counts prompts."""
    size, clip, vanilla = given("n", 1), given("clip_ratio", 0.2), given("loss_mode", VANILLA[0]) in VANILLA
    return {
        "grpo.num_prompts_per_step": given("train_batch_size", 1024),
        "grpo.num_generations_per_prompt": size,
        "policy.train_global_batch_size": given("ppo_mini_batch_size", 256) * size,
        "data.max_input_seq_length": given("max_prompt_length", 512),
        "policy.generation.max_new_tokens": given("max_response_length", 512),
        "loss_fn.ratio_clip_min": given("clip_ratio_low", clip),
        "loss_fn.ratio_clip_max": given("clip_ratio_high", clip),
        **({"loss_fn.ratio_clip_c": given("clip_ratio_c", 3.0)} if vanilla else {}),
        "policy.megatron_cfg.optimizer.weight_decay": given("weight_decay", 0.01),
    }


def _mapped(names: Mapping[str, Any], what: str) -> Callable[[_Given, Any], Any]:
    def convert(_given: _Given, value: Any) -> Any:
        if str(value) not in names:
            raise NotCarried(f"{what} here are {', '.join(sorted(set(map(str, names.values()))))}")
        return names[str(value)]

    return convert


def _loss(given: _Given, value: Any) -> dict[str, Any]:
    name = given("loss_mode", value) if given.library == "verl" and value in VANILLA else value
    aggregation = {}
    if given.library == "TRL":
        aggregation = {"loss_fn.aggregation": "token_mean" if value in TOKEN_MEAN else "sequence_mean"}
    if name in (*TOKEN_MEAN, *VANILLA):
        return {"loss_fn.variant": "grpo", **aggregation}
    if name not in OBJECTIVES:
        raise NotCarried("no loss here, or advantages without groups; see `nemo-grpo variants`")
    length = {}
    if OBJECTIVES[name].model_fields["aggregation"].default == "constant":
        longest = given("max_completion_length", given("max_response_length"))
        length = {} if longest is None else {"loss_fn.max_response_length": longest}
    return {"loss_fn.variant": name, **length}


def _kl(given: _Given, value: Any) -> float:
    """verl's coefficient counts with use_kl_loss alone."""
    return float(value) if given.library == "TRL" or given("use_kl_loss", False) else 0.0


def _kl_type(given: _Given, value: Any) -> Any:
    """k1's own derivative pulls nowhere; with the score-function term it is a penalty."""
    kind = _mapped(KL_TYPES, "estimators of KL")(given, value)
    score = {"loss_fn.reference_policy_kl_type": kind, "loss_fn.kl_score_function_gradient": True}
    return score if kind == "k1" else kind


def _correction(given: _Given, value: Any) -> dict[str, Any]:
    """verl bounds the weights of tokens; the switch is TRL's, which also drops whole responses."""
    if given.library == "TRL":
        if value:
            raise NotCarried(_TRL_CORRECTION)
        return {}
    prefix = "loss_fn.truncated_importance_sampling"
    bounds = {f"{prefix}_type": "tis", f"{prefix}_ratio": value}
    return {"loss_fn.use_importance_sampling_correction": True, **bounds} if value > 0 else {}


def _scaled(_given: _Given, value: Any) -> bool:
    if value == "batch":
        raise NotCarried("rewards are divided by their group's deviation, or not at all")
    return _is_scaled(value)


def _is_scaled(value: Any) -> bool:
    return value not in (False, "none", "False")


def _positive(_given: _Given, value: Any) -> dict[str, Any] | Any:
    return value if value > 0 else {}


def _precision(_given: _Given, value: Any) -> Any:
    if value in (True, "bfloat16", "bf16"):
        return "bfloat16"
    if value in (False, "auto"):
        return {}
    raise NotCarried("policy.precision is bfloat16 or float32")


def _later(_given: _Given, _value: Any) -> dict[str, Any]:
    """It is part of `_whole`."""
    return {}


def _not(reason: str) -> Callable[[_Given, Any], Any]:
    def convert(_given: _Given, _value: Any) -> Any:
        raise NotCarried(reason)

    return convert


def _at_once(given: _Given, value: Any) -> dict[str, Any]:
    if (given("num_iterations", 1), given("ppo_epochs", 1)) != (1, 1):
        raise NotCarried("every response trains once")
    return {}


CONVERSIONS: dict[str, Callable[[_Given, Any], Any]] = {
    **dict.fromkeys(("grpo.max_num_steps", "grpo.max_num_epochs", "grpo.val_period"), _positive),
    **dict.fromkeys(("checkpointing.save_period", "checkpointing.keep_top_k"), _positive),
    "policy.megatron_cfg.scheduler.lr_warmup_iters": _positive,
    **dict.fromkeys(("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"), _later),
    **dict.fromkeys(("policy.max_total_sequence_length", "policy.generation.max_new_tokens"), _later),
    "policy.train_global_batch_size": _at_once,
    "policy.train_micro_batch_size": lambda _, value: value or {},
    "nemo_grpo.run_name": _later,
    "nemo_grpo.task": _not("data are JSONL files of question and answer; see docs/tasks.md"),
    "nemo_grpo.rewards": _not("a component of the task, or a function of your own; see docs/own.md"),
    "loss_fn.variant": _loss,
    "loss_fn.reference_policy_kl_penalty": _kl,
    "loss_fn.reference_policy_kl_type": _kl_type,
    "loss_fn.aggregation": _mapped(AGGREGATIONS, "aggregations"),
    "loss_fn.ratio_clip_min": _later,
    "loss_fn.ratio_clip_max": _later,
    "loss_fn.normalize_rewards": _scaled,
    "loss_fn.use_importance_sampling_correction": _correction,
    "loss_fn.sequence_level_importance_ratios": lambda _, value: value == "sequence",
    "policy.generation.backend": lambda _, value: "vllm" if value else {},
    "policy.generation.top_k": _positive,
    "policy.precision": _precision,
    "policy.megatron_cfg.peft": _not("give its rank and alpha as policy.megatron_cfg.peft.dim and .alpha"),
    "policy.megatron_cfg.peft.dim": lambda _, value: (
        {"policy.megatron_cfg.peft.enabled": True, "policy.megatron_cfg.peft.dim": value} if value else {}
    ),
    "policy.megatron_cfg.peft.alpha": lambda given, value: (
        value if given("lora_rank", given("lora_r")) else {}
    ),
    "policy.megatron_cfg.scheduler.lr_decay_style": _mapped(SCHEDULES, "schedules"),
    "logger.wandb_enabled": lambda _, value: "wandb" in value,
}
"""Our key -> its value, or values of several keys, from theirs; elsewhere the value is the same."""
