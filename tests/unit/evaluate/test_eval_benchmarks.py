"""``nemo-grpo eval --benchmarks`` on a real, untrained folder: results, resuming, refusals."""

import json

import pytest
from pydantic import ValidationError
from test_eval_command import run

from nemo_grpo.data.manifest import write_manifest
from nemo_grpo.evaluate import EvalOptions, evaluate
from nemo_grpo.evaluate.benchmarks import load_benchmarks
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.recipe import load_recipe, load_recipe_dict
from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import sha256_of

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """aime24: 4 problems that a manifest describes, two of them with the same question; mine: 2, without."""
    folder = tmp_path_factory.mktemp("data")
    write(folder / "aime24.jsonl", [("1+1?", "2"), ("2+2?", "4"), ("1+1?", "2"), ("3+3?", "6")])
    write(folder / "mine.jsonl", [("5+5?", "10"), ("6+6?", "12")])
    manifest = {"task": "math", "sha256": sha256_of(folder / "aime24.jsonl")}
    write_manifest(folder / "aime24.jsonl", manifest)
    return folder


def write(path, problems):
    lines = [{"id": f"p{i}", "question": q, "answer": a} for i, (q, a) in enumerate(problems)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def options(model, data, out, *more):
    sets = f"aime24,{data / 'mine.jsonl'}"
    fixed = ["--k", 3, "--max-tokens", 6, "--device", "cpu", "--batch-size", 4]
    return ["--model", model, "--benchmarks", sets, "--data-dir", data, "--out", out, *fixed, *more]


def results(out):
    summary = json.loads((out / "summary.json").read_text())
    return summary, [(out / f"samples-{name}.jsonl").read_text() for name in ("aime24", "mine")]


@pytest.fixture(scope="module")
def unbroken(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    return out, run(*options(model, data, out))


def test_every_benchmark_is_shown(unbroken):
    out, output = unbroken
    for word in ("aime24", "mine", "average", "4 problems", "avg@3", "greedy pass@1", "pass@2", "maj@3",
                 "+- 0.0", "3 samples, temperature 1, top_p 0.95", "gpg_7b", "cpu"):  # fmt: skip
        assert word in output
    assert (out / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_records_the_conditions(unbroken, data):
    summary, _ = results(unbroken[0])
    conditions = summary["conditions"]
    assert (conditions["generator"], conditions["dtype"]) == ("decoder", "float32")
    assert conditions["sampling"]["top_p"] == 0.95
    aime = summary["benchmarks"]["aime24"]
    assert (aime["num_problems"], aime["prompt"], aime["task"]["form"]) == (4, "gpg_7b", "boxed")
    assert aime["sha256"] == sha256_of(data / "aime24.jsonl")


def test_a_question_that_is_repeated_has_other_samples(unbroken):
    _, samples = results(unbroken[0])
    first, _, again, _ = map(json.loads, samples[0].splitlines())  # the same question
    assert first["completions"] != again["completions"]
    assert first["greedy_completion"] == again["greedy_completion"]
    assert "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}." in first["prompt"]


def test_a_second_call_samples_nothing(unbroken, model, data, monkeypatch):
    before = results(unbroken[0])
    monkeypatch.setattr(LocalGenerator, "__init__", lambda *_, **__: pytest.fail("the model was loaded"))
    run(*options(model, data, unbroken[0]))
    assert results(unbroken[0]) == before


def one(model, data, out, name, *more):
    arguments = options(model, data, out, *more)
    arguments[3] = name
    return run(*arguments)


def test_benchmarks_of_several_calls_are_kept_together(unbroken, model, data, tmp_path):
    """One call for both, or one for each: the same summary, table and average."""
    mine = data / "mine.jsonl"
    one(model, data, tmp_path, "aime24")
    output = one(model, data, tmp_path, mine)
    assert results(tmp_path) == results(unbroken[0])
    assert output.replace(str(tmp_path), str(unbroken[0])) == unbroken[1]
    one(model, data, tmp_path, "aime24", "--overwrite")  # replaces what it evaluates, under these conditions
    assert results(tmp_path)[0]["benchmarks"].keys() == {"aime24", "mine"}
    one(model, data, tmp_path, mine, "--seed", 1, "--overwrite")  # other conditions never mix
    assert results(tmp_path)[0]["benchmarks"].keys() == {"mine"}


def test_results_are_not_replaced_by_a_benchmark_with_another_prompt(model, data, tmp_path):
    one(model, data, tmp_path, "aime24", "--num-problems", 1)
    with pytest.raises(UserError, match=r"results of aime24 with another prompt; .*--overwrite"):
        one(model, data, tmp_path, "aime24", "--num-problems", 1, "--prompt", "tr_grpo_math")
    one(model, data, tmp_path, "aime24", "--num-problems", 2)  # more of the same are welcome
    assert json.loads((tmp_path / "summary.json").read_text())["benchmarks"]["aime24"]["num_problems"] == 2
    with pytest.raises(UserError, match=r"of 2 problems of aime24, and --num-problems 1 .* at least 2, "):
        one(model, data, tmp_path, "aime24", "--num-problems", 1)
    one(model, data, tmp_path, "aime24", "--num-problems", 1, "--overwrite")


def responses(out):
    """Lines of each file of responses by its name."""
    paths = sorted(out.glob("responses-*.jsonl"))
    return {path.name: path.read_text().splitlines(keepends=True) for path in paths}


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "another model's files"},
        {"sampling": {"temperature": 0.5}},
        {"num_samples": 4},
        {"prompt": "tr_grpo_math"},
        {"file": [("1+1?", "2"), ("2+3?", "5")]},
    ],
)
def test_responses_are_filed_under_all_that_produced_them(model, tmp_path, changed):
    """Seeds share a file: a greedy response has none."""

    def key(prompt="gpg_7b", file=(("1+1?", "2"), ("2+2?", "4")), **conditions):
        write(tmp_path / "mine.jsonl", file)
        chosen = EvalOptions(benchmarks=str(tmp_path / "mine.jsonl"), prompt=prompt)
        (benchmark,) = load_benchmarks(EvalConfig.of(model, chosen))
        fixed = {"model": "files", "sampling": {"temperature": 1.0}, "num_samples": 3, "seed": 0}
        return benchmark.response_key(fixed | conditions)

    assert key(seed=5) == key()
    assert key(**changed) != key()


