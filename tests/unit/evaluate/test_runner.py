"""Evaluation with a scripted generator: every number by hand."""

import json
import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from character_tokenizer import END, CharacterTokenizer
from processes import ROOT

from nemo_grpo.evaluate import ResponseSource, evaluate_problems
from nemo_grpo.evaluate.sampling import ResponseFile
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.rules import validation_metrics
from nemo_grpo.sampling.images import image_digest
from nemo_grpo.sampling.requests import Rollout, SamplingParams
from nemo_grpo.support.progress import TokenMeter
from nemo_grpo.tasks import Problem, Prompt, parse_task
from nemo_grpo.tasks.scoring import Scorer

RIGHT = "<think></think><answer>Knight, knave</answer>"
WRONG = "<think></think><answer>knave, knave</answer>"
BARE = "<answer>knave,  KNAVE</answer>"
NONE = "I do not know"


class Killed(BaseException):
    pass


class ScriptedGenerator:
    """Answers each prompt from a script: {prompt: (greedy response, [sampled responses])}.

    It is killed in the call after ``life`` others.
    """

    def __init__(self, script, life=math.inf):
        self.script, self.calls, self.life = script, [], life

    def generate(self, request):
        prompts, num_generations, sampling = request.prompts, request.num_generations, request.sampling
        if len(self.calls) == self.life:
            raise Killed
        self.calls.append((len(prompts), num_generations, sampling, request.seed))
        texts = []
        for prompt in prompts:
            greedy, samples = self.script["".join(map(chr, prompt))]
            texts += [greedy] if sampling.greedy else samples[:num_generations]
        width = max(map(len, texts)) + 1
        tokens = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor([ord(character) for character in text])
        truncated = torch.tensor([text == NONE for text in texts])
        lengths = torch.tensor([len(text) for text in texts]) + (~truncated).long()
        if request.meter is not None:
            request.meter(int(lengths.sum()), len(texts))
        zeros = torch.zeros(tokens.shape)
        return Rollout(tokens, zeros, lengths, truncated)


@pytest.fixture
def task():
    return parse_task({"name": "knights_knaves"}).build()


PROBLEMS = [Problem(id=f"p{i}", question=f"Q{i}?", answer="knight, knave") for i in range(3)]
SCRIPT = {
    "[Q0?]": (RIGHT, [RIGHT, WRONG, RIGHT, WRONG]),
    "[Q1?]": (WRONG, [WRONG, RIGHT, BARE, NONE]),
    "[Q2?]": (NONE, [NONE, NONE, NONE, NONE]),
}
SAMPLING = SamplingParams(100, temperature=0.7, top_p=0.9, stop_token_ids=(END,))


def run(task, generator=None, sampling=SAMPLING, scorer=None, **source):
    generator = generator or ScriptedGenerator(SCRIPT)
    asked = ResponseSource(generator, CharacterTokenizer(), task, Prompt(), sampling, 7, **source)
    return evaluate_problems(asked, PROBLEMS, 4, scorer)


