"""What may never happen, whatever the layout: more bandwidth that slows, more work that is faster."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.toys import SETUP

from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.lengths import of_mean
from nemo_grpo.plan.presets import PRESETS
from nemo_grpo.plan.scenario import Scenario
from nemo_grpo.plan.step_time import step_time
from nemo_grpo.plan.workload import Workload
from nemo_grpo.recipe.layout import Layout

MODELS = ("Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")
RATES = ("bf16_flops", "memory_bandwidth", "nvlink_bandwidth", "network_bandwidth", "host_bandwidth")


@st.composite
def cases(draw):
    """A model on up to 512 H100, colocated or one step ahead."""
    name = draw(st.sampled_from(MODELS))
    tp, pp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2)))
    experts = PRESETS[name].num_experts
    layout = Layout(tp, pp, cp, draw(st.sampled_from((1, 8))) if experts else 1, 1, tp > 1)
    nodes = draw(st.sampled_from((8, 16, 64)))
    ahead = draw(st.sampled_from((0, 1, 4)))
    setup = replace(
        SETUP,
        layout=layout,
        num_nodes=nodes,
        gpus_per_node=8,
        num_rollout_gpus=nodes * 4 if ahead else 0,
        train_tokens=4096,
        score_tokens=4096 * draw(st.sampled_from((1, 2))),
        max_length=4096,
        vllm_tensor=draw(st.sampled_from((1, 2, 8))),
        vllm_share=0.8,
    )
    lengths = of_mean(draw(st.sampled_from((200, 1000, 3000))), 3968)
    prompts = draw(st.sampled_from((64, 256)))
    work = Workload(prompts * 8, 8, 1, lengths, draw(st.integers(0, 2)), trajectory_age=ahead)
    return Scenario(PRESETS[name], setup, work, HARDWARE["h100"])


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(RATES), st.floats(1.1, 4))
def test_faster_hardware_is_never_slower(case, rate, factor):
    faster = replace(case.hardware, **{rate: factor * getattr(case.hardware, rate)})
    one, other = step_time(case), step_time(replace(case, hardware=faster))
    assert other.seconds <= one.seconds * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_longer_responses_and_more_passes_are_never_faster(case):
    """Where the cache holds one longer response less, the rollout may take up to 2 % less."""
    work = case.work
    longer = replace(work, lengths=of_mean(work.lengths.mean * 1.2, 3968))
    more = replace(work, scoring_passes=work.scoring_passes + 1)
    one, two, three = (step_time(replace(case, work=w)).seconds for w in (work, longer, more))
    assert two >= one * 0.98
    assert three >= one
