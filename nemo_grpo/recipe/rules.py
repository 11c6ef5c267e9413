"""Rules on recipes for either engine that need arithmetic or a look-up; see `registry`."""

import re
from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.megatron_sections import LORA_LAYERS
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import MEGATRON, metric_key
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import as_yaml, did_you_mean
from nemo_grpo.tasks.jsonl import FileTaskConfig

PEFT = f"{MEGATRON}.peft"
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
"""Linear layers of latent attention, Mamba, Gated DeltaNet, multi-token prediction and the output layer."""
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
"""Megatron's name of a layer -> Hugging Face's names of the layers that it fuses or renames."""


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
    """Refuse unknown layers: NeMo-RL accepts any name, and fails without an optimizer if no layer matches."""
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
        # A dictionary instead of a set keeps the order of the recipe's names.
        remedy = dict.fromkeys(layer for layers in megatron_layers.values() for layer in layers)
        yield (
            f"{PEFT}.{key}=[{', '.join(names)}] has Hugging Face's names, and Megatron-core's linear_qkv and "
            f"linear_fc1 hold several of those layers; use [{', '.join(remedy)}]"
        )


def _megatron_layers(name: str) -> tuple[str, ...]:
    """Translate the name of a layer to Megatron's names.

    Returns: the layers that a name of Hugging Face or PEFT stands for; the name itself if it is Megatron's or
        a pattern; nothing for an unknown name.
    """
    # PEFT calls all linear layers by this name.
    if name == "all-linear":
        return LORA_LAYERS
    # A name of Hugging Face may have a path, as in self_attn.q_proj.
    last_part = name.rpartition(".")[2]
    layers = tuple(layer for layer, parts in HUGGING_FACE_LAYERS.items() if last_part in parts)
    if layers:
        return layers
    if name in LORA_LAYERS or name in FURTHER_LAYERS or "*" in name:
        return (name,)
    return ()


@rule(Scope.ALL)
def only_files_have_an_order(recipe: Recipe) -> Iterator[str]:
    """Refuse shuffle=false for a task that reads no training files, so there is no order to keep."""
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
    # The suggested batch must also consist of whole microbatches. If the layout does not fit, another rule
    # asks for a new one first, and any divisor will do here.
    unit = recipe.num_sequences_per_microbatch if recipe.layout_fits else 1
    remedy = _divisors_near(recipe.num_sequences_per_step, batch, multiple_of=unit)
    yield (
        f"policy.train_global_batch_size={batch} does not divide grpo.num_prompts_per_step x "
        f"grpo.num_generations_per_prompt = {num_prompts} x {num_generations} = "
        f"{recipe.num_sequences_per_step}; use {remedy}"
    )


@rule(Scope.ALL)
def grpo_section_agrees_with_the_loss(recipe: Recipe) -> Iterator[str]:
    """Refuse values of NeMo-RL's estimator that differ from the variant's, which are the ones in effect."""
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
    # NeMo-Gym's environments name their metrics themselves.
    if recipe.env.should_use_nemo_gym:
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
    # A name with two slashes, validation/SET/METRIC, is of one of several validation sets.
    if recipe.grpo.is_async and goal is not None and goal.count("/") > 1:
        yield (
            f"grpo.stop_at_validation_metric={goal}: NeMo-RL's asynchronous trainer decides before each "
            "validation set has its own; use validation/accuracy"
        )


def _is_of_nemo_rls_data(recipe: Recipe, metric: str) -> bool:
    """True for a metric of one of NeMo-RL's own validation sets, whose names are not known here."""
    sets = recipe.data.validation if recipe.nemo_grpo.task is None else None
    return isinstance(sets, list) and re.fullmatch("validation/.+/(accuracy|pass_k)", metric) is not None


def validation_metrics(recipe: Recipe) -> list[str]:
    """List the validation metrics that the recipe's engine computes, overall and for each validation set."""
    k = recipe.grpo.val_num_generations_per_prompt
    learns_from_demonstrations = recipe.loss_fn.learns_from_demonstrations
    whole_run = []
    if recipe.nemo_grpo.target == "cluster":
        # These are the metrics of NeMo-RL's sft and, for rollouts, of its validate().
        if learns_from_demonstrations:
            return ["val_loss"]
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
    # Remove repetitions: accuracy and format are reward components, too.
    sampled = list(dict.fromkeys(sampled))

    validation_sets = getattr(task, "validation_sets", {})
    by_set = []
    if len(validation_sets) > 1:
        by_set = [f"{name}/{metric}" for name in validation_sets for metric in sampled]
    return [*whole_run, *sampled, *by_set]


def _pass_sizes(k: int) -> list[int]:
    """List the powers of 2 up to k, and k itself: the sizes n of pass@n."""
    powers = {2**exponent for exponent in range(k.bit_length())}
    return sorted(powers | {k})


@rule(Scope.ALL)
def sampling_parameters_have_an_effect(recipe: Recipe) -> Iterator[str]:
    changed = changed_keys(recipe, *recipe.loss_fn.sampling_keys)
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
    """Report NeMo-RL's maximum number of draws if the variant has its own, which is in effect."""
    attempts = getattr(recipe.loss_fn, "max_resample_attempts", None)
    if attempts is None or not recipe.grpo.use_dynamic_sampling:
        return
    max_draws = recipe.grpo.dynamic_sampling_max_gen_batches
    # The default is left alone: it comes from NeMo-RL or a base, and the user did not choose it.
    if max_draws != type(recipe.grpo).model_fields["dynamic_sampling_max_gen_batches"].default:
        yield (
            f"grpo.dynamic_sampling_max_gen_batches={max_draws}: {recipe.loss_fn.variant} draws up to 1 + "
            f"loss_fn.max_resample_attempts={attempts} times; set the latter to {max_draws - 1} and leave "
            "this out"
        )


def changed_keys(recipe: Recipe, *keys: str) -> list[str]:
    """List those of the keys of ``loss_fn`` whose value differs from the variant's default."""
    fields = type(recipe.loss_fn).model_fields
    changed = []
    for key in keys:
        # Null switches the parameter off, so it has no effect to report.
        if key in fields and getattr(recipe.loss_fn, key) not in (None, fields[key].default):
            changed.append(key)
    return changed


def _divisors_near(number: int, size: int, *, multiple_of: int) -> str:
    """Name the nearest divisors of a number below and above a size, such as "8 or 16".

    Args:
        number: The number to divide.
        size: A size that does not divide the number.
        multiple_of: The divisors must be multiples of this, unless it does not divide the number itself.
    """
    unit = multiple_of if number % multiple_of == 0 else 1
    divisors = [divisor for divisor in range(unit, number + 1, unit) if number % divisor == 0]
    largest_below = [divisor for divisor in divisors if divisor <= size][-1:]
    smallest_above = [divisor for divisor in divisors if divisor >= size][:1]
    return " or ".join(map(str, largest_below + smallest_above))
