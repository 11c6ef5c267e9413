"""``nemo-grpo eval`` on a real, untrained folder."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nemo_grpo.cli.eval import eval_command
from nemo_grpo.evaluate.config import fingerprint, fitting_batch_size
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_card import Training, write_card

pytestmark = pytest.mark.usefixtures("undrawn")
app = typer.Typer()
app.command()(eval_command)
RECIPE = ["--recipe", "recipes/quickstart.yaml"]
TASK = ["nemo_grpo.task.name=knights_knaves"]


def run(*arguments):
    """Output of the command; what it raises comes through."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "120"})
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.output


def samples(out):
    return [json.loads(line) for line in (out / "samples-recipe.jsonl").read_text().splitlines()]


def test_a_recipes_own_problems_are_one_more_benchmark(model, tmp_path):
    options = ["--k", 3, "--num-problems", 5, "--max-tokens", 7, "--temperature", 0.5, "--seed", 4]
    output = run("--model", model, *RECIPE, "--out", tmp_path / "out", *options, *TASK)
    for word in ("recipe", "avg@3", "greedy", "pass@2", "pass@3", "maj@3", "5 problems", "3 samples"):
        assert word in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    entry, conditions = summary["benchmarks"]["recipe"], summary["conditions"]
    assert (summary["model"], conditions["model"]) == (str(model), fingerprint(model))
    assert (entry["task"]["name"], entry["num_problems"], entry["prompt"]) == ("knights_knaves", 5, "recipe")
    assert (conditions["num_samples"], conditions["seed"], conditions["dtype"]) == (3, 4, "float32")
    sampling = conditions["sampling"]
    assert (sampling["max_new_tokens"], sampling["temperature"], sampling["stop_token_ids"]) == (7, 0.5, [2])
    assert [len(sample["completions"]) for sample in samples(tmp_path / "out")] == [3] * 5
    assert entry["metrics"]["num_tokens"] <= 7


def test_a_response_ends_at_every_end_of_sequence_of_the_models_folder(model, tmp_path):
    """By generation_config.json here every token is one."""
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(400)]}))
    run("--model", folder, *RECIPE, "--out", tmp_path / "out", "--k", 2, "--num-problems", 2, *TASK)
    metrics = json.loads((tmp_path / "out" / "summary.json").read_text())["benchmarks"]["recipe"]["metrics"]
    assert (metrics["num_tokens"], metrics["truncated"]) == (1, 0)


def test_one_problem_has_no_error_over_problems(model, tmp_path):
    few = ["--k", 2, "--num-problems", 1, "--max-tokens", 2]
    output = run("--model", model, *RECIPE, "--out", tmp_path, *few, *TASK)
    assert not re.search(r"\d \+- ", output)
    entry = json.loads((tmp_path / "summary.json").read_text())["benchmarks"]["recipe"]
    assert "accuracy" in entry["metrics"]
    assert not {name for name in entry["metrics"] if name.endswith("_stderr")}
    assert entry["standard_errors"].keys() == {"accuracy_runs"}
    run("--model", model, *RECIPE, "--out", tmp_path / "seeds", *few, "--seeds", "2", *TASK)


def recorded(out):
    """The samples of the recipe's problems, and the one file of their responses."""
    (responses,) = out.glob("responses-recipe-*.jsonl")
    return [out / "samples-recipe.jsonl", responses]


