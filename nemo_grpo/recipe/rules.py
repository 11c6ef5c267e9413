"""Rules for both engines, and advice, that need arithmetic or a look-up; see `registry`."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.keys import unread_key_messages
from nemo_grpo.recipe.megatron_sections import LORA_LAYERS, ModelOverrides
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import MEGATRON, VLLM, metric_key
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import as_yaml, did_you_mean
from nemo_grpo.tasks.jsonl import FileTaskConfig

PEFT = f"{MEGATRON}.peft"
MOST_SHARED = 0.9
"""Share of a GPU's memory above which vLLM leaves too little for the policy on it."""
FURTHER_LAYERS = (
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "in_proj",
    "out_proj",
    "eh_proj",
    "output_layer",
)
"""Linear layers of latent attention, Mamba and Gated DeltaNet, multi-token prediction, and the output."""
HUGGING_FACE_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"),
    "linear_proj": ("o_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    "linear_fc2": ("down_proj", "w2"),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "output_layer": ("lm_head",),
}
"""Megatron's layer -> the Hugging Face layers that it fuses or renames."""


@rule(Scope.ALL)
def model_is_no_checkpoint_of_nemo(recipe: Recipe) -> Iterator[str]:
    name = recipe.policy.model_name
    if name is None:
        return
    reason = nemo.reason_against(Path(name))
    if reason is not None:
        yield f"policy.model_name={name} is {reason}"


