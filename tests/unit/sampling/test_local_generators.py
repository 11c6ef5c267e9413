"""Both local generators against transformers' forward pass and generate; distributions by hand."""

from dataclasses import replace

import pytest
import torch
from small_models import SPECIAL, small_config
from toy_models import full_forward, greedy_of, logprobs_of, make_generator, make_model, responses
from transformers import AutoConfig

from nemo_grpo.sampling.draws import draw, response_uniforms
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.requests import Request, SamplingParams
from nemo_grpo.support.errors import UserError

VOCAB, NORM = 40, "model.norm.weight"
PROMPTS = [[3, 7, 1], [5], [9, 9, 2, 30, 11, 4, 8], [12, 1]]


def toy(tied=True, seed=0):
    family = "qwen2-tied" if tied else "qwen2"
    return make_model(small_config(family, vocab_size=VOCAB, **dict.fromkeys(SPECIAL)), seed)


@pytest.fixture(scope="module", params=[HFGenerator, DecoderGenerator])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model():
    return toy()


@pytest.fixture(scope="module")
def generator(kind, model):
    return make_generator(kind, model)


def greedy(generator, num_tokens):
    return generator.generate(Request(PROMPTS, 1, SamplingParams(num_tokens, greedy=True), 0))


def test_greedy_equals_transformers_generate_and_has_the_logprobs_of_temperature_one(model, generator):
    sampling = SamplingParams(12, greedy=True, temperature=0.5, top_k=1)
    rollout = generator.generate(Request(PROMPTS, 1, sampling, 0))
    for prompt, response, found in zip(PROMPTS, responses(rollout), rollout.logprobs, strict=True):
        assert response == greedy_of(model, prompt, 12)
        torch.testing.assert_close(found, logprobs_of(model, prompt, response), atol=1e-5, rtol=0)
    assert len({tuple(response) for response in responses(rollout)}) > 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_p": 0.8}, {"top_k": 5, "top_p": 0.9}]
)
def test_logprobs_equal_a_full_forward_pass(model, generator, options):
    sampling = SamplingParams(10, **options)
    rollout = generator.generate(Request(PROMPTS, 3, sampling, 5))
    for row, response in enumerate(responses(rollout)):
        logits = full_forward(model, PROMPTS[row // 3], response)
        chosen = torch.tensor(response)[:, None]
        scaled = torch.log_softmax(logits / sampling.temperature, -1)
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        for position, logprobs in enumerate(scaled):
            order = logprobs.argsort(descending=True)[: sampling.top_k]
            mass = logprobs[order].softmax(0)
            num_kept = int((mass.cumsum(0) - mass < sampling.top_p).sum())
            kept[position, order[:num_kept]] = True
        assert kept.gather(1, chosen).all()
        want = scaled.gather(1, chosen)[:, 0]
        torch.testing.assert_close(rollout.logprobs[row, : len(response)], want, atol=1e-5, rtol=0)


@pytest.fixture
def stopped(generator):
    """Stop tokens, and a rollout with responses that end at one."""
    stop = tuple(range(0, VOCAB, 3))
    return stop, generator.generate(Request(PROMPTS, 8, SamplingParams(6, stop_token_ids=stop), 1))


def test_stop_token_belongs_to_its_response(stopped):
    stop, rollout = stopped
    assert rollout.truncated.any()
    assert not rollout.truncated.all()
    for row, length in enumerate(rollout.lengths.tolist()):
        response = rollout.tokens[row, :length].tolist()
        assert all(token not in stop for token in response[:-1])
        assert (response[-1] not in stop) == bool(rollout.truncated[row])
        assert length == 6 or response[-1] in stop


def test_nothing_follows_the_end_of_a_response(stopped):
    _, rollout = stopped
    for row, length in enumerate(rollout.lengths.tolist()):
        for values in (rollout.tokens, rollout.logprobs):
            assert (values[row, length:] == 0).all()
        assert (rollout.logprobs[row, :length] < 0).all()


def test_stop_token_at_the_limit_is_no_truncation(generator):
    every = tuple(range(VOCAB))
    rollout = generator.generate(Request(PROMPTS, 2, SamplingParams(1, stop_token_ids=every), 1))
    assert not rollout.truncated.any()


def test_the_seed_alone_decides(kind, model, generator):
    sampling = SamplingParams(12, temperature=1.3)
    first = generator.generate(Request(PROMPTS, 4, sampling, 3))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = make_generator(kind, model).generate(Request(PROMPTS, 4, sampling, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens, generator.generate(Request(PROMPTS, 4, sampling, 4)).tokens)


@pytest.mark.parametrize("max_batch_size", [1, 5])
def test_responses_do_not_depend_on_the_rest_of_the_batch(kind, model, generator, max_batch_size):
    sampling = SamplingParams(10, stop_token_ids=(1, 2, 3))
    together = generator.generate(Request(PROMPTS, 4, sampling, 3))
    of_small_batches = make_generator(kind, model, max_batch_size=max_batch_size)
    small = of_small_batches.generate(Request(PROMPTS, 4, sampling, 3))
    assert responses(small) == responses(together)
    torch.testing.assert_close(small.logprobs, together.logprobs, atol=1e-5, rtol=0)
    reversed_order = generator.generate(Request(PROMPTS[::-1], 4, sampling, 3))
    for row, prompt in enumerate(PROMPTS):
        alone = responses(generator.generate(Request([prompt], 4, sampling, 3)))
        assert alone == responses(together)[4 * row : 4 * row + 4]
        assert alone == responses(reversed_order)[4 * (3 - row) : 4 * (3 - row) + 4]


def test_every_token_and_every_end_is_counted_as_it_comes(kind, model):
    generator, told = make_generator(kind, model, max_batch_size=3), []
    request = Request(PROMPTS, 2, SamplingParams(6, stop_token_ids=(4, 5)), 0)
    rollout = generator.generate(replace(request, meter=lambda *step: told.append(step)))
    assert sum(num_tokens for num_tokens, _ in told) == int(rollout.lengths.sum())
    assert sum(num_ended for _, num_ended in told) == 8
    assert told[0][0] == 3


def test_draw_at_the_ends_of_the_unit_interval_picks_possible_tokens():
    logits = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log().expand(2, 4)
    tokens, _ = draw(logits, SamplingParams(1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "probabilities"),
    [
        ({"top_p": 0.49}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.79}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_k": 9}, [0.5, 0.3, 0.15, 0.05]),
        # of the two best, the first alone has 0.625 of the mass
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
        # p^2 / sum p^2, sum = 0.365
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        # 0.25 / 0.365 = 0.685 >= 0.6: the first alone; at temperature 1 it has only 0.5
        ({"temperature": 0.5, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_filters_keep_the_mass_worked_out_by_hand(options, probabilities):
    columns = torch.tensor([2, 0, 3, 1])  # the order of tokens must not matter
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[columns] + 7.0
    expected = torch.tensor(probabilities)[columns]
    num = 20000
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, _ = draw(logits.expand(num, 4), SamplingParams(1, **options), uniforms)
    frequencies = torch.bincount(tokens, minlength=4) / num
    torch.testing.assert_close(frequencies, expected, atol=2e-4, rtol=0)


def test_random_numbers_of_a_prompt_do_not_depend_on_its_neighbours():
    both = response_uniforms(Request([[1, 2], [3], [1, 2]], 2, SamplingParams(5), 0))
    assert both.shape == (6, 5)
    assert torch.equal(both[2:4], response_uniforms(Request([[3]], 2, SamplingParams(5), 0)))
    assert torch.equal(both[:2], response_uniforms(Request([[1, 2]], 2, SamplingParams(5), 0)))
    assert len(both.unique()) == 30
    many = response_uniforms(Request([[i] for i in range(2000)], 1, SamplingParams(5), 1))
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.003


@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_not_finite_are_an_error(kind, greedy):
    model = toy()
    model.model.norm.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        make_generator(kind, model).generate(Request(PROMPTS, 1, SamplingParams(2, greedy=greedy), 0))


def test_update_weights_makes_it_the_new_model(kind, model):
    other = toy(seed=2)
    fresh = make_generator(kind, model)
    before = greedy(fresh, 8)
    fresh.update_weights(other.named_parameters())
    expected = greedy(make_generator(kind, other), 8)
    for parameter in other.parameters():
        parameter.zero_()  # they are copied, not shared
    after = greedy(fresh, 8)
    assert torch.equal(after.logprobs, expected.logprobs)
    assert responses(before) != responses(after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"1 weights missing: {NORM}"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unexpected weight 'extra'"),
        (lambda weights: weights.update({NORM: torch.zeros(31)}), rf"'{NORM}' has shape \[31\], not \[32\]"),
        (
            lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}),
            "'lm_head.weight' differs from 'model.embed_tokens.weight'",
        ),
    ],
)
def test_update_weights_is_strict(kind, change, message):
    source = toy()
    weights = dict(source.named_parameters())
    generator = make_generator(kind, source)
    change(weights)
    with pytest.raises(ValueError, match=message):
        generator.update_weights(weights.items())
    with pytest.raises(AssertionError, match="not complete"):
        generator.generate(Request(PROMPTS, 1, SamplingParams(2), 0))
    generator.update_weights(source.named_parameters())
    generator.generate(Request(PROMPTS, 1, SamplingParams(2), 0))


def test_a_tied_weight_may_come_under_either_name_or_both(kind):
    source = toy()
    embedding = source.model.embed_tokens.weight
    rest = {name: w for name, w in source.named_parameters() if name != "model.embed_tokens.weight"}
    expected = greedy(make_generator(kind, source), 5)
    for names in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        generator = kind(source.config)
        generator.update_weights([*rest.items(), *((name, embedding) for name in names)])
        got = greedy(generator, 5)
        assert torch.equal(got.logprobs, expected.logprobs)


def test_loading_from_a_folder_gives_the_same_model(kind, tmp_path, model, generator):
    model.save_pretrained(tmp_path)
    loaded = kind(tmp_path).generate(Request(PROMPTS, 2, SamplingParams(5), 0))
    assert torch.equal(
        loaded.logprobs, generator.generate(Request(PROMPTS, 2, SamplingParams(5), 0)).logprobs
    )


def test_folder_without_a_model_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        HFGenerator(tmp_path / "nothing")
    rope = '"rope_parameters": {"rope_type": "llama3", "factor": 8.0}'
    for config in ("{}", f'{{"model_type": "llama", {rope}}}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(UserError, match="cannot load a causal language model"):
            HFGenerator(tmp_path)
    with pytest.raises(UserError, match=r"cannot read the model's config .*low_freq_factor"):
        DecoderGenerator(tmp_path)


RECURRENT = {
    "mamba": {"state_size": 4},
    "rwkv": {"context_length": 32},
    "lfm2": {"num_attention_heads": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_model_with_recurrent_layers_is_left_to_vllm(model_type):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes, **RECURRENT[model_type])
    with pytest.raises(UserError, match=f"model_type={model_type}: it has recurrent layers, .*; use vllm"):
        HFGenerator(config)


def test_longrope_ends_where_a_response_would_depend_on_its_batch():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 1e4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    more = {"pad_token_id": 0, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = AutoConfig.for_model("phi3", vocab_size=VOCAB, **sizes, **more, rope_parameters=rope)
    generator = make_generator(HFGenerator, make_model(config))
    generator.generate(Request([[1] * 12], 1, SamplingParams(4), 0))
    message = r"the longrope model's original_max_position_embeddings=16; .* lower one of them, or use vllm"
    with pytest.raises(UserError, match=message):
        generator.generate(Request([[1] * 12], 1, SamplingParams(5), 0))


def test_a_prompt_that_leaves_no_room_is_a_user_error(generator):
    generator.generate(Request([[1] * 60], 1, SamplingParams(4), 0))
    with pytest.raises(UserError, match=r"max_position_embeddings=64.*61 tokens.*max_new_tokens=4"):
        generator.generate(Request([[1], [1] * 61], 1, SamplingParams(4), 0))


NONSENSE = [("max_new_tokens", 0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", 0)]
NONSENSE += [("temperature", value) for value in (0.0, 1e-40, float("nan"), float("inf"))]


@pytest.mark.parametrize(("name", "value"), NONSENSE)
def test_sampling_params_refuse_nonsense(name, value):
    remedy = r" must be at least 1e-06 .*; got 1e-40; .* \(--temperature 0\)" if value == 1e-40 else ""
    with pytest.raises(UserError, match=name + remedy):
        SamplingParams(**{"max_new_tokens": 4, name: value})