def test_a_recipe_sets_any_option_and_the_command_overrides_it(model, data):
    given = ["nemo_grpo.evaluation.max_tokens=9", "nemo_grpo.evaluation.benchmarks=aime24",
             "nemo_grpo.evaluation.protocol=erpo", "nemo_grpo.evaluation.seeds=0,7"]  # fmt: skip
    recipe = load_recipe("recipes/quickstart.yaml", given)
    assert load_recipe_dict(recipe.to_dict()).nemo_grpo.evaluation == recipe.nemo_grpo.evaluation
    config = EvalConfig.of(model, EvalOptions(data_dir=str(data)), recipe)
    assert (config.benchmarks, config.protocol, config.num_samples) == ("aime24", "erpo", 16)
    assert (config.max_tokens, config.num_problems, config.all_seeds()) == (2048, None, [0, 7])
    config = EvalConfig.of(model, EvalOptions(max_tokens=5, seed=3, protocol="greedy"), recipe)
    assert (config.max_tokens, config.num_samples, config.all_seeds()) == (5, 1, [3])
    without = EvalConfig.of(model, EvalOptions(), load_recipe("recipes/quickstart.yaml"))
    assert without.max_tokens == recipe.policy.generation.max_new_tokens


def test_python_evaluates_as_the_command_does(unbroken, model, data, tmp_path):
    chosen = EvalOptions(benchmarks=f"aime24,{data / 'mine.jsonl'}", data_dir=str(data), num_samples=3,
                         max_tokens=6, device="cpu", batch_size=4)  # fmt: skip
    evaluation = evaluate(model, chosen, out=tmp_path)
    assert results(tmp_path) == results(unbroken[0])
    assert json.loads(json.dumps(evaluation.summaries[0])) == results(tmp_path)[0]
    with pytest.raises(ValidationError, match="num_sample"):
        EvalOptions(num_sample=3)


def test_any_responses_that_are_missing_are_sampled_as_before(unbroken, model, data, tmp_path):
    whole = responses(unbroken[0])
    assert [name.split("-")[1] for name in whole] == ["aime24", "mine"]
    for name, lines in whole.items():
        partial = [line for number, line in enumerate(lines) if number % 3]
        (tmp_path / name).write_text("".join(partial))
    run(*options(model, data, tmp_path), "--batch-size", 64)  # on which nothing depends
    assert results(tmp_path) == results(unbroken[0])
    assert {name: sorted(lines) for name, lines in responses(tmp_path).items()} == {
        name: sorted(lines) for name, lines in whole.items()
    }


