"""Every formula of a step's time against numbers worked out by hand."""

from dataclasses import replace

import pytest
from unit.plan.toys import CASE, EXPERTS, FREE, GPU, MATRICES, PARAMETERS, PEAK, SETUP, SMALL, WORK

from nemo_grpo.plan import rollout_time, training_time
from nemo_grpo.plan import scenario as collectives
from nemo_grpo.plan import step_time as transfer_time
from nemo_grpo.plan.forecast import Forecast
from nemo_grpo.plan.hardware import OTHER
from nemo_grpo.plan.step_time import StepTime, step_time
from nemo_grpo.recipe.layout import Layout


def test_ring_collectives_move_their_share():
    # 1000 bytes over 4 ranks of a domain: 3/4 x 1000 / 1e4; an all-reduce twice that
    assert collectives.gather_seconds(CASE, 1000, 4, 4) == pytest.approx(0.075)
    assert collectives.reduce_seconds(CASE, 1000, 4) == pytest.approx(0.15)
    # 16 ranks are two domains of 8: 2 x 7/8 x 1000 / 1e4 inside, 2 x 1/2 x 1000 / 8 / 1e3 across
    assert collectives.reduce_seconds(CASE, 1000, 16) == pytest.approx(0.175 + 0.125)
    assert collectives.gather_seconds(CASE, 1000, 16, 16) == pytest.approx(15 / 16 * 1000 / 1e3)
    # an all-to-all waits for its slower side: 8 of 16 ranks near, 8/16 over the network, 7/16 over NVLink
    assert collectives.exchange_seconds(CASE, 1000, 16, 1) == pytest.approx(0.5)
    assert collectives.exchange_seconds(CASE, 1000, 8, 1) == pytest.approx(7 / 8 * 0.1)


def test_a_job_beyond_one_nvlink_domain_is_sure_of_a_node_alone():
    def rate(num_nodes, segment=0):
        setup = replace(SETUP, num_nodes=num_nodes, gpus_per_node=4, segment_nodes=segment)
        return 500 / collectives.gather_seconds(replace(CASE, setup=setup), 1000, 2, span=8)

    # 8 GPUs are a domain: two nodes of 4 fit into it, four nodes do not, unless pairs are kept together
    assert (rate(2), rate(4), rate(4, segment=2), rate(4, segment=4)) == (1e4, 1e3, 1e4, 1e4)


def test_a_slower_host_lengthens_fixed_times_alone():
    eff = replace(FREE, layer=7.0, decode=5.0, step=2.0)
    slow = replace(CASE, eff=eff, hardware=replace(GPU, host_slowdown=3.0))
    assert training_time.layer_seconds(slow, 1, is_dense=True)[0] == 21
    assert step_time(slow).phases["rewards, data, logs"] == 6
    one, other = (rollout_time.engine_of(case).iteration(3, 10) for case in (replace(CASE, eff=eff), slow))
    assert other - one == pytest.approx(10)
    assert training_time.scoring_seconds(replace(slow, eff=FREE)) == training_time.scoring_seconds(CASE)


def test_decoding_reads_weights_and_cache_once():
    engine = rollout_time.engine_of(CASE)
    # 2 bytes x matrices of a layer, output matrix 800; 2 x 2 heads x 2 columns x 2 bytes of a layer's cache
    assert (engine.layers, engine.dense, engine.head) == (4, 2 * MATRICES, 2 * 800)
    assert engine.cache == 16
    # 3 sequences with 10 tokens: weights 6208 bytes / 1e5, cache 3 x 10 x 64 / 1e5; products 3 x 6208 / 1e6
    assert engine.iteration(3, 10) == pytest.approx(0.06208 + 0.0192)
    # with 100 sequences the products take longer than the weights
    assert engine.iteration(100, 0) == pytest.approx(100 * 6208 / PEAK)


def test_decoding_reads_the_experts_that_were_chosen():
    engine = rollout_time.engine_of(replace(CASE, shape=EXPERTS))
    assert engine.expert == 2 * 4 * 384
    # one token chooses 2 of 4; two tokens 4 x (1 - 1/4) = 3
    one, two = (engine.iteration(n, 0) for n in (1, 2))
    assert two - one == pytest.approx((3 - 2) / 4 * 4 * engine.expert / 1e5)
    # tokens that are not independent choose as one does
    alike = replace(CASE, shape=EXPERTS, eff=replace(FREE, routes=0.0))
    assert rollout_time.engine_of(alike).iteration(2, 0) == pytest.approx(one)


