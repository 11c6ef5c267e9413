"""Responses in turns: by hand with a scripted policy, then with the sampler on a model."""

import pytest
import torch
from character_tokenizer import END, CharacterTokenizer
from small_models import SPECIAL, small_config
from toy_models import logprobs_of, make_generator, make_model

from nemo_grpo.engine.rollout import sample_groups
from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.run.demonstrations import demonstrated
from nemo_grpo.sampling.episodes import StopTexts, sample_responses
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.requests import Request, Rollout, SamplingParams, Turn
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, parse_task
from nemo_grpo.tasks.base import Episode, Observed
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.scoring import Scorer
from nemo_grpo.tasks.search_qa import SearchQA, SearchQAConfig


class ContinuingTokenizer(CharacterTokenizer):
    """Refuses special tokens: an observation continues a text."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return super().__call__(text, add_special_tokens)


class ScriptedGenerator:
    """Continues each context as a table says; a list: a turn per generation. Logprobs are -1, -2, .."""

    def __init__(self, script):
        self.script, self.calls = script, []

    def generate(self, request):
        prompts, num_generations, turn = request.prompts, request.num_generations, request.turn
        self.calls.append((["".join(map(chr, prompt)) for prompt in prompts], num_generations, turn))
        rows = []
        for index, prompt in enumerate(self.calls[-1][0]):
            limit = request.limits[index]
            turns = self.script[prompt]
            for text in turns if isinstance(turns, list) else [turns] * num_generations:
                rows.append(([ord(c) for c in text][:limit], len(text) > limit))
        width = max(len(tokens) for tokens, _ in rows)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
        logprobs = -torch.arange(1.0, width + 1).expand(len(rows), -1)
        lengths = torch.tensor([len(tokens) for tokens, _ in rows])
        truncated = torch.tensor([cut for _, cut in rows])
        if request.meter is not None:
            request.meter(int(lengths.sum()), len(rows))
        return Rollout(ids, logprobs, lengths, truncated)


class OneFact:
    def search(self, queries, top_k):
        return [[Passage("1", "", f"{query.upper()}!")] for query in queries]


@pytest.fixture
def task():
    search = SearchQA(SearchQAConfig(max_turns=3))
    search.retriever = OneFact()
    return search


ASK, TOLD = "<search>a</search>", "\n<information>[1] A!</information>\n"
ANSWER = "<answer>A</answer>"


def converse(task, script, prompts, num_generations, max_new_tokens=200, meter=None):
    generator = ScriptedGenerator(script)
    ids = [[ord(character) for character in prompt] for prompt in prompts]
    sampling = SamplingParams(max_new_tokens, stop_token_ids=(END,))
    request = Request(ids, num_generations, sampling, 0, meter=meter)
    sampled = sample_responses(generator, ContinuingTokenizer(), task, request)
    return sampled, generator.calls


TWO_RESPONSES = {"p": [ASK, "no\0"], f"p{ASK}{TOLD}": ANSWER}
"""Script: the first response asks, hears and answers; the second ends in its first turn."""


def test_only_turns_carry_the_mask(task):
    (first, second), _ = converse(task, TWO_RESPONSES, ["p"], 2)
    assert first.text == ASK + TOLD + ANSWER
    assert "".join(map(chr, first.tokens.tolist())) == first.text
    spoken = [True] * len(ASK) + [False] * len(TOLD) + [True] * len(ANSWER)
    assert first.token_mask.tolist() == spoken
    turns = [*range(-1, -len(ASK) - 1, -1)], [*range(-1, -len(ANSWER) - 1, -1)]
    assert first.logprobs.tolist() == [*turns[0], *[0] * len(TOLD), *turns[1]]
    assert (first.truncated, first.episode) == (False, Episode(2, 1, 0))
    assert (second.text, second.tokens.tolist()) == ("no", [ord("n"), ord("o"), END])
    assert (second.truncated, second.episode) == (False, Episode(1, 0, 0))


def test_turns_and_observations_alternate(task):
    told = []
    _, calls = converse(task, TWO_RESPONSES, ["p"], 2, meter=lambda *step: told.append(step))
    # two turns in the first call, one of which ends its response; then the other response's last turn
    assert told == [(len(ASK) + 3, 0), (0, 1), (len(ANSWER), 0), (0, 1)]
    left = 200 - len(ASK) - len(TOLD)  # the second call: only who goes on, with what is left
    assert [(prompts, n, turn.max_new_tokens) for prompts, n, turn in calls] == [
        (["p"], 2, [200]),
        ([f"p{ASK}{TOLD}"], 1, [left]),
    ]


def test_the_turn_limit_ends_a_response_without_an_observation(task):
    context, script = "p", {}
    for _ in range(3):
        script[context] = ASK
        context += ASK + TOLD
    (only,), calls = converse(task, script, ["p"], 1)
    assert only.text == ASK + TOLD + ASK + TOLD + ASK
    assert (only.episode, only.truncated, len(calls)) == (Episode(3, 2, 0), False, 3)


@pytest.mark.parametrize(("spare", "goes_on"), [(0, False), (1, True)])
def test_an_observation_needs_room_for_one_more_token(task, spare, goes_on):
    script = {"p": ASK, f"p{ASK}{TOLD}": ANSWER}
    limit = len(ASK) + len(TOLD) + spare
    (only,), _ = converse(task, script, ["p"], 1, limit)
    assert only.text == (ASK + TOLD + "<" if goes_on else ASK)
    assert only.truncated
    assert len(only.tokens) <= limit
    (cut,), calls = converse(task, {"p": ASK}, ["p"], 1, len(ASK) - 1)  # within its call
    assert (cut.text, cut.truncated, cut.episode, len(calls)) == (ASK[:-1], True, Episode(), 1)


def test_a_task_without_turns_is_sampled_in_one_call():
    task = parse_task({"name": "knights_knaves"}).build()
    sampled, calls = converse(task, {"p": ["1\0", "22"], "q": ["3", "4"]}, ["p", "q"], 2)
    assert [one.text for one in sampled] == ["1", "22", "3", "4"]
    assert sampled[0].token_mask.tolist() == [True, True]
    assert sampled[0].episode is None
    assert [(n, turn) for _, n, turn in calls] == [(2, None)]


def test_the_response_prefix_begins_what_is_graded_observed_and_recorded(task):
    begun, said = ASK[:9], ASK[9:]
    script = {"p": [said, said], f"p{said}{TOLD}": ANSWER}
    prompt = Prompt(response_prefix=begun)
    asked = Request([[ord("p")]], 2, SamplingParams(200, stop_token_ids=(END,)), 0)
    scorer = Scorer(task, {"answer": 1.0}, prompt)
    problem = Problem("x", "?", "A", {"answers": ["A"]})
    (group,) = sample_groups(ScriptedGenerator(script), ContinuingTokenizer(), scorer, [problem], asked)
    assert [one.response.text for one in group.responses] == [ASK + TOLD + ANSWER] * 2
    assert [response.reward for response in group.responses] == [1.0, 1.0]
    assert "".join(map(chr, group.responses[0].response.tokens.tolist())) == said + TOLD + ANSWER


class Pieces:
    """A tokenizer of given pieces."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, tokens, skip_special_tokens):
        return "".join(self.pieces[token] for token in tokens)


