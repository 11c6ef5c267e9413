"""Rules across sections that hold for both engines, and advice. See `registry`."""

from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.keys import unread_key_messages
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import MEGATRON, VLLM, metric_key
from nemo_grpo.support import nemo_folder as nemo
from nemo_grpo.support.errors import as_yaml, did_you_mean

MOST_SHARED = 0.9
"""Largest share of a GPU that vLLM takes beside the policy without a note."""


@rule(Scope.ALL)
def model_is_named(recipe: Recipe) -> Iterator[str]:
    if recipe.policy.model_name is None and recipe.nemo_grpo.warm_start is None:
        yield "policy.model_name=null: no model; name a folder or a Hub model, or set nemo_grpo.warm_start"


@rule(Scope.ALL)
def model_is_no_checkpoint_of_nemo(recipe: Recipe) -> Iterator[str]:
    name = recipe.policy.model_name
    if name is not None and (reason := nemo.reason_against(Path(name))):
        yield f"policy.model_name={name} is {reason}"


@rule(Scope.ALL)
def warm_start_fits_the_layout(recipe: Recipe) -> Iterator[str]:
    w, m = recipe.nemo_grpo.warm_start, recipe.policy.megatron_cfg
    if w is None:
        return
    for name, size, key in (
        ("TP", m.tensor_model_parallel_size, "num_key_value_heads"),
        ("PP", m.pipeline_model_parallel_size, "num_hidden_layers"),
    ):
        if getattr(w, key) % size:
            what = f"nemo_grpo.warm_start.{key}={getattr(w, key)}"
            yield f"{what} is not a multiple of {name}={size}; change one"
    length = recipe.policy.max_total_sequence_length
    if length > w.max_position_embeddings:
        yield (
            f"nemo_grpo.warm_start.max_position_embeddings={w.max_position_embeddings} is less than "
            f"policy.max_total_sequence_length={length}; raise it"
        )


@rule(Scope.ALL)
def updates_divide_the_step(recipe: Recipe) -> Iterator[str]:
    g, batch = recipe.grpo, recipe.policy.train_global_batch_size
    if recipe.num_sequences_per_step % batch:
        fitting = _divisors_near(
            recipe.num_sequences_per_step, batch, multiple_of=_microbatch_sequences(recipe)
        )
        yield (
            f"policy.train_global_batch_size={batch} does not divide grpo.num_prompts_per_step x "
            f"grpo.num_generations_per_prompt = {g.num_prompts_per_step} x {g.num_generations_per_prompt} = "
            f"{recipe.num_sequences_per_step}; use {fitting}"
        )


@rule(Scope.ALL)
def updates_average_whole_groups(recipe: Recipe) -> Iterator[str]:
    """`core.aggregation.group_mean_factors` supposes as many sequences in every group of a step."""
    batch, group = recipe.policy.train_global_batch_size, recipe.grpo.num_generations_per_prompt
    if recipe.loss_fn.aggregation != "group_token_mean":
        return
    if batch % group:
        yield (
            f"policy.train_global_batch_size={batch} is not a multiple of grpo.num_generations_per_prompt="
            f"{group}, and loss_fn.aggregation=group_token_mean averages whole groups; use a multiple, or "
            "token_mean"
        )
    updates, whole = recipe.num_updates_per_step, recipe.num_sequences_per_step
    leaves_out = {
        "overlong_filtering": recipe.grpo.overlong_filtering or None,
        "seq_logprob_error_threshold": recipe.grpo.seq_logprob_error_threshold,
    }
    for key, value in leaves_out.items():
        if value is not None and updates > 1:
            yield (
                f"grpo.{key}={as_yaml(value)} leaves groups of different sizes, by which "
                f"loss_fn.aggregation=group_token_mean would weigh the {updates} updates of a step; use "
                f"policy.train_global_batch_size={whole}, or token_mean"
            )


