"""Which runs a comparison or a sweep consists of, and what is refused before any starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_grpo.cli.compare import parse_seeds
from nemo_grpo.experiments.jobs import Setting, make_jobs
from nemo_grpo.experiments.results import settings_that_differ
from nemo_grpo.experiments.sweep import (
    find_sweep,
    is_sweep,
    load_sweep,
    sweep_variants,
    with_overrides,
)
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"
PRESETS = sorted((RECIPES / "sweeps").glob("*.yaml"))


def settings_of(variants, overrides=(), recipe=QUICKSTART):
    return with_overrides(sweep_variants(recipe, variants, [0]).settings, overrides)


def test_compare_uses_a_variants_overlay_and_the_given_recipe_for_its_own_variant():
    settings = settings_of(["grpo", "gpg"], ["grpo.max_num_steps=3"])
    named = [(s.label, s.recipe.name) for s in settings]
    assert named == [("grpo", "quickstart.yaml"), ("gpg", "quickstart-gpg.yaml")]
    assert {s.overrides for s in settings} == {("grpo.max_num_steps=3",)}


def test_what_the_recipe_sets_of_the_loss_holds_for_every_variant_that_has_the_parameter(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: nemo_grpo://quickstart.yaml\n"
        "loss_fn: {reference_policy_kl_penalty: 0.04, ratio_clip_max: 0.3, normalize_rewards: false}\n"
    )
    jobs = make_jobs(settings_of(["grpo", "tr_grpo", "gpg"], recipe=recipe), [0], tmp_path)
    losses = [job.recipe.loss_fn for job in jobs]
    assert [loss.reference_policy_kl_penalty for loss in losses] == [0.04, 0.04, 0.04]
    assert [getattr(loss, "ratio_clip_max", None) for loss in losses] == [0.3, 0.3, None]
    assert [getattr(loss, "normalize_rewards", None) for loss in losses] == [False, False, None]
    assert losses[1].tau == 9.0
    head, rows = settings_that_differ(jobs)
    assert head == ["settings that differ", "grpo", "tr_grpo", "gpg"]
    differing = {key: values for key, *values in rows}
    assert differing["loss_fn.tau"] == ["", "9.0", ""]
    assert differing["loss_fn.ratio_clip_max"] == ["0.3", "0.3", ""]
    assert "loss_fn.reference_policy_kl_penalty" not in differing
    assert not {"grpo.seed", "nemo_grpo.run_name"} & differing.keys()


def test_a_clip_of_the_recipe_that_differs_from_another_arms_recipe_is_tabulated(tmp_path):
    jobs = make_jobs(settings_of(["grpo", "tr_grpo"]), [0, 1], tmp_path)  # quickstart and its overlay
    assert ["loss_fn.ratio_clip_max", "0.2", "0.24"] in settings_that_differ(jobs)[1]
    assert settings_that_differ(jobs[:1])[1] == []


def test_compare_without_an_overlay_uses_the_variants_defaults(tmp_path):
    recipe = RECIPES / "quickstart-tr_grpo.yaml"  # has keys that GPG does not know, and no overlay of its own
    job = make_jobs(settings_of(["gpg"], recipe=recipe), [0], tmp_path)[0]
    assert job.setting.recipe == recipe
    loss = job.recipe.loss_fn
    assert (loss.variant, loss.reward_normalization, loss.valid_fraction_threshold) == ("gpg", "none", 0.6)


def test_jobs_have_folders_and_seeds_of_their_own_and_seeds_go_last(tmp_path):
    jobs = make_jobs(settings_of(["grpo", "gpg"]), [0, 7], tmp_path)
    named = [(job.name, job.recipe.grpo.seed) for job in jobs]
    assert named == [("grpo-s0", 0), ("gpg-s0", 0), ("grpo-s7", 7), ("gpg-s7", 7)]
    assert jobs[3].folder == tmp_path / "runs" / "gpg-s7"
    assert len({job.recipe.policy.model_name for job in jobs}) == 1


def test_variants_that_do_not_exist_or_come_twice_are_refused():
    with pytest.raises(UserError, match=r"grp: .*did you mean 'grpo'\?"):
        make_jobs(settings_of(["grpo", "grp"]), [0], Path("out"))
    with pytest.raises(UserError, match="--variants grpo,grpo: the setting 'grpo' is repeated; name it once"):
        settings_of(["grpo", "grpo"])
    with pytest.raises(UserError, match=r"loss_fn\.variant is what the settings vary; leave"):
        settings_of(["grpo"], ["loss_fn.variant=gpg"])


def test_a_setting_that_is_not_valid_is_refused_by_its_name(tmp_path):
    with pytest.raises(UserError, match=r"gpg: .*loss_fn\.tau"):
        make_jobs(settings_of(["grpo", "gpg"], ["loss_fn.tau=1"])[1:], [0], tmp_path)
    with pytest.raises(UserError, match="nothing to run"):
        make_jobs([], [0], tmp_path)


def test_runs_that_would_share_a_place_are_refused(tmp_path):
    one = settings_of(["grpo"], [f"checkpointing.checkpoint_dir={tmp_path}"])
    with pytest.raises(UserError, match="several runs would share the checkpoints"):
        make_jobs(one, [0, 1], tmp_path)
    alike = [Setting("a b", QUICKSTART), Setting("a/b", QUICKSTART)]
    with pytest.raises(UserError, match="several runs would share the folder"):
        make_jobs(alike, [0], tmp_path)


@pytest.mark.parametrize("override", ["++grpo.seed=4", "nemo_grpo.run_name=x", "nemo_grpo.runs_dir=x"])
def test_what_every_job_sets_itself_is_refused_instead_of_ignored(tmp_path, override):
    key = override.lstrip("+").partition("=")[0]
    with pytest.raises(UserError, match=f"{key} cannot be set for all runs"):
        make_jobs(settings_of(["grpo"], [override]), [0], tmp_path)
    grid = load_sweep(write_sweep(tmp_path, "  grids: [{grpo.seed: [3, 4]}]\n"))
    with pytest.raises(UserError, match=r"name the seeds in --seeds, or in sweep\.seeds"):
        make_jobs(grid.settings, [0], tmp_path)


@pytest.mark.parametrize("name", ["runs #1", "a: b", "{z}", "1"])
def test_runs_go_below_out_whatever_its_name_means_in_yaml(name):
    assert make_jobs(settings_of(["grpo"]), [0], Path(name))[0].folder == Path(name, "runs", "grpo-s0")


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("policy.model_name=other/model", r"policy\.model_name of b .* one model on one task"),
        ("policy.generation.temperature=3", r"val_temperature of b \(3\.0\) .* alike; add"),
        ("grpo.max_val_samples=16", r"grpo\.max_val_samples of b \(16\) .* alike; add"),
    ],
)
def test_settings_that_start_or_are_validated_differently_are_refused(tmp_path, override, refused):
    follows = "policy.generation.val_temperature=${.temperature}"
    settings = [Setting("a", QUICKSTART, (follows,)), Setting("b", QUICKSTART, (follows, override))]
    with pytest.raises(UserError, match=refused):
        make_jobs(settings, [0], tmp_path)
    key = override.partition("=")[0]  # which may differ where a sweep varies it
    values = "[a, b]" if key == "policy.model_name" else "[1, 2]"
    varied = load_sweep(write_sweep(tmp_path, f"  grids: [{{{key}: {values}}}]\n"))
    assert len(make_jobs(varied.settings, [0], tmp_path)) == 2


def test_variants_in_a_sweep_have_the_recipes_that_compare_gives_them(tmp_path):
    file = write_sweep(tmp_path, "  grids: [{loss_fn.variant: [grpo, gpg, cispo]}]\n")
    for mine, theirs in zip(load_sweep(file).settings, settings_of(["grpo", "gpg", "cispo"]), strict=True):
        assert mine == replace(theirs, label=f"variant={theirs.label}")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_setting_of_a_preset_is_a_valid_recipe(path, tmp_path):
    sweep = load_sweep(path)
    assert find_sweep(path.stem).resolve() == path.resolve()
    jobs = make_jobs(sweep.settings, sweep.seeds[:1], tmp_path)
    assert len({job.recipe.to_yaml() for job in jobs}) == len(jobs) == len(sweep.settings)
    if path.stem != "ablations":  # one paper's has its recipe for the cluster
        sweep = load_sweep(path, "cluster")
        jobs = make_jobs(sweep.settings, sweep.seeds, tmp_path, prefix=f"{path.stem}-")
        assert {job.recipe.nemo_grpo.target for job in jobs} == {"cluster"}
        assert all(job.name.startswith(f"{path.stem}-") for job in jobs)
        assert len(jobs) == len(sweep.settings)  # one seed, as in the papers


def values(preset, *keys, target="cluster"):
    """What a preset's settings have for these keys of loss_fn or with a dot, in order."""
    jobs = make_jobs(load_sweep(find_sweep(preset), target).settings, [0], Path("out"))
    names = [key if "." in key else f"loss_fn.{key}" for key in keys]
    return [tuple(value_of(job.recipe, name) for name in names) for job in jobs]


