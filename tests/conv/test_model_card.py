"""The README.md of exports: what a run knows reaches it, folders of the machine do not."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoConfig, GenerationConfig

from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo.nemorl.checkpoints import SIDE_FOLDER, SideFiles
from nemo_grpo.support.model_card import Training, training_of, write_card

RECIPE = {
    "policy": {"model_name": "Qwen/Qwen2.5-1.5B"},
    "loss_fn": {"variant": "tr_grpo"},
    "nemo_grpo": {"run_name": "my-run", "task": {"name": "math", "train_files": ["/home/me/open-rs.jsonl"]}},
}
OWN = {"step": 40, "state": {"step": 40}, "metrics": {"validation/accuracy": 0.71875, "note": "x"}}
NEMO_RL = {"total_steps": 40, "val:accuracy": 0.71875, "consumed_samples": 5120}


def step_of(run, checkpoint, engine):
    """A run's folder with one step, as each engine lays it out. Returns: the step's folder."""
    step = run / "checkpoints" / "step_000040"
    shutil.copytree(checkpoint, step / "policy" / "weights")
    (step / "training_info.json").write_text(json.dumps(OWN if engine == "embedded" else NEMO_RL))
    recipe = run / "recipe.resolved.yaml" if engine == "embedded" else step / "config.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    (run / "versions.json").write_text('{"torch": "2.13.0"}')
    return step


@pytest.mark.parametrize("engine", ["embedded", "cluster"])
def test_a_converted_step_says_what_was_trained(engine, source, checkpoint, tmp_path):
    step, config = step_of(tmp_path / "run", checkpoint, engine), source
    if engine == "cluster":  # whose checkpoints have their own configuration and tokenizer
        tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "vocab.txt").write_text("a"))
        SideFiles(tokenizer, AutoConfig.from_pretrained(source)).on_checkpoint(step)
        config = step / SIDE_FOLDER
    hf = megatron_to_hf(step, config, tmp_path / "hf")
    assert (
        GenerationConfig.from_pretrained(hf).to_dict() == GenerationConfig.from_pretrained(source).to_dict()
    )
    assert (hf / "vocab.txt").exists() == (engine == "cluster")
    card = ModelCard.load(hf / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("Qwen/Qwen2.5-1.5B", "transformers")
    assert (card.data.pipeline_tag, card.data.tags[-1]) == ("text-generation", "tr_grpo")
    rows = dict(re.findall(r"^\| (.+) \| (.+) \|$", card.text, re.MULTILINE))
    accuracy = "validation/accuracy" if engine == "embedded" else "val:accuracy"
    assert rows == {
        **{"base model": "Qwen/Qwen2.5-1.5B", "license": "the base model's, which was not known here"},
        **{"recipe": "my-run", "variant": "tr_grpo", "task": "math", "data": "open-rs.jsonl"},
        **{"step": "40", accuracy: "0.71875", "torch": "2.13.0"},
    }
    assert "# my-run" in card.text
    assert "/home" not in card.content


@pytest.mark.parametrize("name", ["validation/mine.py:cost", "val:mine.py:cost"])
def test_the_metric_that_ranks_checkpoints_stands_first(name, tmp_path):
    recipe = RECIPE | {"checkpointing": {"metric_name": "val:mine.py:cost"}}
    metrics = {"validation/accuracy": 0.5, name: 2.0, "validation/format": 1.0}
    write_card(tmp_path, Training(recipe, 40, metrics), tmp_path)
    rows = re.findall(r"^\| (.+) \| (.+) \|$", (tmp_path / "README.md").read_text(), re.MULTILINE)
    numbers = [row for row in rows if row[0].startswith("val")]
    assert numbers == [(name, "2"), ("validation/accuracy", "0.5"), ("validation/format", "1")]


def test_a_checkpoint_without_a_run_names_the_model_of_its_config(source, checkpoint, tmp_path):
    """Files that happen to lie above are not a run's."""
    shutil.copytree(checkpoint, tmp_path / "above" / "megatron")
    (tmp_path / "above" / "config.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "recipe.resolved.yaml").write_text(yaml.safe_dump(RECIPE))
    hf = megatron_to_hf(tmp_path / "above" / "megatron", source, tmp_path / "hf")
    card = ModelCard.load(hf / "README.md")
    assert card.data.base_model is None  # a folder of this machine
    assert f"| base model | {source.name} |" in card.text
    assert str(source) not in card.content


def test_damaged_files_of_a_run_do_not_end_an_export(source, checkpoint, tmp_path):
    step = step_of(tmp_path / "run", checkpoint, "cluster")
    (step / "config.yaml").write_text("a: [")
    (step / "training_info.json").write_text("{")
    assert training_of(step / "policy" / "weights" / "iter_0000000") == Training(versions={"torch": "2.13.0"})
    assert (megatron_to_hf(step, source, tmp_path / "hf") / "README.md").is_file()


def test_an_adapter_is_named_so(tmp_path):
    (tmp_path / "config.json").write_text('{"_name_or_path": "org/base"}')
    write_card(tmp_path, Training(), tmp_path, is_adapter=True)
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "peft"


def test_a_model_with_images_is_named_so(tmp_path):
    (tmp_path / "config.json").write_text('{"_name_or_path": "org/base"}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    write_card(tmp_path, Training(RECIPE), tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.pipeline_tag, data.base_model) == ("image-text-to-text", "Qwen/Qwen2.5-1.5B")


CARD = "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\nbase_model: Qwen/parent\n---\n"
LICENSE = ("other", "qwen", "LICENSE")


def card_after(folder, source, model_name=None):
    """Of a training that began with ``model_name``."""
    folder.mkdir()
    write_card(folder, Training({"policy": {"model_name": model_name}}), source)
    return ModelCard.load(folder / "README.md")


def license_of(card):
    return card.data.license, card.data.get("license_name"), card.data.get("license_link")


def folder_with(path, card):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "README.md").write_text(card)
    return path


def test_the_license_and_the_name_on_the_hub_are_those_of_the_hubs_cache(tmp_path, monkeypatch):
    cache = tmp_path / "hub" / "models--Qwen--Qwen2.5-1.5B"
    snapshot = folder_with(cache / "snapshots" / "abc", CARD)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    empty = folder_with(tmp_path / "tokenizer", "")
    downloaded = folder_with(tmp_path / "Qwen-Instruct", CARD)
    name = "Qwen/Qwen2.5-1.5B"
    for number, (source, given, base) in enumerate(
        [(empty, name, name), (snapshot, None, name), (empty, str(snapshot), name), (downloaded, None, None)]
    ):
        card = card_after(tmp_path / str(number), source, given)
        assert (card.data.base_model, license_of(card)) == (base, LICENSE)
        assert "| license | qwen |" in card.text
    assert "| base model | Qwen-Instruct |" in card.text  # and not its parent


def test_a_second_stage_names_the_model_with_which_the_first_began(tmp_path):
    first = folder_with(tmp_path / "runs" / "sft" / "hf", "")
    write_card(first, Training({"policy": {"model_name": "org/base"}}), folder_with(tmp_path / "base", CARD))
    card = card_after(tmp_path / "second", first, str(first))
    assert (card.data.base_model, license_of(card)) == ("org/base", LICENSE)
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    "card",
    ["---\na: [\n---\n", "---\n- x\n---\n", "---\nlicense: [a, b]\ntags: 3\n---\n", "license: mit", "\x00"],
)
def test_a_card_that_says_nothing_is_no_obstacle(card, tmp_path):
    found = card_after(tmp_path / "x", folder_with(tmp_path / "base", card))
    assert (found.data.base_model, found.data.license) == (None, None)


@pytest.mark.parametrize("name", [".cache/smollm2", "runs/x/hf", "/lustre/org/base"])
def test_a_folder_that_is_gone_is_no_name_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where `make smollm2` has made no such folder
    assert card_after(tmp_path / "x", folder_with(tmp_path / "base", ""), name).data.base_model is None


def test_everybody_may_read_an_export(source, checkpoint, tmp_path):
    mask = os.umask(0o077)
    try:
        hf = megatron_to_hf(checkpoint, source, tmp_path / "hf")
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in hf.iterdir()} == {0o644}
    assert hf.stat().st_mode & 0o777 == 0o755