def test_other_conditions_are_refused_then_kept_apart(unbroken, model, data, tmp_path):
    short = [*options(model, data, tmp_path), "--num-problems", 1]
    run(*short)
    with pytest.raises(UserError, match=r"other conditions \(seed\); choose another --out, or --overwrite"):
        run(*short, "--seed", 1)
    before = responses(tmp_path)
    run(*short, "--seed", 1, "--overwrite")
    assert results(tmp_path)[0]["conditions"]["seed"] == 1
    assert results(tmp_path)[1][1].splitlines()[0] != results(unbroken[0])[1][1].splitlines()[0]
    for name, lines in responses(tmp_path).items():
        assert lines[: len(before[name])] == before[name]
        assert len(lines) > len(before[name])


def test_a_recipe_gives_prompt_and_settings(model, data, tmp_path):
    recipe = ["--recipe", "recipes/quickstart.yaml", "nemo_grpo.evaluation.num_samples=2"]
    prompt = "nemo_grpo.prompt.template='Q: {question}'"
    run("--model", model, *recipe, prompt, "policy.generation.max_new_tokens=5", "--device", "cpu",
        "--benchmarks", data / "mine.jsonl", "--out", tmp_path)  # fmt: skip
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["conditions"]["num_samples"] == 2
    assert summary["conditions"]["sampling"]["max_new_tokens"] == 5
    assert summary["benchmarks"]["mine"]["prompt"] == "recipe"
    assert "Q: 5+5?" in json.loads((tmp_path / "samples-mine.jsonl").read_text().splitlines()[0])["prompt"]


def test_a_recipe_with_nemo_rls_data_gives_settings_alone(model, data, tmp_path):
    stock = ("recipes/cw_grpo/cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml", "~nemo_grpo.task", "~nemo_grpo.prompt",
             "~nemo_grpo.rewards", "++data.train={dataset_name: gsm8k, env_name: math}",
             "++env.math.num_workers=1", "policy.generation.max_new_tokens=5",
             "nemo_grpo.evaluation.num_samples=1")  # fmt: skip
    fixed = ("--model", model, "--recipe", *stock, "--device", "cpu", "--out", tmp_path)
    with pytest.raises(UserError, match=r"the held-out problems of a recipe's nemo_grpo.task; add"):
        run(*fixed)
    run(*fixed, "--benchmarks", data / "mine.jsonl")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["conditions"]["sampling"]["max_new_tokens"] == 5
    assert summary["benchmarks"]["mine"]["prompt"] == "gpg_7b", "as without a recipe"


@pytest.mark.parametrize(
    ("name", "k", "temperature", "top_p", "max_tokens", "prompt"),
    [
        ("cw_grpo", 1, 0.6, 0.95, 32768, "lighteval"),
        ("erpo", 16, 1.0, 0.95, 2048, "gpg_7b"),
        ("tr_grpo", 16, 1.0, 1.0, 4096, "tr_grpo_math"),
        ("qwen-math", 1, 0.0, 1.0, 2048, "qwen_math"),
        ("greedy", 1, 0.0, 1.0, 32768, "gpg_7b"),
    ],
)
def test_a_protocol_has_its_sources_values(name, k, temperature, top_p, max_tokens, prompt, data):
    options = {
        "protocol": name,
        "benchmarks": "aime24",
        "data_dir": str(data),
        "num_problems": 1,
        "batch_size": 1,
    }
    config = EvalConfig.of(data, EvalOptions(**options))
    assert (config.num_samples, config.temperature) == (k, temperature)
    assert (config.top_p, config.max_tokens) == (top_p, max_tokens)
    assert load_benchmarks(config)[0].prompt_name == prompt