TAUS = (0.5, 2.0, 7.0, 9.0, 10.0, 20.0)


@pytest.mark.parametrize(
    ("preset", "label", "name"),
    [
        ("gpg-components", "A. std", "math-std-no_alpha"),
        ("gpg-components", "B. plain", "math-no_alpha"),
        ("gpg-components", "std, alpha", "math-std"),
        ("gpg-components", "C. alpha", "math-no_threshold"),
        ("gpg-components", "D. alpha, beta_th", "math"),
        ("gpg-normalization", "reward_normalization=group", "math-std-no_alpha"),
        ("gpg-normalization", "reward_normalization=batch", "math-batch-no_alpha"),
        ("gpg-normalization", "reward_normalization=none", "math-no_alpha"),
        ("gpg-threshold", "valid_fraction_threshold=0.6", "math"),
        ("gpg-group_size", "G=8", "math-std-no_alpha"),
    ],
)
def test_a_row_that_has_a_recipe_of_its_own_is_that_recipe(preset, label, name, tmp_path):
    settings = [s for s in load_sweep(find_sweep(preset), "cluster").settings if s.label == label]
    (job,) = make_jobs(settings, [0], tmp_path)
    own = [f"nemo_grpo.runs_dir={tmp_path}/runs", f"nemo_grpo.run_name={job.name}", "grpo.seed=0"]
    assert job.recipe == load_recipe(RECIPES / f"gpg/gpg-qwen2.5-math-7b-{name}-1n8g.yaml", own)


