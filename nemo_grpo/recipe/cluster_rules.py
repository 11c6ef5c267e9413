"""Rules on recipes for NeMo-RL that need arithmetic or a look-up; see `registry`."""

import os
from collections.abc import Iterator, Mapping

from nemo_grpo.recipe.host import has_images
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.schema import V0_7_0, lacking
from nemo_grpo.recipe.sections import GENERATION, OVERLAP, VLLM, AsyncGRPO, AsyncRL
from nemo_grpo.recipe.tables import rows
from nemo_grpo.support.dotted import leaves, parents, value_of
from nemo_grpo.support.errors import as_yaml, did_you_mean, shown

TP_CHECK_OFF = "NRL_IGNORE_TP_ACCURACY_CHECK"
"""Environment variable that turns off NeMo-RL's comparison of the batches at TP >= 4."""
TRAINING_METRICS = (
    "loss",
    "grad_norm",
    "lr",
    "wd",
    "reward",
    "mean_prompt_length",
    "total_num_tokens",
    "advantages/mean",
    "advantages/max",
    "advantages/min",
    "global_valid_seqs",
    "global_valid_toks",
    "mean_gen_tokens_per_sample",
    "max_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
)
"""Metrics that every training step of NeMo-RL has (algorithms/grpo.py, experience/rollouts.py)."""


