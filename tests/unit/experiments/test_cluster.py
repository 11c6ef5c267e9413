"""Sweeps on Slurm, with an sbatch that records what it is given."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.launch.shell import write_programs

from nemo_grpo.cli import app
from nemo_grpo.recipe import load_recipe
from nemo_grpo.run.recipe_checks import Findings, check_recipe
from nemo_grpo.support.errors import UserError

pytestmark = pytest.mark.usefixtures("undrawn")
SWEEP = ["sweep", "tr_grpo-weighting", "--target", "cluster"]


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A command of that name on PATH: it writes its arguments to a file and refuses the first job."""
    monkeypatch.setattr("nemo_grpo.experiments.cluster.check_recipe", lambda _recipe, **_how: Findings())
    folder, calls = tmp_path / "bin", tmp_path / "bin/calls"
    refuses = '[ "$n" != 1 ] || { echo "too many jobs" >&2; exit 1; }'
    sbatch = f'echo "$*" >> {calls}\nn=$(wc -l < {calls})\n{refuses}\necho "4$n;cluster"'
    write_programs(folder, sbatch=sbatch)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


def sweep(*arguments):
    return CliRunner().invoke(app, [*SWEEP, *map(str, arguments)])


def test_runs_are_tasks_of_one_array_each_with_its_whole_recipe(tmp_path, sbatch):
    out = tmp_path / "out"
    options = ["--out", out, "--time", "04:00:00", "--logs", tmp_path / "logs"]
    assert "sbatch refuses: too many jobs" in str(sweep(*options).exception)
    assert not (out / "submitted.json").exists()
    done = sweep(*options)
    assert done.exit_code == 0, done.output
    numbers = json.loads((out / "submitted.json").read_text())
    names = [f"tr_grpo-weighting-weighting={way}-s0" for way in ("equal", "random", "reverse", "probability")]
    assert numbers == dict(zip(names, ("42_0", "42_1", "42_2", "42_3"), strict=True))
    call = sbatch.read_text().splitlines()[1]
    assert "--array=0-3 " in call
    assert "--job-name=out " in call
    assert "--time=04:00:00" in call
    recipes = Path(call.split()[-1])
    assert recipes.read_text().splitlines() == [f"{out}/recipes/{name}.yaml" for name in names]
    recipe = load_recipe(out / "recipes" / f"{names[1]}.yaml")
    assert (recipe.loss_fn.weighting, recipe.run_dir) == ("random", out / "runs" / names[1])
    assert f"- {names[3]}: job 42_3, step 0 of 350" in done.output
    assert sweep(*options, "--seeds", "2").exit_code == 0
    numbers = json.loads((out / "submitted.json").read_text())
    assert [numbers[name] for name in names] == ["42_0", "42_1", "42_2", "42_3"]
    added = Path(sbatch.read_text().splitlines()[2].split()[-1])
    assert [Path(line).stem for line in added.read_text().splitlines()] == [f"{name[:-1]}1" for name in names]
    assert added != recipes, "tasks of the first array may still read theirs"


