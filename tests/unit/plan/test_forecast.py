"""Lengths, draws, GPUs from a file, and what the planner makes of a recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_grpo.plan.forecast import Assumptions, at_scale, for_time
from nemo_grpo.plan.hardware import HARDWARE, hardware_of
from nemo_grpo.plan.inputs import PRESETS, plan_input
from nemo_grpo.plan.layouts import best_layouts
from nemo_grpo.plan.lengths import Lengths, of_mean, read_lengths
from nemo_grpo.plan.planner import plan_recipe
from nemo_grpo.plan.rules import for_memory
from nemo_grpo.plan.scaling import Point, own_layout, scaling
from nemo_grpo.plan.scenario import expected_draws, scoring_passes, workload_of
from nemo_grpo.recipe import load_recipe, load_recipe_dict
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
LARGE = RECIPES / "gpg" / "gpg-qwen2.5-32b-4n8g.yaml"
SMALL = RECIPES / "cw_grpo" / "cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml"
SHAPE = PRESETS["Qwen/Qwen2.5-32B"]
H100 = HARDWARE["h100"]


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(LARGE)


def forecast_of(recipe, mean=4000):
    """The recipe's time on H100, which it fits, with responses of this mean."""
    plan = plan_recipe(recipe, assumed=Assumptions(mean))
    assert plan.accepted
    assert plan.forecast is not None
    return plan.forecast


@pytest.fixture(scope="module")
def base(recipe):
    return forecast_of(recipe)


@pytest.mark.parametrize(("mean", "limit"), [(100, 1000), (999, 1000), (1, 16), (16, 16)])
def test_lengths_have_the_mean_that_was_given(mean, limit):
    lengths = of_mean(mean, limit)
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.responses == tuple(sorted(lengths.responses))
    assert max(lengths.responses) <= limit


def test_longest_response_by_hand():
    lengths = Lengths(1, (10.0, 20.0, 30.0, 40.0), 50)
    # the quantile 1/2 lies between the second and the third class
    assert lengths.longest(1) == 25
    assert 40 < lengths.longest(100) < lengths.longest(10_000) < 50


def test_attended_tokens_by_hand():
    # attended tokens weigh long sequences more; sequences of 10 and 30: (100 + 900) / 40 / 2
    assert Lengths(4, (6.0, 26.0), 30).attended == 12.5


def test_rows_are_packed_first_fit_decreasing():
    # 7, 7, 3, 3 into rows of 10: two full ones; 6 and 5 do not share a row of 10
    assert Lengths(1, (2.0, 6.0), 10).packed(10) == 10
    assert Lengths(1, (4.0, 5.0), 10).packed(10) == pytest.approx((6 + 6 + 10) / 3)


def test_lengths_come_from_a_runs_files(tmp_path):
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    metrics.write_text("\n".join(json.dumps({"step": n, "length/mean": 100 + n}) for n in range(3)))
    samples.write_text(json.dumps({"num_tokens": 7}) + "\n" + json.dumps({"num_tokens": [5, 9]}))
    assert read_lengths(metrics, 1000).mean == pytest.approx(101, rel=1e-3)
    assert read_lengths(samples, 1000).responses == (5.0, 7.0, 9.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_tokens": 2000}', "a response of 2000 tokens, the recipe allows 1 to 1000"),
        ('{"loss": 1}', "no num_tokens and no length/mean in it"),
        ("{", "give a number, metrics.jsonl or samples.jsonl"),
    ],
)
def test_wrong_lengths_are_refused(tmp_path, text, message):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_lengths(file, 1000)


def test_impossible_means_are_refused(recipe):
    with pytest.raises(UserError, match="--lengths 99999: responses have 1 to 16384 tokens"):
        Assumptions(99999).lengths_of(recipe)
    for prompt in (0, float("nan"), recipe.policy.max_total_sequence_length):
        with pytest.raises(UserError, match=rf"--prompt-length {prompt:g}: .* fewer than policy\.max_total"):
            Assumptions(100, prompt=prompt).lengths_of(recipe)
    with pytest.raises(UserError, match="--signal 0: a share"):
        plan_recipe(recipe, assumed=Assumptions(signal=0))


def test_draws_until_enough_groups_carry_signal():
    assert expected_draws(1.0, 1.0, 10, 64) == 1
    # half of the groups have signal: two draws bring the threshold of 0.6, and about as often not that of 1
    assert expected_draws(0.5, 0.6, 10, 10_000) == pytest.approx(2, abs=1e-3)
    assert expected_draws(0.5, 1.0, 10, 10_000) == pytest.approx(2.5, abs=0.01)
    assert expected_draws(0.01, 1.0, 10, 64) == pytest.approx(10, abs=1e-3)