@rule(Scope.ADVICE)
def refit_sends_updated_weights(recipe: Recipe) -> Iterator[str]:
    megatron = recipe.policy.megatron_cfg
    overlaps = megatron.distributed_data_parallel_config.overlap_param_gather
    if recipe.nemo_grpo.target != "cluster" or not (megatron.enabled and overlaps):
        return
    # Megatron-core shards the optimizer over data-parallel and context-parallel ranks alike.
    num_shards = recipe.data_parallel_size * megatron.context_parallel_size
    if megatron.expert_model_parallel_size > 1:
        # The optimizer of the experts is sharded over the ranks that hold copies of the same experts.
        num_shards = max(num_shards, recipe.num_stage_ranks // recipe.num_expert_ranks)
    if megatron.optimizer.use_distributed_optimizer and num_shards > 1:
        yield (
            f"{OVERLAP}=true (NeMo-RL's default): each of the {num_shards} ranks updates its own part of the "
            "weights, and a NeMo-RL without its pull request 4086 sends the others as they were before the "
            "step; the driver sets it to false there"
        )


NOTHING_SAVED = (
    "checkpointing.enabled=false: nothing is saved, and a job that reaches its time limit loses everything; "
    "set it to true, unless the run fits into one job and its model is not wanted"
)


@rule(Scope.ADVICE)
def run_on_a_cluster_saves_checkpoints(recipe: Recipe) -> Iterator[str]:
    """Warn about a run without checkpoints: NeMo-RL's own recipes for its nightly tests save nothing."""
    if recipe.nemo_grpo.target == "cluster" and not recipe.checkpointing.enabled:
        yield NOTHING_SAVED


@rule(Scope.CLUSTER)
def loss_does_not_need_whole_groups(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.needs_whole_groups:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true needs one whole group per loss call; NeMo-RL "
            "splits groups over microbatches and ranks: set it to false, or train with the embedded engine"
        )


@rule(Scope.CLUSTER)
def logprob_and_training_batches_match_at_high_tp(recipe: Recipe) -> Iterator[str]:
    policy = recipe.policy
    # NeMo-RL (models/policy/lm_policy.py) accepts different batches only with TP below 4, with the ratio
    # forced to 1, or with the environment variable.
    if policy.layout.tensor < 4 or policy.train_micro_batch_size == policy.logprob_batch_size:
        return
    if not recipe.loss_fn.force_on_policy_ratio and not os.environ.get(TP_CHECK_OFF):
        yield (
            f"policy.logprob_batch_size={policy.logprob_batch_size} differs from "
            f"train_micro_batch_size={policy.train_micro_batch_size}: with TP >= 4 the two then round "
            f"differently and NeMo-RL refuses to start; make them equal, or set {TP_CHECK_OFF}=1 in its "
            "environment"
        )


@rule(Scope.ADVICE)
def images_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """Warn if vLLM may reuse images that it encoded with older weights.

    An engine drops cached images only when it sleeps, which separate engines never do (vllm_worker.py).
    """
    generation = recipe.policy.generation
    vllm = generation.vllm_cfg
    if not recipe.samples_with_vllm or generation.colocated.enabled:
        return
    clears_cache = vllm.async_engine and vllm.reset_encoder_cache_after_weight_update
    if not clears_cache and has_images(recipe):
        yield (
            f"{GENERATION}.colocated.enabled=false: after a refit vLLM sees an image as the old weights "
            f"did; set {VLLM}.async_engine and {VLLM}.reset_encoder_cache_after_weight_update (newer than "
            "NeMo-RL 0.7.0), or let no image return within a few steps"
        )


@rule(Scope.ADVICE)
def prefixes_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """Warn if vLLM may reuse prefixes that it cached with older weights.

    Only the asynchronous trainers are checked: the synchronous ones reset the cache, or let the engine sleep,
    between rollouts.
    """
    trainer: AsyncGRPO | AsyncRL | None
    if recipe.grpo.is_async:
        name = "grpo.async_grpo"
        trainer = recipe.grpo.async_grpo
    else:
        name = "async_rl"
        trainer = recipe.async_rl
    cache = recipe.policy.generation.vllm_cfg.enable_prefix_caching
    if trainer is None or not recipe.samples_with_vllm or cache is False:
        return
    if not trainer.recompute_kv_cache_after_weight_updates:
        yield (
            f"{name}.recompute_kv_cache_after_weight_updates=false: after a refit vLLM goes on from what "
            f"older weights cached of a prompt ({VLLM}.enable_prefix_caching={as_yaml(cache)}; null: on from "
            "Ampere on); set it to true, or the cache to false"
        )
    elif isinstance(trainer, AsyncGRPO) and not trainer.in_flight_weight_updates:
        yield (
            f"{name}.recompute_kv_cache_after_weight_updates=true: NeMo-RL 0.7.0 reads it only with "
            f"{name}.in_flight_weight_updates=true; set that, or {VLLM}.enable_prefix_caching=false"
        )


@rule(Scope.CLUSTER)
def vllm_layout_tiles_the_gpus(recipe: Recipe) -> Iterator[str]:
    if not recipe.samples_with_vllm:
        return
    vllm = recipe.policy.generation.vllm_cfg
    engine_gpus = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    # Colocated rollouts sample on the GPUs that train.
    num_gpus = recipe.num_rollout_gpus or recipe.world_size
    gpus_per_node = recipe.cluster.gpus_per_node
    # An engine takes an equal part of a node, or several whole nodes.
    tiles_nodes = gpus_per_node % engine_gpus == 0 or engine_gpus % gpus_per_node == 0
    if num_gpus % engine_gpus or not tiles_nodes:
        yield (
            f"{VLLM}.tensor_parallel_size={vllm.tensor_parallel_size} x "
            f"pipeline_parallel_size={vllm.pipeline_parallel_size} does not tile the {num_gpus} GPUs in "
            f"nodes of {gpus_per_node}; use a divisor of {gpus_per_node}"
        )


@rule(Scope.CLUSTER)
def separate_rollouts_leave_gpus_to_train(recipe: Recipe) -> Iterator[str]:
    cluster = recipe.cluster
    colocated = recipe.policy.generation.colocated
    if colocated.enabled:
        return
    key = f"{GENERATION}.colocated.resources"
    num_nodes = colocated.resources.num_nodes or 0
    gpus_per_node = colocated.resources.gpus_per_node or 0
    if cluster.num_nodes == 1:
        takes_part_of_the_node = 0 < gpus_per_node < cluster.gpus_per_node and num_nodes <= 1
        if not takes_part_of_the_node:
            yield (
                f"{key}.gpus_per_node={gpus_per_node}: separate rollouts (colocated.enabled=false) take some "
                f"of the node's {cluster.gpus_per_node} GPUs and leave at least one to train; use fewer, and "
                "num_nodes=1"
            )
        return
    takes_whole_nodes = 0 < num_nodes < cluster.num_nodes and gpus_per_node == cluster.gpus_per_node
    if not takes_whole_nodes:
        yield (
            f"{key}.num_nodes={num_nodes}, gpus_per_node={gpus_per_node}: separate rollouts "
            f"(colocated.enabled=false) take whole nodes of the {cluster.num_nodes}; use 1 to "
            f"{cluster.num_nodes - 1}, and gpus_per_node={cluster.gpus_per_node}"
        )


@rule(Scope.CLUSTER)
def vllm_stops_at_the_end_of_a_turn(recipe: Recipe) -> Iterator[str]:
    task = recipe.nemo_grpo.task
    if task is None or not task.stop_texts:
        return
    stop_strings = recipe.policy.generation.stop_strings
    skips_tokenizer = recipe.policy.generation.vllm_cfg.skip_tokenizer_init
    if skips_tokenizer is None:
        # By default NeMo-RL skips the tokenizer if there are no stop strings.
        skips_tokenizer = not stop_strings
    if skips_tokenizer:
        yield (
            f"{GENERATION}.stop_strings={stop_strings or 'null'}: NeMo-RL starts vLLM without a tokenizer, "
            f"which then cannot see where a turn of {task.name} ends; set it to "
            f"[{', '.join(task.stop_texts)}], and leave {VLLM}.skip_tokenizer_init out"
        )


@rule(Scope.ADVICE)
def training_metric_is_one_of_every_run(recipe: Recipe) -> Iterator[str]:
    """Warn if checkpoints are ranked by a training metric that not every step has.

    NeMo-RL (algorithms/grpo.py) raises an error at the first save after a step without the metric.
    """
    name = recipe.checkpointing.metric_name or ""
    metric = name.removeprefix("train:")
    if recipe.nemo_grpo.target != "cluster" or not name.startswith("train:"):
        return
    if metric not in TRAINING_METRICS:
        yield (
            f"checkpointing.metric_name={name} is not a metric of every run, and NeMo-RL stops at the first "
            f"save if a step lacks it{did_you_mean(metric, TRAINING_METRICS)}"
        )


@rule(Scope.ADVICE)
def data_name_the_environments_that_a_recipe_adds(recipe: Recipe) -> Iterator[str]:
    """Report an environment that the recipe adds but no data set uses.

    The mistake is to add an environment without changing ``env_name`` in the base's data. Unused environments
    of a base are left alone: NeMo-RL's bases list several, from which recipes choose.
    """
    if recipe.nemo_grpo.task is not None or recipe.env.should_use_nemo_gym:
        return
    written = recipe.source
    naming_keys = [key for key in written.origins if key.startswith("data.") and key.endswith(".env_name")]
    if not naming_keys:
        return
    environments_in_use = {str(value_of(recipe.settings, key)) for key in naming_keys}
    for section in (recipe.data.train, recipe.data.validation):
        # Several data sets are a list, and `Written.origins` has no keys within a list.
        data_sets = section if isinstance(section, list) else []
        for data_set in data_sets:
            if isinstance(data_set, Mapping):
                environments_in_use.add(str(data_set.get("env_name")))
    for name, section in recipe.env.settings.items():
        if name in environments_in_use or not isinstance(section, Mapping):
            continue
        keys = [f"env.{name}.{key}" for key, _ in leaves(section)]
        if any(all(written.is_above(key, naming_key) for naming_key in naming_keys) for key in keys):
            yield (
                f"env.{name}: no data set of the recipe names this environment, so nothing reads it; the "
                f"data name {', '.join(sorted(environments_in_use))}. Set data.default.env_name={name}, or "
                "remove it"
            )


@rule(Scope.ADVICE)
def positive_examples_reach_the_loss(recipe: Recipe) -> Iterator[str]:
    """Warn about a weight without effect: no GRPO trainer of 7ea279abf passes the rewards to the loss."""
    weight = getattr(recipe.loss_fn, "positive_example_nll_weight", 0)
    if recipe.loss_fn.is_stock and weight:
        yield (
            f"loss_fn.positive_example_nll_weight={weight} has no effect: NeMo-RL's loss needs the rewards, "
            "which its GRPO trainers do not pass on (loss_functions.py of 7ea279abf); leave it out"
        )


@rule(Scope.ADVICE)
def dynamic_sampling_keeps_single_successes(recipe: Recipe) -> Iterator[str]:
    """Warn about lost responses: NeMo-RL drops a response if the others of its group have equal rewards.

    The variants keep or drop whole groups.
    """
    drops_by_others = recipe.grpo.use_dynamic_sampling and recipe.grpo.use_leave_one_out_baseline
    if recipe.loss_fn.is_stock and drops_by_others:
        yield (
            "grpo.use_leave_one_out_baseline=true with grpo.use_dynamic_sampling=true: NeMo-RL then drops "
            "the only correct response of a group, and the only wrong one, since the others' std is 0; set "
            "use_leave_one_out_baseline=false, or name a loss_fn.variant, which keeps whole groups"
        )


@rule(Scope.CLUSTER)
def single_controller_trains_on_texts(recipe: Recipe) -> Iterator[str]:
    if recipe.has_single_controller and has_images(recipe):
        yield "async_rl={..} loads no processor for images; set async_rl=null, data_plane.enabled=false"


@rule(Scope.V0_7_0)
def settings_are_known_to_nemo_rl_0_7_0(recipe: Recipe) -> Iterator[str]:
    """Refuse settings that NeMo-RL 0.7.0 would ignore.

    A key with a row in the tables is left to that row, which knows the harmless values.
    """
    in_tables = {row.key for row in rows(Scope.V0_7_0)}
    for key, value in lacking(V0_7_0, recipe.settings):
        if in_tables.isdisjoint((*parents(key), key)):
            yield (
                f"{key}={shown(value)}: NeMo-RL 0.7.0 does not know this and would run without; leave it "
                "out, or use a newer NeMo-RL"
            )
