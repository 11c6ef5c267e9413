"""What a GPU run needs, as far as a CPU can show it: BF16, recompute, fused norms, no host sync."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from ranks import run_ranks
from toy_policies import (
    FULL_RECOMPUTE,
    PARAMETERS,
    SELECTIVE,
    hf_model,
    policy_of,
    step,
    token_batch,
    train,
    weights_of,
)

from nemo_grpo import VARIANTS, build_objective
from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.engine.megatron import layers, model
from nemo_grpo.engine.megatron.lora import LoRASettings
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.recipe.layout import Layout

TP2 = Layout(tensor=2, sequence_parallel=True)


def trained(layout: Layout, dtype: torch.dtype, fields: dict[str, Any]) -> dict[str, Any]:
    """Updates on one step: losses, gradient norms, the last update's whole gradient, dtypes of weights."""
    policy, (sequences, _) = policy_of(hf_model(), layout=layout, dtype=dtype, config_fields=fields), step()
    scores, _ = policy.score(sequences, micro_batch_size=4, temperature=1.0)
    results = train(policy, 4, "gpg")
    gradients = {name: p.main_grad.clone() for name, p in policy.weights.local_parameters()}
    return {
        "scores": scores,
        "losses": [r.metrics["loss/total"] for r in results],
        "grad_norms": [r.grad_norm for r in results],
        "gradients": policy.weights.gather(gradients),
        "dtypes": {tensor.dtype for _, tensor in policy.named_tensors()},
        "main_dtypes": {p.dtype for group in policy.optimizer.param_groups for p in group["params"]},
    }


@cache
def trained_in_fp32(num_ranks, layout):
    return run_ranks(num_ranks, trained, layout, torch.float32, {})[0]


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, Layout()), (2, TP2)])
def test_bf16_trains_like_fp32_with_fp32_main_parameters(num_ranks, layout):
    full = trained_in_fp32(num_ranks, layout)
    half = run_ranks(num_ranks, trained, layout, torch.bfloat16, {})[0]
    assert half["dtypes"] == {torch.bfloat16}
    assert half["main_dtypes"] == full["main_dtypes"] == {torch.float32}
    torch.testing.assert_close(half["scores"], full["scores"], rtol=0.02, atol=0.02)
    assert half["losses"] == pytest.approx(full["losses"], abs=0.03)
    assert half["grad_norms"] == pytest.approx(full["grad_norms"], rel=0.05)
    assert abs(full["losses"][-1] - full["losses"][0]) > 0.1  # the comparison spans real training


@pytest.mark.parametrize("fields", [FULL_RECOMPUTE, SELECTIVE], ids=["full", "selective"])
def test_recompute_leaves_every_gradient_as_it_is(fields):
    plain = trained_in_fp32(2, TP2)
    again = run_ranks(2, trained, TP2, torch.float32, fields)[0]
    assert again["losses"] == plain["losses"]
    assert all(gradient.any() for gradient in plain["gradients"].values())
    torch.testing.assert_close(again["gradients"], plain["gradients"], rtol=1e-6, atol=1e-8)


def test_recompute_keeps_fewer_activations():
    def kept(fields: dict[str, Any]) -> int:
        policy, (sequences, _) = policy_of(hf_model(), config_fields=fields), step()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            policy.model(sequences.input_ids, position_ids=None, attention_mask=None)
        return sum(sizes)

    assert kept(FULL_RECOMPUTE) < 0.5 * kept(SELECTIVE)
    assert kept(SELECTIVE) < 0.8 * kept({})


@pytest.mark.parametrize(("recipe", "length"), [("tensorwise", 16), ("blockwise", 128)])
def test_fp8_pads_the_tokens_to_what_its_products_need(recipe, length):
    """Without Transformer Engine megatron-core computes the same in BF16; the padding is ours."""
    sequences, _ = step()  # up to 16 tokens, of which 15 are computed
    lengths: list[int] = []
    scores = []
    for fields in ({}, {"fp8": "e4m3", "fp8_recipe": recipe}):
        policy = policy_of(hf_model(), dtype=torch.bfloat16, config_fields=fields)
        embedding = policy.model.embedding.word_embeddings
        embedding.register_forward_hook(lambda _m, inputs, _out: lengths.append(inputs[0].shape[1]))
        scores.append(policy.score(sequences, micro_batch_size=8, temperature=1.0)[0])
    assert lengths == [int(sequences.lengths.max()) - 1, length]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0.02)