def test_setup_follows_the_recipes_own_keys():
    """Speculative decoding, MX weights and router replay."""
    plain = plan_input(load_recipe(LARGE))
    assert (plain.draft_tokens, plain.vllm_mx, plain.replays_routes) == (0, False, False)
    vllm, drafts = "policy.generation.vllm_cfg", "policy.generation.vllm_kwargs.speculative_config"
    keys = [f"{drafts}={{method: eagle3, num_speculative_tokens: 3}}", f"{vllm}.precision=fp8"]
    keys += [f"{vllm}.is_mx=true", f"{vllm}.quantization_ignored_layer_kws=[q_proj, o_proj]"]
    keys += ["policy.router_replay.enabled=true", "cluster.segment_size=2"]
    keys += ["loss_fn.use_importance_sampling_correction=true"]
    setup = plan_input(load_recipe(LARGE, keys))
    assert (setup.draft_tokens, setup.draft_layers) == (3, 1)
    assert (setup.vllm_mx, setup.vllm_bf16_attention, setup.replays_routes) == (True, True, True)
    assert (plain.segment_nodes, setup.segment_nodes) == (0, 2)
    setup = plan_input(load_recipe(LARGE, [f"{drafts}={{method: ngram, num_speculative_tokens: 2}}"]))
    assert (setup.draft_tokens, setup.draft_layers) == (2, 0)


AHEAD = [
    "grpo.async_grpo={enabled: true}",
    "policy.generation.colocated={enabled: false, resources: {num_nodes: 2, gpus_per_node: 8}}",
    "policy.generation.vllm_cfg.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.use_dynamic_sampling=false",
]


def test_refits_wait_for_rollouts_unless_weights_change_in_flight():
    lengths = of_mean(100, 1000)
    assert workload_of(load_recipe(LARGE, AHEAD), lengths).waits_for_rollouts
    in_flight = load_recipe(LARGE, [*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true"])
    assert not workload_of(in_flight, lengths).waits_for_rollouts


def test_scoring_passes_follow_the_variant_and_a_forced_ratio():
    cluster = load_recipe(RECIPES / "cw_grpo" / "cw_grpo-qwen2.5-math-7b-instruct-1n8g.yaml")
    assert scoring_passes(cluster) == 2
    assert scoring_passes(load_recipe(LARGE)) == 1
    batch = f"policy.train_global_batch_size={load_recipe(LARGE).num_sequences_per_step}"
    forced = [batch, "loss_fn.force_on_policy_ratio=true"]
    assert scoring_passes(load_recipe(LARGE, forced)) == 0
    assert scoring_passes(load_recipe(LARGE, [*forced, "grpo.seq_logprob_error_threshold=2.0"])) == 1


def test_acceptance_is_a_share(recipe):
    with pytest.raises(UserError, match=r"--acceptance 1\.5: a share of drafted tokens"):
        plan_recipe(recipe, assumed=Assumptions(acceptance=1.5))
    drafts = "policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 2}"
    drafted, assumed = load_recipe(LARGE, [drafts]), (Assumptions(4000, acceptance=share) for share in (0, 1))
    never, always = (plan_recipe(drafted, assumed=one).forecast.step.phases["tail"] for one in assumed)
    assert never == pytest.approx(3 * always)


def test_hardware_comes_from_a_file(tmp_path):
    file = tmp_path / "gpus.yaml"
    file.write_text("mine:\n  base: h100\n  memory_bandwidth: 6.7e+12\n")
    mine = hardware_of("mine", file)
    assert (mine.memory_bandwidth, mine.bf16_flops) == (6.7e12, H100.bf16_flops)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {base: h10}", "mine.base=h10: unknown; did you mean 'h100'"),
        ("mine: {base: h100, memory_bandwith: 1}", "did you mean 'memory_bandwidth'"),
        ("mine: {base: h100, bf16_flops: 0}", "must be above 0"),
        ("mine: {base: h100, bf16_flops: fast}", "is not a number"),
        ("mine: {bf16_flops: 1}", "mine lacks memory_bytes"),
    ],
)
def test_wrong_hardware_is_refused(tmp_path, text, message):
    file = tmp_path / "gpus.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        hardware_of("mine", file)


