"""``nemo-grpo plan`` as a user meets it, and shapes from config files."""

import json
import os
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_grpo.cli import app, plan_tables
from nemo_grpo.cli import plan as command
from nemo_grpo.models import read_spec
from nemo_grpo.plan.forecast import Assumptions, as_dict
from nemo_grpo.plan.hardware import PUBLISHED
from nemo_grpo.plan.inputs import PRESETS, shape_of
from nemo_grpo.plan.planner import plan_recipe
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support import pictures
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = RECIPES / "cw_grpo" / "cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml"
HUGE = RECIPES / "tr_grpo" / "tr_grpo-llama-3.1-70b-instruct-logic-8n8g.yaml"
MEGATRON = "policy.megatron_cfg"


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_plan_of_one_recipe_shows_its_parts_and_accepts_it():
    code, output = run(SMALL)
    assert code == 0
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "training", "KV cache", "fits")
    assert all(part in output for part in parts), output
    assert "1.78 of 1.78 B parameters" in output


def test_plan_of_several_recipes_is_one_table_and_refuses_if_one_does_not_fit():
    code, output = run(SMALL, HUGE, "policy.generation.vllm_cfg.gpu_memory_utilization=0.2")
    assert code == 2
    assert output.count("refused") == 1
    assert "gpu_memory_utilization=0.2: after weights of 16.4 GiB" in output
    assert run(SMALL, HUGE, "--gpu", "h200")[0] == 0


