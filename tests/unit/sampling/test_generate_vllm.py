"""The vLLM generator against a stand-in with vLLM's interface: what is asked, what comes of the answers."""

import importlib.machinery
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from PIL import Image

from nemo_grpo.sampling.generate_vllm import VLLMGenerator, vllm_device
from nemo_grpo.sampling.requests import Request, SamplingParams, Turn
from nemo_grpo.support.errors import UserError

END = 9


@dataclass
class Params:
    """The fields of vllm.SamplingParams that are used, with its names and defaults (0.11)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_kind: str = "cumulative"


class LLM:
    """Response i to a prompt is its first token, i times, then END if there is room, a token a step.

    i is what a seed is above the first one of its prompt in a call. Token 7 is the stop text ``</search>``.
    """

    def __init__(
        self, model, *, tensor_parallel_size=1, dtype="auto", seed=None, gpu_memory_utilization=0.9, **kwargs
    ):
        assert set(kwargs) <= {
            "max_model_len", "logprobs_mode", "generation_config", "kv_cache_memory_bytes", "enforce_eager",
            "enable_chunked_prefill", "limit_mm_per_prompt",
        }  # fmt: skip
        if model == "too/large":
            raise ValueError("\nNo available memory for the cache blocks.\n  Lower max_model_len.\n")
        self.options = {"model": model, "dtype": dtype, **kwargs}
        self.llm_engine, self.calls, self.going = self, [], {}
        LLM.last = self

    def add_request(self, request_id, prompt, params):
        if not self.going:
            self.calls.append(([], []))
            self.first = {}
        prompts, sampling_params = self.calls[-1]
        prompts.append(prompt)
        sampling_params.append(params)
        number = params.seed - self.first.setdefault(prompt["prompt_token_ids"][0], params.seed)
        self.going[request_id] = self._answer(prompt["prompt_token_ids"], params, number % 1000)

    def _answer(self, prompt, params, number):
        assert params.output_kind == "delta"
        ids = ([prompt[0]] * min(number, 9) + [END])[: params.max_tokens]
        stop_reason = END if ids[-1] == END else None
        if 7 in ids and params.detokenize and "</search>" in (params.stop or ()):
            assert params.include_stop_str_in_output
            ids, stop_reason = ids[: ids.index(7) + 1], "</search>"
        return [*enumerate(ids)], stop_reason

    def has_unfinished_requests(self):
        return bool(self.going)

    def step(self):
        answers = []
        for request_id, (left, stop_reason) in reversed(self.going.items()):  # in any order
            place, token = left.pop(0)
            output = SimpleNamespace(
                token_ids=[token],
                logprobs=[{token: SimpleNamespace(logprob=-0.5 - place)}],
                stop_reason=None if left else stop_reason,
            )
            answers.append(SimpleNamespace(request_id=request_id, outputs=[output], finished=not left))
        self.going = {request_id: one for request_id, one in self.going.items() if one[0]}
        return answers


@pytest.fixture(params=["cuda"])
def platform(request, monkeypatch):
    module, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    kinds = ModuleType("vllm.sampling_params")
    kinds.RequestOutputKind = SimpleNamespace(DELTA="delta")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = LLM, Params
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: request.param == "cpu")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")  # what the generator sets goes with the test
        monkeypatch.delenv(name)
    return request.param


@pytest.fixture
def generator(platform):
    return VLLMGenerator("some/model", "bfloat16", max_model_len=32)


SAMPLING = SamplingParams(2, temperature=0.7, stop_token_ids=(END,))


def test_rows_belong_to_prompts_and_stop_tokens_to_responses(generator):
    rollout = generator.generate(Request([[3, 4, 5], [6]], 3, SAMPLING, 1))
    assert rollout.tokens.tolist() == [[END, 0], [3, END], [3, 3], [END, 0], [6, END], [6, 6]]
    assert rollout.lengths.tolist() == [1, 2, 2, 1, 2, 2]
    assert rollout.truncated.tolist() == [False, False, True, False, False, True]
    assert rollout.logprobs.tolist()[:3] == [[-0.5, 0.0], [-0.5, -1.5], [-0.5, -1.5]]


def test_what_is_asked_of_vllm(generator):
    generator.generate(Request([[3, 4]], 3, SamplingParams(7, 0.6, 0.95, 20, (END, 8)), 1))
    requests, (params, second, third) = LLM.last.calls[0]
    assert requests == [{"prompt_token_ids": [3, 4]}] * 3
    assert (second.seed, third.seed) == (params.seed + 1, params.seed + 2)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert (params.max_tokens, params.stop_token_ids, params.ignore_eos) == (7, [END, 8], True)
    generator.generate(Request([[3]], 1, SamplingParams(7, 0.6, 0.95, 20, (END,), greedy=True), 1))
    (_, (params,)) = LLM.last.calls[1]
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 0)
    assert LLM.last.options == {
        "model": "some/model", "dtype": "bfloat16", "max_model_len": 32,
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "kv_cache_memory_bytes": None,
    }  # fmt: skip


def test_every_token_and_every_end_is_counted(generator):
    told = []
    generator.generate(Request([[3], [6]], 3, SAMPLING, 1, meter=lambda *step: told.append(step)))
    # responses of 1, 2, 2, 1, 2, 2 tokens, each with one more in each step
    assert told == [(6, 2), (4, 4)]


@pytest.mark.parametrize("platform", ["cpu"], indirect=True)
def test_a_cpu_gets_a_cache_of_1_gib_and_whole_prompts(generator):
    options = LLM.last.options
    assert (options["kv_cache_memory_bytes"], options["enable_chunked_prefill"]) == (2**30, False)
    VLLMGenerator("some/model", max_model_len=32, cache_bytes=5)
    assert LLM.last.options["kv_cache_memory_bytes"] == 5


def test_what_vllm_says_of_a_model_is_one_line(platform):
    with pytest.raises(UserError, match=r"too/large: No available memory .* blocks\. Lower max_model_len\.$"):
        VLLMGenerator("too/large", max_model_len=32)


@pytest.mark.parametrize("platform", ["cpu", "cuda"], indirect=True)
def test_the_device_is_what_vllm_is_built_for(platform):
    other = {"cpu": "cuda", "cuda": "cpu"}[platform]
    assert vllm_device("auto") == vllm_device(platform) == platform
    with pytest.raises(UserError, match=f"device={other}.* on {platform} only"):
        vllm_device(other)


@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_temperatures_that_vllm_replaces_or_refuses_are_user_errors(generator, temperature):
    with pytest.raises(UserError, match=f"temperature={temperature}: .* between 0.01 and 2"):
        generator.generate(Request([[3]], 1, SamplingParams(2, temperature), 1))
    generator.generate(Request([[3]], 1, SamplingParams(2, temperature, greedy=True), 1))


def test_seeds_stay_with_prompts_and_differ_between_copies(generator):
    def seeds(prompts, seed):
        generator.generate(Request(prompts, 1, SAMPLING, seed))
        return [params.seed for params in LLM.last.calls[-1][1]]

    first, second, copy = seeds([[3], [4], [3]], 1)
    assert len({first, second, copy}) == 3
    assert seeds([[4], [3]], 1) == [second, first]
    assert seeds([[3]], 2) != [first]


def pictures(folder, *colors):
    for color in colors:
        Image.new("RGB", (4, 4), color).save(folder / f"{color}.png")
    return [(str(folder / f"{color}.png"),) for color in colors]


def test_images_go_with_their_prompts_and_into_their_seeds(platform, tmp_path):
    images = pictures(tmp_path, "red", "blue", "red")
    generator = VLLMGenerator("some/model", max_model_len=32, max_images=2)
    assert LLM.last.options["limit_mm_per_prompt"] == {"image": 2, "video": 0}

    def asked(images):
        generator.generate(Request([[3]] * len(images), 1, SAMPLING, 1, images=images))
        return LLM.last.calls[-1]

    prompts, params = asked(images)
    assert [p["multi_modal_data"]["image"][0].getpixel((0, 0)) for p in prompts] == [
        (255, 0, 0), (0, 0, 255), (255, 0, 0),
    ]  # fmt: skip
    red, blue, again = (p.seed for p in params)
    assert len({red, blue, again}) == 3
    assert [p.seed for p in asked(images[1::-1])[1]] == [blue, red]
    generator.generate(Request([[3]], 1, SAMPLING, 1))
    assert LLM.last.calls[-1][0] == [{"prompt_token_ids": [3]}]


def test_a_file_that_is_no_picture_is_a_user_error(platform, tmp_path):
    (tmp_path / "x.png").write_text("no")
    generator = VLLMGenerator("some/model", max_model_len=32, max_images=1)
    with pytest.raises(UserError, match=r"x\.png: not a picture"):
        generator.generate(Request([[3]], 1, SAMPLING, 1, images=[(str(tmp_path / "x.png"),)]))


@pytest.mark.parametrize(
    ("sampling", "known"),
    [
        (SamplingParams(2, stop_token_ids=(END,)), True),
        (SamplingParams(2, temperature=0.5, stop_token_ids=(END,)), True),
        (SamplingParams(2, top_p=0.9, stop_token_ids=(END,)), False),
        (SamplingParams(2, temperature=0.5, top_p=0.9, greedy=True, stop_token_ids=(END,)), True),
    ],
)
def test_logprobs_that_vllm_cannot_tell_are_nan_and_0_behind_the_end(generator, sampling, known):
    rollout = generator.generate(Request([[3]], 2, sampling, 1))
    assert rollout.logprobs[1].tolist() == [-0.5, -1.5] if known else torch.isnan(rollout.logprobs[1]).all()
    assert rollout.logprobs[0, 1] == 0


def test_a_turn_ends_at_a_stop_text_or_at_what_its_response_has_left(generator):
    turn = Turn([1, 3], SimpleNamespace(texts=("</search>", "</answer>")))
    rollout = generator.generate(Request([[3], [7]], 3, SamplingParams(4, stop_token_ids=(END,)), 1, turn))
    assert rollout.tokens.tolist() == [[END], [3], [3], [END], [7], [7]]
    assert rollout.truncated.tolist() == [False, True, True, False, False, False]
    assert not LLM.last.calls[0][1][0].skip_special_tokens  # a stop text may be one
    with pytest.raises(UserError, match=r"max_model_len=32.*31 tokens and max_new_tokens=2"):
        generator.generate(Request([[3] * 31, [3]], 1, SAMPLING, 1, Turn([2, 2], turn.end)))