def test_best_layout_is_faster_and_fits_when_its_overrides_are_given(recipe, base):
    found = best_layouts(recipe, base)
    assert [one.forecast.step.seconds for one in found] == sorted(one.forecast.step.seconds for one in found)
    assert found[0].forecast.step.seconds < base.step.seconds
    again = forecast_of(load_recipe(LARGE, found[0].overrides))
    assert again.step.seconds == pytest.approx(found[0].forecast.step.seconds)


def test_best_layout_may_give_rollouts_gpus_of_their_own():
    """A small model's step saves waking vLLM; rollouts still wait for the update."""
    small = load_recipe(SMALL)
    found = best_layouts(small, forecast_of(small, 1000))[0]
    assert "policy.generation.colocated.enabled=false" in found.overrides
    again = forecast_of(load_recipe_dict(small.to_dict(), found.overrides), 1000)
    assert again.setup.num_rollout_gpus == found.forecast.setup.num_rollout_gpus > 0
    assert again.work.trajectory_age == 0
    assert again.step.seconds == pytest.approx(found.forecast.step.seconds)


@pytest.mark.parametrize(
    ("sampler", "ahead"),
    [("name: in_order, max_lookahead_versions: 0", 0), ("name: windowed, max_staleness_versions: 3", 3)],
)
def test_rollouts_of_the_single_controller_run_beside_training(sampler, ahead):
    """As far ahead as its sampler allows; a refit does not wait for them."""
    recipe = load_recipe(
        SMALL,
        ["++data_plane.enabled=true", f"++async_rl={{max_buffered_rollouts: 512, sampler: {{{sampler}}}}}",
         "++async_rl.min_groups_for_streaming_train=1", "grpo.val_period=0", "grpo.val_at_start=false",
         "grpo.val_at_end=false", "checkpointing.metric_name=null",
         "policy.generation.vllm_cfg.async_engine=true",
         "++policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}"],
    )  # fmt: skip
    step, work = forecast_of(recipe, 1000).step, workload_of(recipe, of_mean(1000, 4096))
    assert (work.trajectory_age, work.waits_for_rollouts) == (ahead, False)
    both = step.rollout + step.training
    assert step.seconds == pytest.approx(
        both if ahead == 0 else max(step.training, step.steady, both / (ahead + 1))
    )


def test_best_layout_leaves_a_given_microbatch_alone():
    given = load_recipe(LARGE, ["policy.sequence_packing.train_mb_tokens=17408"])
    found = best_layouts(given, forecast_of(given))
    assert {one.forecast.setup.train_tokens for one in found} == {17408}
    assert not any("train_micro_batch_size" in override for one in found for override in one.overrides)


def test_scaling_uses_the_best_layout_of_each_size():
    small = load_recipe(SMALL)
    base = forecast_of(small, 1000)
    points = scaling(small, base, "16,12,8")
    assert [point.num_gpus for point in points] == [8, 12, 16]
    one_node, part, twice = points
    assert (part.strong, part.note) == (None, "not whole nodes of 8 GPUs")
    assert one_node.strong_efficiency == one_node.weak_efficiency == 1
    best = best_layouts(small, base, 1)[0]
    assert (one_node.strong_overrides, one_node.own and one_node.own.step) == (best.overrides, base.step)
    for found, overrides, samples in (
        (twice.strong, twice.strong_overrides, 1),
        (twice.weak, twice.weak_overrides, 2),
    ):
        again = forecast_of(load_recipe(SMALL, overrides), 1000)
        assert again.work.num_samples == samples * base.work.num_samples
        assert again.step.seconds == pytest.approx(found.step.seconds, rel=0.01)
        assert again.step.num_gpus == twice.num_gpus


def test_scaling_refuses_what_has_no_layout(recipe, base):
    for asked, message in (
        ("12", "--scale 12: not whole nodes of 8 GPUs; use multiples of 8"),
        ("2", "--scale 2: no layout fits; use multiples of 8"),
        ("8,0", "--scale 8,0: numbers of GPUs"),
    ):
        with pytest.raises(UserError, match=message):
            scaling(recipe, base, asked)


