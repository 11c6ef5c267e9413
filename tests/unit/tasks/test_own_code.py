"""A user's own rewards, tasks and variants, named in a recipe by file and name."""

from __future__ import annotations

import logging
import math
import os
import pickle
import re
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from processes import ROOT, output_of, python
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.nemorl.loss import ObjectiveLoss
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.support import extensions
from nemo_grpo.support.errors import EXIT_USAGE, UserError
from nemo_grpo.tasks import Problem, Prompt, parse_task
from nemo_grpo.tasks.base import NOT_FINITE
from nemo_grpo.tasks.grading import workers_of
from nemo_grpo.tasks.own_task import try_own_task
from nemo_grpo.tasks.rewards import worker_pool
from nemo_grpo.tasks.rewards.own_reward import OwnReward, parameters_of
from nemo_grpo.tasks.scoring import RewardsFailed, Scorer, component_means
from nemo_grpo.variants import parse_loss_fn

PROBLEM = Problem("p", "How many?", "4", {"level": 2})
TOY = parse_task({"name": "knights_knaves"}).build()
REWARDS = """
import os

def length(response): return len(response)
def everything(prompt, response, problem):
    assert prompt == "Say: How many?" and problem.id == "p"
    return problem.metadata["level"] * (response == problem.answer)
def one_for_all(responses): return [1.0]
def all_at_once(prompts, responses, problems, **others):
    return [len(responses) + len(text) for text in responses]
def of_its_process(response): return os.getpid()
def fails_on_b(response): return {"a": 1.0}[response]
def infinite(response): return float("inf")
def judges_short_ones(response): return None if len(response) > 2 else len(response)
def judges_the_first(responses): return [1.0] + [None] * (len(responses) - 1)
def text(response): return "1"
def too_few(responses): return [1.0]
def by_response(responses): return {float(i): 1.0 for i, _ in enumerate(responses)}
def in_any_order(responses): return {float(len(response)) for response in responses}
def for_ever(response):
    while response == "loop": pass
    return 1
def greedy_for_memory(response): return len(bytearray(8 << 30))
def slow(responses):
    import time
    time.sleep(0.2 * len(responses))
    return [1.0] * len(responses)
def twice(response):
    if os.fork() == 0:
        return 99.0  # the copy's answer to the same request
    os.wait()
    return float(response)
def leaves_a_child(response):
    import subprocess
    return subprocess.Popen(["sleep", "600"]).pid
def fails_often(response): return 1 / float(response)
def quotes(response): raise ValueError(f"no number in {response}")
def other_names(completion): return 0.0
not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(name, responses, **limits):
    function = OwnReward(f"my_rewards.py:{name}")
    function.pool.arguments = (str(limits.get("cpu", 3.0)), str(2 << 30))
    got = function(["Say: How many?"] * len(responses), responses, [PROBLEM] * len(responses))
    function.pool.close()
    return got


def test_a_function_takes_what_it_names_in_a_process_of_its_own(folder):
    assert values("length", ["", "abc"]) == [0.0, 3.0]
    assert values("everything", ["4", "5"]) == [2.0, 0.0]
    assert values("all_at_once", ["a", "bc"]) == [3.0, 4.0]
    assert values("of_its_process", ["x"]) != [os.getpid()]


def test_a_function_may_abstain(folder, caplog):
    assert values("judges_short_ones", ["a", "abc", ""]) == [1.0, None, 0.0]
    assert values("judges_the_first", ["a", "abc"]) == [1.0, None]
    assert not caplog.records


def test_a_response_without_a_reward_is_counted_and_in_no_mean_of_that_reward(folder):
    name = "my_rewards.py:judges_short_ones"
    with closing(Scorer(TOY, {"accuracy": 1.0, name: 0.5}, Prompt())) as scorer:
        rows = scorer([PROBLEM] * 4, ["a", "abc", "ab", "abcd"])
        scorer.try_out(0)
    assert [scorer.reward(row) for row in rows][::2] == [0.5, 1.0]
    assert all(math.isnan(scorer.reward(row)) for row in rows[1::2])
    means = component_means(rows)
    assert (means[f"reward/{name}"], means["reward/abstained"], means["reward/not_finite"]) == (1.5, 0.5, 0)
    assert f"reward/{name}" not in component_means(rows[1::2])  # nobody has one
    unweighted = Scorer(TOY, {"accuracy": 1.0, name: 0.0}, Prompt())
    assert [unweighted.reward(row) for row in rows] == [0.0] * 4  # only shown


def test_a_failure_is_no_number_and_the_log_says_why(folder, caplog):
    with caplog.at_level(logging.WARNING):
        got = values("fails_on_b", ["a", "b", "a"])
    assert got[0] == got[2] == 1.0
    assert math.isnan(got[1])
    assert "my_rewards.py:fails_on_b failed for 1 of 3 responses, which get 0 for it: KeyError" in caplog.text
    assert "(my_rewards.py:12)" in caplog.text
    values("quotes", ["one\n\ntwo\r\n\tthree"])  # line breaks of a response split no line of the log
    assert "ValueError: no number in one two three (my_rewards.py:" in caplog.messages[-1]


@pytest.mark.parametrize("name", ["text", "too_few", "by_response", "in_any_order", "greedy_for_memory"])
def test_what_is_not_a_number_per_response_is_a_failure(folder, name):
    assert all(map(math.isnan, values(name, ["a", "bc"])))


def test_a_function_beyond_the_time_limit_costs_only_its_response(folder):
    got = values("for_ever", ["a", "loop", "b"], cpu=0.3)
    assert (got[0], got[2]) == (1.0, 1.0)
    assert math.isnan(got[1])


def test_time_for_a_list_grows_with_its_length(folder, monkeypatch):
    function = OwnReward("my_rewards.py:slow")
    monkeypatch.setattr(worker_pool, "WALL_SECONDS", 0.3)
    with closing(function.pool):
        monkeypatch.setattr(worker_pool, "WALL_SECONDS_PER_RESPONSE", 2.0)
        assert function(["q"] * 4, ["a"] * 4, [PROBLEM] * 4) == [1.0] * 4  # 0.8 s
        monkeypatch.setattr(worker_pool, "WALL_SECONDS_PER_RESPONSE", 0.05)
        assert all(map(math.isnan, function(["q"] * 4, ["a"] * 4, [PROBLEM] * 4)))


def test_a_function_that_forks_answers_once(folder):
    assert values("twice", ["1", "2", "3", "4"]) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc to see processes in")
def test_processes_that_a_function_starts_end_with_its_worker(folder):
    for pid in values("leaves_a_child", ["a", "b"]):
        while is_running(int(pid)):  # killed, but perhaps not yet gone
            time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_failed_rewards_end_the_step(folder):
    weights = {"accuracy": 1.0, "my_rewards.py:fails_often": 1.0}

    def failed(num_failed, num_responses, max_failed):
        responses = ["0"] * num_failed + ["1"] * (num_responses - num_failed)
        with closing(Scorer(TOY, weights, Prompt(), max_failed)) as scorer:
            return sum(NOT_FINITE in row for row in scorer([PROBLEM] * num_responses, responses))

    assert failed(3, 3, 0.0) == 3  # few
    assert failed(4, 8, 0.5) == 4
    for numbers in ((4, 8, 0.0), (5, 8, 0.5)):
        with pytest.raises(RewardsFailed, match=f"of {numbers[0]} of 8 .*max_failed_rewards={numbers[2]}"):
            failed(*numbers)


def test_own_functions_join_the_tasks_components(folder):
    weights = {"accuracy": 1.0, "my_rewards.py:length": 0.1, "my_rewards.py:infinite": 1.0}
    with closing(Scorer(TOY, weights, Prompt(template="Say: {question}"))) as scorer:
        (row,) = scorer([PROBLEM], ["<answer>4</answer>"])
    expected = {"my_rewards.py:length": 18.0, "my_rewards.py:infinite": 0.0, NOT_FINITE: 1.0}
    assert row == {"accuracy": 1.0, "format": 0.0, **expected}
    assert scorer.reward(row) == pytest.approx(2.8)


def test_a_function_that_fails_on_a_sample_problem_is_refused_before_the_run(folder):
    for name, message in (
        ("fails_on_b", "KeyError: '' .*for the response '' to problem"),
        ("infinite", ": inf,"),
        ("one_for_all", "1 values for 3 responses, .*each response of the list"),
    ):
        scorer = Scorer(TOY, {f"my_rewards.py:{name}": 1.0}, Prompt())
        with closing(scorer), pytest.raises(UserError, match=message):
            scorer.try_out(0)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my_rewards.py:lenght", "my_rewards.py has no 'lenght'; did you mean 'length'?"),
        ("none.py:length", "there is no file /.*none.py; a path is relative to the working directory"),
        ("no_such_package.rewards:f", "No module named 'no_such_package'; install it"),
        ("my_rewards.py:other_names", r"other_names\(completion\): a reward function takes some of prompt"),
        ("my_rewards.py:not_a_function", "it is not a function"),
        ("broken.py:f", r"broken.py:f: SyntaxError: .* \(broken.py:2\)"),
        ("exits:f", r"exits:f: when it is imported: SystemExit: 0 \(.*exits.py:2\)"),
    ],
)
def test_a_wrong_reference_is_one_line(folder, reference, message, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=message) as error:
        parameters_of(reference)
    assert "\n" not in str(error.value)


def test_a_file_that_imports_its_neighbour_is_told_the_remedy(folder):
    (folder / "entropy_terms.py").write_text("def term(x): return x\n")
    (folder / "uses_it.py").write_text("from entropy_terms import term\n\ndef f(response): return 1\n")
    with pytest.raises(
        UserError, match=r"No module named 'entropy_terms' \(uses_it.py:1\); .*one file, or inst"
    ):
        parameters_of("uses_it.py:f")
    (folder / "lacks.py").write_text("import no_such_package\n\ndef f(response): return 1\n")
    with pytest.raises(UserError, match=r"No module named 'no_such_package' \(lacks.py:1\)$"):
        parameters_of("lacks.py:f")


def test_code_that_fails_is_run_once_until_its_file_changes(folder):
    (folder / "broken.py").write_text("with open('runs', 'a') as file: file.write('x')\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"broken.py:f: ZeroDivisionError: .* \(broken.py:2\)"):
            parameters_of("broken.py:f")
    assert (folder / "runs").read_text() == "x"
    (folder / "broken.py").write_text("def f(response): return 1")
    assert parameters_of("broken.py:f") == ("response",)


def test_an_import_that_never_ends_can_be_interrupted_and_the_traceback_names_the_line(folder):
    (folder / "loops.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n"
    )
    code = "from nemo_grpo.support import extensions\nextensions.load('loops.py:f', 'key')\n"
    shown = output_of(python("-c", code, cwd=folder), -signal.SIGINT)
    assert re.search(r'File "loops.py", line [23]', shown)
    assert shown.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os\nos._exit(3)\n", r"its import ends Python \(exit code 3\)"),
        ("while True: pass\n", r"its import takes more than 5 s"),
        ("x = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(bad.py:2\)"),
    ],
)
def test_recipe_check_outlives_the_import_of_a_users_file(folder, monkeypatch, code, message):
    monkeypatch.setattr(extensions, "TRIAL_SECONDS", 5)
    (folder / "bad.py").write_text(code)
    sound = str(ROOT / "recipes/quickstart.yaml")
    (folder / "bad.yaml").write_text(
        f"defaults: {sound}\nnemo_grpo: {{rewards: {{accuracy: 1.0, 'bad.py:f': 0.1}}}}\n"
    )
    checked = CliRunner().invoke(app, ["recipe", "check", "bad.yaml", sound])
    assert checked.exit_code == EXIT_USAGE
    wrong, right = checked.stdout.splitlines()
    assert re.match(rf"error  bad.yaml: nemo_grpo.rewards.*bad.py:f: {message}", wrong)
    assert right.startswith("ok")


VARIANT = '''
"""Half of GRPO's advantages."""
from __future__ import annotations
from pydantic import Field
from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.objective import Shaped
from nemo_grpo.variants.base import RatioConfig

