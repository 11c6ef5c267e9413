"""Small policies on megatron-core, steps to train them on, and what makes two updates the same."""

import pytest
import torch
from small_models import small_config
from transformers import AutoModelForCausalLM

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.core.batch import Sequences
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.new_model import write_new_model
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.recipe.own import NewModel
from nemo_grpo.support import shipped
from nemo_grpo.variants import OBJECTIVES

# eps well above rounding: with 1e-8 the last bit decides the update of a parameter whose gradient is 1e-8.
SETTINGS = MegatronOptimizer(lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05)
UNSHARDED = SETTINGS.model_copy(update={"use_distributed_optimizer": False})
LAYOUTS = {
    "tp2": (2, Layout(tensor=2)),
    "tp2-sp": (2, Layout(tensor=2, sequence_parallel=True)),
    "pp2": (2, Layout(pipeline=2)),
    "pp2-uneven": (2, Layout(pipeline=2, first_stage_layers=1)),
    "cp2": (2, Layout(context=2)),
    "dp2": (2, Layout()),
    "tp2-pp2": (4, Layout(tensor=2, pipeline=2)),
    "tp2-cp2-sp": (4, Layout(tensor=2, context=2, sequence_parallel=True)),
    "dp2-pp2": (4, Layout(pipeline=2)),
}
PARAMETERS = {
    "dr_grpo": {"max_response_length": 12},
    "clip_cov": {"covariance_min": 0.0, "clip_fraction": 0.1},
}
"""What a variant needs besides its defaults on these steps."""
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


def hf_model(family="qwen2-tied", num_layers=2):
    """A transformers model with weights that no symmetry hides behind."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family, num_hidden_layers=num_layers)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def new_model(folder, **sizes):
    """A model of these sizes with random weights, and a tokenizer learnt from the quickstart's puzzles."""
    task = load_recipe(shipped.recipe_file("quickstart")).task.build()
    return write_new_model(NewModel(**sizes), task, folder)


def policy_of(model, *sections, keep_reference=False, **more):
    """The model as a policy, by default with `SETTINGS`; ``more`` goes to `MegatronPolicy`."""
    policy = MegatronPolicy(model.config, *(sections or (SETTINGS,)), **more)
    policy.load_weights(dict(model.state_dict()), keep_reference=keep_reference)
    return policy


def weights_of(policy):
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


def assert_equal(found, expected):
    """The same keys and, of every tensor, the same dtype and bits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def step():
    """Four prompts of 3 tokens with two responses of 3 to 13 tokens each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 17, (8,), generator=generator)
    ids = torch.randint(96, (8, 16), generator=generator)
    ids[1::2, :3] = ids[::2, :3]
    rewards = torch.rand(8, generator=generator).round()
    rewards[:2] = torch.tensor([1.0, 0.0])
    return Sequences(ids, lengths, torch.full((8,), 3), torch.arange(8) // 2), rewards


def rollout():
    """Three prompts of 5, 3 and 4 tokens with 4, 2 and 3 responses of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    prompts = torch.randint(96, (3, 16), generator=generator)[prompt_ids]
    prompt_lengths = torch.tensor([5, 3, 4])[prompt_ids]
    lengths = prompt_lengths + torch.tensor([9, 1, 4, 6, 2, 7, 3, 3, 8])
    ids = torch.randint(96, (9, 16), generator=generator)
    ids = torch.where(torch.arange(16) < prompt_lengths[:, None], prompts, ids)
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1, 1])
    return Sequences(ids, lengths, prompt_lengths, prompt_ids), rewards


def token_batch(sequences, rewards, prev_logprobs, **scores):
    """A prompt's responses are a group; all of their tokens count."""
    column = torch.arange(sequences.input_ids.shape[1] - 1)
    inside = column < sequences.lengths[:, None] - 1
    return TokenBatch(
        prev_logprobs=prev_logprobs,
        token_mask=inside & (column >= sequences.prompt_lengths[:, None] - 1),
        sample_mask=torch.ones(len(rewards)),
        rewards=rewards,
        group_ids=sequences.prompt_ids,
        **scores,
    )


def train(policy, num_updates=1, variant="grpo"):
    """Updates on one step, each after a score of its own."""
    sequences, rewards = step()
    objective, results = build_objective(variant), []
    for _ in range(num_updates):
        prev, _ = policy.score(sequences, micro_batch_size=3, temperature=1.0)
        prepared = objective.prepare(token_batch(sequences, rewards, prev))
        results.append(policy.update(objective, prepared, sequences, micro_batch_size=2, temperature=1.0))
    return results


def outcome(result, scores, policy):
    """Of one update, for `assert_same`."""
    metrics = {"loss": result.metrics["loss/total"], "grad_norm": result.grad_norm}
    return {"scores": scores, **metrics, "weights": weights_of(policy)}


def one_step(
    layout,
    variants=tuple(OBJECTIVES),
    family="qwen2-tied",
    num_layers=2,
    settings=SETTINGS,
    share_prompts=True,
    **how,
):
    """Score and update once with each variant, from the same weights; scores of the responses alone.

    Args: how: of the passes, ``micro_batch_size`` and ``mb_tokens``.
    """
    model, (sequences, rewards) = hf_model(family, num_layers), rollout()
    how = {"micro_batch_size": 3, "temperature": 0.9, **how}
    found = {}
    for variant in variants:
        policy = policy_of(model, settings, layout=layout, keep_reference=True)
        policy.share_prompts = share_prompts
        prev, entropies = policy.score(sequences, **how)
        with policy.reference_weights():
            reference = policy.score(sequences, **how, with_entropies=False).logprobs
        mask = token_batch(sequences, rewards, prev).mask
        scores = torch.stack([prev, entropies, reference]).where(mask, 0.0)
        # The step-level part must see the same numbers: clip_cov draws by their bits, erpo amplifies them.
        prev, entropies, reference = ((1000 * x).round() / 1000 for x in scores)
        further = {"entropies": entropies, "reference_policy_logprobs": reference - 0.1 * entropies}
        objective = build_objective(variant, **PARAMETERS.get(variant, {}))
        prepared = objective.prepare(token_batch(sequences, rewards, prev, **further))
        found[variant] = outcome(policy.update(objective, prepared, sequences, **how), scores, policy)
    return found


def assert_same(found, expected):
    """Of every variant scores, loss, gradient norm and weights, as the order of sums allows."""
    for variant, want in expected.items():
        have = found[variant]
        torch.testing.assert_close(have["scores"], want["scores"], rtol=1e-5, atol=1e-5)
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6), variant
        assert have["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5), variant
        torch.testing.assert_close(have["weights"], want["weights"], rtol=1e-5, atol=5e-6)