def test_metrics_by_hand(task):
    metrics = run(task).metrics()
    # problem means 1/2, 1/4, 0: mean 1/4, deviations 1/4, 0, -1/4, variance 1/16, error sqrt(1/48)
    assert metrics["accuracy"] == pytest.approx(1 / 4)
    assert metrics["accuracy_stderr"] == pytest.approx(math.sqrt(1 / 48))
    assert metrics["greedy"] == pytest.approx(1 / 3)
    assert metrics["greedy_stderr"] == pytest.approx(1 / 3)
    # 2 of 4 right: 1 - C(2,2)/C(4,2) = 5/6; 1 of 4: 1 - C(3,2)/C(4,2) = 1/2; none: 0
    assert metrics["pass@1"] == pytest.approx(1 / 4)
    assert metrics["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 3)
    assert metrics["pass@4"] == pytest.approx(2 / 3)
    # votes: a tie that the first, right answer wins; two for "knave,knave"; none
    assert metrics["maj@4"] == pytest.approx(1 / 3)
    assert metrics["format"] == pytest.approx((4 + 2 + 0) / 12)
    assert metrics["truncated"] == pytest.approx(5 / 12)
    num_tokens = 3 * (len(RIGHT) + 1) + 3 * (len(WRONG) + 1) + len(BARE) + 1 + 5 * len(NONE)
    assert metrics["num_tokens"] == pytest.approx(num_tokens / 12)
    # 2 of 4 right: every 3 hold one; 1 of 4: 1 - C(3,3)/C(4,3) = 3/4
    assert replace(run(task), pass_at=(3, 4)).metrics()["pass@3"] == pytest.approx((1 + 3 / 4) / 3)
    assert list(metrics)[4:7] == ["pass@1", "pass@2", "pass@4"]


def test_recipes_may_ask_for_every_metric_and_no_other(task):
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", ["grpo.val_num_generations_per_prompt=4"])
    scorer = Scorer(task, {"accuracy": 1.0}, Prompt())
    measured = {name for name in run(task, scorer=scorer).metrics() if not name.endswith("_stderr")}
    assert set(validation_metrics(recipe)) == measured


def test_own_rewards_are_means_over_the_samples_and_weighted(task, tmp_path, monkeypatch):
    """Rewards: 0.5 x accuracy + 0.01 x length; accuracies 2/4, 1/4 and 0/4; the other abstains on NONE."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def length(response): return len(response)\n"
        "def tagged(response): return 1.0 if 'answer' in response else None\n"
    )
    weights = {"accuracy": 0.5, "mine.py:length": 0.01, "mine.py:tagged": 0.0}
    with closing(Scorer(task, weights, Prompt())) as scorer:
        metrics = run(task, scorer=scorer).metrics()
    texts = [text for _, samples in SCRIPT.values() for text in samples]
    length = sum(map(len, texts)) / 12
    assert metrics["mine.py:length"] == pytest.approx(length)
    assert metrics["mine.py:tagged"] == 1.0
    assert metrics["reward"] == pytest.approx(0.5 * 3 / 12 + 0.01 * length)
    assert metrics["accuracy"] == pytest.approx(3 / 12)
    assert "reward" not in run(task).metrics()


def test_a_response_prefix_begins_the_texts_that_are_graded_and_shown(task, tmp_path):
    begun = RIGHT[:10]
    script = {f"[Q0?]{begun}": (RIGHT[10:], [RIGHT[10:], BARE])}
    fixed = (CharacterTokenizer(), task, Prompt(response_prefix=begun), SAMPLING, 7)

    def answer(generator):
        with ResponseFile(tmp_path / "log.jsonl") as file:
            source = ResponseSource(generator, *fixed, recorded=file)
            return evaluate_problems(source, PROBLEMS[:1], 2)

    result = answer(ScriptedGenerator(script))
    assert result.problems[0].samples.completions == [RIGHT, begun + BARE]
    assert result.problems[0].greedy.scores == [1.0]
    assert answer(ScriptedGenerator({})) == result  # nothing is sampled again


def test_greedy_is_one_response_with_the_same_limits(task):
    run(task, generator := ScriptedGenerator(SCRIPT))
    (_, one, greedy, seed), (_, four, sampled, _) = generator.calls
    assert (one, four, seed) == (1, 4, 7)
    assert greedy.greedy
    assert sampled == SAMPLING
    assert (greedy.max_new_tokens, greedy.stop_token_ids) == (100, (END,))


def test_samples_at_temperature_0_are_the_greedy_response_again(task, tmp_path):
    generator, greedy = ScriptedGenerator(SCRIPT), replace(SAMPLING, greedy=True)
    with ResponseFile(tmp_path / "responses.jsonl") as file:
        result = run(task, generator, recorded=file, sampling=greedy)
    assert [len(problem.samples.scores) for problem in result.problems] == [4, 4, 4]
    # one problem of three is solved, by all of its samples or by none
    metrics = result.metrics()
    names = ("accuracy", "greedy", "pass@1", "pass@2", "pass@4", "maj@4")
    assert [metrics[name] for name in names] == [pytest.approx(1 / 3)] * 6
    assert len(generator.calls) == 1


@pytest.mark.parametrize("life", range(6))
def test_a_killed_run_keeps_each_call_that_has_ended_and_samples_the_others(task, tmp_path, life):
    """Three problems, one a call: greedily, then four samples."""
    expected, told = run(task), []
    killed = ScriptedGenerator(SCRIPT, life)
    with ResponseFile(tmp_path / "log.jsonl") as file, pytest.raises(Killed):
        run(task, killed, recorded=file, problems_per_call=1)
    kept = 5 * (life // 2) + life % 2
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == kept
    meter = TokenMeter(lambda note, amount: told.append(amount), 3 * (1 + 4), 100)
    generator = ScriptedGenerator(SCRIPT)
    with ResponseFile(tmp_path / "log.jsonl") as file:
        assert run(task, generator, meter=meter, recorded=file, problems_per_call=1) == expected
    assert len(generator.calls) == 6 - life
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 15  # none twice
    assert (meter.num_ended, sum(told)) == (15 - kept, 15)


class SeeingTokenizer(CharacterTokenizer):
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        ((*images, text),) = (message["content"] for message in messages)
        return "#" * len(images) + f"[{text['text']}]"


def seen(folder, contents):
    """A problem per picture, all with the same question."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [Problem(name, "Q?", "(B)", {"images": [str(folder / name)], "task": "T"}) for name in contents]


def test_problems_with_the_same_words_and_other_images_are_asked_together(tmp_path):
    task = parse_task({"name": "vision_classification"}).build()
    problems = seen(tmp_path, {"a": b"1", "b": b"2"})
    answers = ["<answer>B</answer>", "<answer>A</answer>"]
    script = ScriptedGenerator({"#[Q?]": ("<answer>(B)</answer>", answers)})
    generate, requests = script.generate, []
    script.generate = lambda request: (requests.append(request), generate(request))[1]

    def ask():
        with ResponseFile(tmp_path / "log.jsonl") as file:
            fixed = (SeeingTokenizer(), task, Prompt(), SAMPLING, 7)
            return evaluate_problems(ResponseSource(script, *fixed, recorded=file), problems, 2)

    assert ask().metrics()["accuracy"] == 0.5
    assert [request.images for request in requests] == [[(str(tmp_path / "a"),), (str(tmp_path / "b"),)]] * 2
    ask()
    assert len(requests) == 2  # all are on record
    (tmp_path / "b").write_bytes(b"3")
    image_digest.cache_clear()
    ask()
    assert [request.images for request in requests[2:]] == [[(str(tmp_path / "b"),)]] * 2


def test_a_tasks_own_metrics_stand_beside_the_others(tmp_path):
    task = parse_task({"name": "vision_grounding"}).build()
    (problem,) = seen(tmp_path, {"a": b"1"})
    half = "<answer>(0,0),(2,4)</answer>"
    script = ScriptedGenerator({"#[Q?]": (half, [half, NONE])})
    asked = [replace(problem, answer="(0,0),(4,4)")]
    source = ResponseSource(script, SeeingTokenizer(), task, Prompt(), SAMPLING, 7)
    metrics = evaluate_problems(source, asked, 2).metrics()
    assert (metrics["box_miou"], metrics["box_ciou"]) == (0.25, 8 / 32)


def test_samples_file_has_a_line_per_problem(task, tmp_path):
    run(task).write_samples(tmp_path / "samples.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["p0", "p1", "p2"]
    assert lines[1] == {
        "id": "p1",
        "prompt": "[Q1?]",
        "gold": "knight, knave",
        "completions": [WRONG, RIGHT, BARE, NONE],
        "extracted": ["knave,knave", "knight,knave", "knave,knave", None],
        "score": [0.0, 1.0, 0.0, 0.0],
        "format": [1.0, 1.0, 0.0, 0.0],
        "num_tokens": [len(WRONG) + 1, len(RIGHT) + 1, len(BARE) + 1, len(NONE)],
        "truncated": [False, False, False, True],
        "greedy_completion": WRONG,
        "greedy_extracted": "knave,knave",
        "greedy_score": 0.0,
    }


def test_partial_credit_does_not_pass(task, monkeypatch):
    monkeypatch.setattr(task, "score", lambda problem, response: {"accuracy": 0.9, "format": 1.0})
    metrics = run(task).metrics()
    assert metrics["accuracy"] == pytest.approx(0.9)
    assert metrics["pass@4"] == 0.0


def test_votes_cut_short_by_comparison_limits_are_counted(task, caplog):
    def as_mathematics(problem):  # words have a verdict at once
        answers = [answer and f"{answer}+1" for answer in problem.samples.extracted]
        return replace(problem, samples=replace(problem.samples, extracted=answers))

    result = run(task)
    result = replace(result, problems=[as_mathematics(problem) for problem in result.problems])
    undecided = replace(result, same_answer=lambda one, other: None)
    # problem 0 and 1 have two different answers each, problem 2 has none; equal texts still count together
    assert undecided.to_dict()["num_votes_cut_short"] == 2
    assert undecided.metrics()["maj@4"] == result.metrics()["maj@4"]
    assert "2 of 3 votes hit the limits on comparing answers" in caplog.text
    asked = []
    hopeless = replace(
        result,
        problems=[replace(problem, gold=problem.id) for problem in undecided.problems],
        same_answer=lambda *pair: asked.append(pair) or False,
        undecided=lambda reference, answer: (reference, answer) == ("p0", "knave,knave+1"),
    )
    assert hopeless.to_dict()["num_votes_cut_short"] == 1
    assert len(asked) == 1  # problem 1 has the same two answers, and another reference