def test_a_pass_checks_drafts_and_keeps_those_before_the_first_refusal():
    assert rollout_time.kept_tokens(0, 0.9) == 1
    assert rollout_time.kept_tokens(3, 1.0) == 4
    assert rollout_time.kept_tokens(2, 0.5) == 1.75
    eff, work = replace(FREE, decode=0.1), replace(WORK, acceptance=0.5)
    case = replace(CASE, eff=eff, work=work, setup=replace(SETUP, draft_tokens=2, draft_layers=1))
    # 3 sequences with 10 tokens: weights 6208 bytes, cache 3 x 10 x 64, and the fixed time; its products of
    # 3 x 3 tokens take less. Twice a layer of 1152 and the output matrix of 1600, a layer's cache of 16
    checked = 0.06208 + 0.0192 + 0.1
    drafted = 0.02752 + 0.0048 + rollout_time.DRAFT * 0.1
    seconds = rollout_time.engine_of(case).iteration(3, 10)
    assert seconds == pytest.approx((checked + 2 * drafted) / 1.75)
    # with many sequences three times the products count
    many = rollout_time.engine_of(replace(case, eff=FREE)).iteration(100, 0)
    assert many == pytest.approx((3 * 100 * 6208 + 2 * 100 * 2752) / PEAK / 1.75)
    # n-grams need no model
    counted = replace(case, setup=replace(SETUP, draft_tokens=2))
    assert rollout_time.engine_of(counted).iteration(3, 10) == pytest.approx(checked / 1.75)


def test_fp8_weights_have_scales_and_may_leave_attention_alone():
    fp8 = replace(SETUP, vllm_fp8=True)
    feed_forward, attention = 384, 192

    def dense(setup):
        return rollout_time.engine_of(replace(CASE, setup=setup)).dense

    assert dense(fp8) == MATRICES
    assert dense(replace(fp8, vllm_mx=True)) == MATRICES * 33 / 32
    assert dense(replace(fp8, vllm_bf16_attention=True)) == feed_forward + 2 * attention
    assert dense(replace(SETUP, vllm_bf16_attention=True)) == 2 * MATRICES


def test_mx_weights_are_widened_before_blackwell():
    mx = replace(CASE, setup=replace(SETUP, vllm_fp8=True, vllm_mx=True))
    # 100 sequences: their products take longest, in BF16 on Hopper and at twice its peak on Blackwell
    hopper, blackwell = (
        rollout_time.engine_of(replace(mx, hardware=replace(GPU, compute_capability=cc))).iteration(100, 0)
        for cc in (9.0, 10.0)
    )
    assert hopper == pytest.approx(100 * 6208 / PEAK)
    assert blackwell == pytest.approx(hopper / 2)
    # attention in BF16 beside it counts twice: 192 of the 576 weights of each of 4 layers
    mixed = replace(mx, hardware=replace(GPU, compute_capability=10.0))
    mixed = replace(mixed, setup=replace(mixed.setup, vllm_bf16_attention=True))
    more = 100 * 2 * 4 * 192 / (2 * PEAK)
    assert rollout_time.engine_of(mixed).iteration(100, 0) == pytest.approx(blackwell + more)


def test_rollout_ends_with_its_longest_response():
    engine = rollout_time.engine_of(CASE)
    work = replace(WORK, lengths=replace(WORK.lengths, responses=(2.0, 6.0)))
    seconds = rollout_time.rollout_seconds(replace(CASE, work=work))
    # 8 responses for 2 tokens at 4 + 1 in the cache, then 4 for the other 4 tokens at 4 + 4
    assert seconds["decode"] == pytest.approx(2 * engine.iteration(8, 5))
    assert seconds["tail"] == pytest.approx(4 * engine.iteration(4, 8))
    # two prompts of 4 tokens: 2 x 4 x products of one token
    assert seconds["prefill"] == pytest.approx(2 * 4 * 6208 / PEAK)


def test_responses_that_find_no_place_wait_and_draws_repeat():
    setup = replace(SETUP, vllm_max_sequences=4)
    case = replace(CASE, setup=setup)
    engine = rollout_time.engine_of(case)
    seconds = rollout_time.rollout_seconds(case)
    # 4 of 8 wait: 6 tokens of 4 at 4 + 3 in the cache, then 6 more until the last ends
    waiting, last = (6 * engine.iteration(4, 7) for _ in range(2))
    assert seconds["decode"] + seconds["tail"] == pytest.approx(waiting + last)
    once = rollout_time.rollout_seconds(CASE)
    more = rollout_time.rollout_seconds(replace(CASE, work=replace(WORK, num_draws=2.5)))
    assert more == {name: pytest.approx(2.5 * seconds) for name, seconds in once.items()}


def test_flops_of_a_token():
    # products 2 x 576; attention to 5 tokens 4 x 5 x 8
    assert training_time.layer_flops(SMALL, 5) == (2 * MATRICES, 160, 0)
    assert training_time.layer_flops(EXPERTS, 5, is_dense=False) == (2 * (192 + 32), 160, 2 * 2 * 384)
    assert training_time.model_flops(SMALL, 5) == 4 * (2 * MATRICES + 160) + 2 * 100 * 8


