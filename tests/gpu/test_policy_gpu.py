"""The policy on a GPU: as on the CPU in FP32 and BF16; FP8 finite and close; a loss that never waits."""

import math

import pytest
import torch
from small_models import small_config
from toy_policies import FULL_RECOMPUTE, PARAMETERS
from transformers import AutoModelForCausalLM

from nemo_grpo import VARIANTS, TokenBatch, build_objective
from nemo_grpo.core.batch import Sequences
from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.engine.megatron.layers import transformer_engine_is_installed
from nemo_grpo.engine.megatron.options import FP8_CAPABILITY
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer

pytestmark = pytest.mark.gpu

LOCAL = {"transformer_impl": "local"}
SETTINGS = MegatronOptimizer(lr=1e-3, weight_decay=0.1, adam_eps=1e-4, clip_grad=1.0)
needs_te = pytest.mark.skipif(
    not transformer_engine_is_installed(), reason="Transformer Engine is not installed"
)


SIZES = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
SIZES |= {"head_dim": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
"""Widths of 16 and head dimension 64, so that FP8 and fused attention can run."""


def make(dtype, fields):
    torch.manual_seed(0)
    config = small_config(**SIZES)
    weights = AutoModelForCausalLM.from_config(config).float().state_dict()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    policy = MegatronPolicy(config, SETTINGS, dtype=dtype, device=device, config_fields=fields)
    policy.load_weights(dict(weights), keep_reference=False)
    return policy


def rollout():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(20, 49, (8,), generator=generator)
    return Sequences(torch.randint(500, (8, 48), generator=generator), lengths), torch.arange(8) % 2


def token_batch(sequences, rewards, scores, **more):
    column = torch.arange(scores.shape[1])
    return TokenBatch(
        prev_logprobs=scores,
        token_mask=(column >= 4) & (column < sequences.lengths[:, None] - 1),
        sample_mask=torch.ones(len(rewards)),
        rewards=rewards.float(),
        group_ids=torch.arange(len(rewards)) // 4,
        **more,
    )


class Run:
    """A policy and one rollout; each `step` is an update on it."""

    def __init__(self, policy, mb_tokens=None):
        self.policy = policy
        self.sequences, self.rewards = rollout()
        self.how = {"micro_batch_size": 4, "temperature": 1.0, "mb_tokens": mb_tokens}
        self.objective = build_objective("gpg")
        self.losses = []
        self.grad_norms = []

    def score(self):
        return self.policy.score(self.sequences, **self.how)

    def step(self, scores):
        prepared = self.objective.prepare(token_batch(self.sequences, self.rewards, scores.logprobs))
        result = self.policy.update(self.objective, prepared, self.sequences, **self.how)
        self.losses.append(result.metrics["loss/total"])
        self.grad_norms.append(result.grad_norm)

    def answer(self, scores):
        return {
            "scores": scores.logprobs,
            "entropies": scores.entropies,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "weights": {name: x.float().cpu().clone() for name, x in self.policy.named_tensors()},
        }

    def trained(self, num_steps):
        scores = self.score()
        for _ in range(num_steps):
            self.step(scores)
        return self.answer(scores)


def trained(dtype, fields, num_steps=5, mb_tokens=None):
    return Run(make(dtype, fields), mb_tokens).trained(num_steps)


def measured(found, expected):
    """The largest differences, for pytest -rP."""
    pairs = {key: list(zip(found[key], expected[key], strict=True)) for key in ("losses", "grad_norms")}
    apart = {key: (found[key] - expected[key]).abs().max().item() for key in ("scores", "entropies")}
    apart["losses"] = max(abs(a - b) for a, b in pairs["losses"])
    apart["grad_norms, relative"] = max(abs(a / b - 1) for a, b in pairs["grad_norms"])
    weights = ((x - expected["weights"][name]).abs().max().item() for name, x in found["weights"].items())
    return {name: f"{x:.2e}" for name, x in (apart | {"weights": max(weights)}).items()}


def assert_close(found, expected, logprob, relative):
    print("measured", measured(found, expected))  # noqa: T201
    for key in ("scores", "entropies"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=logprob, msg=key)
    assert found["losses"] == pytest.approx(expected["losses"], abs=logprob)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=relative)
    assert found["weights"].keys() == expected["weights"].keys()


def test_fp32_equals_the_cpu(on_cpu):
    found, expected = trained(torch.float32, {}), on_cpu("trained", torch.float32, {})
    assert_close(found, expected, logprob=1e-4, relative=1e-3)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_bf16_with_local_layers_equals_the_cpu(on_cpu):
    assert_close(
        trained(torch.bfloat16, LOCAL), on_cpu("trained", torch.bfloat16, LOCAL), logprob=0.05, relative=0.05
    )


