"""Shipped recipes by name, and copies of them that work anywhere."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.experiments.sweep import load_sweep
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
runner = CliRunner()


def test_a_shipped_recipe_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "gpg/gpg-qwen2.5-32b-4n8g"):
        assert load_recipe(name) == load_recipe(f"{name}.yaml") == load_recipe(RECIPES / f"{name}.yaml")
    (tmp_path / "quickstart").write_text("defaults: nemo_grpo://quickstart.yaml\ngrpo: {seed: 7}")
    assert load_recipe("quickstart").grpo.seed == 7  # a file comes first


@pytest.mark.parametrize("name", shipped.recipe_names())
def test_a_shipped_recipe_needs_neither_folder_nor_ending(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = name.rpartition("/")[2]
    for given in (name, short, f"{short}.yaml", f"nemo_grpo://{name}.yaml", Path(f"nemo_grpo://{name}.yaml")):
        assert shipped.recipe_file(given) == RECIPES / f"{name}.yaml"


def test_a_recipe_is_checked_varied_and_copied_by_its_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "nemo_grpo://quickstart.yaml"
    checked = runner.invoke(app, ["recipe", "check", address]).output
    assert checked.startswith(f"ok     {RECIPES}/quickstart.yaml: grpo")
    sweep = {"sweep": {"recipe": address, "settings": [{"grpo.seed": 1}]}}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    assert load_sweep(Path("sweep.yaml")).settings[0].recipe == RECIPES / "quickstart.yaml"
    for name in (address, "tr_grpo-qwen2.5-7b-orz-1n8g"):
        done = runner.invoke(app, ["recipe", "copy", name])
        assert done.exit_code == 0, done.output
        assert load_recipe(done.output.partition(":")[0]) == load_recipe(name)


def test_a_name_that_is_neither_is_answered_by_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"No such file.*did you mean 'quickstart'"):
        load_recipe("quickstrat")
    with pytest.raises(UserError, match=r"did you mean 'tr_grpo-qwen2.5-7b-orz-1n8g'"):
        load_recipe("tr_grpo-qwen2.5-7b-oz-1n8g")
    for outside in ("nemo_grpo://../pyproject", "../recipes/quickstart", "nemo_grpo://"):
        with pytest.raises(UserError, match="nor a shipped recipe"):
            load_recipe(outside)
    with pytest.raises(UserError, match=r"nor a shipped recipe of that name; `nemo-grpo recipe list`"):
        load_recipe(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", ["base/embeded.yaml", "embedded.yaml"])
def test_a_missing_base_names_the_way_to_a_shipped_one(tmp_path, name):
    (tmp_path / "a.yaml").write_text(f"defaults: {name}")
    with pytest.raises(UserError, match="nemo_grpo://base/embedded"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart-gpg", "gpg/gpg-qwen2.5-32b-4n8g", "gpg/gpg-qwen2.5-32b-4n8g-fp8"]
)
def test_a_copy_elsewhere_is_the_same_recipe(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["recipe", "copy", name, "mine.yaml"])
    assert result.exit_code == 0, result.output
    assert load_recipe("mine.yaml") == load_recipe(RECIPES / f"{name}.yaml")


def test_copy_overwrites_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("mine")
    result = runner.invoke(app, ["recipe", "copy", "quickstart"])
    assert isinstance(result.exception, UserError)
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"


def test_list_names_every_recipe():
    output = runner.invoke(app, ["recipe", "list"]).output
    assert [line.split(":")[0] for line in output.splitlines()] == shipped.recipe_names()
    assert len(shipped.recipe_names()) == len(
        [p for p in RECIPES.rglob("*.yaml") if not {"base", "sweeps"} & {*p.parts}]
    )
    only = runner.invoke(app, ["recipe", "list", "quickstart-gpg"]).output
    assert only.startswith("quickstart-gpg: gpg, warm start, 160 steps of 16 x 8")