@pytest.mark.parametrize(
    ("name", "task", "answer", "prompt"),
    [
        ("cv-bench", "vision_classification", "1", "gpg_cv_bench"),
        ("pets37-test", "vision_classification", "1", "question"),
        ("geoqa-test", "vision_math", "1", "gpg_geoqa"),
        ("lisa-val", "vision_grounding", "(0,0),(1,1)", "gpg_grounding"),
    ],
)
def test_a_set_with_images_is_asked_as_gpgs_release_asks_it(name, task, answer, prompt, tmp_path):
    (tmp_path / "x.png").touch()
    line = {"id": "a", "question": "q", "answer": answer, "metadata": {"images": ["x.png"]}}
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    options = {"protocol": "gpg_vision", "task": task, "generator": "vllm", "batch_size": 1}
    config = EvalConfig.of(tmp_path, EvalOptions(**options, benchmarks=str(tmp_path / f"{name}.jsonl")))
    assert load_benchmarks(config)[0].prompt_name == prompt


def test_a_protocol_is_recorded_cut_to_the_models_length_and_gives_way_to_options(model, data, tmp_path):
    sets = ["--model", model, "--benchmarks", "aime24", "--data-dir", data, "--device", "cpu"]
    few = ["--num-problems", 1, "--prompt", "tr_grpo_math"]
    output = run(*sets, *few, "--protocol", "cw_grpo", "--temperature", 0.8, "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    sampling, entry = summary["conditions"]["sampling"], summary["benchmarks"]["aime24"]
    assert summary["conditions"]["num_samples"] == 1
    assert (sampling["temperature"], sampling["top_p"]) == (0.8, 0.95)
    assert 100 < sampling["max_new_tokens"] < 256  # of the model's 256 positions
    assert entry["protocol"]["name"] == "cw_grpo"
    assert "WangCheng0116/CW-GRPO" in entry["protocol"]["source"]
    assert "protocol cw_grpo" in output
    with pytest.raises(UserError, match=r"--protocol cwgrpo is unknown; did you mean 'cw_grpo'"):
        run(*sets, "--protocol", "cwgrpo", "--out", tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --benchmarks, --recipe, or both"),
        (["--benchmarks", "aime24", "nemo_grpo.prompt.preset=gpg"], "there is no --recipe; add one"),
        (["--benchmarks", "aime2"], "did you mean 'aime2"),
        (["--benchmarks", "math500"], "run `nemo-grpo data prepare math500 --out"),
        (["--benchmarks", "no/file.jsonl"], "No such file"),
        (["--benchmarks", "aime24,aime24"], "each once"),
        (["--benchmarks", "aime24", "--prompt", "gpg_8b"], "did you mean 'gpg_7b'"),
        (["--benchmarks", "aime24", "--task", "knights_knaves"], "reads no files"),
        (["--benchmarks", "aime24", "--task", "vision_math"], "add --generator vllm"),
        (["--benchmarks", "recipe"], "held-out problems of a recipe's nemo_grpo.task; add --recipe"),
        (["--benchmarks", "aime24", "--k", "0"], "--k 0 must be greater than 0"),
        (["--benchmarks", "aime24", "--top-p", "1.5"], "--top-p 1.5 must be less than or equal to 1"),
        (["--benchmarks", "aime24", "--max-tokens", "250"], "max_position_embeddings=256"),
        (["--benchmarks", "aime24", "--generator", "vllm"], r"pip install 'nemo-grpo\[vllm\]', or use hf"),
    ],
)
def test_invalid_evaluation_is_refused_before_anything_is_created(
    model, data, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("nemo_grpo.sampling.generate_vllm.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        run("--model", model, "--data-dir", data, "--out", tmp_path / "out", "--max-tokens", 4, *arguments)
    assert not (tmp_path / "out").exists()


def test_repeated_ids_are_those_of_the_benchmark(model, tmp_path):
    row = json.dumps({"id": "a", "question": "1+1?", "answer": "2"})
    (tmp_path / "mine.jsonl").write_text(f"{row}\n{row}\n")
    with pytest.raises(UserError, match=r"^--benchmarks .*mine.jsonl:2: id 'a' is repeated") as error:
        run("--model", model, "--benchmarks", tmp_path / "mine.jsonl", "--out", tmp_path / "out")
    assert "nemo_grpo.task" not in str(error.value)


def test_benchmarks_are_checked_before_there_is_a_model(data, tmp_path):
    options = ["--check", "--model", tmp_path / "none", "--data-dir", data]
    run(*options, "--benchmarks", "aime24")
    for benchmarks, message in (("aime24,nosuch", "nosuch"), ("aime24,math500", "data prepare math500")):
        with pytest.raises(UserError, match=message):
            run(*options, "--benchmarks", benchmarks)