class FusedNormLinear(ColumnParallelLinear):
    """Norm and linear layer as one module, with the parameter names of Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon
        self.return_layernorm_output = False

    def forward(self, x: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        output, bias = super().forward(normed, *arguments, **more)
        return (output, normed) if self.return_layernorm_output else output, bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            {name: tensor for name, tensor in state.items() if tensor is not None},
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
        )


def fused_block_spec(config: Any) -> Any:
    """The local layers in Transformer Engine's structure."""
    spec = layers.local_block_spec(config)
    parts = spec.layer_specs[0].submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = FusedNormLinear
    of_mlp = parts.mlp  # a partial in newer versions of megatron-core
    submodules = of_mlp.keywords["submodules"] if isinstance(of_mlp, partial) else of_mlp.submodules
    submodules.linear_fc1 = FusedNormLinear
    parts.sharded_state_dict_keys_map = {}
    return spec


def two_updates(
    layout: Layout, fused: bool, family: str = "qwen2", lora: Any = None, save: Any = None, load: Any = None
) -> dict[str, Any]:
    """Load, update, gather; ``save`` or ``load`` a checkpoint around the updates."""
    model.block_spec = fused_block_spec if fused else layers.block_spec
    policy, (sequences, _) = policy_of(hf_model(family), layout=layout, lora=lora, seed=3), step()
    if load:
        load_policy(policy, load)
    scores, _ = policy.score(sequences, micro_batch_size=4, temperature=1.0)
    results = train(policy, 2, "gpg")  # two: while B of adapters is zero, A has no gradient
    if save:
        begin_save(policy, save, 1).finish()
    return {
        "scores": scores,
        "grad_norms": [result.grad_norm for result in results],
        "names": [name for name, _ in policy.weights.local_parameters()],
        "weights": weights_of(policy),
    }


@pytest.mark.parametrize("lora", [None, LoRASettings(dim=4, alpha=6)], ids=["all weights", "adapters"])
@pytest.mark.parametrize(("num_ranks", "layout", "family"), [(1, Layout(), "qwen3"), (2, TP2, "qwen2")])
def test_norms_within_linear_layers_load_train_and_gather_the_same(num_ranks, layout, family, lora):
    fused, apart = (run_ranks(num_ranks, two_updates, layout, one, family, lora)[0] for one in (True, False))
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in fused["names"]
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in fused["names"]
    assert not any("input_layernorm" in name or "pre_mlp" in name for name in fused["names"])
    torch.testing.assert_close(fused["scores"], apart["scores"], rtol=1e-6, atol=1e-6)
    for part in ("grad_norms", "weights"):
        torch.testing.assert_close(fused[part], apart[part], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_one_structure_loads_into_the_other(tmp_path):
    apart = run_ranks(2, two_updates, TP2, False, save=tmp_path)[0]
    fused, again = (run_ranks(1, two_updates, Layout(), one, load=tmp_path)[0] for one in (True, False))
    assert not torch.equal(fused["scores"], apart["scores"])  # two updates later
    torch.testing.assert_close(fused["scores"], again["scores"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_of_a_microbatch_never_waits_for_the_device(variant):
    """On a device without data every read by the host raises, and so does a shape that depends on values."""
    sequences, rewards = step()
    scores = -torch.rand(8, 15)
    batch = token_batch(sequences, rewards, scores, entropies=-scores, reference_policy_logprobs=scores - 0.1)
    objective = build_objective(variant, **PARAMETERS.get(variant, {}))
    prepared = objective.prepare(batch).to("meta")
    logits = torch.empty(4, 15, 96, device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets, rows = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in ((4, 15), (4,)))
    logprobs, _ = logprobs_and_entropy(logits, targets, temperature=0.9, vocab_size=90)
    part = prepared.select(rows, next_token_logprobs=logprobs, length=15)
    toks, seqs = prepared.batch.mask.sum(), prepared.batch.sample_mask.sum()
    loss, metrics = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
    loss.backward()
    assert {x.device.type for x in (loss, *metrics.values(), logits.grad)} == {"meta"}
    with pytest.raises(RuntimeError, match="item"):
        loss.item()  # such a read would have been noticed