def test_own_layout_stops_paying_where_less_than_half_of_the_gpus_help(base):
    def point(num_gpus, own):
        def taking(seconds):
            phases = {"prefill": 0, "decode": seconds, "tail": 0}
            setup = replace(base.setup, num_nodes=1, gpus_per_node=num_gpus)
            scenario = replace(base.scenario, setup=setup)
            return replace(base, step=replace(base.step, phases=phases, scenario=scenario))

        return Point(num_gpus, own=taking(own) if own else None, strong=taking(10), weak=taking(10))

    # twice the GPUs have to make a step at least 1.5 times as fast
    assert own_layout([point(4, None), point(8, 90), point(16, 60)]).endswith("pays on all of these GPUs")
    stops = own_layout([point(8, 90), point(16, 61), point(32, 50)])
    assert "stops paying at 16 GPUs: 61 s per step, 10 s with the best one" in stops
    assert "does not divide or fit 16 GPUs, 10 s with" in own_layout([point(8, 90), point(16, None)])
    assert "any of these GPUs" in own_layout([point(8, None)])


def test_bottleneck_is_the_largest_phase(base):
    assert base.step.phases["tail"] == max(base.step.phases.values())
    share = f"{base.step.phases['tail'] / base.step.seconds:.0%}"
    assert base.bottleneck.startswith(f"{share} is the longest responses; lower")


@pytest.mark.parametrize(("limit", "side"), [(2200, "training side"), (5000, "rollouts")])
def test_bottleneck_of_two_sides_is_of_the_longer_one(limit, side):
    forecast = forecast_of(load_recipe(LARGE, [*AHEAD, f"policy.generation.max_new_tokens={limit}"]), 400)
    assert f" of the {side} is " in forecast.bottleneck
    assert at_scale(forecast, 64).setup.num_rollout_gpus == 2 * forecast.setup.num_rollout_gpus == 32


def test_padded_microbatches_have_the_longest_length():
    padded = ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"]
    setup = plan_input(recipe := load_recipe(SMALL, [*padded, "policy.logprob_batch_size=3"]))
    longest = recipe.policy.max_total_sequence_length
    assert (setup.train_tokens, setup.score_tokens) == (2 * longest, 3 * longest)


def test_steps_within_a_time_leave_room_for_a_checkpoint(base):
    step, save = base.step.seconds, base.step.checkpoint
    assert base.steps_within(3 * step + save + 1) == 3
    assert base.steps_within(3 * step + save - 1) == 2
    assert base.steps_within(save) == 0


@pytest.mark.parametrize(
    ("phase", "remedy", "key", "possible", "not_possible"),
    [
        ("forward and backward", "no recomputation", "recompute", ("full",), ()),
        ("scoring", "leave out the KL penalty", "has_penalty", True, False),
        ("optimizer", "no optimizer_cpu_offload", "offload_fraction", 0.5, 0.0),
        ("refit", "fewer stages", "layout", Layout(pipeline=2), Layout()),
        ("refit", "fewer expert ranks", "layout", Layout(expert=2), Layout()),
        ("decode", "FP8 rollouts", "vllm_fp8", False, True),
        ("memory: optimizer", "distributed", "distributed_optimizer", False, True),
        ("memory: optimizer", "cpu_offload", "offload_fraction", 0.0, 1.0),
        ("memory: optimizer", "cpu_offload", "embedded", False, True),
        ("memory: activations", "checkpointing=true", "recompute", ("mlp",), ("full",)),
        ("memory: activations", "micro_batch_size", "train_tokens", 200_000, 1000),
        ("memory: logits", "policy.logprob_chunk_size", "logprob_chunk", 0, 1024),
        ("memory: reference", "leave out the KL penalty", "has_penalty", True, False),
    ],
)
def test_remedy_is_named_where_it_is_possible(base, phase, remedy, key, possible, not_possible):
    def advice(value):
        setup, (kind, _, part) = replace(base.setup, **{key: value}), phase.partition(": ")
        return for_memory(part, setup) if kind == "memory" else for_time(phase, setup, base.work)

    assert remedy in advice(possible)
    assert remedy not in advice(not_possible)
    ahead = [for_time("tail", base.setup, replace(base.work, trajectory_age=age)) for age in (0, 1)]
    assert ["grpo.async_grpo" in text for text in ahead] == [True, False]


def test_penalty_can_be_left_out_only_where_nothing_else_needs_the_reference(recipe):
    penalty = ["loss_fn.reference_policy_kl_penalty=0.01"]
    assert not plan_input(recipe).has_penalty
    assert plan_input(load_recipe(LARGE, penalty)).has_penalty
    erpo = next((RECIPES / "erpo").glob("*-1n8g.yaml"))
    assert plan_input(load_recipe(erpo)).has_penalty is False  # its advantages compare with the reference