def test_runs_of_one_array_have_the_same_nodes(tmp_path, sbatch):
    base = Path(__file__).parents[3] / "recipes/tr_grpo/tr_grpo-qwen2.5-3b-instruct-logic-1n8g.yaml"
    settings = "[{cluster.num_nodes: 1}, {cluster.num_nodes: 2}]"
    (tmp_path / "nodes.yaml").write_text(f"sweep: {{recipe: {base}, seeds: 1, settings: {settings}}}\n")
    command = ["sweep", tmp_path / "nodes.yaml", "--target", "cluster", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert "num_nodes=2 needs 2 x 8 GPUs, and num_nodes=1 1 x 8 GPUs: " in str(done.exception)
    assert not sbatch.exists()


def test_repeating_the_command_collects_the_runs_that_are_done(tmp_path, sbatch):
    out = tmp_path / "out"
    sbatch.write_text("\n" * 5)
    goal = ("metric=val:accuracy", "threshold=0.7")  # as "reverse" has it after its first step
    what = ["--out", out, "grpo.max_num_steps=2", *(f"++grpo.stop_at_validation_{part}" for part in goal)]
    assert sweep(*what).exit_code == 0
    for way, steps, accuracy in (("equal", 2, 0.5), ("random", 1, 0.25), ("reverse", 1, 0.75)):
        folder = out / "runs" / f"tr_grpo-weighting-weighting={way}-s0"
        folder.mkdir(parents=True)
        (folder / "recipe.resolved.yaml").write_text((out / "recipes" / f"{folder.name}.yaml").read_text())
        rows = [{"step": step, "validation/accuracy": accuracy * step / steps} for step in range(steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = sbatch.read_text()
    output = sweep(*what).output
    assert sbatch.read_text() == calls  # nothing is submitted again
    results = json.loads((out / "results.json").read_text())
    assert [setting["setting"] for setting in results["settings"]] == ["weighting=equal", "weighting=reverse"]
    assert [setting["final"]["values"] for setting in results["settings"]] == [[0.5], [0.75]]
    assert "weighting=random-s0: job 46_1, step 1 of 2" in output
    assert (out / "report.html").is_file()


def test_another_recipe_than_the_submitted_one_is_refused(tmp_path, sbatch):
    sbatch.write_text("\n" * 5)
    assert sweep("--out", tmp_path).exit_code == 0
    calls = sbatch.read_text()
    error = sweep("--out", tmp_path, "grpo.max_num_steps=7").exception
    assert isinstance(error, UserError)
    assert re.search(r"weighting=equal-s0 was submitted as job 46_0 .* choose another --out", str(error))
    assert sbatch.read_text() == calls


def test_damaged_record_of_what_was_submitted_is_refused(tmp_path, sbatch):
    sbatch.write_text("\n" * 5)
    assert sweep("--out", tmp_path).exit_code == 0
    calls = sbatch.read_text()
    (tmp_path / "submitted.json").write_text("{")
    assert "not known what was submitted" in str(sweep("--out", tmp_path).exception)
    assert sbatch.read_text() == calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nemo_grpo.target=embedded"], "equal: .*--target cluster needs a cluster recipe"),
        (["policy.generation.vllm_cfg.gpu_memory_utilization=0.05"], "equal: "),
        (["--time", "banana"], "--time=banana: Slurm reads"),
        (["--time", "00:01:00"], r"equal: .*not one of each fits"),
        (["--sbatch", "time=04:00:00"], "--sbatch time=04:00:00: .* --time"),
        (["--target", "embedded", "--time", "1"], "--time is for jobs on Slurm"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, sbatch, arguments, message):
    done = sweep("--out", tmp_path / "out", *arguments)
    assert isinstance(done.exception, UserError), done.output
    assert re.search(message, str(done.exception))
    assert not (tmp_path / "out").exists()
    assert not sbatch.exists()


def test_missing_data_are_refused_before_anything_is_written_but_not_for_what_is_submitted(
    tmp_path, sbatch, monkeypatch
):
    sbatch.write_text("\n" * 5)
    out = tmp_path / "out"
    assert sweep("--out", tmp_path / "submitted").exit_code == 0
    monkeypatch.setattr("nemo_grpo.experiments.cluster.check_recipe", check_recipe)
    assert sweep("--out", tmp_path / "submitted").exit_code == 0
    done = sweep("--out", out)
    assert re.search(r"equal: .* missing in .*`nemo-grpo data prepare", str(done.exception))
    assert not out.exists()


def test_dry_run_prints_the_commands_and_writes_nothing(tmp_path, sbatch):
    done = sweep("--out", tmp_path / "out", "--dry-run", "--partition", "batch")
    command, *runs = done.stdout.splitlines()
    assert "--partition=batch" in command
    assert "--array=0-3" in command
    assert [line.split()[0] for line in runs] == ["0", "1", "2", "3"]
    assert all(Path(line.split()[1]).suffix == ".yaml" for line in runs)
    assert not (tmp_path / "out").exists()
    assert not sbatch.exists()
