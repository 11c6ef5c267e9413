"""Recipes of NeMo-RL's own, with a variant in one more line and without."""

import pytest
import yaml
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.recipe import advice, host, load_recipe, load_recipe_dict
from nemo_grpo.recipe.loader import merge
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss

STOCK = yaml.safe_load("""
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 4
  max_num_steps: 10
  normalize_rewards: true
  use_leave_one_out_baseline: true
  adv_estimator: {name: grpo, normalize_rewards: true, use_leave_one_out_baseline: true}
loss_fn: {reference_policy_kl_penalty: 0.02, reference_policy_kl_type: k3, kl_input_clamp_value: 20.0,
          ratio_clip_min: 0.2, ratio_clip_max: 0.2, ratio_clip_c: null, token_level_loss: true,
          force_on_policy_ratio: false, use_kl_in_reward: false}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 16
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,
                 optimizer: {lr: 1.0e-6}}
  generation: {backend: vllm, max_new_tokens: 256}
data: {train: {dataset_name: gsm8k}, default: {env_name: math}}
env: {math: {num_workers: 8}}
checkpointing: {checkpoint_dir: results/mine}
logger: {log_dir: logs}
""")
"""What NeMo-RL's base configurations set, as far as this package reads it."""


@pytest.fixture
def recipe(tmp_path):
    def load(*overrides, **loss_fn):
        for name, tree in (("stock", STOCK), ("mine", {"defaults": "stock.yaml", "loss_fn": loss_fn})):
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        return load_recipe(tmp_path / "mine.yaml", overrides)

    return load


def notes(loaded):
    return "\n".join(loaded.notes)


def test_without_a_variant_the_loss_stays_nemo_rls(recipe):
    stock = recipe()
    assert stock.loss_fn.is_stock
    assert stock.loss_fn.model_dump()["ratio_clip_max"] == 0.2
    assert (stock.nemo_grpo.target, stock.notes) == ("cluster", ())
    assert stock.grpo.use_leave_one_out_baseline is True
    assert str(stock.run_dir) == "results/mine"
    assert stock.checkpoint_dir == stock.run_dir
    assert load_recipe_dict(stock.to_dict()).to_dict() == stock.to_dict()


def test_one_line_adds_a_variant_with_its_own_parameters(recipe):
    mine = recipe(variant="tr_grpo")
    assert (mine.loss_fn.variant, mine.loss_fn.reference_policy_kl_penalty) == ("tr_grpo", 0.001)
    assert (mine.loss_fn.ratio_clip_max, mine.loss_fn.tau) == (0.24, 9.0)
    chosen = recipe(variant="tr_grpo", ratio_clip_max=0.28).loss_fn
    assert (chosen.ratio_clip_min, chosen.ratio_clip_max) == (0.2, 0.28)
    assert (mine.data.train, mine.data.default) == (STOCK["data"]["train"], STOCK["data"]["default"])
    assert mine.env.settings == STOCK["env"]


def test_a_note_names_what_the_variants_advantages_replace(recipe):
    mine = recipe(variant="dr_grpo")
    assert (mine.grpo.normalize_rewards, mine.grpo.use_leave_one_out_baseline) == (False, False)
    assert mine.to_dict()["grpo"]["adv_estimator"]["normalize_rewards"] is False
    assert "normalize_rewards=true is a setting of NeMo-RL" in notes(mine)
    assert "dr_grpo has loss_fn.normalize_rewards=false" in notes(mine)
    assert advice(mine)[: len(mine.notes)] == list(mine.notes)


def test_a_setting_of_the_estimator_that_the_variant_has_too_is_kept(recipe):
    mine = recipe(variant="grpo", use_leave_one_out_baseline=True)
    assert mine.grpo.use_leave_one_out_baseline is True
    assert "use_leave_one_out_baseline" not in notes(mine)


@pytest.mark.parametrize(
    ("variant", "by_tokens", "aggregation", "noted"),
    [
        ("grpo", True, "token_mean", False),
        ("grpo", False, "sequence_mean", False),
        ("cw_grpo", True, "sequence_mean", True),
        ("cw_grpo", False, "sequence_mean", False),
        ("dr_grpo", True, "constant", True),
        ("dr_grpo", False, "constant", True),
    ],
)
def test_token_level_loss_sets_the_aggregation_where_the_paper_leaves_it(
    recipe, variant, by_tokens, aggregation, noted
):
    mine = recipe(variant=variant, token_level_loss=by_tokens)
    assert mine.loss_fn.aggregation == aggregation
    assert ("loss_fn.token_level_loss" in notes(mine)) is noted