def test_nearest_layout_fits_when_its_overrides_are_given():
    wrong = [f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=1"]
    plan = plan_recipe(load_recipe(HUGE, wrong))
    assert not plan.accepted
    assert plan.nearest is not None
    assert plan_recipe(load_recipe(HUGE, [*wrong, *plan.nearest])).accepted
    assert run(HUGE, *wrong)[1].count("nearest that fits: ") == 1
    assert plan_recipe(load_recipe(HUGE)).nearest is None


def test_shape_comes_from_a_local_folder_or_a_given_file(tmp_path):
    config = {
        "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(config, "Qwen/Qwen2.5-7B") == PRESETS["Qwen/Qwen2.5-7B"]
    local = shape_of(load_recipe(SMALL, [f"policy.model_name={tmp_path}"]))
    given = shape_of(load_recipe(SMALL, ["policy.model_name=me/mine"]), tmp_path / "config.json")
    assert (local.num_layers, given.hidden_size) == (28, 3584)


def test_plan_of_an_embedded_recipe_counts_its_engine():
    plain = run(RECIPES / "quickstart.yaml")[1]
    assert "FP32" in plain
    assert "sampler" in plain
    assert "reference" not in plain
    assert "reference" in run(RECIPES / "quickstart.yaml", "loss_fn.reference_policy_kl_penalty=0.1")[1]
    assert "sampler" not in run(SMALL)[1]


def test_plan_shows_time_cost_and_uncertainty():
    code, output = run(SMALL, "--price", "2", "--lengths", "1000")
    assert code == 0
    for part in ("decode", "forward and backward", "refit", "bottleneck: ", "a median error of 11%", "($"):
        assert part in output
    assert "hold 85% of 26 published steps on H100" in output
    assert "responses per step: 144, on average 1000 tokens long (as --lengths says)" in output
    assert "of 44 published steps, none of them on such GPUs" in run(SMALL, "--gpu", "b200")[1]


def test_defaults_of_the_command_are_the_planners():
    options, assumed = signature(command.plan).parameters, Assumptions()
    defaults = [options[name].default for name in ("prompt_length", "signal", "acceptance")]
    assert defaults == [assumed.prompt, assumed.signal, assumed.acceptance]


def test_plan_shows_what_drafts_yield():
    drafts = "policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 2}"
    output = run(SMALL, drafts, "--acceptance", "0.5")[1]
    assert "drafts: 2 per pass, accepted with 50%: 1.8 tokens per pass" in output
    assert "approximated: drafts are taken to cost a layer of the policy" in output
    assert "drafts" not in run(SMALL)[1]


def test_plan_says_that_a_sliding_window_is_approximated():
    output = run(HUGE, "policy.model_name=openai/gpt-oss-20b")[1]
    assert "approximated: layers that see 128 positions are counted as if they saw all" in output


def test_json_holds_what_the_tables_show_and_the_picture_every_line_within(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "write_png", lambda figure, path, dpi: drawn.append(figure))
    arguments = ("--json", "--price", "2", "--scale", "8,16", "--best", "--png", tmp_path / "scale.png")
    code, output = run(SMALL, *arguments)
    assert code == 0
    steps = drawn[0].axes[0]
    assert [line.get_label() for line in steps.lines] == ["same batch", "batch grows", "recipe's own layout"]
    assert all(max(line.get_ydata()) < axes.get_ylim()[1] for axes in drawn[0].axes for line in axes.lines)
    found = json.loads(output)
    (one,) = found["recipes"]
    time = one["time"]
    assert one["fits"]
    assert sum(time["phases"].values()) == pytest.approx(time["step_seconds"])
    assert time["dollars"] == pytest.approx(2 * time["gpu_hours"])
    assert time["gpu_hours"] == pytest.approx(time["run_seconds"] * 8 / 3600)
    low, high = time["interval"]["step_seconds"]
    assert low / time["step_seconds"] == pytest.approx(PUBLISHED["h100"].low)
    assert high / time["step_seconds"] == pytest.approx(PUBLISHED["h100"].high)
    assert time["interval"]["run_seconds"][0] / time["run_seconds"] == pytest.approx(PUBLISHED["h100"].low)
    assert time["interval"]["covered"] == PUBLISHED["h100"].covered
    assert [point["num_gpus"] for point in found["scale"]] == [8, 16]
    assert found["best"][0]["step_seconds"] <= time["step_seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RECIPES / "quickstart.yaml", "--best"), "take one recipe with target=cluster"),
        ((SMALL, HUGE, "--scale", "8"), "take one recipe"),
        ((SMALL, "--scale", "8,many"), "--scale 8,many: numbers of GPUs"),
        ((SMALL, "--png", "x.png"), "--png x.png draws --scale"),
        ((SMALL, "--lengths", "nowhere.jsonl"), "--lengths nowhere.jsonl: "),
        ((SMALL, "--gpu", "h10"), r"--gpu h10: .*did you mean 'h100'"),
        ((SMALL, "policy.model_name=Qwen/Qwen2.5-14"), r"did you mean 'Qwen/Qwen2.5-14B'.*--model-config"),
        ((Path(__file__).parent,), "no recipe to plan"),
    ],
)
def test_wrong_questions_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        run(*arguments)


def test_models_that_are_not_counted_are_refused_with_the_reason(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(UserError, match="has no num_attention"):
        read_spec({"model_type": "qwen2"}, "mine")
    with pytest.raises(UserError, match=r"model_type=nemotron_h is not supported: .*AutoBridge"):
        shape_of(load_recipe(HUGE), file)


def test_a_folder_is_planned_around_what_is_wrong_in_it(tmp_path):
    (tmp_path / "a.yaml").write_text(f"defaults: {SMALL}\npolicy: {{model_name: nobody/knows}}\n")
    (tmp_path / "b.yaml").write_text(f"defaults: {SMALL}\n")
    code, output = run(tmp_path)
    assert code == 2
    assert f"error: {tmp_path / 'a.yaml'}: policy.model_name=nobody/knows" in output
    assert "of 1.78 B parameters" in output, "the other one is planned"


def test_the_model_of_an_earlier_stage_is_that_stages(tmp_path):
    (tmp_path / "first.yaml").write_text(f"defaults: {SMALL}\nnemo_grpo: {{run_name: first}}\n")
    stage = "policy: {model_name: runs/first/hf/step_100}\nnemo_grpo: {run_name: second}"
    (tmp_path / "second.yaml").write_text(f"defaults: {SMALL}\n{stage}\n")
    code, output = run(tmp_path / "second.yaml")
    assert code == 0, output
    assert "of 1.78 B parameters" in output


STOCK = f"""
defaults: {RECIPES}/cluster-quickstart.yaml
policy:
  model_name: Qwen/Qwen2.5-7B
  train_micro_batch_size: 1
  logprob_batch_size: 2
  megatron_cfg: {{tensor_model_parallel_size: 4, sequence_parallel: true}}
cluster: {{gpus_per_node: 8}}
"""


def test_unequal_batches_at_tp_4_are_planned_with_a_note(tmp_path, monkeypatch):
    """NVIDIA's own scripts switch NeMo-RL's check off, and memory and time do not depend on it."""
    monkeypatch.delenv("NRL_IGNORE_TP_ACCURACY_CHECK", raising=False)
    (tmp_path / "stock.yaml").write_text(STOCK)
    output = run(tmp_path / "stock.yaml")[1]
    assert "note: policy.logprob_batch_size=2 differs from train_micro_batch_size=1" in output
    assert "bottleneck: " in output
    with pytest.raises(UserError, match="NeMo-RL refuses to start"):
        load_recipe(tmp_path / "stock.yaml")
    assert "note: " not in run(tmp_path / "stock.yaml", "policy.logprob_batch_size=1")[1]


def test_run_that_ends_with_its_data_has_no_cost_of_a_million_steps():
    recipe = load_recipe(SMALL, ["grpo.max_num_steps=1000000"])
    known = plan_recipe(recipe).forecast
    work = replace(known.work, or_passes=" or 1 pass through the data")
    scenario = replace(known.scenario, work=work)
    unknown = replace(known, step=replace(known.step, scenario=scenario))
    line = plan_tables.sentences(unknown, 2.0)[2]
    hundred = known.of_steps(100)
    assert line.startswith("run: 1000000 steps or 1 pass through the data, whichever ends first; every 100 ")
    assert plan_tables.cost(hundred, 2.0) in line
    assert hundred.gpu_hours == pytest.approx(known.gpu_hours / 10_000, rel=0.02)
    assert plan_tables.cost(unknown, 2.0) == "-"
    values = as_dict(unknown, 2.0)
    assert [values[name] for name in ("run_seconds", "gpu_hours", "dollars")] == [None, None, None]
    assert values["step_seconds"] == known.step.seconds


def test_embedded_recipe_is_planned_for_the_machine_that_trains_it():
    on_cpu = run(RECIPES / "quickstart.yaml", "nemo_grpo.engine.device=cpu")[1]
    assert "on this machine's CPUs" in on_cpu
    assert "h100" not in on_cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    ranks = load_recipe(RECIPES / "quickstart.yaml").cluster.gpus_per_node
    assert f"usable {0.92 * memory / ranks:.1f} GiB" in on_cpu
    assert "time: predicted for the cluster engine alone" in on_cpu
    on_gpu = run(RECIPES / "quickstart.yaml", "--gpu", "h200", "nemo_grpo.engine.device=cuda")[1]
    assert "h200" in on_gpu
    with pytest.raises(UserError, match="only the embedded engine trains on CPUs"):
        run(SMALL, "--gpu", "cpu")
