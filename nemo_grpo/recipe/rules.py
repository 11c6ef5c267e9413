"""Rules for both engines, and advice, that need arithmetic or a look-up; see `registry`."""

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
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("in_proj", "out_proj", "eh_proj", "output_layer"),
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
    if name is not None and (reason := nemo.reason_against(Path(name))):
        yield f"policy.model_name={name} is {reason}"


@rule(Scope.ALL)
def lora_layers_have_megatrons_names(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL accepts any name; if none is a layer's, its driver ends without an optimizer."""
    peft = recipe.policy.megatron_cfg.lora_in_use
    lists = peft and {"target_modules": peft.target_modules, "exclude_modules": peft.exclude_modules}
    for key, names in (lists or {}).items():
        meant = {name: _megatrons(name) for name in names}
        if all(own == (name,) for name, own in meant.items()):
            continue
        if unknown := [name for name, own in meant.items() if not own]:
            hint = did_you_mean(unknown[0], LORA_LAYERS)
            yield f"{PEFT}.{key}: {unknown[0]!r} is no linear layer of Megatron-core{hint}"
            continue
        own = dict.fromkeys(layer for layers in meant.values() for layer in layers)
        yield (
            f"{PEFT}.{key}=[{', '.join(names)}] has Hugging Face's names, and Megatron-core's linear_qkv and "
            f"linear_fc1 hold several of those layers; use [{', '.join(own)}]"
        )


def _megatrons(name: str) -> tuple[str, ...]:
    """Return Megatron's layers for a name: itself if it is Megatron's or a pattern; none if it is unknown."""
    if name == "all-linear":  # PEFT's word
        return LORA_LAYERS
    if own := [own for own, theirs in HUGGING_FACE_LAYERS.items() if name.rpartition(".")[2] in theirs]:
        return tuple(own)
    return (name,) if "*" in name or name in (*LORA_LAYERS, *FURTHER_LAYERS) else ()


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
    g, batch = recipe.grpo, recipe.policy.train_global_batch_size
    if recipe.num_sequences_per_step % batch:
        unit = recipe.num_sequences_per_microbatch if recipe.layout_fits else 1
        fitting = _divisors_near(recipe.num_sequences_per_step, batch, multiple_of=unit)
        yield (
            f"policy.train_global_batch_size={batch} does not divide grpo.num_prompts_per_step x "
            f"grpo.num_generations_per_prompt = {g.num_prompts_per_step} x {g.num_generations_per_prompt} = "
            f"{recipe.num_sequences_per_step}; use {fitting}"
        )


@rule(Scope.ALL)
def grpo_section_agrees_with_the_loss(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL has each of these keys in two places; the variant's own is the one that trains."""
    if recipe.loss_fn.is_stock:
        return
    for place, section in (("grpo", recipe.grpo), ("grpo.adv_estimator", recipe.grpo.adv_estimator)):
        for key in ("normalize_rewards", "use_leave_one_out_baseline"):
            given, used = getattr(section, key, None), getattr(recipe.loss_fn, key, False)
            if given not in (None, used):
                yield (
                    f"{place}.{key}={as_yaml(given)}, but {recipe.loss_fn.variant} trains with "
                    f"loss_fn.{key}={as_yaml(used)}; leave {place}.{key} out or make them equal"
                )


@rule(Scope.ALL)
def validation_metrics_exist(recipe: Recipe) -> Iterator[str]:
    if recipe.env.should_use_nemo_gym:  # its environments name the metrics
        return
    known = [f"validation/{name}" for name in validation_metrics(recipe)]
    ranking, goal = recipe.checkpointing.metric_key or "", metric_key(recipe.grpo.stop_at_validation_metric)
    for key, metric in (
        ("checkpointing.metric_name", ranking if ranking.startswith("validation/") else None),
        ("grpo.stop_at_validation_metric", goal),
    ):
        if metric is not None and metric not in known and not _is_of_their_data(recipe, metric):
            yield f"{key}: validation has no metric {metric!r}{did_you_mean(metric, known)}"
    if recipe.grpo.is_async and goal is not None and goal.count("/") > 1:
        yield (
            f"grpo.stop_at_validation_metric={goal}: NeMo-RL's asynchronous trainer decides before each "
            "validation set has its own; use validation/accuracy"
        )


def _is_of_their_data(recipe: Recipe, metric: str) -> bool:
    """True for a metric of one of several validation sets of NeMo-RL's own data, which names them itself."""
    sets = recipe.data.validation if recipe.nemo_grpo.task is None else None
    return isinstance(sets, list) and re.fullmatch("validation/.+/(accuracy|pass_k)", metric) is not None


def validation_metrics(recipe: Recipe) -> list[str]:
    """List the validation metrics of the recipe's engine, with those of each of several sets."""
    k, learns = recipe.grpo.val_num_generations_per_prompt, recipe.loss_fn.learns_from_demonstrations
    if recipe.nemo_grpo.target == "cluster" and learns:  # NeMo-RL's sft
        return ["val_loss"]
    passes = [f"pass@{n}" for n in sorted({*(1 << i for i in range(k.bit_length())), k})]
    task = recipe.nemo_grpo.task
    rewards = [] if task is None else ["reward", *task.reward_components, *recipe.nemo_grpo.rewards]
    sampled = ["accuracy", "greedy", f"maj@{k}", "format", "truncated", "num_tokens", *passes]
    whole = ["val_loss"] if learns else []
    if recipe.nemo_grpo.target == "cluster":  # NeMo-RL's validate()
        sampled, whole = ["accuracy", *(["pass_k"] if k > 1 else [])], ["avg_length"]
    sampled = list(dict.fromkeys([*sampled, *rewards]))
    sets = getattr(task, "validation_sets", {})
    of_sets = [f"{name}/{metric}" for name in sets for metric in sampled] if len(sets) > 1 else []
    return [*whole, *sampled, *of_sets]


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
    # the default is NeMo-RL's and the bases': nobody chose it
    g, attempts = recipe.grpo, getattr(recipe.loss_fn, "max_resample_attempts", None)
    most = g.dynamic_sampling_max_gen_batches
    is_default = most == type(g).model_fields["dynamic_sampling_max_gen_batches"].default
    if attempts is not None and g.use_dynamic_sampling and not is_default:
        yield (
            f"grpo.dynamic_sampling_max_gen_batches={most}: {recipe.loss_fn.variant} draws up to 1 + "
            f"loss_fn.max_resample_attempts={attempts} times; set the latter to {most - 1} and leave this out"
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
    # without a task of ours NeMo-RL's accuracy is a mean reward
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
    saves = checkpointing.save_period
    validates = recipe.grpo.val_period
    ranks = checkpointing.ranks_by_validation and checkpointing.keep_top_k is not None
    if recipe.nemo_grpo.target == "embedded" and ranks and validates > 0 and saves % validates != 0:
        yield (
            f"checkpointing.save_period={saves} is no multiple of grpo.val_period={validates}: a checkpoint "
            f"without {checkpointing.metric_name} cannot be the best, and only the newest "
            f"{checkpointing.keep_top_k} of them stay; use {-(-saves // validates) * validates}"
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
    m = recipe.policy.megatron_cfg
    most = 1e-2 if m.lora_in_use or recipe.policy.model_name is None else 1e-3
    if m.enabled and m.optimizer.optimizer == "adam" and m.optimizer.lr > most:
        yield (
            f"{MEGATRON}.optimizer.lr={m.optimizer.lr:g} moves every weight by as much in its first step; "
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
    turns, task = recipe.grpo.max_rollout_turns, recipe.nemo_grpo.task
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
    size, group = recipe.policy.train_global_batch_size, recipe.grpo.num_generations_per_prompt
    if size % group or size // group < recipe.data_parallel_size:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true sums over whole groups: "
            f"policy.train_global_batch_size={size} must be a multiple of "
            f"grpo.num_generations_per_prompt={group}, with at least one group for each of the "
            f"{recipe.data_parallel_size} data-parallel ranks; use {recipe.num_sequences_per_step}"
        )


def _changed(recipe: Recipe, *keys: str) -> list[str]:
    """List the keys of ``loss_fn`` that differ from the variant's default."""
    fields = type(recipe.loss_fn).model_fields
    return [k for k in keys if k in fields and getattr(recipe.loss_fn, k) not in (None, fields[k].default)]


def _divisors_near(number: int, wanted: int, *, multiple_of: int) -> str:
    """Name the divisors next to ``wanted``, below and above, that are multiples; if none is, any divisor."""
    unit = multiple_of if number % multiple_of == 0 else 1
    divisors = [d for d in range(unit, number + 1, unit) if number % d == 0]
    near = {*[d for d in divisors if d <= wanted][-1:], *[d for d in divisors if d >= wanted][:1]}
    return " or ".join(map(str, sorted(near)))