def test_terms_that_the_variant_lacks_are_set_aside_only_with_a_note(recipe):
    assert "ratio_clip" not in notes(recipe(variant="gpg"))  # at NeMo-RL's default: nothing was asked for
    asked = recipe(variant="gpg", ratio_clip_max=0.28, kl_input_clamp_value=None)
    assert "loss_fn.ratio_clip_max=0.28 is a setting of NeMo-RL" in notes(asked)
    assert "loss_fn.kl_input_clamp_value=null" in notes(asked)


@pytest.mark.parametrize(("variant", "own"), [("gpg", 0.0), ("tr_grpo", 0.001), ("grpo", 0.0)])
def test_one_note_names_every_parameter_that_gives_way_to_the_variant(recipe, variant, own):
    mine = recipe(variant=variant)
    assert mine.loss_fn.reference_policy_kl_penalty == own
    (note,) = [note for note in mine.notes if note.startswith("loss_fn")]
    assert f"reference_policy_kl_penalty=0.02 -> {own}" in note
    assert f"give way to {variant}'s own: " in note
    assert ("ratio_clip_max=0.2 -> 0.24" in note) is (variant == "tr_grpo")
    assert note.endswith("; write a key that it has beside loss_fn.variant to keep a value")
    assert "kl_input_clamp_value" not in note  # at NeMo-RL's default, and the variant has no such term


@pytest.mark.parametrize("penalty", [0.01, 0.02, 0.0])
@pytest.mark.parametrize("written_as", ["file", "override"])
def test_the_writers_kl_penalty_is_kept_whatever_its_value(recipe, penalty, written_as):
    key = "reference_policy_kl_penalty"
    in_file = {key: penalty} if written_as == "file" else {}
    overrides = [] if in_file else [f"loss_fn.{key}={penalty}"]
    mine = recipe(*overrides, variant="tr_grpo", **in_file)
    assert mine.loss_fn.reference_policy_kl_penalty == penalty
    assert key not in notes(mine)


def test_what_corrects_for_the_recipes_rollouts_is_kept_with_every_variant(tmp_path):
    corrected = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    stock = merge(STOCK, {"loss_fn": corrected | {"use_kl_in_reward": True, "token_level_loss": False}})
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(stock))
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: stock.yaml\nloss_fn: {variant: grpo}\n")
    loss = load_recipe(mine).loss_fn
    assert {key: getattr(loss, key) for key in corrected} == corrected
    assert loss.aggregation == "token_mean"
    note = notes(load_recipe(mine))
    assert "use_kl_in_reward=true -> none" in note
    assert "token_level_loss=false -> aggregation=token_mean" in note


def test_a_variant_that_corrects_by_itself_trains_asynchronous_stock_recipes(tmp_path):
    """DPPO's ratio is to the sampler: NeMo-RL's truncation gives way, and its asynchronous trainer starts."""
    corrected = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }
    apart = {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": 1}}
    asynchronous = {
        "loss_fn": corrected,
        "grpo": {"async_grpo": {"enabled": True}},
        "policy": {"generation": {"vllm_cfg": {"async_engine": True}, "colocated": apart}},
        "cluster": {"gpus_per_node": 2, "num_nodes": 1},
    }
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(merge(STOCK, asynchronous)))
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: stock.yaml\nloss_fn: {variant: dppo}\n")
    recipe = load_recipe(mine)
    assert recipe.loss_fn.use_importance_sampling_correction
    assert recipe.loss_fn.truncated_importance_sampling_type is None
    assert recipe.loss_fn.importance_correction() is None
    assert "truncated_importance_sampling_type=tis -> null" in notes(recipe)