def test_a_stop_text_is_found_however_it_is_spelt():
    tokenizer = Pieces("</", "search", ">", ">\n", "</search>", "a", "b>", "</answer>.")
    end = StopTexts(("</search>", "</answer>"), tokenizer)
    assert end.reached([5, 0, 1, 2])
    assert end.reached([0, 1, 3])
    assert end.reached([4])
    assert end.reached([5, 5, 7])
    assert not end.reached([0, 1])
    assert not end.reached([0, 1, 6])
    assert not end.reached([5, 2])
    assert not end.reached([4, 5])  # complete already before the last token


VOCAB = 40
LETTERS = "".join(map(chr, range(97, 97 + VOCAB)))


class LetterTokenizer(Pieces):
    def __init__(self):
        super().__init__(*LETTERS)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [LETTERS.index(character) for character in text]}

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(row, skip_special_tokens) for row in rows]


class Echo:
    """Answers a turn that ends with c or f, up to three times, with its own last three letters."""

    stop_texts, tags = ("c", "f"), ()
    config = None

    def observe(self, episodes, turns, reserved):
        pairs = [(episode.num_turns, turn) for episode, turn in zip(episodes, turns, strict=True)]
        return [
            Observed(Episode(number + 1), turn[-3:] if turn[-1] in "cf" and number < 3 else None)
            for number, turn in pairs
        ]

    def segments(self, response): ...
    def train_problem(self, index, seed): ...
    def validation_problems(self, num_problems): ...
    def demonstration(self, problem, rng): ...
    def extract(self, response): ...
    def score(self, problem, response): ...


