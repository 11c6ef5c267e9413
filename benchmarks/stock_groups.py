"""NeMo-RL's own GRPO configurations, grouped by what a rehearsal makes of them.

    python -m benchmarks.stock_groups RL [RL ...] -o groups.json

Reads every configuration that `benchmarks.stock_recipes` reads, gives it a variant that `recipe check`
accepts, and reduces it as `nemo-grpo rehearse` does. Those whose reduced recipes have the same model family,
parallel dimensions and values of `PATHS` form a group, of which one is rehearsed; those that a rehearsal
refuses form a group by the reason. `benchmarks.rehearse_all --groups groups.json` rehearses one of each, in
the order of the file: the first groups together have every value of every feature of both versions, those
after them every pair of values that occurs in one configuration.
"""

import argparse
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.stock_recipes import PLACES, configurations, rule_of
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.environment import Stack, stack_for
from nemo_grpo.rehearsal.model import RehearsalModel
from nemo_grpo.rehearsal.small_config import rehearsed_shape
from nemo_grpo.rehearsal.tiny_data import problems_of
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

VARIANTS = ("cw_grpo", "tr_grpo", "gpg", "erpo", "dapo", "cispo", "clip_cov", "dr_grpo", "gspo", "grpo")
"""Variants in the order in which a configuration tries them, from another start for each."""
VOCABULARY = 352
PATHS = (
    "async_rl.min_groups_for_streaming_train",
    "async_rl.recompute_kv_cache_after_weight_updates",
    "data_plane.backend",
    "data_plane.enabled",
    "grpo.async_grpo.enabled",
    "grpo.async_grpo.in_flight_weight_updates",
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
    "grpo.deduplicate_multimodal_data",
    "grpo.overlong_filtering",
    "grpo.reward_scaling.enabled",
    "grpo.reward_shaping.enabled",
    "grpo.skip_reference_policy_logprobs_calculation",
    "grpo.use_dynamic_sampling",
    "loss_fn.truncated_importance_sampling_type",
    "policy.dynamic_batching.enabled",
    "policy.generation.colocated.enabled",
    "policy.generation.refit_transport",
    "policy.generation.top_k",
    "policy.generation.top_p",
    "policy.generation.vllm_cfg.async_engine",
    "policy.generation.vllm_cfg.cap_max_tokens_to_context",
    "policy.generation.vllm_cfg.enable_expert_parallel",
    "policy.megatron_cfg.converter_type",
    "policy.megatron_cfg.freeze_config.freeze_vision_model",
    "policy.megatron_cfg.moe_router_enable_expert_bias",
    "policy.megatron_cfg.peft.enabled",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.use_fused_linear_logprobs",
    "policy.sequence_packing.enabled",
)
"""Keys that choose a code path of NeMo-RL or Megatron and that a rehearsal keeps."""
OFF = (None, False, 0, "", [], {})
"""Values of a key that is off; missing is the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repositories", nargs="+", type=Path, metavar="RL", help="NeMo-RL's repository")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    for name, value in PLACES.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)
    groups: dict[str, dict[str, Any]] = {}
    for repository in arguments.repositories:
        for number, path in enumerate(configurations(repository)):
            entry = entry_of(repository.absolute(), path, number)
            key = json.dumps(entry.pop("key"), sort_keys=True)
            group = groups.setdefault(key, {**entry, "key": json.loads(key), "members": []})
            group["members"].append(entry["recipe"])
    ordered_groups = list(by_coverage(list(groups.values())))
    arguments.output.write_text(json.dumps(ordered_groups, indent=1))
    num_recipes = sum(len(group["members"]) for group in ordered_groups)
    print(f"{num_recipes} in {len(ordered_groups)} groups")


def entry_of(repository: Path, path: Path, number: int) -> dict[str, Any]:
    """Describe a configuration.

    Returns:
        ``repository``, ``recipe`` (below ``examples``), ``variant`` ("" if none is accepted), and the
        ``key`` of its group.
    """
    entry = {"repository": str(repository), "recipe": str(path.relative_to(repository / "examples"))}
    recipe, variant, refusal = accepted(path, number)
    if recipe is None:
        return {
            **entry,
            "variant": "",
            "refused by": "check",
            "key": {"version": repository.name, "refused": rule_of(refusal)},
        }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            key = reduced(recipe, path, repository, Path(scratch))
        except UserError as error:
            key = {"refused": re.sub(r"^\S+: ", "", rule_of(str(error)))}
            entry["refused by"] = "rehearse"
    return {**entry, "variant": variant, "key": {"version": repository.name, **key}}


def accepted(path: Path, number: int) -> tuple[Recipe | None, str, str]:
    """Load a configuration with the first variant that is accepted.

    Returns:
        The recipe, its variant and ""; if no variant is accepted None, "" and the last refusal.
    """
    start = number % len(VARIANTS)
    refusal = ""
    for variant in VARIANTS[start:] + VARIANTS[:start]:
        try:
            return load_recipe(path, [f"++loss_fn.variant={variant}"]), variant, ""
        except UserError as error:
            refusal = str(error)
    return None, "", refusal


def reduced(recipe: Recipe, path: Path, repository: Path, folder: Path) -> dict[str, Any]:
    """Reduce a recipe as a rehearsal does, and return the features on which its code paths depend."""
    stack_for(recipe, path, Stack(Path("python"), repository, Path("vllm"), Path("torchvision")))
    problems = problems_of(recipe, folder / "problems", repository)
    model = RehearsalModel(folder, "", "", 100, 12, VOCABULARY)
    layout = small.rehearsed_ranks(recipe, 4)
    changes = small.overrides_of(recipe, problems.task, model, layout, folder / "runs", uses_vllm=True)
    small.write_recipe(folder / "recipe.yaml", recipe, changes)
    rehearsed = load_recipe(folder / "recipe.yaml")
    features: dict[str, Any] = {}
    for key in PATHS:
        value = value_of(rehearsed, key)
        if value not in OFF:
            features[key] = value
    # These values choose no code path of the rehearsed recipe.
    if rehearsed.policy.generation.top_p == 1.0:
        del features["policy.generation.top_p"]
    if not rehearsed.uses_data_plane:
        features.pop("data_plane.backend", None)
    if not rehearsed.grpo.is_async:
        features.pop("grpo.async_grpo.in_flight_weight_updates", None)
    spec, _ = rehearsed_shape(recipe)
    sizes = {f"{name} > 1": True for name, size in layout._asdict().items() if size > 1}
    features["async_rl"] = rehearsed.has_single_controller
    return {**features, **sizes, "family": spec.model_type}


def by_coverage(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the groups so that the first of them have every value of every feature, the next ones every pair.

    The next group is always the one with the most values that no earlier group had. Of groups with equally
    many, the larger one comes first.
    """
    waiting = sorted(groups, key=lambda group: -len(group["members"]))
    for combined in (1, 2):
        covered: set[tuple[str, ...]] = set()
        while waiting:
            group = max(waiting, key=lambda group: len(combinations_of(group, combined) - covered))
            if combinations_of(group, combined) <= covered:
                # No group that waits has a new combination.
                break
            waiting.remove(group)
            covered |= combinations_of(group, combined)
            yield group
    yield from waiting


def combinations_of(group: Mapping[str, Any], size: int) -> set[tuple[str, ...]]:
    """List the combinations of `size` features that a group has; a feature is of one version of NeMo-RL."""
    key = group["key"]
    values = sorted(f"{name}={value}" for name, value in key.items() if name != "version")
    return {(key["version"], *names) for names in itertools.combinations(values, size)}


if __name__ == "__main__":
    main()