def test_presets_hold_the_papers_values():
    assert set(values("tr_grpo-sensitivity", "tau", target="embedded")) == {(tau,) for tau in TAUS}
    ranges = set(values("tr_grpo-sensitivity", "lower", "upper", target="embedded"))
    assert ranges == {(1.0, 1.2), (1.0, 1.4), (0.8, 1.5), (0.5, 1.5)}
    ways = [("equal",), ("random",), ("reverse",), ("probability",)]
    for target in ("embedded", "cluster"):
        assert values("tr_grpo-weighting", "weighting", target=target) == ways
    table7 = values("tr_grpo-sensitivity", "tau", "lower", "upper")
    assert table7[:3] == [(9.0, 1.0, 1.2), (9.0, 0.8, 1.5), (9.0, 0.5, 1.5)]
    assert table7[3:] == [(tau, 1.0, 1.4) for tau in TAUS]
    assert values("gpg-threshold", "valid_fraction_threshold") == [(0.6,), (0.8,)]
    sizes = values("gpg-group_size", "grpo.num_generations_per_prompt", "grpo.num_prompts_per_step")
    assert sizes == [(2, 256), (4, 128), (8, 64), (16, 32)]


def write_sweep(folder, text):
    path = folder / "mine.yaml"
    path.write_text(f"sweep:\n  recipe: nemo_grpo://quickstart.yaml\n{text}")
    return path


def test_grids_are_products_and_settings_single_points(tmp_path):
    text = "  overrides: {grpo.max_num_steps: 5}\n  seeds: [4, 2]\n"
    text += "  settings: [{label: slow, policy.megatron_cfg.optimizer.lr: 1.0e-4}]\n"
    text += "  grids: [{loss_fn.normalize_rewards: [true, false], grpo.num_prompts_per_step: [16, 32]}]\n"
    sweep = load_sweep(write_sweep(tmp_path, text))
    assert sweep.seeds == [4, 2]
    product = [f"normalize_rewards={a} num_prompts_per_step={b}" for a in (True, False) for b in (16, 32)]
    assert [s.label for s in sweep.settings] == ["slow", *product]
    jobs = make_jobs(with_overrides(sweep.settings, ["grpo.max_num_steps=6"]), [0], tmp_path)
    assert {job.recipe.grpo.max_num_steps for job in jobs} == {6}  # the command line wins
    assert jobs[0].recipe.policy.megatron_cfg.optimizer.lr == 1e-4
    assert [job.recipe.loss_fn.normalize_rewards for job in jobs[1:]] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  grid: []\n", r"sweep\.grid is not a key of a sweep; did you mean 'grids'"),
        ("", "nothing is varied"),
        ("  seeds: many\n", r"sweep\.seeds"),
    ],
)
def test_sweep_files_with_mistakes_are_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_sweep(write_sweep(tmp_path, text))


@pytest.mark.parametrize("override", ["loss_fn.tau=3", "~loss_fn.tau", "loss_fn={variant: tr_grpo}"])
def test_an_override_of_what_a_sweep_varies_is_refused(tmp_path, override):
    text = "  overrides: {grpo.max_num_steps: 5}\n  grids: [{loss_fn.tau: [0.5, 2.0]}]\n"
    settings = load_sweep(write_sweep(tmp_path, text)).settings
    with pytest.raises(UserError, match=r"loss_fn\.tau is what the settings vary"):
        with_overrides(settings, [override])
    changed = with_overrides(settings, ["grpo.max_num_steps=6", "loss_fn.tau_convention=multiply"])
    assert [setting.overrides[-2] for setting in changed] == ["grpo.max_num_steps=6"] * 2


def test_recipe_is_not_a_sweep():
    assert not is_sweep(QUICKSTART)
    assert all(map(is_sweep, PRESETS))
    with pytest.raises(UserError, match="is not a sweep"):
        load_sweep(QUICKSTART)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'gpg-threshold'"):
        find_sweep("gpg-treshold")


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("0,7", [0, 7]), ("7,", [7])])
def test_seeds_are_a_number_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds
    for wrong in ("", "0", "a", "1,b", "-1,"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)
