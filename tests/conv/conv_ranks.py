"""megatron-core on a few processes: load, save and run real GPT models on the CPU."""

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from ranks import run_ranks
from transformers import AutoConfig

from nemo_grpo.engine.megatron import cpu, parallel
from nemo_grpo.engine.megatron.layers import CausalAttention, RMSNorm
from nemo_grpo.engine.megatron.model import PackableGPTModel, build_model, transformer_config
from nemo_grpo.engine.megatron.policy import SHARDING
from nemo_grpo.engine.megatron.policy_checkpoint import write_in_this_process
from nemo_grpo.models import read_spec
from nemo_grpo.recipe.layout import Layout

TOKENS = torch.tensor([[5, 17, 3, 88, 41, 2, 60, 9], [1, 95, 33, 7, 7, 12, 80, 4]])


def on_ranks(world_size, function, *args):
    """Run ``function(*args)`` with megatron-core on every rank. Returns: rank 0's result."""
    return run_ranks(world_size, _on_rank, function, args)[0]


def _on_rank(function, args):
    cpu.install()
    dist.init_process_group("gloo")
    result = function(*args)
    dist.barrier()
    return result


def model_of(hf_folder, tensor=1, pipeline=1, expert=1, vocab_size=None):
    """This rank's part of a model with the shapes of a Hugging Face config."""
    hf = AutoConfig.from_pretrained(hf_folder)
    hf.vocab_size = vocab_size or hf.vocab_size
    layout = Layout(tensor=tensor, pipeline=pipeline)
    if hf.model_type == "qwen3_moe":
        return _moe_model(hf, layout, expert)
    parallel.initialize(layout, torch.device("cpu"), seed=1)
    spec = read_spec(hf.to_dict())
    return build_model(spec, transformer_config(spec, layout, torch.float32, perform_initialization=True))


def _moe_model(hf, layout, expert):
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.pipeline, expert_model_parallel_size=expert, create_gloo_process_groups=False
    )
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    moe_utils.te_general_gemm = None  # 0.16.1 forgets to define it where Transformer Engine is missing
    config = transformer_config(
        read_spec(hf.to_dict()),
        layout,
        torch.float32,
        num_moe_experts=hf.num_experts,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_router_topk=hf.num_experts_per_tok,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=expert,
        perform_initialization=True,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=hf.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    block = TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    return GPTModel(
        config,
        block,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )


def load(model, checkpoint):
    """Fill a model by megatron-core's own loader; every tensor must come from the checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    state = {"model": model.sharded_state_dict(metadata=SHARDING)}
    loaded = dist_checkpointing.load(state, str(checkpoint), strict=StrictHandling.RAISE_UNEXPECTED)
    model.load_state_dict(loaded["model"])
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@torch.no_grad()
def logits_from_checkpoint(hf_folder, checkpoint, tensor, pipeline):
    """Load at a layout and run the fixed tokens. Returns: [B, T, V] on rank 0."""
    model = model_of(hf_folder, tensor, pipeline)
    load(model, checkpoint)
    model.eval()
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(TOKENS.shape[1], TOKENS.shape[0], model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out = model(TOKENS, None, None)
    if isinstance(model, PackableGPTModel) and parallel_state.is_pipeline_last_stage():
        out = out @ model.output_weight.T
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        out = torch.empty(*TOKENS.shape, AutoConfig.from_pretrained(hf_folder).vocab_size // tensor)
    last = dist.get_world_size() - tensor  # ranks of the last stage come last
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out.contiguous())
    return torch.cat(parts[last:], dim=-1)


def parameters_from_checkpoint(hf_folder, checkpoint, vocab_size=None):
    """Load at TP 1 in one process. Returns: name -> parameter."""
    model = model_of(hf_folder, vocab_size=vocab_size)
    load(model, checkpoint)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def delta_net_after_a_change(hf_folder, checkpoint, saved):
    """Layer 1's gated delta net on two ranks, loaded, A_log raised, saved. Returns: rank 1's parameters."""
    gated_delta_net.HAVE_FLA = True  # its kernels are CUDA only, its checkpoint layout is not
    parallel.initialize(Layout(tensor=2), torch.device("cpu"), seed=1)
    spec = read_spec(AutoConfig.from_pretrained(hf_folder).to_dict())
    names = (*("conv_kernel_dim", "key_head_dim", "value_head_dim"), *("num_key_heads", "num_value_heads"))
    sizes = {
        f"linear_{name}": getattr(AutoConfig.from_pretrained(hf_folder), f"linear_{name}") for name in names
    }
    config = transformer_config(spec, Layout(tensor=2), torch.float32, perform_initialization=True, **sizes)
    parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    net = gated_delta_net.GatedDeltaNet(config, parts, layer_number=2, pg_collection=groups)
    prefix = "decoder.layers.1.self_attention."
    for parameter in net.parameters():
        parameter.fill_(float("nan"))
    loaded = dist_checkpointing.load(net.sharded_state_dict(prefix), str(checkpoint))
    net.load_state_dict({n.removeprefix(prefix): x for n, x in loaded.items() if n.startswith(prefix)})
    own = {name: parameter.clone() for name, parameter in net.named_parameters()}
    assert not any(tensor.isnan().any() for tensor in own.values())
    net.A_log += 1
    write_in_this_process()
    dist_checkpointing.save(net.sharded_state_dict(prefix), str(saved))
    everyone = [None, None]
    dist.all_gather_object(everyone, own)
    return everyone[1]


def save_after_a_step(hf_folder, checkpoint, tensor, pipeline, vocab_size=None, expert=1, prefix=""):
    """One optimizer step on random gradients, then megatron-core's own save, with the optimizer."""
    model = model_of(hf_folder, tensor, pipeline, expert, vocab_size=vocab_size)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, config, model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    wrapped.zero_grad_buffer()
    for name, parameter in model.named_parameters():
        if expert > 1 and "experts" not in name:
            continue  # replicated over expert ranks; they must stay equal
        parameter.main_grad.normal_()
    optimizer.step()
    weights = model.sharded_state_dict(prefix=prefix, metadata=SHARDING)
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=SHARDING),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }
    with torch.no_grad():
        write_in_this_process()  # or megatron-core starts a process that outlives this one
        dist_checkpointing.save(state, str(checkpoint), content_metadata=SHARDING)
    return {}