def test_scoring_computes_every_token_once():
    # 8 sequences of 10 tokens, two of them in a row of 20: attended tokens 5
    seconds = training_time.scoring_seconds(CASE)
    products = 80 * (4 * (2 * MATRICES + 160) + 2 * 800) / PEAK
    assert seconds == pytest.approx(products + 3 * 4 * 80 * 100 / 1e5)


def test_update_costs_three_or_four_forward_passes():
    forward = training_time.scoring_seconds(CASE)
    update = training_time.update_seconds(CASE)
    assert update["forward and backward"] == pytest.approx(3 * forward)
    again = training_time.update_seconds(replace(CASE, setup=replace(SETUP, recompute=("full",))))
    assert again["forward and backward"] == pytest.approx(4 * forward)
    # 10 bytes of state per parameter read and written, gradients of 2 read; 3976 parameters, at 1e5 bytes/s
    assert update["optimizer"] == pytest.approx(22 * PARAMETERS / 1e5)
    assert update["pipeline bubble"] == update["gradients"] == 0


def test_pipeline_waits_for_its_bubble():
    assert training_time.bubble(4, 6) == 9 / 6
    setup = replace(SETUP, layout=Layout(pipeline=2), gpus_per_node=2)
    update = training_time.update_seconds(replace(CASE, setup=setup))
    # 4 rows of 20 tokens and 2 stages: one row more
    assert update["pipeline bubble"] == pytest.approx(update["forward and backward"] / 4)


def test_tensor_parallel_divides_products_and_gathers_activations():
    case = replace(CASE, setup=replace(SETUP, layout=Layout(tensor=2, sequence_parallel=True)))
    kernels, talk = training_time.layer_seconds(case, 20, is_dense=True)
    assert kernels == pytest.approx(20 * (2 * MATRICES + 160) / 2 / PEAK)
    # two all-gathers and two reduce-scatters of 20 tokens x 8 x 2 bytes, half of each sent
    assert talk == pytest.approx(4 * 320 / 2 / 1e4)


def test_experts_products_and_exchange():
    setup = replace(SETUP, layout=Layout(expert=4), gpus_per_node=4)
    kernels, talk = training_time.layer_seconds(replace(CASE, shape=EXPERTS, setup=setup), 20, is_dense=False)
    assert kernels == pytest.approx(20 * (2 * (192 + 32) + 160 + 2 * 2 * 384) / PEAK)
    # 20 tokens x 2 experts x 8 x 2 bytes there and back, 3/4 of them to other ranks
    assert talk == pytest.approx(2 * 640 * 3 / 4 / 1e4)
    # a layer takes its least time
    slow = replace(CASE, eff=replace(FREE, layer=7.0, expert_layer=9.0))
    assert training_time.layer_seconds(slow, 1, is_dense=True)[0] == 7
    assert training_time.layer_seconds(replace(slow, shape=EXPERTS), 1, is_dense=False)[0] == 9


def test_fp8_gains_more_from_wide_matrices():
    wide = replace(SMALL, hidden_size=800, ffn_size=1600, head_dim=200)

    def gain(shape):
        both = [replace(CASE, shape=shape, setup=replace(SETUP, fp8_training=fp8)) for fp8 in (False, True)]
        bf16, fp8 = (training_time.layer_seconds(case, 20, is_dense=True)[0] for case in both)
        return bf16 / fp8

    assert gain(SMALL) < gain(wide) < 2


def test_context_parallel_passes_keys_and_values_on():
    setup = replace(SETUP, layout=Layout(context=2), gpus_per_node=2)
    _, talk = training_time.layer_seconds(replace(CASE, setup=setup), 10, is_dense=True)
    # keys and values, 2 x 2 bytes x 4 columns, of 2 x 10 tokens, half of them another rank's
    assert talk == pytest.approx(16 * 20 / 2 / 1e4)


def test_refit_moves_the_model_where_it_is_divided():
    assert transfer_time.refit_seconds(CASE) == 0
    near = replace(SETUP, layout=Layout(tensor=2))
    assert transfer_time.refit_seconds(replace(CASE, setup=near)) == pytest.approx(2 * PARAMETERS / 1e4)
    far = replace(SETUP, layout=Layout(tensor=2, pipeline=8))
    assert transfer_time.refit_seconds(replace(CASE, setup=far)) == pytest.approx(2 * PARAMETERS / 1e3)


