"""``nemo-grpo recipe`` and ``nemo-grpo variants`` as a user meets them."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nemo_grpo
from nemo_grpo.cli import app, recipe
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import OBJECTIVES, VARIANTS, tr_grpo

RECIPES = Path(__file__).parents[3] / "recipes"
QUICKSTART = str(RECIPES / "quickstart.yaml")
runner = CliRunner()


def run(*arguments):
    result = runner.invoke(recipe.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_check_of_a_folder_skips_bases(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "part.yaml").write_text("grpo: {}")
    with pytest.raises(UserError, match="no recipe to check"):
        run("check", str(tmp_path))
    (tmp_path / "a.yaml").write_text(f"defaults: {QUICKSTART}")
    assert len(run("check", str(tmp_path))[1].splitlines()) == 1


def test_check_of_a_folder_gives_one_line_per_recipe(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {QUICKSTART}")
    code, output = run("check", str(tmp_path))
    assert code == 0
    assert [line.split()[:2] for line in output.splitlines()] == [
        ["ok", f"{tmp_path / name}.yaml:"] for name in ("a", "b")
    ]


def test_prompt_is_printed_as_the_model_sees_it():
    task = load_recipe(QUICKSTART).task.build()
    code, output = run("prompt", QUICKSTART, "nemo_grpo.prompt.response_prefix=Well", "grpo.seed=3")
    question = task.train_problem(0, 3).question
    assert (code, output) == (0, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nWell\n")
    with pytest.raises(UserError, match="cannot read the tokenizer in no/model"):
        run("prompt", QUICKSTART, "policy.model_name=no/model")


def test_check_reports_all_wrong_recipes_with_exit_code_2(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {QUICKSTART}\ngrpo: {{sed_{name}: 1}}")
    code, output = run("check", str(tmp_path), QUICKSTART)
    assert code == 2
    assert "grpo.sed_a=1" in output
    assert "grpo.sed_b=1" in output
    assert f"ok     {QUICKSTART}" in output
    assert "2 of 3 recipes are wrong" in output


def test_check_refuses_what_the_recipes_engine_cannot_train():
    cluster = str(RECIPES / "cluster-quickstart.yaml")
    code, output = run("check", QUICKSTART, cluster, "grpo.max_num_epochs=2", "~checkpointing.metric_name")
    assert code == 2
    assert f"error  {QUICKSTART}: grpo.max_num_epochs=2: not supported by the embedded engine" in output
    assert f"ok     {cluster}" in output


def test_check_applies_overrides():
    code, output = run("check", QUICKSTART, "loss_fn.variant=gpg", "grpo.max_num_steps=7")
    assert code == 0
    assert "gpg, quickstart, 7 steps of 16 x 8" in output
    assert "note gpg without" in output


@pytest.mark.parametrize(
    ("text", "values", "said", "wrong"),
    [
        ("", (4, -4), "2 settings x 3 seeds", "num_prompts_per_step=-4: "),
        (
            "  cluster:\n    recipe: {0}/cluster-quickstart.yaml\n    seeds: 1\n"
            "    overrides: {{grpo.val_period: {1}}}\n",
            (5, -5),
            "2 settings x 3 seeds; on the cluster of cluster-quickstart.yaml, 2 settings x 1 seeds",
            "num_prompts_per_step=8: grpo.val_period",
        ),
    ],
    ids=["here", "cluster"],
)
def test_check_loads_every_setting_of_a_sweep(text, values, said, wrong, tmp_path):
    for name, value in zip(("good", "wrong"), values, strict=True):
        here = 4 if text else value
        grids = f"sweep:\n  recipe: {QUICKSTART}\n  grids: [{{grpo.num_prompts_per_step: [8, {here}]}}]\n"
        (tmp_path / f"{name}.yaml").write_text(grids + text.format(RECIPES, value))
    code, output = run("check", str(tmp_path))
    assert code == 2
    assert f"good.yaml: sweep of quickstart.yaml, {said}" in output
    assert f"wrong.yaml: {wrong}" in output


def test_resolve_prints_a_recipe_that_loads_again(tmp_path):
    code, output = run("resolve", QUICKSTART, "grpo.seed=5")
    assert code == 0
    (tmp_path / "again.yaml").write_text(output)
    assert load_recipe(tmp_path / "again.yaml") == load_recipe(QUICKSTART, ["grpo.seed=5"])


def test_diff_shows_changed_added_and_removed_keys(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"defaults: {QUICKSTART}\ngrpo: {{seed: 5}}\nloss_fn: {{variant: gpg}}\n")
    lines = run("diff", QUICKSTART, str(other))[1].splitlines()
    assert "~ grpo.seed: 0 -> 5" in lines
    assert "- loss_fn.ratio_clip_min: 0.2" in lines
    assert "+ loss_fn.valid_fraction_threshold: 0.6" in lines
    assert not any("grpo.max_num_steps" in line for line in lines)
    assert "the same recipe" in run("diff", QUICKSTART, QUICKSTART)[1]


def test_diff_shows_an_invalid_recipe_with_its_errors(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"defaults: {QUICKSTART}\ngrpo: {{max_num_steps: 0, seed: 4}}")
    done = runner.invoke(app, ["recipe", "diff", QUICKSTART, str(other)])
    assert done.exit_code == 2
    assert {"~ grpo.max_num_steps: 160 -> 0", "~ grpo.seed: 0 -> 4"} <= set(done.stdout.splitlines())
    assert "other.yaml: grpo.max_num_steps=0 must be greater than 0" in done.stderr


def test_variants_lists_all_with_needs():
    output = runner.invoke(app, ["variants"], env={"COLUMNS": "200"}).output
    rows = {
        name: others for name, *others in (re.split(" {2,}", line.strip()) for line in output.splitlines())
    }
    assert set(OBJECTIVES) <= set(rows)
    assert rows["sft"][2] == "-"  # no parameters
    assert rows["erpo"][1] == "entropy"
    assert rows["gpg"][1] == rows["grpo"][1] == "(reference)"
    lines = runner.invoke(app, ["variants"], env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert {word for config in OBJECTIVES.values() for word in config.paper.split()} <= words, (
        "none is broken"
    )


def test_variants_of_one_shows_its_equations_its_departures_and_every_parameter():
    output = runner.invoke(app, ["variants", "tr_grpo"], env={"COLUMNS": "200"}).output
    assert output.startswith(str(tr_grpo.__doc__).splitlines()[0])
    assert "Deviation: Eqs. 5 and 10" in output
    for name in VARIANTS["tr_grpo"].model_fields:
        assert (f"│ {name} " in output) == (name != "variant")
    assert "did you mean 'erpo'" in str(runner.invoke(app, ["variants", "erp"]).exception)


def test_resolve_shows_an_invalid_recipe_with_what_is_wrong_beside_it():
    wrong = ["grpo.num_generations_per_prompt=0", "policy.max_grad_norm=x", "loss_fn.beta=1"]
    code, output = run("resolve", QUICKSTART, *wrong)
    assert code == 2
    lines = output.splitlines()
    for key, message in (
        ("  num_generations_per_prompt: 0", "  # wrong: grpo.num_generations_per_prompt=0 must be"),
        ("  max_grad_norm: x", "  # wrong: policy.max_grad_norm="),
        ("  beta: 1", "  # wrong: loss_fn.beta is not a parameter of grpo; TRL's beta is"),
    ):
        assert lines[lines.index(key) - 1].startswith(message)
    assert "# wrong" not in run("resolve", QUICKSTART)[1]


def test_train_of_a_cluster_recipe_names_launch_and_rehearse():
    with pytest.raises(
        UserError, match=r"`nemo-grpo launch RECIPE --time 04:00:00`.*`nemo-grpo rehearse RECIPE`"
    ):
        runner.invoke(app, ["train", "erpo/erpo-qwen2.5-1.5b-1n8g"], catch_exceptions=False)


def test_names_that_lead_out_of_the_shipped_recipes_are_refused(tmp_path):
    with pytest.raises(UserError, match="is no name of a shipped recipe"):
        run("copy", "../../pyproject", str(tmp_path / "x.yaml"))
    with pytest.raises(UserError, match=r"quickstrt is no name .*did you mean 'quickstart'"):
        run("copy", "quickstrt", str(tmp_path / "x.yaml"))
    (tmp_path / "a.yaml").write_text("defaults: nemo_grpo://../pyproject.toml\n")
    code, output = run("check", str(tmp_path / "a.yaml"))
    assert code == 2
    assert "is no name of a shipped recipe" in output


def test_the_version_is_the_packages():
    assert runner.invoke(app, ["--version"]).output == f"nemo-grpo {nemo_grpo.__version__}\n"
