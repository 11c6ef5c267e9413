"""What `test_fake_cuda` runs on a GPU that is not there; each case answers with something that JSON holds."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_cuda import FakeCuda, fake_cuda
from toy_policies import PARAMETERS, hf_model, policy_of, rollout, token_batch
from transformers import Qwen2ForCausalLM  # noqa: F401 - while there is no GPU

from nemo_grpo import VARIANTS, build_objective
from nemo_grpo.core.logprobs import logprobs_and_entropy, next_token_logprobs
from nemo_grpo.engine.megatron import schedule
from nemo_grpo.engine.megatron.lora import LoRASettings
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.nemorl.loss import build_loss
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer

GPU = torch.device("cuda", 0)


def _message(gpu: FakeCuda, function: Callable[[], Any]) -> str:
    """The error that the function raises, or else its waits."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return " ".join(kind for kind, _ in gpu.taken_in_order())


def device() -> dict[str, str]:
    with fake_cuda() as gpu:
        x, y = torch.randn(4, 8, device="cuda"), torch.randn(4, 8)
        w = torch.randn(8, 8, device="cuda", requires_grad=True)
        (x @ w).sum().backward()
        cases: dict[str, Callable[[], Any]] = {
            "add": lambda: x + x + torch.ones(()),
            "mixed": lambda: x + y,
            "mixed in place": lambda: x.add_(y),
            "item": lambda: x.sum().item(),
            "if": lambda: 1 if x.sum() > 0 else 0,
            "tolist": lambda: x.tolist(),
            "cpu": lambda: x.cpu() + y,
            "to": lambda: y.to("cuda") + x,
            "to, pinned": lambda: y.pin_memory().to("cuda", non_blocking=True) + x,
            "tensor": lambda: torch.tensor([1.0], device="cuda"),
            "index": lambda: x[torch.tensor([0, 1])],
            "mask": lambda: x[x > 0],
            "nonzero": lambda: x.nonzero(),
            "synchronize": lambda: torch.cuda.synchronize(),
            "reduce": lambda: torch.distributed.all_reduce(x),
            "reduce on the CPU": lambda: torch.distributed.all_reduce(y),
        }
        found = {name: _message(gpu, case) for name, case in cases.items()}
        assert w.grad is not None
        return found | {"gradient": str(w.grad.device)}


def losses() -> dict[str, dict[str, Any]]:
    """Waits of each variant's loss with its backward pass: ours, and NeMo-RL's object."""
    found: dict[str, dict[str, Any]] = {}
    (sequences, rewards), scores = rollout(), -torch.rand(9, 15)
    further = {"entropies": -scores, "reference_policy_logprobs": scores - 0.1}
    with fake_cuda() as gpu:
        for variant in VARIANTS:
            objective = build_objective(variant, **PARAMETERS.get(variant, {}))
            prepared = objective.prepare(token_batch(sequences, rewards, scores, **further)).to(GPU)
            toks, seqs = prepared.batch.mask.sum(), prepared.batch.sample_mask.sum()
            logits = torch.randn(9, 15, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            targets = torch.randint(96, (9, 15), device="cuda")
            rows = torch.arange(9, device="cuda")
            gpu.taken()
            logprobs, entropies = logprobs_and_entropy(
                logits, targets, temperature=0.9, chunk_size=16, vocab_size=90
            )
            part = prepared.select(rows, next_token_logprobs=logprobs, length=15)
            loss, metrics = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
            (loss + entropies.sum()).backward()
            devices = {str(x.device) for x in (loss, logits.grad, *metrics.values())}
            found[variant] = {"waits": gpu.taken(), "devices": sorted(devices)}

            data = {
                "advantages": prepared.advantages,
                "prev_logprobs": prepared.batch.prev_logprobs,
                "generation_logprobs": prepared.batch.prev_logprobs,
                "reference_policy_logprobs": prepared.batch.reference_policy_logprobs,
                "token_mask": prepared.batch.token_mask.float(),
            }
            if prepared.token_weights is not None:
                data["token_weights"] = prepared.token_weights
            data = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in data.items()}
            data["sample_mask"] = torch.ones(9, device="cuda")
            logprobs = next_token_logprobs(logits, targets, chunk_size=16)
            nemo = build_loss({"variant": variant, **PARAMETERS.get(variant, {})})
            loss, _ = nemo(logprobs, data, seqs, toks)
            loss.backward()
            found[variant]["nemo_rl"] = gpu.taken()
    return found


