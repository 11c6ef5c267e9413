"""Shipped recipes: by name, copied, fit for H100 as their names say, and the same on both engines."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.experiments.sweep import load_sweep
from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.inputs import plan_input, shape_of
from nemo_grpo.plan.rules import problems
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import leaves
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
    again = runner.invoke(app, ["recipe", "copy", "quickstart", "mine.yaml"])
    assert isinstance(again.exception, UserError), "it overwrites nothing"
    assert load_recipe("mine.yaml") == load_recipe(RECIPES / f"{name}.yaml")


def test_list_names_every_recipe():
    output = runner.invoke(app, ["recipe", "list"]).output
    assert [line.split(":")[0] for line in output.splitlines()] == shipped.recipe_names()
    assert len(shipped.recipe_names()) == len(
        [p for p in RECIPES.rglob("*.yaml") if not {"base", "sweeps"} & {*p.parts}]
    )
    only = runner.invoke(app, ["recipe", "list", "quickstart-gpg"]).output
    assert only.startswith("quickstart-gpg: gpg, quickstart, 160 steps of 16 x 8")


PAPERS = ("cw_grpo", "erpo", "tr_grpo", "gpg")
CLUSTER = sorted(path for paper in PAPERS for path in (RECIPES / paper).glob("*.yaml"))
NAME = re.compile(r"(?P<variant>[a-z_]+)-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g(?P<fp8>-fp8)?")
SOURCED = re.compile(r"^\s+(num_prompts|num_gen|max_num_steps|lr|weight_decay|ratio_clip|reference)")


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_cluster_recipe_is_what_its_name_says_and_fits_its_gpus(path):
    recipe = load_recipe(path)
    name = NAME.fullmatch(path.stem)
    fp8 = recipe.policy.megatron_cfg.fp8_cfg
    assert recipe.nemo_grpo.target == "cluster"
    assert recipe.nemo_grpo.run_name == path.stem
    assert recipe.loss_fn.variant == name["variant"]
    assert (recipe.cluster.num_nodes, recipe.cluster.gpus_per_node) == (int(name["nodes"]), int(name["gpus"]))
    assert (fp8 is not None and fp8.enabled) == bool(name["fp8"])
    assert problems(shape_of(recipe), plan_input(recipe), HARDWARE["h100"]) == []
    numbers = [line for line in path.read_text().splitlines() if SOURCED.search(line)]
    assert [line for line in numbers if "#" not in line] == [], "each names its source"


def test_every_cluster_recipe_is_in_the_table_of_the_docs():
    table = (RECIPES.parent / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in CLUSTER)


OF_THE_ENGINE = (
    "checkpointing.",
    "logger.",
    "nemo_grpo.evaluation.",  # of nemo-grpo eval
    "nemo_grpo.export.",
    "nemo_grpo.run_name",
    "nemo_grpo.target",
    "grpo.max_num_epochs",
    "grpo.val_batch_size",
    "grpo.reward_shaping.",  # off
    "policy.generation.vllm_cfg.",
    "policy.make_sequence_length_divisible_by",
    "policy.sequence_packing.",  # how many tokens a microbatch holds
    "policy.megatron_cfg.distributed_data_parallel_config.",
    "policy.megatron_cfg.optimizer.use_",  # where the optimizer's state is, and in what
)
"""Beginnings of keys in which they may differ: they change how an engine computes, not what."""


def settings(name):
    return dict(leaves(load_recipe(name).to_dict()))


def differing(a, b):
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


@pytest.mark.parametrize(
    ("cluster", "embedded", "may_differ"),
    [
        ("cluster-quickstart", "cluster-quickstart-embedded", set()),
        # auto is NeMo-RL's bfloat16 where the processor has instructions for it
        ("cluster-smollm2-sft", "smollm2-sft", {"grpo.val_num_generations_per_prompt", "policy.precision"}),
        (
            "cluster-smollm2",
            "smollm2",
            # NeMo-RL validates by one sample of each problem, and demonstrations by the loss alone.
            # Each export has its folder. A bin of packed tokens holds a microbatch of the longest sequences.
            {
                "policy.precision",
                "policy.train_micro_batch_size",
                "policy.logprob_batch_size",
                "grpo.val_num_generations_per_prompt",
                "grpo.max_val_samples",
                "grpo.val_at_start",
                "policy.model_name",
                "policy.tokenizer.name",
            },
        ),
    ],
)
def test_both_engines_train_and_validate_alike(cluster, embedded, may_differ):
    ours, theirs = settings(embedded), settings(cluster)
    assert not load_recipe(cluster).grpo.reward_shaping.enabled
    if ours["nemo_grpo.rewards.format"] == 0.0:  # NeMo-RL's environment leaves out what weighs 0
        del ours["nemo_grpo.rewards.format"]
    assert {key for key in differing(theirs, ours) if not key.startswith(OF_THE_ENGINE)} == may_differ
    assert {"policy.megatron_cfg.optimizer.lr", "policy.precision", "grpo.max_val_samples"} <= theirs.keys()


def test_task_objective_and_optimizer_are_the_quickstarts():
    embedded, quickstart = settings("cluster-quickstart-embedded"), settings("quickstart")
    megatron = ("policy.megatron_cfg.optimizer.", "policy.megatron_cfg.scheduler.")
    same = ("loss_fn.", "nemo_grpo.task.", "nemo_grpo.prompt.", *megatron, "policy.generation.", "grpo.num_")
    assert not [key for key in differing(embedded, quickstart) if key.startswith(same)]
    first, second = (load_recipe(name) for name in ("cluster-smollm2-sft", "cluster-smollm2"))
    assert second.policy.model_name == f"{first.run_dir}/hf"