@needs_te
def test_bf16_with_transformer_engine_equals_the_cpu(on_cpu):
    policy = make(torch.bfloat16, {})
    assert policy.config.transformer_impl == "transformer_engine"
    names = [name for name, _ in policy.weights.local_parameters()]
    assert "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight" in names
    found, expected = trained(torch.bfloat16, {}), on_cpu("trained", torch.float32, {})
    assert_close(found, expected, logprob=0.05, relative=0.05)


@pytest.mark.parametrize("fields", [LOCAL, pytest.param({}, marks=needs_te)], ids=["local", "te"])
def test_recompute_gives_the_same_update(fields):
    plain, again = trained(torch.bfloat16, fields, 2), trained(torch.bfloat16, fields | FULL_RECOMPUTE, 2)
    assert_close(again, plain, logprob=1e-5, relative=1e-5)  # an H200: the same bits


@pytest.mark.parametrize("fields", [LOCAL, pytest.param({}, marks=needs_te)], ids=["local", "te"])
def test_packed_sequences_give_the_same_update(fields):
    padded = trained(torch.bfloat16, fields, 2)
    packed = trained(torch.bfloat16, fields, 2, mb_tokens=100)
    assert_close(packed, padded, logprob=5e-4, relative=1e-2)  # an H200: 5.4e-5, 2.1e-3


@needs_te
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", FP8_CAPABILITY)
def test_fp8_is_finite_and_close_to_bf16(recipe, form):
    if torch.cuda.get_device_capability() < FP8_CAPABILITY[recipe]:
        pytest.skip(f"this GPU has no {recipe} FP8")
    fields = {"fp8": form, "fp8_recipe": recipe}
    if recipe != "delayed":
        fields |= {"first_last_layers_bf16": True}
    bf16, fp8 = trained(torch.bfloat16, {}), trained(torch.bfloat16, fields)
    assert all(map(math.isfinite, fp8["losses"] + fp8["grad_norms"]))
    assert all(tensor.isfinite().all() for tensor in fp8["weights"].values())
    assert not torch.equal(fp8["scores"], bf16["scores"])  # FP8 did run
    assert (fp8["scores"] - bf16["scores"]).abs().mean() < 0.05
    assert fp8["losses"] == pytest.approx(bf16["losses"], abs=0.1)


@needs_te
def test_a_checkpoint_of_transformer_engine_resumes(tmp_path):
    run = Run(make(torch.bfloat16, {}))
    run.step(run.score())
    before = run.score().logprobs
    begin_save(run.policy, tmp_path / "weights", 1).finish()
    with torch.no_grad():
        for parameter in run.policy.model.parameters():
            parameter.mul_(1.1)
    load_policy(run.policy, tmp_path / "weights")
    torch.testing.assert_close(run.score().logprobs, before, rtol=0, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_loss_waits_for_the_gpu(variant):
    sequences, rewards = rollout()
    scores = -torch.rand(8, 47)
    more = {"entropies": -scores, "reference_policy_logprobs": scores - 0.1}
    objective = build_objective(variant, **PARAMETERS.get(variant, {}))
    prepared = objective.prepare(token_batch(sequences, rewards, scores, **more)).to("cuda")
    logits = torch.randn(4, 47, 500, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(490, (4, 47), device="cuda")
    rows = torch.arange(4, device="cuda")
    toks, seqs = prepared.batch.mask.sum(), prepared.batch.sample_mask.sum()

    def loss_and_backward():
        logprobs, _ = logprobs_and_entropy(logits, targets, temperature=0.9, vocab_size=490)
        part = prepared.select(rows, next_token_logprobs=logprobs, length=47)
        loss, _ = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
        loss.backward()

    loss_and_backward()  # the first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_backward()
        with pytest.raises(RuntimeError, match="synchroniz"):
            toks.item()  # the debug mode does notice
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_profiler_sees_no_copy_to_the_host_in_a_microbatch():
    """Two microbatches copy to the host as often as one: what an update reads back does not grow."""
    run = Run(make(torch.bfloat16, LOCAL))
    scores = run.score()

    def copies(micro_batch_size):
        run.how["micro_batch_size"] = micro_batch_size
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run.step(scores)
            torch.cuda.synchronize()
        return sum(event.count for event in profile.key_averages() if "Memcpy DtoH" in event.key)

    copies(4)
    assert copies(8) == copies(2) > 0