@rule(Scope.ALL)
def prompt_has_room(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL ends a response where the sequence is full, and its base configurations let both be equal."""
    response, longest = recipe.policy.generation.max_new_tokens, recipe.policy.max_total_sequence_length
    if response > longest or (response == longest and recipe.nemo_grpo.target == "embedded"):
        yield (
            f"policy.generation.max_new_tokens={response} leaves no room for the prompt in "
            f"policy.max_total_sequence_length={longest}; lower one or raise the other"
        )


@rule(Scope.ALL)
def microbatches_hold_the_longest_sequence(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.target == "embedded":
        yield from _short_microbatches(recipe)


@rule(Scope.ADVICE)
def a_long_sequence_may_end_the_run(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's packer raises an error only when such a sequence comes (data/packing/algorithms.py)."""
    if recipe.nemo_grpo.target == "cluster":
        yield from _short_microbatches(recipe)


def _short_microbatches(recipe: Recipe) -> Iterator[str]:
    p, longest = recipe.policy, recipe.policy.max_total_sequence_length
    for key, tokens in (("train_mb_tokens", p.train_mb_tokens), ("logprob_mb_tokens", p.logprob_mb_tokens)):
        if tokens is not None and tokens < longest:
            yield (
                f"policy.sequence_packing.{key}={tokens} is less than policy.max_total_sequence_length="
                f"{longest}, and a longer sequence than this ends the run; raise it"
            )


@rule(Scope.ALL)
def layout_divides_the_ranks(recipe: Recipe) -> Iterator[str]:
    m, world, size = recipe.policy.megatron_cfg, recipe.world_size, recipe.model_parallel_size
    if world % size:
        yield (
            f"cluster.gpus_per_node x cluster.num_nodes = {world} is not a multiple of TP x PP x CP = "
            f"{m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size} x {m.context_parallel_size} "
            f"= {size}; use a multiple of {size} ranks, or smaller sizes in {MEGATRON}"
        )
    elif (world // m.pipeline_model_parallel_size) % m.expert_model_parallel_size:
        yield (
            f"{MEGATRON}.expert_model_parallel_size={m.expert_model_parallel_size} does not divide "
            f"the {world // m.pipeline_model_parallel_size} ranks of a pipeline stage; use a divisor"
        )


@rule(Scope.ALL)
def microbatches_divide_the_update(recipe: Recipe) -> Iterator[str]:
    p, dp = recipe.policy, recipe.data_parallel_size
    if p.train_global_batch_size % _microbatch_sequences(recipe):
        given = f"policy.train_micro_batch_size x data-parallel ranks = {p.train_micro_batch_size} x {dp}"
        yield (
            f"policy.train_global_batch_size={p.train_global_batch_size} is not a multiple of "
            f"{f'{dp} data-parallel ranks' if p.batches_by_tokens else given}; change one of them"
        )


@rule(Scope.ALL)
def grpo_section_agrees_with_the_loss(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.is_stock:
        return
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        given, used = getattr(recipe.grpo, key), getattr(recipe.loss_fn, key, False)
        if given is not None and given != used:
            yield disagreement(recipe, f"grpo.{key}", key, given)


@rule(Scope.ALL)
def forced_ratio_makes_one_update_per_step(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.force_on_policy_ratio and recipe.num_updates_per_step != 1:
        yield (
            "loss_fn.force_on_policy_ratio=true: the ratio is 1 in the first of "
            f"{recipe.num_updates_per_step} updates only; use policy.train_global_batch_size="
            f"{recipe.num_sequences_per_step}, or false"
        )


@rule(Scope.ALL)
def reference_is_scored_for_a_penalty(recipe: Recipe) -> Iterator[str]:
    penalty = getattr(recipe.loss_fn, "reference_policy_kl_penalty", 0)
    if recipe.grpo.skip_reference_policy_logprobs_calculation and penalty:
        yield (
            "grpo.skip_reference_policy_logprobs_calculation=true, but loss_fn.reference_policy_kl_penalty="
            f"{penalty:g} needs these logprobs; set one to false or the other to 0"
        )


@rule(Scope.ALL)
def validation_metrics_exist(recipe: Recipe) -> Iterator[str]:
    if recipe.env.should_use_nemo_gym:  # its environments name the metrics
        return
    known = [f"validation/{name}" for name in validation_metrics(recipe)]
    ranking = recipe.checkpointing.metric_key or ""
    for key, metric in (
        ("checkpointing.metric_name", ranking if ranking.startswith("validation/") else None),
        ("grpo.stop_at_validation_metric", metric_key(recipe.grpo.stop_at_validation_metric)),
    ):
        if metric is not None and metric not in known:
            yield f"{key}: validation has no metric {metric!r}{did_you_mean(metric, known)}"


def validation_metrics(recipe: Recipe) -> list[str]:
    """Names of the validation metrics of the recipe's engine."""
    k, learns = recipe.grpo.val_num_generations_per_prompt, recipe.loss_fn.learns_from_demonstrations
    if recipe.nemo_grpo.target == "cluster" and learns:  # NeMo-RL's sft
        return ["val_loss"]
    if recipe.nemo_grpo.target == "cluster":  # NeMo-RL's validate()
        return ["accuracy", "avg_length", *(["pass_k"] if k > 1 else [])]
    passes = [f"pass@{n}" for n in sorted({*(1 << i for i in range(k.bit_length())), k})]
    sampled = ["accuracy", "greedy", f"maj@{k}", "format", "truncated", "num_tokens", *passes]
    return ["val_loss", *sampled] if learns else sampled


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
    """The default is that of NeMo-RL and of the bases: nobody chose it."""
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


def disagreement(recipe: Recipe, place: str, key: str, wanted: object) -> str:
    """Message: a NeMo-RL setting contradicts the loss that trains."""
    used = getattr(recipe.loss_fn, key, False)
    return (
        f"{place}={as_yaml(wanted)}, but {recipe.loss_fn.variant} trains with loss_fn.{key}={as_yaml(used)}; "
        f"leave {place} out or make them equal"
    )


def _changed(recipe: Recipe, *keys: str) -> list[str]:
    """Those keys of ``loss_fn`` that differ from the variant's default; a resolved recipe gives them all."""
    fields = type(recipe.loss_fn).model_fields
    return [k for k in keys if k in fields and getattr(recipe.loss_fn, k) not in (None, fields[k].default)]


def _microbatch_sequences(recipe: Recipe) -> int:
    """Least sequences in a microbatch of all data-parallel ranks; 1 if the ranks do not fit the layout."""
    if recipe.world_size % recipe.model_parallel_size:
        return 1
    policy = recipe.policy
    return (1 if policy.batches_by_tokens else policy.train_micro_batch_size) * recipe.data_parallel_size


def _divisors_near(number: int, wanted: int, *, multiple_of: int) -> str:
    """The divisors nearest to ``wanted``, below and above, that are multiples; if none is, any divisor."""
    unit = multiple_of if number % multiple_of == 0 else 1
    divisors = [d for d in range(unit, number + 1, unit) if number % d == 0]
    near = {*[d for d in divisors if d <= wanted][-1:], *[d for d in divisors if d >= wanted][:1]}
    return " or ".join(map(str, sorted(near)))