def policy(world_size: int, layout: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Score, reference, update, weights, checkpoint: waits inside megatron-core's schedule, and elsewhere."""
    with fake_cuda(world_size) as gpu:
        made = _policy(layout, how)
        inside: list[Any] = []

        def watched() -> Callable[..., Any]:
            run = original()

            def counted(**arguments: Any) -> Any:
                before = len(gpu.waits)
                result = run(**arguments)
                inside.extend(gpu.waits[before:])
                return result

            return counted

        original = schedule.get_forward_backward_func
        arguments = {"micro_batch_size": how["rows"], "temperature": 0.9, "mb_tokens": how.get("mb_tokens")}
        sequences, rewards = rollout()
        found: dict[str, Any] = {}
        gpu.taken()
        with mock.patch.object(schedule, "get_forward_backward_func", watched):
            scores = made.score(sequences, **arguments)
            found["score"] = gpu.taken()
            with made.reference_weights():
                reference = made.score(sequences, **arguments, with_entropies=False).logprobs
            found["reference"] = gpu.taken()
            objective = build_objective(how["variant"])
            further = {"entropies": scores.entropies, "reference_policy_logprobs": reference}
            prepared = objective.prepare(token_batch(sequences, rewards, scores.logprobs, **further))
            result = made.update(
                objective, prepared, sequences, scoring=how.get("scoring", False), **arguments
            )
            found["update"] = gpu.taken()
        weights = {name: str(x.device) for name, x in made.named_tensors()}
        return found | {
            "inside": inside,
            "loss": result.metrics["loss/total"],
            "weights": sorted(set(weights.values())),
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        }


def _policy(layout: dict[str, Any], how: dict[str, Any]) -> MegatronPolicy:
    return policy_of(
        hf_model(),
        MegatronOptimizer(lr=1e-3, weight_decay=0.0),
        keep_reference=True,
        dtype=getattr(torch, how.get("dtype", "bfloat16")),
        device=GPU,
        layout=Layout(**layout),
        lora=LoRASettings(4, 8) if how.get("lora") else None,
        config_fields=how.get("fields", {}),
    )


def checkpoint(folder: str) -> dict[str, Any]:
    from nemo_grpo.engine.megatron.checkpoint import begin_save, load_policy

    with fake_cuda():
        made = _policy({}, {})
        devices = []
        for behind in (False, True):
            begin_save(made, Path(folder) / str(behind), 1, behind=behind).finish()
            load_policy(made, Path(folder) / str(behind))
            devices.append(sorted({str(p.device) for p in made.model.parameters()}))
        return {"devices": devices, "files": sorted(p.name for p in (Path(folder) / "True").iterdir())}


def benchmark(output: str) -> dict[str, Any]:
    """`gpu_policy_update`'s main on a tiny shape; the layers that do without FP8 stand in for FP8's."""
    import gpu_policy_update as script

    asked = []
    measure = script.measure

    def without_fp8(precision: str, shape: Any, fields: dict[str, Any], *more: Any, **how: Any) -> Any:
        asked.append(fields)
        return measure(precision, shape, {}, *more, **how)

    tiny = {"tiny": script.Shape(64, 2, 4, 2, 128, 96, True)}
    line = ["--length=9", "--sequences=8", "--micro-batch-size=4", "--steps=8", f"--output={output}"]
    with (
        fake_cuda(),
        mock.patch.multiple(script, SHAPES=tiny, measure=without_fp8),
        mock.patch("nemo_grpo.engine.megatron.options.fp8_refusals", return_value=[]),
        mock.patch.object(sys, "argv", ["gpu_policy_update.py", *line]),
    ):
        return {"exit": script.main(), "fields": asked}


def gpu_tests(folder: str) -> list[str]:
    """The bodies of tests/gpu that need no numbers."""
    import test_policy_gpu as tests

    with fake_cuda():
        tests.test_packed_sequences_give_the_same_update(tests.LOCAL)
        tests.test_recompute_gives_the_same_update(tests.LOCAL)
        tests.test_a_checkpoint_of_transformer_engine_resumes(Path(folder))
        return sorted(path.name for path in Path(folder).iterdir())


if __name__ == "__main__":
    print(json.dumps([globals()[name](**arguments) for name, arguments in json.loads(sys.argv[1])]))  # noqa: T201