@pytest.fixture(scope="module", params=[DecoderGenerator, HFGenerator])
def generator(request):
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 32}
    model = make_model(small_config("qwen2", **sizes, **dict.fromkeys(SPECIAL)))
    generator = make_generator(request.param, model, max_batch_size=5)
    generator.reference = model
    return generator


PROMPTS = [[3, 7, 1], [5], [9, 9, 2, 30, 11, 4, 8], [12, 1]]
SAMPLING = SamplingParams(24, stop_token_ids=(0,))


def echo(generator, prompts, num_generations=4, seed=3):
    return sample_responses(
        generator, LetterTokenizer(), Echo(), Request(prompts, num_generations, SAMPLING, seed)
    )


def test_a_turn_is_the_beginning_of_an_unlimited_response(generator):
    whole = [row.tolist() for row in generator.generate(Request(PROMPTS, 2, SAMPLING, 1)).tokens]
    texts = ["".join(LETTERS[token] for token in row) for row in whole]
    stops, limits = ("c", "f", texts[0][4:6]), [24, 3, 9, 1]  # the last takes two tokens
    turn = Turn(limits, StopTexts(stops, LetterTokenizer()))
    turns = generator.generate(Request(PROMPTS, 2, SAMPLING, 1, turn))
    kinds = set()
    for row, (tokens, text) in enumerate(zip(whole, texts, strict=True)):
        full = tokens.index(0) + 1 if 0 in tokens else len(tokens)
        ends = [end for stop in stops if stop in text and (end := text.find(stop) + len(stop)) <= full]
        length = min([*ends, limits[row // 2], full])
        assert turns.lengths[row] == length
        assert turns.tokens[row, :length].tolist() == tokens[:length]
        assert bool(turns.truncated[row]) == (length not in ends and tokens[length - 1] != 0)
        kinds.add((bool(turns.truncated[row]), length in ends, length < full))
    assert len(kinds) >= 2
    assert turns.lengths[0] <= 6


def test_every_policy_token_has_the_logprob_of_a_full_forward_pass(generator):
    sampled = echo(generator, PROMPTS)
    assert any(not one.token_mask.all() for one in sampled)
    for row, one in enumerate(sampled):
        expected = logprobs_of(generator.reference, PROMPTS[row // 4], one.tokens.tolist())
        torch.testing.assert_close(one.logprobs, expected * one.token_mask, atol=1e-5, rtol=0)
        assert len(one.tokens) <= 24


def test_a_response_does_not_depend_on_what_is_sampled_beside_it(generator):
    together = echo(generator, PROMPTS)
    apart = [one for prompt in PROMPTS for one in echo(generator, [prompt])]
    backwards = [one for prompt in reversed(PROMPTS) for one in echo(generator, [prompt])]
    for a, b in zip(together, apart, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    assert [one.text for one in backwards[:4]] == [one.text for one in together[12:]]
    assert [one.text for one in together] != [one.text for one in echo(generator, PROMPTS, seed=4)]
    assert max(one.episode.num_turns for one in together) > 1


def test_the_context_is_checked_with_what_each_response_has_left(generator):
    end = StopTexts(("c",), LetterTokenizer())
    generator.generate(Request([[1] * 30, [1] * 8], 1, SAMPLING, 0, Turn([2, 24], end)))  # 32 positions each
    with pytest.raises(UserError, match="longest prompt has 30 tokens and max_new_tokens=3"):
        generator.generate(Request([[1] * 30, [1] * 8], 1, SAMPLING, 0, Turn([3, 24], end)))


def test_demonstrations_teach_the_policys_part_only():
    task = parse_task({"name": "search_qa", "top_k": 1}).build()
    tokenizer = build_tokenizer(task, 512, 0)
    problem = next(p for p in (task.train_problem(i, 0) for i in range(50)) if p.metadata["hops"] == 2)
    (only,) = demonstrated(tokenizer, task, Prompt(), problem, None, limit=512, key="length").responses
    shown = only.response
    learnt = tokenizer.decode(shown.tokens[shown.token_mask])
    first, second = task._source.queries(problem)
    assert learnt == (
        f"<search>{first}</search><search>{second}</search><answer>{problem.answer}</answer><|im_end|>"
    )
    assert tokenizer.decode(shown.tokens).count("<information>") == 2
    for tag in (*task.tags, "<answer>"):
        assert len(tokenizer(tag, add_special_tokens=False)["input_ids"]) == 1
