"""What stands for the parts of NeMo-RL's own recipes that need a network or a GPU.

The data are a few sums in NeMo-RL's own `ResponseDataset`, or a few pictures that NeMo-RL's class of the data
set reads in place of those that it downloads; environment, processor and prompt stay. The small model learns
to answer as NeMo-RL's environments read answers, so that its groups have signal.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_grpo.dotted import value_of
from nemo_grpo.errors import UserError, as_yaml
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.host import VISION_PROCESSOR, data_sets, prompt_file
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM
from nemo_grpo.rehearsal.changes import Change
from nemo_grpo.tasks.jsonl import FileTaskConfig, read_problems, write_problems
from nemo_grpo.tasks.mathematics import MathConfig, sum_problem
from nemo_grpo.tasks.prompts import SLOT, Prompt
from nemo_grpo.tasks.vision import VisionClassificationConfig

ENVIRONMENTS = ("math", "math_multi_reward")
"""NeMo-RL's environments whose rewards the small model can earn."""
PROCESSORS = ("default", "math_data_processor", "math_hf_data_processor")
KEPT = ("env_name", "processor", "prompt_file", "system_prompt_file")
PICTURED = {
    "clevr-cogent": ("MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "MMInstruction/Clevr_CoGenT_ValA")
}
"""Data set with images -> what NeMo-RL downloads for training and for validation."""


def refuse_data(recipe: Recipe) -> None:
    """Refuse data that neither sums nor pictures can stand for.

    Raises: UserError: another environment or processor, or other data with images.
    """
    if all(_is_pictured(data) for _, data in data_sets(recipe)):
        return
    key, data = data_sets(recipe)[0]
    if data.get("processor") == VISION_PROCESSOR:
        raise UserError(
            f"{key}.dataset_name={as_yaml(data.get('dataset_name'))}: a rehearsal has pictures for "
            f"{', '.join(PICTURED)} alone; use recipe check and plan, or name it in both data.train and "
            "data.validation"
        )
    for name, known in (("env_name", ENVIRONMENTS), ("processor", PROCESSORS)):
        if data.get(name, "default" if name == "processor" else None) not in known:
            raise UserError(
                f"{key}.{name}={as_yaml(data.get(name))}: a rehearsal has small problems for "
                f"{', '.join(known)} alone; use recipe check and plan, or give data.train one of these"
            )


def _is_pictured(data: dict[str, Any]) -> bool:
    return data.get("processor") == VISION_PROCESSOR and data.get("dataset_name") in PICTURED


def problems(recipe: Recipe, folder: Path, number: int) -> tuple[FileTaskConfig, str]:
    """(the problems as the task that teaches the small model, what they are).

    Args: folder: gets the files.  number: of training problems, and of validation problems.
    """
    _, data = data_sets(recipe)[0]
    if _is_pictured(data):
        return _pictures(folder, number, PICTURED[data["dataset_name"]]), "pictures"
    return _sums(folder, number), "sums"


def _pictures(folder: Path, number: int, downloads: tuple[str, str]) -> VisionClassificationConfig:
    """The task's made-up problems, written again as each download has its rows: image, problem, solution."""
    task = VisionClassificationConfig().made_up(folder, number)
    for files, name in zip((task.train_files, task.validation_files), downloads, strict=True):
        (folder / name).mkdir(parents=True)
        with (folder / name / "metadata.jsonl").open("w", encoding="utf-8") as rows:
            for one in read_problems(files, with_images=True):
                (image,) = one.metadata["images"]
                shutil.copy(image, folder / name)
                solution = f"<answer> {one.answer} </answer>"
                row = {"file_name": Path(image).name, "problem": one.question, "solution": solution}
                rows.write(f"{json.dumps(row)}\n")
    return task


def _sums(folder: Path, number: int) -> MathConfig:
    """Solved as every verifier reads it; few answers, so that the small policy often gives the right one."""
    problems = sorted(map(sum_problem, range(64)), key=lambda one: abs(int(one.answer) - 9))
    shown = [
        replace(one, metadata={"solution": f"Answer: \\boxed{{{one.answer}}}"})
        for one in problems[: 2 * number]
    ]
    return MathConfig(
        form="boxed",
        train_files=(write_problems(folder / "train.jsonl", shown[:number]),),
        validation_files=(write_problems(folder / "validation.jsonl", shown[number:]),),
    )


def prompt_of(recipe: Recipe, nemo_rl: Path) -> Prompt:
    """The recipe's prompt, as this package writes it.

    Args: nemo_rl: NeMo-RL's repository, to which its recipes' paths are relative.
    """
    _, data = data_sets(recipe)[0]
    template = _text(data.get("prompt_file"), nemo_rl)
    shown = SLOT if template is None else template.format(SLOT)  # as NeMo-RL's processors fill it
    return Prompt(system=_text(data.get("system_prompt_file"), nemo_rl), template=shown)


def _text(name: str | None, nemo_rl: Path) -> str | None:
    return None if name is None else prompt_file(name, nemo_rl).read_text(encoding="utf-8")


def sections(recipe: Recipe, task: FileTaskConfig) -> Iterator[Change]:
    """Changes of ``data.train`` and ``data.validation``; pictures stand behind the recipe's own names.

    Without a validation there is none of its data either.
    """
    is_sums = isinstance(task, MathConfig)
    for split in ("train", "validation"):
        if split == "validation" and not recipe.grpo.validates:
            yield Change(f"data.{split}", None)
        elif is_sums:
            yield Change(f"data.{split}", _section(recipe, task, split))


def _section(recipe: Recipe, task: FileTaskConfig, split: str) -> dict[str, Any]:
    _, given = data_sets(recipe)[0]
    (file,) = task.train_files if split == "train" else task.validation_files
    return {
        "dataset_name": "ResponseDataset",
        "data_path": file,
        "input_key": "question",
        "output_key": "answer",
        "split": "train",
        **{key: given[key] for key in KEPT if key in given},
    }


STAND_INS: dict[str, tuple[Any, str]] = {
    "policy.router_replay.enabled": (False, "vLLM returns no routing on a CPU"),
    "policy.draft.enabled": (False, "one model is rehearsed"),
    "policy.quant_cfg": (None, "quantisation needs a GPU"),
    f"{GENERATION}.quant_cfg": (None, "quantisation needs a GPU"),
    f"{GENERATION}.real_quant": (False, "quantisation needs a GPU"),
    f"{GENERATION}.vllm_cfg.kv_cache_dtype": ("auto", "FP8 needs a GPU"),
    f"{GENERATION}.vllm_cfg.is_mx": (False, "FP8 needs a GPU"),
    f"{GENERATION}.vllm_kwargs.speculative_config": (None, "one model is rehearsed"),
    f"{MEGATRON}.moe_enable_deepep": (False, "DeepEP needs a GPU"),
    f"{MEGATRON}.moe_shared_expert_overlap": (False, "it overlaps CUDA streams"),
    f"{MEGATRON}.moe_grouped_gemm": (False, "grouped products need a GPU"),
    f"{MEGATRON}.gradient_accumulation_fusion": (False, "the fusion is a CUDA kernel"),
    f"{MEGATRON}.num_layers_in_first_pipeline_stage": (None, "the small model has two layers"),
    f"{MEGATRON}.num_layers_in_last_pipeline_stage": (None, "the small model has two layers"),
    f"{MEGATRON}.mtp_num_layers": (0, "the small model has no such layers"),
    "policy.hf_config_overrides": ({}, "they are of the full model"),
    "data.use_multiple_dataloader": (False, "one data set stands for all"),
}
"""Key -> the value without a GPU, and why; set where the recipe has another one."""


def uses_async_engine(recipe: Recipe) -> bool:
    """True if the rehearsal's rollouts need vLLM's asynchronous engine."""
    generation, is_async = recipe.policy.generation, recipe.grpo.is_async or recipe.has_single_controller
    return generation.vllm_cfg.async_engine or (generation.backend != "vllm" and is_async)


def replaced_parts(recipe: Recipe) -> Iterator[Change]:
    """Changes for what the recipe uses and a CPU has not."""
    policy = recipe.policy
    if policy.dtensor_cfg.enabled:
        reason = "there is no nemo-automodel here: Megatron-core trains in its place"
        yield Change("policy.dtensor_cfg.enabled", False, reason)
        yield Change(f"{MEGATRON}.enabled", True, reason)
        if policy.layout.context > 1 and not policy.sequence_packing.enabled:
            reason = "Megatron-core splits packed sequences only"
            yield Change("policy.dynamic_batching.enabled", False, reason)
            yield Change("policy.sequence_packing.enabled", True, reason)
    if policy.generation.backend != "vllm":
        yield Change(f"{GENERATION}.backend", "vllm", f"{policy.generation.backend} needs a GPU")
        if uses_async_engine(recipe):
            yield Change(f"{VLLM}.async_engine", True, "asynchronous rollouts by vLLM")
    if policy.megatron_cfg.optimizer.optimizer not in ("adam", "sgd"):
        reason = f"{policy.megatron_cfg.optimizer.optimizer} is not in this stack"
        yield Change(f"{MEGATRON}.optimizer.optimizer", "adam", reason)
    if policy.megatron_cfg.moe_token_dispatcher_type != "alltoall":
        yield Change(f"{MEGATRON}.moe_token_dispatcher_type", "alltoall", "other dispatchers need a GPU")
    for key, (value, reason) in STAND_INS.items():
        if value_of(recipe, key) not in (None, value):
            yield Change(key, value, reason)