@pytest.mark.parametrize(
    ("files", "overrides", "clip"),
    [
        ({"mine": {"variant": "dapo"}}, [], 0.28),
        ({"mine": {"variant": "dapo", "ratio_clip_max": 0.2}}, [], 0.2),
        ({"mine": {"variant": "dapo", "ratio_clip_min": 0.2}}, [], 0.28),  # each key by itself
        ({"mine": {"variant": "dapo"}}, ["loss_fn.ratio_clip_max=0.2"], 0.2),
        ({"mine": {"variant": "dapo"}}, ["loss_fn={variant: dapo, ratio_clip_max: 0.2}"], 0.2),
        ({"mine": {"ratio_clip_max": 0.2}}, ["++loss_fn.variant=dapo"], 0.2),
        ({"mine": {"ratio_clip_max": 0.25}}, ["++loss_fn.variant=dapo"], 0.25),
        ({"more": {"ratio_clip_max": 0.25}, "mine": {"variant": "dapo"}}, [], 0.28),
        ({"more": {"variant": "dapo"}, "mine": {"ratio_clip_max": 0.2}}, [], 0.2),
        ({"more": {"variant": "grpo", "ratio_clip_max": 0.2}, "mine": {"variant": "dapo"}}, [], 0.2),
        ({"examples/configs/theirs": {"ratio_clip_max": 0.25}}, ["++loss_fn.variant=dapo"], 0.28),
        ({"examples/nemo_gym/theirs": {"ratio_clip_max": 0.25}}, ["++loss_fn.variant=dapo"], 0.28),
    ],
)
def test_a_parameter_is_the_writers_if_it_is_in_the_recipe_or_above_a_variant(
    files, overrides, clip, tmp_path
):
    below, path = tmp_path / "stock.yaml", tmp_path
    below.write_text(yaml.safe_dump(STOCK))
    for name, loss_fn in files.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"defaults": str(below), "loss_fn": loss_fn}))
        below = path
    mine = load_recipe(path, overrides)
    assert (mine.loss_fn.ratio_clip_min, mine.loss_fn.ratio_clip_max) == (0.2, clip)
    gave_way = any(f"ratio_clip_max={value} -> 0.28" in notes(mine) for value in (0.2, 0.25))
    assert gave_way == (clip == 0.28)
    (tmp_path / "resolved.yaml").write_text(mine.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").to_dict() == mine.to_dict()


@pytest.mark.parametrize("section", ["distillation", "dpo", "eval", "ppo", "rm", "sft"])
@pytest.mark.parametrize("overrides", [[], ["++loss_fn.variant=grpo", "++grpo.seed=1"]])
def test_a_recipe_of_another_algorithm_is_refused_in_one_sentence(section, overrides, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({section: {"steps": "???"}, "policy": {"model_name": "a", "odd": 1}}))
    with pytest.raises(
        UserError, match=rf"^{section}: this is a recipe for NeMo-RL's .*, not for GRPO; [^;]*$"
    ):
        load_recipe(path, overrides)


def test_keys_of_the_stock_loss_have_the_defaults_of_nemo_rls_class():
    assert {key: value for key, value in NeMoRLLoss.keys().items() if value not in (False, None)} == {
        **{"token_level_loss": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2},
        **{"reference_policy_kl_penalty": 0.01, "reference_policy_kl_type": "k3"},
        **{"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0},
    }


@pytest.mark.parametrize("key", ["use_cispo", "use_kl_in_reward", "disable_ppo_ratio"])
def test_a_request_for_another_objective_is_refused(recipe, key):
    with pytest.raises(UserError, match=f"loss_fn.{key}=true is not supported: "):
        recipe(variant="grpo", **{key: True})


def test_a_misspelt_variant_or_stock_key_is_refused(recipe):
    with pytest.raises(UserError, match=r"varaint is not a parameter.*did you mean 'variant'"):
        recipe(varaint="cw_grpo")
    with pytest.raises(UserError, match="variant='cw_gppo' is not a variant; did you mean 'cw_grpo'"):
        recipe(variant="cw_gppo")
    with pytest.raises(UserError, match=r"ratio_clip_mix is not a parameter of tr_grpo; did you mean"):
        recipe(variant="tr_grpo", ratio_clip_mix=0.2)
    with pytest.raises(UserError, match=r"loss_fn\.aggregation=constant is a parameter of variants"):
        recipe(aggregation="constant")


def test_a_recipe_with_neither_task_nor_data_lacks_its_task():
    with pytest.raises(UserError, match="nemo_grpo is missing"):
        load_recipe_dict({key: value for key, value in STOCK.items() if key != "data"})


def test_gspo_and_cispo_come_with_their_own_clips(recipe):
    gspo, cispo = recipe(variant="gspo").loss_fn, recipe(variant="cispo").loss_fn
    assert (gspo.ratio_clip_max, gspo.aggregation) == (4e-4, "sequence_mean")
    assert (cispo.ratio_clip_min, cispo.ratio_clip_max) == (1.0, 5.0)
    assert recipe(variant="gspo", ratio_clip_max=0.27).loss_fn.sequence_level_importance_ratios is True
    asked = recipe(variant="cispo", use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=4.0)
    assert asked.loss_fn.ratio_clip_max == 4.0


def test_a_forced_ratio_is_taken_over_where_the_advantages_allow(recipe):
    assert recipe(variant="grpo", force_on_policy_ratio=True).loss_fn.force_on_policy_ratio
    with pytest.raises(UserError, match="force_on_policy_ratio=true: the advantages are shaped by"):
        recipe(variant="cw_grpo", force_on_policy_ratio=True)


CHECKPOINTS_WITHOUT_METRIC = {"checkpointing": {"save_period": 3, "metric_name": "val:accuracy"}}


def test_losing_checkpoints_is_a_note_without_a_task():
    stock = load_recipe_dict(merge(STOCK, CHECKPOINTS_WITHOUT_METRIC))
    assert "checkpointing.save_period=3 is not a multiple of grpo.val_period=10" in notes(stock)


def test_losing_checkpoints_is_an_error_with_a_task():
    section = {"task": {"name": "math"}, "target": "cluster", "run_name": "own"}
    loss = {"_override_": True, "variant": "grpo"}
    changes = CHECKPOINTS_WITHOUT_METRIC | {"nemo_grpo": section, "loss_fn": loss}
    with pytest.raises(UserError, match=r"checkpointing\.save_period=3 is not a multiple"):
        load_recipe_dict(merge(STOCK, changes))


def test_prompts_are_found_here_before_nemo_rls_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, repository = "examples/prompts/cot.txt", tmp_path / "nemo-rl"
    with pytest.raises(UserError, match=rf"prompt {name} is neither in {tmp_path} nor in .*{repository};"):
        host.prompt_file(name, repository)
    for root in (repository, tmp_path):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
        assert host.prompt_file(name, repository).resolve() == root / name


@pytest.mark.parametrize(("passes", "said"), [(1, "1 pass"), (3, "3 passes")])
def test_the_end_of_the_data_is_said_where_it_may_end_the_run(passes, said, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(merge(STOCK, {"grpo": {"max_num_epochs": passes}})))
    check, plan = (
        CliRunner().invoke(app, [*command, str(path)], env={"COLUMNS": "200"}).output
        for command in (["recipe", "check"], ["plan"])
    )
    assert f"10 steps of 4 x 4 or {said} through the data, TP 1" in check
    assert f"run: 10 steps or {said} through the data, whichever ends first; every 10 steps" in plan


def test_a_recipe_of_another_driver_of_nemo_rls_is_refused_with_its_name(recipe, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(merge(STOCK, {"env": {"sliding_puzzle_game": {"cfg": {}}}}))
    )
    with pytest.raises(
        UserError, match=r"^env\.sliding_puzzle_game: .* from examples/run_grpo_sliding_puzzle"
    ):
        load_recipe(tmp_path / "mine.yaml")


def test_an_environment_that_no_data_set_names_is_noted_if_it_was_added_on_top(recipe, tmp_path):
    unread = "env.code: no data set of the recipe names this environment"
    recipe()
    more = tmp_path / "more.yaml"
    for data, is_noted in (({}, True), ({"default": {"env_name": "code"}}, False)):
        tree = {"defaults": "stock.yaml", "env": {"code": {"num_workers": 2}}, "data": data}
        more.write_text(yaml.safe_dump(tree))
        said = "\n".join(advice(load_recipe(more)))
        assert (unread in said) == is_noted
        assert "env.math" not in said  # a base's, from which this recipe chooses
    assert unread in "\n".join(advice(recipe("++env.code={num_workers: 2}")))


def test_settings_of_the_stock_loss_without_effect_or_with_a_fault_are_noted(recipe):
    assert advice(recipe()) == []
    (nll,) = advice(recipe("++loss_fn.positive_example_nll_weight=0.1"))
    assert nll.startswith("loss_fn.positive_example_nll_weight=0.1 has no effect")
    (sampling,) = advice(recipe("++grpo.use_dynamic_sampling=true"))
    assert "drops the only correct response of a group" in sampling
    without = ["++grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false"]
    assert advice(recipe(*without)) == []
    assert "only correct" not in "\n".join(advice(recipe("++grpo.use_dynamic_sampling=true", variant="grpo")))
