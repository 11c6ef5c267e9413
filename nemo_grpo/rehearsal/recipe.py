"""A cluster recipe made small enough to rehearse; every key that changes is printed with its reason."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from nemo_grpo.dotted import is_missing, set_value
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.loader import merge, read
from nemo_grpo.rehearsal import host
from nemo_grpo.rehearsal.changes import Change
from nemo_grpo.rehearsal.model import RehearsalModel
from nemo_grpo.tasks import TaskConfig
from nemo_grpo.tasks.jsonl import FileTaskConfig

NUM_STEPS = 3
"""Two steps, a stop, and one step after the resume."""
STOP_AFTER = 2
NUM_SUPERVISED_STEPS = 50
"""Of a run on demonstrations: its steps are so short that the stop comes some steps late."""
NUM_PROMPTS, NUM_GENERATIONS, NUM_VALIDATION = 4, 4, 4
LEARNING_RATE = 1e-3
"""Large enough that rollouts from old weights are noticed."""
MICROBATCH = 2
MANY_EPOCHS = 1000
"""Of a few problems: dynamic sampling may draw them many times."""
ROOM = 8
"""Extra tokens of a response beyond the longest demonstration."""
MEGATRON, GENERATION = "policy.megatron_cfg", "policy.generation"


class Ranks(NamedTuple):
    """Logical ranks: tensor, pipeline, context, data and expert parallel sizes."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int

    @property
    def number(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = zip(("TP", "PP", "CP", "DP", "EP"), self, strict=True)
        return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


def ranks_of(recipe: Recipe) -> Ranks:
    """The recipe's."""
    layout = recipe.policy.layout
    return Ranks(*layout.sizes, recipe.data_parallel_size, layout.expert)


def reduced_ranks(layout: Ranks, max_ranks: int) -> Ranks:
    """2 wherever the recipe has more than 1, in the order TP, PP, CP, DP, as long as the ranks suffice."""
    ranks, sizes = 1, []
    for size in (layout.tp, layout.pp, layout.cp, layout.dp):
        sizes.append(2 if size > 1 and 2 * ranks <= max_ranks else 1)
        ranks *= sizes[-1]
    tp, pp, cp, dp = sizes
    return Ranks(tp, pp, cp, dp, 2 if layout.ep > 1 and (tp * cp * dp) % 2 == 0 else 1)


def changes(
    recipe: Recipe, task: TaskConfig, model: RehearsalModel, layout: Ranks, runs_dir: Path, uses_vllm: bool
) -> Iterator[Change]:
    """What a rehearsal sets, section by section.

    Args: layout: the reduced one.  uses_vllm: the real vLLM samples.
    """
    yield from _loop(recipe)
    yield from _sizes(recipe, model)
    yield from _ranks(recipe, layout)
    yield from _without_a_gpu(recipe)
    yield from _rollouts(recipe, model, uses_vllm)
    yield from _data(recipe, task)
    yield from host.replaced_parts(recipe)
    run_dir = runs_dir / recipe.nemo_grpo.run_name
    yield Change("nemo_grpo.run_name", recipe.nemo_grpo.run_name)
    yield Change("nemo_grpo.runs_dir", str(runs_dir))
    yield Change("checkpointing.checkpoint_dir", str(run_dir / "checkpoints"))
    yield Change("logger.log_dir", str(run_dir / "logs"))
    for service in ("wandb", "mlflow", "swanlab"):
        if getattr(recipe.logger, f"{service}_enabled"):
            yield Change(f"logger.{service}_enabled", False, "no network")
    yield Change("logger.monitor_gpus", False)


def full_size_changes(recipe: Recipe, uses_vllm: bool) -> Iterator[Change]:
    """Changes for a machine without a GPU; steps, sizes, model and problems stay the recipe's.

    Args: uses_vllm: the real vLLM samples.
    """
    response = recipe.policy.generation.max_new_tokens
    prompt = recipe.policy.max_total_sequence_length - response
    model = RehearsalModel(Path(recipe.policy.model_name or "").absolute(), "", "", prompt, response)
    yield from _without_a_gpu(recipe)
    yield from _rollouts(recipe, model, uses_vllm)
    if uses_vllm:
        yield Change(f"{GENERATION}.vllm_kwargs.max_num_seqs", recipe.num_sequences_per_step)
    runs_dir = Path(recipe.nemo_grpo.runs_dir).absolute()
    yield Change("policy.model_name", str(model.folder))
    yield Change("nemo_grpo.runs_dir", str(runs_dir))
    yield Change("logger.monitor_gpus", False)


def _data(recipe: Recipe, task: TaskConfig) -> Iterator[Change]:
    if recipe.nemo_grpo.task is not None:
        yield Change("nemo_grpo.task", task.model_dump(mode="json"))
        return
    assert isinstance(task, FileTaskConfig)
    yield Change("grpo.max_num_epochs", MANY_EPOCHS)
    yield from host.sections(recipe, task)
    for name, settings in recipe.env.settings.items():
        if isinstance(settings, dict) and settings.get("num_workers") is not None:
            yield Change(f"env.{name}.num_workers", 1)


def num_steps(recipe: Recipe) -> int:
    """Steps of the recipe's rehearsal."""
    return NUM_SUPERVISED_STEPS if recipe.loss_fn.learns_from_demonstrations else NUM_STEPS


def _loop(recipe: Recipe) -> Iterator[Change]:
    g = recipe.grpo
    generations = min(g.num_generations_per_prompt, NUM_GENERATIONS)
    yield Change("grpo.num_prompts_per_step", NUM_PROMPTS)
    yield Change("grpo.num_generations_per_prompt", generations)
    updates = min(recipe.num_updates_per_step, 2)
    yield Change("policy.train_global_batch_size", NUM_PROMPTS * generations // updates)
    yield Change("grpo.max_num_steps", num_steps(recipe))
    if recipe.async_rl is not None:
        in_chunks = recipe.async_rl.min_groups_for_streaming_train < g.num_prompts_per_step
        yield Change("async_rl.min_groups_for_streaming_train", 1 if in_chunks else NUM_PROMPTS)
        yield Change("async_rl.max_inflight_prompts", NUM_PROMPTS)
    yield Change("grpo.val_period", 0)
    yield Change("grpo.val_at_start", False)
    if g.validates:
        yield Change("grpo.val_at_end", True)
        yield Change("grpo.max_val_samples", NUM_VALIDATION)
        yield Change("grpo.val_batch_size", NUM_VALIDATION)
    if g.stop_at_validation_metric is not None:
        yield Change("grpo.stop_at_validation_metric", None, "three steps")
        yield Change("grpo.stop_at_validation_threshold", None, "three steps")
    # NeMo-RL 7ea279abf removes checkpoints of other steps, and the stop's is compared
    learns = recipe.loss_fn.learns_from_demonstrations
    yield Change("checkpointing.save_period", num_steps(recipe) if learns else 1)
    if not recipe.checkpointing.enabled:
        yield Change("checkpointing.enabled", True, "a rehearsal stops and resumes")
    if recipe.checkpointing.metric_name and recipe.checkpointing.metric_name.startswith("val:"):
        yield Change("checkpointing.metric_name", None, "stopped and saved where nothing is validated")
    yield Change(f"{MEGATRON}.optimizer.lr", LEARNING_RATE)
    yield Change(f"{MEGATRON}.optimizer.min_lr", 0.0)
    yield Change(f"{MEGATRON}.scheduler.lr_warmup_iters", 0)
    yield Change(f"{MEGATRON}.scheduler.lr_decay_iters", None)


def _sizes(recipe: Recipe, model: RehearsalModel) -> Iterator[Change]:
    p, response = recipe.policy, _multiple(model.longest_response + ROOM, 8)
    yield Change("policy.model_name", str(model.folder))
    yield Change("policy.tokenizer.name", str(model.folder))
    if p.generation.stop_token_ids:
        yield Change(f"{GENERATION}.stop_token_ids", None, "they are of the full model's tokenizer")
    prompt = model.longest_prompt + ROOM
    longest = _multiple(prompt + response, 64)
    yield Change(f"{GENERATION}.max_new_tokens", response)
    yield Change("policy.max_total_sequence_length", longest)
    yield Change(f"{GENERATION}.vllm_cfg.max_model_len", longest)
    if recipe.data.max_input_seq_length is not None:
        yield Change("data.max_input_seq_length", prompt)
    yield Change("policy.train_micro_batch_size", min(p.train_micro_batch_size, MICROBATCH))
    yield Change("policy.logprob_batch_size", min(p.logprob_batch_size, MICROBATCH))
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        if getattr(p.sequence_packing, key) is not None:
            yield Change(f"policy.sequence_packing.{key}", MICROBATCH * longest)
    if recipe.grpo.reward_shaping.enabled:
        yield Change("grpo.reward_shaping.max_response_length", response)
        yield Change("grpo.reward_shaping.overlong_buffer_length", response // 4)
    if getattr(recipe.loss_fn, "max_response_length", None) is not None:
        yield Change("loss_fn.max_response_length", response)


def _ranks(recipe: Recipe, layout: Ranks) -> Iterator[Change]:
    yield Change(f"{MEGATRON}.tensor_model_parallel_size", layout.tp)
    yield Change(f"{MEGATRON}.pipeline_model_parallel_size", layout.pp)
    yield Change(f"{MEGATRON}.context_parallel_size", layout.cp)
    yield Change(f"{MEGATRON}.expert_model_parallel_size", layout.ep)
    splits_sequences = recipe.policy.megatron_cfg.sequence_parallel and layout.tp > 1
    yield Change(f"{MEGATRON}.sequence_parallel", splits_sequences)
    yield Change("cluster.num_nodes", 1)
    if recipe.num_rollout_gpus:
        yield Change("cluster.gpus_per_node", layout.number + 1)
        yield Change(f"{GENERATION}.colocated.resources", {"gpus_per_node": 1, "num_nodes": None})
    else:
        yield Change("cluster.gpus_per_node", layout.number)


def _without_a_gpu(recipe: Recipe) -> Iterator[Change]:
    m = recipe.policy.megatron_cfg
    for key in ("apply_rope_fusion", "moe_permute_fusion", "bias_activation_fusion"):
        yield Change(f"{MEGATRON}.{key}", False)
    yield Change(f"{MEGATRON}.optimizer.use_precision_aware_optimizer", False)
    yield Change(f"{MEGATRON}.checkpoint.async_save", False)
    if m.optimizer.optimizer_cpu_offload:
        yield Change(f"{MEGATRON}.optimizer.optimizer_cpu_offload", False, "there is no GPU to offload from")
    if m.fp8_in_use:
        yield Change(f"{MEGATRON}.fp8_cfg.enabled", False, "FP8 needs Transformer Engine")
    if m.model_overrides is not None and m.model_overrides.first_last_layers_bf16:
        yield Change(f"{MEGATRON}.model_overrides.first_last_layers_bf16", False, "without FP8")


def _rollouts(recipe: Recipe, model: RehearsalModel, uses_vllm: bool) -> Iterator[Change]:
    vllm, engine = f"{GENERATION}.vllm_cfg", recipe.policy.generation.vllm_cfg
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(engine, key) != 1:
            yield Change(f"{vllm}.{key}", 1, "an engine on a CPU is one process")
    if engine.precision != "bfloat16":
        yield Change(f"{vllm}.precision", "bfloat16", "FP8 needs a GPU")
        yield Change(f"{vllm}.use_deep_gemm", False, "FP8 needs a GPU")
    yield Change(f"{vllm}.gpu_memory_utilization", 0.1)
    yield Change(f"{vllm}.enforce_eager", True)
    if uses_vllm:
        tokens = 8 * _multiple(model.longest_prompt + model.longest_response + 2 * ROOM, 64)
        settings = {
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": 1 << 28,
            "max_num_batched_tokens": max(tokens, 2048),
            "max_num_seqs": 64,
        }
        yield Change(f"{GENERATION}.vllm_kwargs", settings)


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def write_recipe(path: Path, source: Path, overrides: Iterable[str], changed: Iterable[Change]) -> None:
    """A recipe file: the source with its overrides and the changes on top, interpolations unresolved."""
    written = read(source, overrides)
    tree = merge({}, written.tree)
    if not is_missing(
        tree, "loss_fn.variant"
    ):  # the file has one writer: what NeMo-RL's files said is settled
        tree["loss_fn"] = load_recipe(source, overrides).settings["loss_fn"]
    for change in changed:
        set_value(tree, change.key, change.value)
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