class Half(RatioConfig):
    factor: float = Field(0.5, ge=0)

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        shaped = super().shape(batch, seed)
        return Shaped(self.factor * shaped.advantages, shaped.base)
'''
TASK = """
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig

class LettersConfig(FileTaskConfig):
    bonus: float = 0.0
    def build(self): return Letters(self)

class Letters(FileTask):
    def __init__(self, config):
        super().__init__(config)
        self.config = config
    def extract(self, response): return response.strip() or None
    def score(self, problem, response):
        right = float(self.extract(response) == problem.answer)
        return {"accuracy": right + self.config.bonus, "format": 1.0}
"""


def test_an_own_variant_is_a_variant_and_travels_without_its_file(folder):
    (folder / "mine.py").write_text(VARIANT)
    section = {"variant": "mine.py:Half", "factor": 0.25, "ratio_clip_max": 0.3}
    config = parse_loss_fn(section)
    assert (config.factor, config.ratio_clip_max, config.build().name) == (0.25, 0.3, "mine.py:Half")
    sent = folder / "loss.pickle"
    sent.write_bytes(pickle.dumps(ObjectiveLoss(config)))
    (folder / "mine.py").unlink()
    code = "import pickle; print(pickle.load(open('loss.pickle', 'rb')).config.factor)"
    assert output_of(python("-c", code, cwd=folder)) == "0.25\n"
    (folder / "mine.py").write_text(VARIANT)
    for wrong, message in (
        ({"variant": "mine.py:Half", "facto": 1.0}, "loss_fn.facto is not .* did you mean 'factor'"),
        ({"variant": "mine.py:TokenBatch"}, "it must be a class that derives from VariantConfig"),
    ):
        with pytest.raises(UserError, match=message):
            parse_loss_fn(wrong)


def test_an_own_task_is_a_task(folder):
    (folder / "mine.py").write_text(TASK)
    (folder / "train.jsonl").write_text('{"question": "q", "answer": 4}\n')
    config = parse_task({"name": "mine.py:LettersConfig", "bonus": 0.5, "train_files": ["train.jsonl"]})
    task = config.build()
    assert task.score(task.train_problem(0, 0), " 4") == {"accuracy": 1.5, "format": 1.0}
    with pytest.raises(UserError, match=r"unknown key nemo_grpo.task.bonu .*did you mean 'bonus'"):
        parse_task({"name": "mine.py:LettersConfig", "bonu": 0.5})
    with pytest.raises(UserError, match="must be a class that derives from TaskConfig"):
        parse_task({"name": "mine.py:Letters"})


def test_a_recipe_names_its_own_files_and_its_resolved_copy_is_equal(folder):
    (folder / "mine.py").write_text(VARIANT)
    changes = ["loss_fn.variant=mine.py:Half", "loss_fn.factor=0.75"]
    changes += ["nemo_grpo.rewards={accuracy: 1.0, my_rewards.py:length: -0.001}"]
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", changes)
    assert recipe.own_files == {"mine.py": VARIANT, "my_rewards.py": REWARDS}
    (folder / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(folder / "resolved.yaml") == recipe


def test_received_text_stands_for_a_file_that_is_not_here(folder):
    extensions.receive_files({"sent.py": "def f(response): return 7"})
    assert parameters_of("sent.py:f") == ("response",)


WHOLE = """
import random
from nemo_grpo.tasks.base import Problem, TaskConfig, is_held_out

class SumsConfig(TaskConfig):
    name: str
    {declared}
    def build(self): return Sums(self)

class Sums:
    def __init__(self, config): self.config = config
    def train_problem(self, index, seed): return self.all(False)[index % 64]
    def validation_problems(self, number): return self.all({held_out})[:number]
    def {demonstration}(self, problem, rng): return {shown}
    def {extract}(self, response): return response.strip() or None
    def score(self, problem, response):
        while response == "loop": pass
        right = float(response.strip() == problem.answer)
        return {scores}
    def all(self, held_out):
        pairs = [(a, b) for a in range(20) for b in range(20) if is_held_out((a, b)) == held_out]
        return [Problem(f"{{a}}+{{b}}", f"{{a}}+{{b}}?", str(a + b)) for a, b in pairs]
"""
PARTS = {
    "declared": "",
    "held_out": "True",
    "demonstration": "demonstration",
    "shown": "problem.answer",
    "extract": "extract",
    "scores": "{'accuracy': right, 'format': 1.0}",
}


def own_task(folder, **changes):
    (folder / "sums.py").write_text(WHOLE.format(**PARTS | changes))
    return parse_task({"name": "sums.py:SumsConfig"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extract": "answer"}, "Sums of sums.py:SumsConfig has no method extract"),
        ({"demonstration": "show"}, "has no method demonstration"),
        ({"scores": "{'accuracy': right}"}, "score returns no 'format'"),
        ({"scores": "{'accuracy': right, 'format': 1, 'extra': 2}"}, "'extra', which reward_components does"),
        ({"scores": "{'accuracy': 1 / len(response), 'format': 1}"}, r"ZeroDivisionError: .* \(sums.py:19\)"),
        ({"declared": "reward_components = {'accuracy': '0 to 1'}"}, "declares no component 'format'"),
        ({"held_out": "False"}, r"problem '0\+\d+' is in training and in validation"),
        ({"shown": "'no'"}, "the demonstration of problem .* has accuracy 0"),
        ({"shown": "problem.nothing"}, "demonstration of sums.py:SumsConfig fails: AttributeError"),
    ],
)
def test_an_own_task_that_would_end_or_mislead_a_run_is_refused_before_it(folder, changes, message):
    config = own_task(folder, **changes)
    with pytest.raises(UserError, match=message):
        try_own_task(config, 0, 10, shows_demonstrations=True)


def test_a_sound_own_task_is_accepted(folder):
    try_own_task(own_task(folder), 0, 10, shows_demonstrations=True)
    unshown = own_task(folder, shown="problem.nothing")  # nobody would call it
    try_own_task(unshown, 0, 10, shows_demonstrations=False)


def test_a_recipe_with_a_wrong_own_task_is_refused_by_every_command(folder):
    own_task(folder, scores="{'accuracy': right}")
    recipe = load_recipe(
        ROOT / "recipes/quickstart.yaml",
        ["nemo_grpo.task={_override_: true, name: 'sums.py:SumsConfig'}", "grpo.max_val_samples=10"],
    )
    with pytest.raises(UserError, match="score returns no 'format'"):
        check_recipe(recipe, continues=False).refuse()


def test_a_score_of_an_own_task_that_never_returns_costs_only_its_response(folder, caplog):
    config = own_task(folder)
    workers = workers_of(config)
    workers.pool.arguments = ("0.3", str(2 << 30))
    task = config.build()
    problem = task.train_problem(0, 0)
    with closing(Scorer(task, {"accuracy": 1.0}, Prompt())) as scorer:
        rows = scorer([problem] * 3, [problem.answer, "loop", "x"])
    workers.pool.close()
    failed = {"accuracy": 0.0, "format": 0.0, NOT_FINITE: 1.0}
    assert rows == [{"accuracy": 1.0, "format": 1.0}, failed, {"accuracy": 0.0, "format": 1.0}]
    assert "score failed, every component counts as 0 for the response 'loop': no value within" in caplog.text