@rule(Scope.ALL)
def lora_layers_have_megatrons_names(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL accepts any name; if none is a layer's, its driver ends without an optimizer."""
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return
    for key, names in (("target_modules", peft.target_modules), ("exclude_modules", peft.exclude_modules)):
        megatron_layers = {name: _megatron_layers(name) for name in names}
        if all(layers == (name,) for name, layers in megatron_layers.items()):
            continue
        unknown_names = [name for name, layers in megatron_layers.items() if not layers]
        if unknown_names:
            hint = did_you_mean(unknown_names[0], LORA_LAYERS)
            yield f"{PEFT}.{key}: {unknown_names[0]!r} is no linear layer of Megatron-core{hint}"
            continue
        # A dictionary and not a set: the remedy keeps the order of the recipe's names.
        remedy = dict.fromkeys(layer for layers in megatron_layers.values() for layer in layers)
        yield (
            f"{PEFT}.{key}=[{', '.join(names)}] has Hugging Face's names, and Megatron-core's linear_qkv and "
            f"linear_fc1 hold several of those layers; use [{', '.join(remedy)}]"
        )


def _megatron_layers(name: str) -> tuple[str, ...]:
    """Return Megatron's layers for a name: itself if it is Megatron's or a pattern; none if it is unknown."""
    if name == "all-linear":  # PEFT's word.
        return LORA_LAYERS
    # Hugging Face's names may have a path, as in self_attn.q_proj.
    last_part = name.rpartition(".")[2]
    layers = tuple(layer for layer, parts in HUGGING_FACE_LAYERS.items() if last_part in parts)
    if layers:
        return layers
    is_megatrons = name in LORA_LAYERS or name in FURTHER_LAYERS
    return (name,) if is_megatrons or "*" in name else ()


@rule(Scope.ALL)
def only_files_have_an_order(recipe: Recipe) -> Iterator[str]:
    """A task that makes its problems, or reads none here, has no file's order to keep."""
    task = recipe.nemo_grpo.task
    has_files = isinstance(task, FileTaskConfig) and bool(task.train_files)
    if task is not None and recipe.data.shuffle is False and not has_files:
        yield (
            f"data.shuffle=false: {task.name} makes its problems and has no file whose order could be kept; "
            "leave it out"
        )


@rule(Scope.ALL)
def updates_divide_the_step(recipe: Recipe) -> Iterator[str]:
    batch = recipe.policy.train_global_batch_size
    num_prompts = recipe.grpo.num_prompts_per_step
    num_generations = recipe.grpo.num_generations_per_prompt
    if recipe.num_sequences_per_step % batch == 0:
        return
    # The remedy must satisfy the rule on whole microbatches, too. Without a layout that fits, another rule
    # asks for a new layout first, and any divisor will do here.
    unit = recipe.num_sequences_per_microbatch if recipe.layout_fits else 1
    remedy = _divisors_near(recipe.num_sequences_per_step, batch, multiple_of=unit)
    yield (
        f"policy.train_global_batch_size={batch} does not divide grpo.num_prompts_per_step x "
        f"grpo.num_generations_per_prompt = {num_prompts} x {num_generations} = "
        f"{recipe.num_sequences_per_step}; use {remedy}"
    )


@rule(Scope.ALL)
def grpo_section_agrees_with_the_loss(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL has each of these keys in two places; the variant's own is the one that trains."""
    if recipe.loss_fn.is_stock:
        return
    for place, section in (("grpo", recipe.grpo), ("grpo.adv_estimator", recipe.grpo.adv_estimator)):
        for key in ("normalize_rewards", "use_leave_one_out_baseline"):
            stated = getattr(section, key, None)
            trained = getattr(recipe.loss_fn, key, False)
            if stated not in (None, trained):
                yield (
                    f"{place}.{key}={as_yaml(stated)}, but {recipe.loss_fn.variant} trains with "
                    f"loss_fn.{key}={as_yaml(trained)}; leave {place}.{key} out or make them equal"
                )


@rule(Scope.ALL)
def validation_metrics_exist(recipe: Recipe) -> Iterator[str]:
    if recipe.env.should_use_nemo_gym:  # Its environments name the metrics.
        return
    metrics = [f"validation/{name}" for name in validation_metrics(recipe)]
    ranking = recipe.checkpointing.metric_key
    goal = metric_key(recipe.grpo.stop_at_validation_metric)
    named_metrics = []
    if ranking is not None and ranking.startswith("validation/"):
        named_metrics.append(("checkpointing.metric_name", ranking))
    if goal is not None:
        named_metrics.append(("grpo.stop_at_validation_metric", goal))
    for key, metric in named_metrics:
        if metric not in metrics and not _is_of_nemo_rls_data(recipe, metric):
            yield f"{key}: validation has no metric {metric!r}{did_you_mean(metric, metrics)}"
    # Two slashes: validation/SET/METRIC.
    if recipe.grpo.is_async and goal is not None and goal.count("/") > 1:
        yield (
            f"grpo.stop_at_validation_metric={goal}: NeMo-RL's asynchronous trainer decides before each "
            "validation set has its own; use validation/accuracy"
        )


def _is_of_nemo_rls_data(recipe: Recipe, metric: str) -> bool:
    """True for a metric of one of several validation sets of NeMo-RL's own data, which names them itself."""
    sets = recipe.data.validation if recipe.nemo_grpo.task is None else None
    return isinstance(sets, list) and re.fullmatch("validation/.+/(accuracy|pass_k)", metric) is not None


def validation_metrics(recipe: Recipe) -> list[str]:
    """List the validation metrics of the recipe's engine, with those of each of several sets."""
    k = recipe.grpo.val_num_generations_per_prompt
    learns_from_demonstrations = recipe.loss_fn.learns_from_demonstrations
    whole_run = []
    if recipe.nemo_grpo.target == "cluster":
        if learns_from_demonstrations:  # NeMo-RL's sft.
            return ["val_loss"]
        # NeMo-RL's validate().
        sampled = ["accuracy"]
        if k > 1:
            sampled.append("pass_k")
        whole_run.append("avg_length")
    else:
        sampled = ["accuracy", "greedy", f"maj@{k}", "format", "truncated", "num_tokens"]
        sampled += [f"pass@{n}" for n in _pass_sizes(k)]
        if learns_from_demonstrations:
            whole_run.append("val_loss")
    task = recipe.nemo_grpo.task
    if task is not None:
        sampled += ["reward", *task.reward_components, *recipe.nemo_grpo.rewards]
    # Once each: accuracy and format are reward components, too.
    sampled = list(dict.fromkeys(sampled))
    validation_sets = getattr(task, "validation_sets", {})
    by_set = []
    if len(validation_sets) > 1:
        by_set = [f"{name}/{metric}" for name in validation_sets for metric in sampled]
    return [*whole_run, *sampled, *by_set]


def _pass_sizes(k: int) -> list[int]:
    """List the powers of 2 up to k, and k."""
    powers = {1 << exponent for exponent in range(k.bit_length())}
    return sorted(powers | {k})


@rule(Scope.ALL)
def sampling_parameters_have_an_effect(recipe: Recipe) -> Iterator[str]:
    changed = _changed(recipe, *recipe.loss_fn.sampling_keys)
    if changed and not recipe.grpo.use_dynamic_sampling:
        yield (
            f"loss_fn.{changed[0]} has no effect with grpo.use_dynamic_sampling=false; set "
            "grpo.use_dynamic_sampling=true"
        )


@rule(Scope.ALL)
def maximum_draws_are_the_variants(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.task is not None:
        yield from _unread_maximum(recipe)


@rule(Scope.ADVICE)
def maximum_draws_are_replaced(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.task is None:
        yield from _unread_maximum(recipe)


def _unread_maximum(recipe: Recipe) -> Iterator[str]:
    """Report NeMo-RL's maximum of draws where the variant has one of its own."""
    attempts = getattr(recipe.loss_fn, "max_resample_attempts", None)
    if attempts is None or not recipe.grpo.use_dynamic_sampling:
        return
    max_draws = recipe.grpo.dynamic_sampling_max_gen_batches
    # The default is NeMo-RL's and the bases': nobody chose it.
    if max_draws != type(recipe.grpo).model_fields["dynamic_sampling_max_gen_batches"].default:
        yield (
            f"grpo.dynamic_sampling_max_gen_batches={max_draws}: {recipe.loss_fn.variant} draws up to 1 + "
            f"loss_fn.max_resample_attempts={attempts} times; set the latter to {max_draws - 1} and leave "
            "this out"
        )


@rule(Scope.ADVICE)
def variant_uses_its_dynamic_sampling(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss_fn
    if loss.without_dynamic_sampling is not None and not recipe.grpo.use_dynamic_sampling:
        yield f"{loss.variant} without grpo.use_dynamic_sampling=true: {loss.without_dynamic_sampling}"


SHARES = re.compile(r"(?:accuracy|greedy|truncated|pass_k|pass@\d+|maj@\d+)(?:_stderr)?")
"""Validation metrics between 0 and 1."""


@rule(Scope.ADVICE)
def validation_can_reach_the_threshold(recipe: Recipe) -> Iterator[str]:
    goal = metric_key(recipe.grpo.stop_at_validation_metric)
    threshold = recipe.grpo.stop_at_validation_threshold
    # Without a task of ours NeMo-RL's accuracy is a mean reward, which may exceed 1.
    if goal is None or threshold is None or threshold <= 1 or recipe.nemo_grpo.task is None:
        return
    if SHARES.fullmatch(goal.rpartition("/")[2]):
        yield (
            f"grpo.stop_at_validation_threshold={threshold:g}: {goal} is at most 1, so that the run never "
            f"stops by it; use a share, as {threshold / 100:g} for {threshold:g} %"
        )


@rule(Scope.ADVICE)
def embedded_checkpoints_are_ranked(recipe: Recipe) -> Iterator[str]:
    checkpointing = recipe.checkpointing
    save_period = checkpointing.save_period
    val_period = recipe.grpo.val_period
    ranks_some = checkpointing.ranks_by_validation and checkpointing.keep_top_k is not None
    if recipe.nemo_grpo.target != "embedded" or not ranks_some or val_period <= 0:
        return
    if save_period % val_period != 0:
        next_multiple = math.ceil(save_period / val_period) * val_period
        yield (
            f"checkpointing.save_period={save_period} is no multiple of grpo.val_period={val_period}: a "
            f"checkpoint without {checkpointing.metric_name} cannot be the best, and only the newest "
            f"{checkpointing.keep_top_k} of them stay; use {next_multiple}"
        )


@rule(Scope.ADVICE)
def keys_are_read(recipe: Recipe) -> Iterator[str]:
    yield from unread_key_messages(recipe.to_dict())


@rule(Scope.ADVICE)
def clip_has_an_effect(recipe: Recipe) -> Iterator[str]:
    changed = _changed(recipe, "ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
    if changed and recipe.num_updates_per_step == 1:
        yield (
            f"loss_fn.{changed[0]}: with one update per step the ratio is 1 and no clip acts; "
            "policy.train_global_batch_size below prompts x generations makes several updates"
        )


@rule(Scope.ADVICE)
def learning_rate_suits_a_pretrained_model(recipe: Recipe) -> Iterator[str]:
    megatron = recipe.policy.megatron_cfg
    optimizer = megatron.optimizer
    # Published LoRA recipes use ten times the rate, and a new model has no pretrained weights to lose.
    keeps_the_weights = megatron.lora_in_use is None and recipe.policy.model_name is not None
    largest = 1e-3 if keeps_the_weights else 1e-2
    # Adam's first step moves each weight by lr, whatever the gradient; other optimizers scale with it.
    if megatron.enabled and optimizer.optimizer == "adam" and optimizer.lr > largest:
        yield (
            f"{MEGATRON}.optimizer.lr={optimizer.lr:g} moves every weight by as much in its first step; "
            "published recipes have 1e-7 to 1e-5, 1e-4 with LoRA"
        )


@rule(Scope.ADVICE)
def shared_gpus_keep_room_for_training(recipe: Recipe) -> Iterator[str]:
    generation = recipe.policy.generation
    share = generation.vllm_cfg.gpu_memory_utilization
    shares = recipe.nemo_grpo.target == "cluster" and generation.colocated.enabled
    if shares and generation.backend == "vllm" and share > MOST_SHARED:
        yield (
            f"{VLLM}.gpu_memory_utilization={share} on GPUs that also train: what the policy keeps there "
            "during a rollout (contexts, buffers, weights at the refit) needs the rest; use 0.5 to 0.8"
        )


@rule(Scope.EMBEDDED)
def turns_are_limited_by_the_task(recipe: Recipe) -> Iterator[str]:
    """Leave 1 alone: it is the default, which nobody chose."""
    turns = recipe.grpo.max_rollout_turns
    task = recipe.nemo_grpo.task
    if task is not None and 1 < turns < task.num_turns:
        yield (
            f"grpo.max_rollout_turns={turns}: in the embedded engine a response to {task.name} takes up to "
            f"{task.num_turns} turns all the same; leave it out, and set the task's own limit"
        )


@rule(Scope.EMBEDDED)
def lora_adapts_layers_of_the_decoder(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return
    for name in (*peft.target_modules, *peft.exclude_modules):
        if name not in LORA_LAYERS:
            yield f"{PEFT}: the embedded engine cannot adapt {name!r}; use {', '.join(LORA_LAYERS)}"
    if not peft.layers:
        yield f"{PEFT}.exclude_modules={peft.exclude_modules} leaves no layer to adapt; shorten it"


@rule(Scope.EMBEDDED)
def model_overrides_are_supported(recipe: Recipe) -> Iterator[str]:
    overrides = recipe.policy.megatron_cfg.model_overrides or ModelOverrides()
    for name, value in (overrides.model_extra or {}).items():
        yield (
            f"{MEGATRON}.model_overrides.{name}={as_yaml(value)} is not supported by the embedded engine"
            f"{did_you_mean(name, ModelOverrides.model_fields)}"
        )


@rule(Scope.EMBEDDED)
def updates_hold_whole_groups(recipe: Recipe) -> Iterator[str]:
    if not recipe.loss_fn.needs_whole_groups:
        return
    batch = recipe.policy.train_global_batch_size
    group_size = recipe.grpo.num_generations_per_prompt
    if batch % group_size or batch // group_size < recipe.data_parallel_size:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true sums over whole groups: "
            f"policy.train_global_batch_size={batch} must be a multiple of "
            f"grpo.num_generations_per_prompt={group_size}, with at least one group for each of the "
            f"{recipe.data_parallel_size} data-parallel ranks; use {recipe.num_sequences_per_step}"
        )


def _changed(recipe: Recipe, *keys: str) -> list[str]:
    """List the keys of ``loss_fn`` that differ from the variant's default."""
    fields = type(recipe.loss_fn).model_fields
    changed = []
    for key in keys:
        # Null switches the parameter off, so it has no effect to report.
        if key in fields and getattr(recipe.loss_fn, key) not in (None, fields[key].default):
            changed.append(key)
    return changed


def _divisors_near(number: int, size: int, *, multiple_of: int) -> str:
    """Name the divisors of a number next to ``size``, below and above.

    Args:
        number: The number to divide.
        size: Size that does not divide it.
        multiple_of: The divisors are multiples of this, if it divides the number; else any.
    """
    unit = multiple_of if number % multiple_of == 0 else 1
    divisors = [divisor for divisor in range(unit, number + 1, unit) if number % divisor == 0]
    largest_below = [divisor for divisor in divisors if divisor <= size][-1:]
    smallest_above = [divisor for divisor in divisors if divisor >= size][:1]
    return " or ".join(map(str, largest_below + smallest_above))
