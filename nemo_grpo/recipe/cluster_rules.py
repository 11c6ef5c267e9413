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
TRAINING_METRICS = (
    *("loss", "grad_norm", "lr", "wd", "reward", "mean_prompt_length", "total_num_tokens"),
    *("advantages/mean", "advantages/max", "advantages/min", "global_valid_seqs", "global_valid_toks"),
    *("mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "mean_total_tokens_per_sample"),
)
"""Metrics of each training step of NeMo-RL: algorithms/grpo.py, experience/rollouts.py of both versions."""


@rule(Scope.ADVICE)
def refit_sends_updated_weights(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    overlaps = m.distributed_data_parallel_config.overlap_param_gather
    if recipe.nemo_grpo.target != "cluster" or not (m.enabled and overlaps):
        return
    shards = recipe.data_parallel_size * m.context_parallel_size  # megatron-core shards over both
    if m.expert_model_parallel_size > 1:  # experts' parameters shard over the ranks divided by EP and ETP
        stage = recipe.world_size // m.pipeline_model_parallel_size
        shards = max(shards, stage // (m.expert_model_parallel_size * m.layout.expert_tensor))
    if m.optimizer.use_distributed_optimizer and shards > 1:
        yield (
            f"{OVERLAP}=true (NeMo-RL's default): each of the {shards} ranks updates its own part of the "
            "weights, and a NeMo-RL without its pull request 4086 sends the others as they were before the "
            "step; the driver sets it to false there"
        )


NOTHING_SAVED = (
    "checkpointing.enabled=false: nothing is saved, and a job that reaches its time limit loses everything; "
    "set it to true, unless the run fits into one job and its model is not wanted"
)


@rule(Scope.ADVICE)
def run_on_a_cluster_saves_checkpoints(recipe: Recipe) -> Iterator[str]:
    """Some of NeMo-RL's own recipes, made for its nightly tests, save nothing."""
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
    p = recipe.policy
    # models/policy/lm_policy.py accepts any of the three
    is_scored = not (recipe.loss_fn.force_on_policy_ratio or os.environ.get(TP_CHECK_OFF))
    if p.layout.tensor >= 4 and p.train_micro_batch_size != p.logprob_batch_size and is_scored:
        yield (
            f"policy.logprob_batch_size={p.logprob_batch_size} differs from "
            f"train_micro_batch_size={p.train_micro_batch_size}: with TP >= 4 the two then round differently "
            f"and NeMo-RL refuses to start; make them equal, or set {TP_CHECK_OFF}=1 in its environment"
        )


@rule(Scope.ADVICE)
def images_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """vllm_worker.py: colocated engines drop cached images when they sleep, separate engines never do."""
    generation = recipe.policy.generation
    vllm = generation.vllm_cfg
    keeps = not (vllm.async_engine and vllm.reset_encoder_cache_after_weight_update)
    if recipe.samples_with_vllm and not generation.colocated.enabled and keeps and has_images(recipe):
        yield (
            f"{GENERATION}.colocated.enabled=false: after a refit vLLM sees an image as the old weights "
            f"did; set {VLLM}.async_engine and {VLLM}.reset_encoder_cache_after_weight_update (newer than "
            "NeMo-RL 0.7.0), or let no image return within a few steps"
        )


@rule(Scope.ADVICE)
def prefixes_are_read_with_the_new_weights(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's synchronous trainers reset the cache, or let the engine sleep, between rollouts."""
    trainer: AsyncGRPO | AsyncRL | None = recipe.grpo.async_grpo if recipe.grpo.is_async else recipe.async_rl
    name = "grpo.async_grpo" if recipe.grpo.is_async else "async_rl"
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
    v = recipe.policy.generation.vllm_cfg
    tp, pp = v.tensor_parallel_size, v.pipeline_parallel_size
    world, per_node = recipe.num_rollout_gpus or recipe.world_size, recipe.cluster.gpus_per_node
    if world % (tp * pp) or ((tp * pp) % per_node and per_node % (tp * pp)):
        yield (
            f"{VLLM}.tensor_parallel_size={tp} x pipeline_parallel_size={pp} does not tile the {world} GPUs "
            f"in nodes of {per_node}; use a divisor of {per_node}"
        )


@rule(Scope.CLUSTER)
def separate_rollouts_leave_gpus_to_train(recipe: Recipe) -> Iterator[str]:
    colocated, c = recipe.policy.generation.colocated, recipe.cluster
    if colocated.enabled:
        return
    key, nodes = f"{GENERATION}.colocated.resources", colocated.resources.num_nodes or 0
    gpus = colocated.resources.gpus_per_node or 0
    if c.num_nodes == 1 and (not 0 < gpus < c.gpus_per_node or nodes > 1):
        yield (
            f"{key}.gpus_per_node={gpus}: separate rollouts (colocated.enabled=false) take some of the "
            f"node's {c.gpus_per_node} GPUs and leave at least one to train; use fewer, and num_nodes=1"
        )
    if c.num_nodes > 1 and (not 0 < nodes < c.num_nodes or gpus != c.gpus_per_node):
        yield (
            f"{key}.num_nodes={nodes}, gpus_per_node={gpus}: separate rollouts (colocated.enabled=false) "
            f"take whole nodes of the {c.num_nodes}; use 1 to {c.num_nodes - 1}, and "
            f"gpus_per_node={c.gpus_per_node}"
        )


@rule(Scope.CLUSTER)
def vllm_stops_at_the_end_of_a_turn(recipe: Recipe) -> Iterator[str]:
    stops, task = recipe.policy.generation.stop_strings, recipe.nemo_grpo.task
    skips = recipe.policy.generation.vllm_cfg.skip_tokenizer_init
    if task is None or not task.stop_texts:
        return
    if skips or (skips is None and not stops):
        yield (
            f"{GENERATION}.stop_strings={stops or 'null'}: NeMo-RL starts vLLM without a tokenizer, which "
            f"then cannot see where a turn of {task.name} ends; set it to [{', '.join(task.stop_texts)}], "
            f"and leave {VLLM}.skip_tokenizer_init out"
        )


@rule(Scope.ADVICE)
def training_metric_is_one_of_every_run(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL raises an error at the first save if the step has no such metric (algorithms/grpo.py)."""
    name = recipe.checkpointing.metric_name or ""
    metric = name.removeprefix("train:")
    if recipe.nemo_grpo.target == "cluster" and metric != name and metric not in TRAINING_METRICS:
        yield (
            f"checkpointing.metric_name={name} is not a metric of every run, and NeMo-RL stops at the first "
            f"save if a step lacks it{did_you_mean(metric, TRAINING_METRICS)}"
        )


@rule(Scope.ADVICE)
def data_name_the_environments_that_a_recipe_adds(recipe: Recipe) -> Iterator[str]:
    """Report sections of ``env`` that nothing uses, added on top of the data that name another.

    Not those below: NeMo-RL's bases list environments from which the recipes on top of them choose.
    """
    if recipe.nemo_grpo.task is not None or recipe.env.should_use_nemo_gym:
        return
    written = recipe.source
    naming = [key for key in written.given if key.startswith("data.") and key.endswith(".env_name")]
    named = {str(value_of(recipe.settings, key)) for key in naming}
    for section in (recipe.data.train, recipe.data.validation):
        if isinstance(section, list):  # of several data sets, whose keys no override can name
            named |= {str(data_set.get("env_name")) for data_set in section if isinstance(data_set, Mapping)}
    for name, section in recipe.env.settings.items():
        if name in named or not isinstance(section, Mapping):
            continue
        keys = [f"env.{name}.{key}" for key, _ in leaves(section)]
        if naming and any(all(written.is_above(key, data_key) for data_key in naming) for key in keys):
            yield (
                f"env.{name}: no data set of the recipe names this environment, so nothing reads it; the "
                f"data name {', '.join(sorted(named))}. Set data.default.env_name={name}, or remove it"
            )


@rule(Scope.ADVICE)
def positive_examples_reach_the_loss(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL's loss reads "rewards", which no GRPO trainer of 7ea279abf puts into its batches."""
    weight = getattr(recipe.loss_fn, "positive_example_nll_weight", 0)
    if recipe.loss_fn.is_stock and weight:
        yield (
            f"loss_fn.positive_example_nll_weight={weight} has no effect: NeMo-RL's loss needs the rewards, "
            "which its GRPO trainers do not pass on (loss_functions.py of 7ea279abf); leave it out"
        )


@rule(Scope.ADVICE)
def dynamic_sampling_keeps_single_successes(recipe: Recipe) -> Iterator[str]:
    """NeMo-RL keeps a response if the std of the others is not 0; the variants keep whole groups."""
    g = recipe.grpo
    if recipe.loss_fn.is_stock and g.use_dynamic_sampling and g.use_leave_one_out_baseline:
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
    """Keys with a row of their own are left to it: the row knows which values are harmless."""
    in_tables = {row.key for row in rows(Scope.V0_7_0)}
    for key, value in lacking(V0_7_0, recipe.settings):
        if in_tables.isdisjoint((*parents(key), key)):
            yield (
                f"{key}={shown(value)}: NeMo-RL 0.7.0 does not know this and would run without; leave it "
                "out, or use a newer NeMo-RL"
            )