def test_refit_counts_tensors_and_waking():
    # 9 tensors in each of 4 layers, and 3; with experts 6 and 3 for each of 4
    assert transfer_time.num_tensors(SMALL) == 39
    assert transfer_time.num_tensors(EXPERTS) == 3 + 4 * (6 + 12)
    slow = replace(CASE, eff=replace(FREE, tensor=0.5, refit=3.0))
    assert transfer_time.refit_seconds(slow) == 3 + 39 * 0.5
    # engines of their own load while the next buffer comes: the longer of 19.5 s and the transfer
    apart = replace(SETUP, gpus_per_node=2, num_rollout_gpus=1)
    assert transfer_time.refit_seconds(replace(slow, setup=apart)) == 39 * 0.5


def test_checkpoint_is_written_by_all_nodes():
    assert transfer_time.checkpoint_seconds(SMALL, SETUP, saves_optimizer=True) == 14 * PARAMETERS / 2e9
    assert transfer_time.checkpoint_seconds(SMALL, SETUP, saves_optimizer=False) == 2 * PARAMETERS / 2e9


def step(age, rollout, training, steady):
    phases = {"prefill": 0.0, "decode": rollout, "tail": 0.0, "forward and backward": training}
    case = replace(CASE, work=replace(WORK, trajectory_age=age), setup=replace(SETUP, gpus_per_node=4))
    return StepTime(case, phases, steady, 5.0, 7.0)


def test_phases_of_a_step_in_turn_add_up():
    assert step(0, 30, 20, 0).seconds == 50


def test_rollouts_that_run_ahead_overlap_with_training():
    assert step(1, 10, 20, 0).seconds == 20
    assert step(1, 30, 20, 0).seconds == 25
    assert step(8, 90, 20, 30).seconds == 30


def test_rollouts_that_a_refit_waits_for_overlap_with_training_alone():
    waits = step(4, 30, 20, 0)
    waits.phases["refit"] = 5.0
    work = replace(waits.scenario.work, waits_for_rollouts=True)
    waits = replace(waits, scenario=replace(waits.scenario, work=work))
    assert waits.seconds == 30 + 5
    assert replace(waits, phases=waits.phases | {"decode": 10.0}).seconds == 20 + 5


def test_router_replay_moves_the_chosen_experts():
    # 80 tokens x 4 layers x 2 experts, a byte each, twice; two bytes where there are more than 128 experts
    replayed = replace(CASE, shape=EXPERTS, setup=replace(SETUP, replays_routes=True))
    assert transfer_time.route_seconds(replayed) == pytest.approx(2 * 640 / transfer_time.ROUTES)
    many = replace(replayed, shape=replace(EXPERTS, num_experts=129))
    assert transfer_time.route_seconds(many) == 2 * transfer_time.route_seconds(replayed)
    logs = [
        step_time(case).phases["rewards, data, logs"] for case in (replayed, replace(replayed, setup=SETUP))
    ]
    assert logs[0] - logs[1] == pytest.approx(transfer_time.route_seconds(replayed))


def test_throughput_counts_all_gpus():
    assert step(0, 30, 20, 0).tokens_per_second_per_gpu == 80 / 50 / 4


def step_of_55_seconds():
    in_turn = step(0, 30, 20, 0)
    update = {"pipeline bubble": 0.0, "gradients": 0.0, "optimizer": 5.0}
    return replace(in_turn, phases=in_turn.phases | update)


def test_mfu_is_of_the_update():
    flops = training_time.model_flops(SMALL, WORK.lengths.attended)
    assert step_of_55_seconds().mfu == pytest.approx(3 * 80 * flops / (25 * 4 * PEAK))


def test_a_run_is_steps_validations_checkpoints():
    # 10 steps of 55 s, 2 validations of 5 s, 4 checkpoints of 7 s
    predicted = step_of_55_seconds()
    work = replace(WORK, num_steps=10, val_period=5, save_period=3)
    predicted = replace(predicted, scenario=replace(predicted.scenario, work=work))
    assert Forecast(predicted, OTHER).run_seconds == 550 + 10 + 28


def test_work_outside_the_gpus_has_a_time_per_step_with_one_per_response():
    case = replace(CASE, eff=replace(FREE, step=2.0, sample=0.5))
    assert step_time(case).phases["rewards, data, logs"] == 2 + 8 * 0.5


def test_a_second_scoring_pass_is_that_of_the_reference():
    both = step_time(replace(CASE, work=replace(WORK, scoring_passes=2))).phases
    once = step_time(CASE).phases
    assert both["scoring"] == pytest.approx(2 * once["scoring"])
    # the optimizer's state goes to the host and back: 2 x 10 bytes x 3976 parameters; the reference comes too
    assert once["swaps to the host"] == pytest.approx(20 * PARAMETERS / 1e3)
    assert both["swaps to the host"] == pytest.approx(24 * PARAMETERS / 1e3)
