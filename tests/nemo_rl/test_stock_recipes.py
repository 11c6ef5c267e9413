"""Recipes of NeMo-RL's own: the configuration that its trainer gets, and its data."""

import json
from pathlib import Path

import nemo_rl
import pytest
import yaml
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from toy_training import character_tokenizer

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import load_run
from nemo_grpo.nemorl.nemo_rl_batches import find_prompt_files, set_up_data
from nemo_grpo.recipe.interpolation import resolve
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.support.errors import UserError

CONFIGS = Path(next(iter(nemo_rl.__path__))).parent / "examples" / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
SOME = SHIPPED[::20]
"""To read all of them takes ten minutes."""
STOCK = [CONFIGS / name for name in ("grpo_math_1B_megatron.yaml", "grpo_math_8B_megatron.yaml")]


def theirs(path):
    register_omegaconf_resolvers()
    return OmegaConf.to_container(load_config(path), resolve=True)


def without_the_drivers_correction(settings):
    """The same without `overlap_param_gather`, which the driver turns off where a refit would miss it."""
    settings["policy"]["megatron_cfg"]["distributed_data_parallel_config"].pop("overlap_param_gather")
    return settings


@pytest.mark.parametrize("path", SOME, ids=[str(path.relative_to(CONFIGS)) for path in SOME])
def test_shipped_configuration_is_read_as_nemo_rl_reads_it(path):
    register_omegaconf_resolvers()
    try:
        expected = OmegaConf.to_container(load_config(path))
    except FileNotFoundError as error:
        pytest.skip(f"this copy of NeMo-RL lacks {error.filename}")
    tree = load_tree(path)
    assert tree == expected
    if not any(unknown in str(tree) for unknown in ("???", "oc.env:")):
        assert resolve(tree).tree == theirs(path)


@pytest.mark.parametrize("path", STOCK, ids=[path.stem for path in STOCK])
def test_variant_replaces_loss_and_estimator_alone_and_a_stock_recipe_is_unchanged(path):
    run = load_run(path)
    assert run.recipe.loss_fn.is_stock
    ours, expected = run.master_config.model_dump(), MasterConfig(**theirs(path)).model_dump()
    expected["policy"]["megatron_cfg"]["distributed_data_parallel_config"].pop("overlap_param_gather")
    assert ours.pop("nemo_grpo")["task"] is None
    assert ours["loss_fn"].pop("variant", None) is None
    assert without_the_drivers_correction(ours) == expected

    ours = load_run(path, ["++loss_fn.variant=tr_grpo"]).master_config.model_dump()
    loss, stock = ours.pop("loss_fn"), expected.pop("loss_fn")
    assert loss["variant"] == "tr_grpo"
    assert loss["reference_policy_kl_penalty"] == stock["reference_policy_kl_penalty"] == 0.01
    assert (stock["ratio_clip_max"], loss["ratio_clip_max"]) == (0.2, 0.24)  # nobody has chosen a clip
    assert expected["grpo"].pop("use_leave_one_out_baseline") is True
    assert ours["grpo"].pop("use_leave_one_out_baseline") is False
    for settings in (ours, expected):
        settings["grpo"].pop("adv_estimator", None)
        settings.pop("nemo_grpo", None)
    assert without_the_drivers_correction(ours) == expected


def local(folder, **data):
    """A stock recipe on local files: three problems to train on, one to validate."""
    for name, problems in (("train", "123"), ("val", "4")):
        rows = [{"question": f"{n} + 1?", "solution": str(int(n) + 1)} for n in problems]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset_name": "ResponseDataset", "input_key": "question", "output_key": "solution"}
    sets = {
        "train": {"_override_": True, "data_path": str(folder / "train.jsonl"), **keys},
        "validation": {"data_path": str(folder / "val.jsonl"), **keys},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"defaults": str(STOCK[0]), "data": sets | data}))
    return load_run(path)


@pytest.fixture
def environments(monkeypatch):
    """In place of NeMo-RL's actors: the settings that each is started with, by name."""
    started = {}

    def start(env_name, env_config):
        started[env_name] = env_config
        return f"actor {env_name}"

    monkeypatch.setattr("nemo_rl.data.utils.create_env", start)
    return started


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """NeMo-RL's repository with a prompt in it, and another working directory."""
    compat.installed()
    folder, elsewhere = tmp_path / "RL", tmp_path / "elsewhere"
    (folder / "examples" / "prompts").mkdir(parents=True)
    elsewhere.mkdir()
    (folder / "examples" / "prompts" / "cot.txt").write_text("Think: {}")
    monkeypatch.setattr(compat, "package_folder", lambda: folder / "nemo_rl")
    monkeypatch.chdir(elsewhere)
    return folder


def test_nemo_rl_sets_up_the_recipes_data_and_environment(tmp_path, repository, environments):
    run = local(tmp_path)
    tokenizer = character_tokenizer()
    data, validation, training_env, validation_env = set_up_data(run, tokenizer)
    assert (len(data), len(validation)) == (3, 1)
    row = data[1]
    said = row["message_log"][0]["token_ids"]
    assert said.tolist() == tokenizer("Think: 2 + 1?")["input_ids"]
    assert row["extra_env_info"] == {"ground_truth": "3"}
    assert row["loss_multiplier"] == 1.0
    assert validation[0]["extra_env_info"] == {"ground_truth": "5"}
    assert training_env[row["task_name"]] == "actor math"
    assert validation_env[validation[0]["task_name"]] == "actor math"
    assert environments == {"math": run.master_config.env["math"]}


def test_a_prompt_that_is_nowhere_is_refused_with_both_places(tmp_path, repository):
    config = local(tmp_path).master_config
    (repository / "examples" / "prompts" / "cot.txt").unlink()
    with pytest.raises(UserError, match=r"the prompt examples/prompts/cot\.txt is neither in .*elsewhere"):
        find_prompt_files(config, repository)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"dataset_name": "OpenMathInstruct-2"}, "OpenMathInstruct-2"),
        ({"dataset_name": "ResponseDataset", "data_path": "absent.jsonl"}, "absent.jsonl"),
    ],
)
def test_data_that_cannot_be_read_offline_is_refused_with_the_remedy(
    train, named, tmp_path, repository, environments
):
    run = local(tmp_path, train={"_override_": True, **train})
    with pytest.raises(
        UserError, match=f"data: {named}.* cannot be read .*download it once .*ResponseDataset"
    ):
        set_up_data(run, character_tokenizer())