def test_more_problems_are_added_to_results_and_other_ones_are_refused(model, tmp_path):
    file, out = tmp_path / "mine.jsonl", tmp_path / "o"

    def evaluate(num_problems, *answers, more=()):
        lines = [{"id": str(i), "question": f"{i}+1?", "answer": a} for i, a in enumerate(answers)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run("--model", model, *RECIPE, "--out", out, "--k", 1, "--max-tokens", 2, "nemo_grpo.task.name=math",
            f"nemo_grpo.task.validation_files=[{file}]", f"nemo_grpo.task.train_files=[{file}]",
            "--num-problems", num_problems, *more)  # fmt: skip

    evaluate(2, "1", "2")
    before = [path.read_text() for path in recorded(out)]
    evaluate(3, "1", "2", "3")
    after = [path.read_text() for path in recorded(out)]
    assert all(new.startswith(old) and new > old for new, old in zip(after, before, strict=True))
    with pytest.raises(UserError, match=r"results of recipe with another sha256; .*--overwrite"):
        evaluate(3, "1", "5", "3")
    assert (out / "samples-recipe.jsonl").read_text() == after[0]
    evaluate(3, "1", "5", "3", more=["--overwrite"])
    assert samples(out)[1]["gold"] == "5"


@pytest.mark.parametrize("content", ["{", '{"conditions": {}, "benchmarks": {"recipe": {}}}'])
def test_a_damaged_summary_is_called_so(model, tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(UserError, match=r"summary\.json is damaged, .*; remove it .*--overwrite"):
        run("--model", model, *RECIPE, "--out", tmp_path, "--num-problems", 1, *TASK)


def test_no_option_excludes_another(model, tmp_path):
    """The recipe's problems beside a file's, by another prompt, generator, precision and batch."""
    (tmp_path / "mine.jsonl").write_text('{"id": "1", "question": "1+1?", "answer": "2"}\n')
    few = ["--model", model, *RECIPE, *TASK, "--k", 1, "--max-tokens", 2, "--num-problems", 1]
    options = ["--prompt", "tr_grpo_math", "--dtype", "bfloat16", "--generator", "hf", "--batch-size", 2]
    both = ["--benchmarks", f"recipe,{tmp_path}/mine.jsonl", "--task", "math", "--device", "cpu"]
    run(*few, *both, *options, "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["conditions"]["generator"], summary["conditions"]["dtype"]) == ("hf", "bfloat16")
    prompts = {name: entry["prompt"] for name, entry in summary["benchmarks"].items()}
    assert prompts == {"recipe": "tr_grpo_math", "mine": "tr_grpo_math"}
    assert samples(tmp_path)[0]["prompt"].endswith(r"output the final answer within \boxed{ }.")


def without_tokenizer(folder):
    """As a conversion makes it where --hf-config has none."""
    (folder / "tokenizer.json").unlink()
    write_card(folder, Training({"policy": {"model_name": "org/base"}}), folder)


def with_small_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a folder"),
        (
            lambda f: (f / "config.json").write_text("{"),
            "cannot read the tokenizer .*config.* is not",
        ),
        (
            lambda f: (f / "tokenizer.json").write_text('{"model": 3}'),
            "cannot read the tokenizer .*; save",
        ),
        (with_small_vocabulary, "the model's vocab_size is 2; put the model's own tokenizer"),
        (
            lambda f: (f / "config.json").rename(f / "recipe.resolved.yaml"),
            "this is a run's folder: give its model, .*hf",
        ),
        (
            lambda f: ((f / "config.json").unlink(), (f / "policy").mkdir()),
            "this is a Megatron checkpoint: convert it with `nemo-grpo convert",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.*; put the tokenizer of"),
        (
            without_tokenizer,
            r"; AutoTokenizer.from_pretrained\('org/base'\).save_pretrained\('.*'\) puts",
        ),
        (
            lambda f: (f / "config.json").rename(f / "adapter_config.json"),
            "PEFT adapter, without its base model; merge them: `nemo-grpo convert .* --lora merge",
        ),
        (
            lambda f: (f / "adapter_config.json").write_text("{}"),
            r"beside config\.json, .*; merge it first",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "cannot load a causal language model"),
    ],
)
def test_an_incomplete_model_is_a_user_error_and_nothing_is_made(model, tmp_path, damage, message):
    damage(folder := shutil.copytree(model, tmp_path / "model"))
    with pytest.raises(UserError, match=message) as error:
        run("--model", folder, *RECIPE, "--out", tmp_path / "out", *TASK)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_model_whose_logits_are_nan_is_a_user_error(model, tmp_path):
    weights = shutil.copytree(model, tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"logits are not finite.*; use another checkpoint"):
        run("--model", weights.parent, *RECIPE, "--out", tmp_path / "o", "--num-problems", 1, *TASK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--num-problems", "100000"], "use 1323 or fewer"),
        (["nemo_grpo.tusk.name=logic"], "did you mean"),
        (["--k", "5", "--pass-at", "1,6"], "--pass-at 1,6: .* between 1 and the 5 samples"),
        (["--pass-at", "x"], "--pass-at x"),
        (["--seeds", "2", "--seed", "1"], "exclude each other"),
        (["--seeds", "1"], "needs two seeds"),
        (["--seeds", "2", "--temperature", "0"], "the same for every seed"),
    ],
)
def test_wrong_settings_are_user_errors(model, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        run("--model", model, *RECIPE, "--out", tmp_path / "out", "--num-problems", "1", *TASK, *arguments)
    assert not (tmp_path / "out").exists()


def test_unwritable_output_is_refused_before_the_work(model, tmp_path, monkeypatch):
    no_access = SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK, X_OK=os.X_OK)
    monkeypatch.setattr("nemo_grpo.evaluate.folders.os", no_access)
    with pytest.raises(UserError, match="cannot be written"):
        run("--model", model, *RECIPE, "--out", tmp_path / "a" / "b", "--num-problems", 1, *TASK)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        run("--model", model, *RECIPE, "--out", tmp_path / "file" / "out", "--num-problems", 1, *TASK)


def test_results_of_a_runs_model_are_named_after_the_run(model, tmp_path):
    shutil.copytree(model, tmp_path / "gpg" / "hf")
    options = ("--num-problems", 1, "--k", 1, "--max-tokens", 2, f"nemo_grpo.runs_dir={tmp_path}", *TASK)
    run("--model", tmp_path / "gpg" / "hf", *RECIPE, *options)
    run("--model", model, *RECIPE, *options)
    assert {path.name for path in tmp_path.glob("eval-*")} == {"eval-gpg", f"eval-{model.name}"}


def test_the_default_batch_follows_the_size_of_the_model(tmp_path):
    """SmolLM2-135M: 30 layers, 3 key heads of 64: 46,080 bytes per token in float32."""
    sizes = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    assert fitting_batch_size(tmp_path, 2048) == (1 << 30) // (46_080 * 2048) == 11
    assert fitting_batch_size(tmp_path, 16) == 256
    assert fitting_batch_size(tmp_path, 1 << 20) == 1
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')  # no attention, no such cache
    assert fitting_batch_size(tmp_path, 1 << 20) == 256


def test_pass_at_any_k_and_the_mean_over_seeds(model, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"id": "1", "question": "1+1?", "answer": "2"}\n')
    what = ["--model", model, *RECIPE, *TASK, "--benchmarks", f"recipe,{tmp_path}/mine.jsonl"]
    few = ["--k", 5, "--num-problems", 1, "--max-tokens", 4, "--out", tmp_path / "o"]
    output = run(*what, *few, "--pass-at", "3,1", "--seeds", "0,7")
    for word in ("pass@3", "pass@5", "standard deviation over 2 seeds", "seeds 0, 7", "seeds.json"):
        assert word in output
    joined = json.loads((tmp_path / "o" / "seeds.json").read_text())
    single = [json.loads((tmp_path / "o" / f"seed-{s}" / "summary.json").read_text()) for s in (0, 7)]
    assert joined["seeds"] == [0, 7]
    assert [s["conditions"]["seed"] for s in single] == [0, 7]
    names = [name for name in joined["benchmarks"]["recipe"]["metrics"] if name.startswith("pass@")]
    assert names == [f"pass@{k}" for k in (1, 2, 3, 4, 5)]
    files = sorted((tmp_path / "o").glob("responses-*.jsonl"))
    assert [path.name.split("-")[1] for path in files] == ["mine", "recipe"]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert sum(line["seed"] is None for line in lines) == 2  # greedy, of two benchmarks, for both seeds
    assert len(lines) == 2 + 2 * 2 * 5
    run(*what, *few[:-1], tmp_path / "alone", "--seed", 0, "--pass-at", "3")
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert single[0]["benchmarks"]["recipe"] == alone["benchmarks"]["recipe"]
