"""The planner's view of a recipe: the model's shape, and all settings that decide memory and time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_grpo.models import ModelSpec, read_spec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import read_yaml
from nemo_grpo.support.model_folder import read_config, with_config_overrides

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe
    from nemo_grpo.recipe.megatron_sections import Megatron
    from nemo_grpo.recipe.policy_sections import Policy


VLLM_SEQUENCES = 1024
"""vLLM's default of max_num_seqs on these GPUs."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "a_proj", "b_proj", "self_attn")
"""Parts of layer names; a recipe that lists one of them in quantization_ignored_layer_kws keeps attention
in BF16."""


@dataclass(frozen=True)
class PlanInput:
    """Everything besides the model's shape that memory and time depend on.

    Attributes:
        layout: split of the model over the ranks that train.
        num_nodes: nodes of the job.
        gpus_per_node: GPUs of a node.
        num_rollout_gpus: GPUs that only sample; 0: rollouts share the GPUs that train.
        train_tokens: tokens of one training microbatch, before context parallelism divides them.
        score_tokens: tokens of one scoring microbatch, likewise.
        num_microbatches: least microbatches of an update on a data-parallel rank.
        max_length: longest sequence, prompt and response, in tokens.
        recompute: ``("full",)``, or the modules that are recomputed selectively; empty: none.
        grad_bytes: bytes of one gradient in DDP's buffer.
        optimizer: ``adam``, or one with a single moment.
        distributed_optimizer: data-parallel ranks share the optimizer state.
        precision_aware: megatron-core's optimizer without an FP32 copy of the parameters.
        offload_fraction: share of the optimizer state on the host.
        lora_dim: rank of the adapters; 0: all parameters train.
        lora_modules: modules with adapters; empty: all that can have them.
        fp8_training: training computes in FP8.
        fp8_recipe: Transformer Engine's recipe; empty without FP8.
        logprob_chunk: tokens whose logits are held in FP32 at once; 0: all of a microbatch.
        vllm_tensor: vLLM's TP.
        vllm_pipeline: vLLM's PP.
        vllm_fp8: vLLM's weights are FP8.
        vllm_cache_bytes: bytes of one number in the KV cache.
        vllm_share: share of a GPU's memory that vLLM takes.
        has_rollouts: vLLM samples.
        embedded: the recipe is the embedded engine's, which has no offloading.
        vllm_expert: vLLM's EP.
        vllm_max_sequences: sequences that an engine decodes at once, at most.
        vllm_eager: vLLM runs without CUDA graphs.
        packed: rows hold several sequences.
        vllm_mx: FP8 with a scale per 32 numbers.
        vllm_bf16_attention: FP8 leaves attention alone.
        draft_tokens: tokens drafted before each pass.
        draft_layers: layers of the draft model; 0: no model, as with n-grams.
        replays_routes: training uses the experts that the rollout selected.
        segment_nodes: nodes that share an NVLink domain; 0: not set.
        precision_bytes: bytes of a parameter in the embedded engine.
        keeps_reference: the embedded engine holds the reference policy, too.
        has_penalty: the reference policy is needed for a KL penalty alone.
        stop_token_ids: tokens that end a response, besides the model's own.
    """

    layout: Layout
    num_nodes: int
    gpus_per_node: int
    num_rollout_gpus: int
    train_tokens: int
    score_tokens: int
    num_microbatches: int
    max_length: int
    recompute: tuple[str, ...]
    grad_bytes: int
    optimizer: str
    distributed_optimizer: bool
    precision_aware: bool
    offload_fraction: float
    lora_dim: int
    lora_modules: tuple[str, ...]
    fp8_training: bool
    fp8_recipe: str
    logprob_chunk: int
    vllm_tensor: int
    vllm_pipeline: int
    vllm_fp8: bool
    vllm_cache_bytes: int
    vllm_share: float
    has_rollouts: bool
    embedded: bool = False
    vllm_expert: int = 1
    vllm_max_sequences: int = VLLM_SEQUENCES
    vllm_eager: bool = False
    packed: bool = True
    vllm_mx: bool = False
    vllm_bf16_attention: bool = False
    draft_tokens: int = 0
    draft_layers: int = 0
    replays_routes: bool = False
    segment_nodes: int = 0
    precision_bytes: int = 2
    keeps_reference: bool = False
    has_penalty: bool = False
    stop_token_ids: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """GPUs that train."""
        return self.num_nodes * self.gpus_per_node - self.num_rollout_gpus

    @property
    def train_gpus_per_node(self) -> int:
        """GPUs of a node that trains; separate rollouts take whole nodes, or a part of the only one."""
        return self.world_size if self.num_nodes == 1 else self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Copies of the model that share a batch."""
        layout = self.layout
        return max(self.world_size // (layout.tensor * layout.pipeline * layout.context), 1)

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer state of a dense parameter: data-parallel times context-parallel."""
        return max(self.world_size // (self.layout.tensor * self.layout.pipeline), 1)

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer state of an expert's parameter."""
        layout = self.layout
        return max(self.world_size // (layout.pipeline * layout.expert * layout.expert_tensor), 1)


def plan_input(recipe: Recipe) -> PlanInput:
    """Extract the planner's view of a recipe."""
    policy = recipe.policy
    megatron = policy.megatron_cfg
    optimizer = megatron.optimizer
    fp8 = megatron.fp8_in_use
    lora = megatron.lora_in_use
    is_cluster = recipe.nemo_grpo.target == "cluster"
    max_length = policy.max_total_sequence_length
    sequences_per_rank = policy.train_global_batch_size // max(recipe.data_parallel_size, 1)
    needs_reference = recipe.loss_fn.needs_reference
    # The embedded engine accumulates in FP32, whatever the recipe says to megatron-core.
    has_fp32_gradients = not is_cluster or megatron.distributed_data_parallel_config.grad_reduce_in_fp32
    return PlanInput(
        layout=policy.layout,
        num_nodes=recipe.cluster.num_nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        num_rollout_gpus=recipe.num_rollout_gpus,
        train_tokens=policy.train_mb_tokens or max_length * policy.train_micro_batch_size,
        score_tokens=policy.logprob_mb_tokens or max_length * policy.logprob_batch_size,
        num_microbatches=max(sequences_per_rank // policy.train_micro_batch_size, 1),
        max_length=max_length,
        recompute=_recomputed_modules(megatron),
        grad_bytes=4 if has_fp32_gradients else 2,
        optimizer=optimizer.optimizer,
        distributed_optimizer=optimizer.use_distributed_optimizer,
        precision_aware=optimizer.use_precision_aware_optimizer,
        offload_fraction=optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0,
        lora_dim=lora.dim if lora else 0,
        lora_modules=tuple(lora.target_modules) if lora else (),
        fp8_training=fp8 is not None,
        fp8_recipe=fp8.fp8_recipe if fp8 else "",
        logprob_chunk=policy.logprob_chunk_size or 0,
        embedded=not is_cluster,
        packed=policy.sequence_packing.enabled,
        precision_bytes=4 if policy.precision == "float32" else 2,
        # With adapters the reference policy is the model without them.
        keeps_reference=needs_reference and lora is None,
        has_penalty=needs_reference and not recipe.loss_fn.compares_with_reference,
        replays_routes=is_cluster and policy.router_replay.enabled,
        segment_nodes=recipe.cluster.segment_size or 0,
        **_sampling(recipe),
    )


def _recomputed_modules(megatron: Megatron) -> tuple[str, ...]:
    if not megatron.activation_checkpointing:
        return ()
    if megatron.recompute_granularity != "selective":
        return ("full",)
    # megatron-core's default module.
    return tuple(megatron.recompute_modules or ("core_attn",))


def _sampling(recipe: Recipe) -> dict[str, Any]:
    """Extract the settings of vLLM, as arguments of `PlanInput`."""
    is_cluster = recipe.nemo_grpo.target == "cluster"
    sampler = recipe.policy.generation
    vllm = sampler.vllm_cfg
    keeps_attention_in_bf16 = any(name in _ATTENTION for name in vllm.quantization_ignored_layer_kws)
    draft_tokens = 0
    draft_layers = 1
    drafts = sampler.vllm_kwargs.speculative_config if is_cluster else None
    if drafts is not None:
        draft_tokens = drafts.num_speculative_tokens or 0
        if drafts.method == "ngram":  # drafts are copied from the text before
            draft_layers = 0
    return {
        "vllm_tensor": vllm.tensor_parallel_size,
        "vllm_pipeline": vllm.pipeline_parallel_size,
        "vllm_fp8": vllm.precision == "fp8",
        "vllm_cache_bytes": 2 if vllm.kv_cache_dtype == "auto" else 1,
        "vllm_share": vllm.gpu_memory_utilization,
        "has_rollouts": is_cluster and sampler.backend == "vllm",
        "vllm_expert": vllm.expert_parallel_size,
        "vllm_max_sequences": sampler.vllm_kwargs.max_num_seqs or VLLM_SEQUENCES,
        "vllm_eager": vllm.enforce_eager,
        "vllm_mx": vllm.is_mx,
        "vllm_bf16_attention": keeps_attention_in_bf16,
        "draft_tokens": draft_tokens,
        "draft_layers": draft_layers,
        "stop_token_ids": tuple(sampler.stop_token_ids or ()),
    }


def _published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, config) of each model in `models.yaml`, with the name's own longest sequence filled in."""
    for entry in read_yaml(Path(__file__).with_name("models.yaml")).values():
        for name, longest in entry["names"].items():
            # Names share a config in the file; a copy, because each gets a length of its own.
            config = copy.deepcopy(entry["config"])
            config.get("text_config", config)["max_position_embeddings"] = longest
            yield name, config


_CONFIGS = dict(_published())
PRESETS: dict[str, ModelSpec] = {name: read_spec(config, name) for name, config in _CONFIGS.items()}
"""Name on the Hub -> shape of the model."""


def shape_of(recipe: Recipe, config_file: Path | None = None, others: Iterable[Recipe] = ()) -> ModelSpec:
    """Find the shape of a recipe's model, with the recipe's policy.hf_config_overrides applied.

    The shape is read from the first of these that exists: ``config_file``, config.json in the model's local
    folder, the table `models.yaml`, or the recipe among ``others`` that will export the model. A recipe with
    nemo_grpo.new_model and no model_name describes the shape itself.

    Args:
        recipe: the recipe.
        config_file: the model's config.json, for models that are neither a local folder nor in the table.
        others: recipes, one of whose runs may export the model that this one starts from.
    Raises: UserError: none of these tells the shape.
    """
    name = recipe.policy.model_name
    overrides = recipe.policy.hf_config_overrides
    new_model = recipe.nemo_grpo.new_model
    if config_file is None and name is None and new_model is not None:
        config = {"model_type": "qwen2", "tie_word_embeddings": True, **new_model.model_dump()}
        return read_spec(with_config_overrides(config, overrides), "new model")
    assert name is not None
    local_config = Path(name) / "config.json" if config_file is None else config_file
    if config_file is not None or local_config.is_file():
        return read_spec(with_config_overrides(read_config(local_config), overrides), name)
    if name in PRESETS:
        return (
            read_spec(with_config_overrides(_CONFIGS[name], overrides), name) if overrides else PRESETS[name]
        )
    # A stage of a pipeline of recipes may start from a model that an earlier stage has not exported yet.
    for other in others:
        if other.run_dir != recipe.run_dir and Path(name).is_relative_to(other.run_dir / "hf"):
            shape = shape_of(other.model_copy(update={"policy": _with_overrides(other, overrides)}))
            return replace(shape, name=f"{name}, of {other.nemo_grpo.run_name}")
    is_folder = name.startswith((".", "/")) or name.count("/") != 1
    hint = "" if is_folder else did_you_mean(name, PRESETS)
    raise UserError(
        f"policy.model_name={name}: neither a folder with a config.json nor in the planner's table{hint}; "
        "give --model-config FILE"
    )


def _with_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Policy:
    """Copy a recipe's policy and add config overrides: those of a later recipe that trains its export."""
    all_overrides = {**recipe.policy.hf_config_overrides, **overrides}
    return recipe.policy.model_copy(update={"hf_config_overrides": all_overrides})
