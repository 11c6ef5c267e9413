"""From a recipe to NeMo-RL's own configuration: its shipped base, with what the recipe says on top."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import compat
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.loader import Tree, apply_overrides, load_tree, merge, resolve

log = logging.getLogger(__name__)

BASE, VISION_BASE = "grpo_math_1B_megatron.yaml", "vlm_grpo_3B_megatron.yaml"
VISION_PREFIX = "vision_"
"""Tasks whose problems have images; NeMo-RL has a base and a data path of their own for them."""

NOT_IN_0_7_0: dict[str, tuple[object, ...]] = {
    "grpo.val_num_generations_per_prompt": (1,),
    "grpo.val_start_at": (-1,),
    "policy.megatron_cfg.checkpoint.async_save": (False,),
    "policy.megatron_cfg.fine_grained_activation_offloading": (False,),
    "policy.megatron_cfg.model_overrides": ({},),
    "policy.megatron_cfg.use_fused_linear_logprobs": (False,),
    "reward_penalties.penalize_duplicated_reasoning": (False,),
    "reward_penalties.penalize_empty_final_answer": (False,),
    "reward_penalties.penalize_malformed_think_tag": (False,),
    "reward_penalties.penalize_unwanted_tokens": (False,),
}
"""Keys that change a run, and that NeMo-RL 0.7.0 never looks at -> the values that change nothing."""

FROM_THE_RECIPE = ("loss_fn", "nemo_grpo")
"""Sections that replace the base's as a whole: its loss is not the one that trains."""


@dataclass(frozen=True)
class ClusterRun:
    """A recipe, and the same as NeMo-RL takes it.

    Attributes: recipe: validated.  master_config: NeMo-RL's `MasterConfig`.
    """

    recipe: Recipe
    master_config: Any

    @property
    def has_images(self) -> bool:
        """True for tasks with images."""
        return self.recipe.nemo_grpo.task.name.startswith(VISION_PREFIX)


def load_run(path: Path, overrides: Iterable[str] = ()) -> ClusterRun:
    """Read and check a recipe, and make NeMo-RL's configuration of it.

    Raises: UserError: the recipe is refused, is not for the cluster, or does not fit this NeMo-RL.
    """
    overrides = list(overrides)
    recipe = load_recipe(path, overrides)
    if recipe.nemo_grpo.target != "cluster":
        raise UserError(
            f"nemo_grpo.target={recipe.nemo_grpo.target}: {path} is for the embedded engine (nemo-grpo "
            "train); start a cluster recipe from recipes/base/cluster.yaml"
        )
    if compat.version() == compat.V0_7_0:
        refuse_what_0_7_0_ignores(recipe)
    tree = nemo_rl_tree(recipe, resolve(apply_overrides(load_tree(path), overrides)), _base_tree(recipe))
    return ClusterRun(recipe, _validated(tree))


def nemo_rl_tree(recipe: Recipe, given: Mapping[str, Any], base: Mapping[str, Any]) -> Tree:
    """NeMo-RL's configuration as a plain mapping.

    Args:    given: what recipe and overrides say, resolved, without our defaults: a key that they do not have
             keeps NeMo-RL's value.  base: NeMo-RL's shipped configuration, not resolved, so that values that
             depend on others follow the recipe's.
    """
    over = {name: section for name, section in given.items() if name not in FROM_THE_RECIPE}
    kept = {name: section for name, section in base.items() if name not in FROM_THE_RECIPE}
    tree = resolve(merge(kept, _without_null_sections(over, kept)))
    tree["loss_fn"] = loss_section(recipe)
    tree["nemo_grpo"] = recipe.nemo_grpo.model_dump(mode="json")
    scheduler = tree["policy"]["megatron_cfg"]["scheduler"]
    if scheduler.get("lr_decay_iters") is None:
        scheduler["lr_decay_iters"] = recipe.grpo.max_num_steps  # NeMo-RL moves the rate once per step
    # A resumed run follows the recipe; megatron-core would refuse a schedule that is not the checkpoint's.
    scheduler["override_opt_param_scheduler"] = True
    # The base's limit is the longest sequence, which no response reaches, and no penalty would be given.
    tree["grpo"]["reward_shaping"] |= recipe.grpo.reward_shaping.model_dump()
    if recipe.grpo.stop_at_validation_metric is not None:
        tree["grpo"]["stop_at_validation_metric"] = early_stop_metric(recipe.grpo.stop_at_validation_metric)
    for section, key in (("checkpointing", "checkpoint_dir"), ("logger", "log_dir")):
        tree[section][key] = str(Path(tree[section][key]).absolute())
    return tree


def refuse_what_0_7_0_ignores(recipe: Recipe) -> None:
    """Raise for keys that came after NeMo-RL 0.7.0, which takes any key and says nothing.

    Raises: UserError: key, value, remedy.
    """
    given = {key: compat.value(recipe.to_dict(), key) for key in NOT_IN_0_7_0}
    ignored = [f"{key}={value}" for key, value in given.items() if value not in (None, *NOT_IN_0_7_0[key])]
    if ignored:
        raise UserError(
            f"{', '.join(ignored)}: NeMo-RL {compat.V0_7_0} does not know this and would run without; leave "
            f"it out, or use {compat.TESTED[compat.HEAD]}"
        )


def early_stop_metric(name: str) -> str:
    """NeMo-RL's name of a validation metric, which has no prefix.

    Raises: UserError: this NeMo-RL never looks at it.
    """
    if compat.version() == compat.V0_7_0:
        raise UserError(
            f"grpo.stop_at_validation_metric={name}: NeMo-RL {compat.V0_7_0} has no early stop and "
            "would train on; leave it and stop_at_validation_threshold out"
        )
    return name.removeprefix("val:").removeprefix("validation/")


def loss_section(recipe: Recipe) -> Tree:
    """The variant's parameters where NeMo-RL reads them too.

    It loads the reference policy for reference_policy_kl_penalty > 0, and its types know no null: what is
    null is left out.
    """
    given = {name: value for name, value in recipe.loss_fn.model_dump().items() if value is not None}
    return {"reference_policy_kl_penalty": 0.0} | given


def _without_null_sections(over: Mapping[str, Any], base: Mapping[str, Any]) -> Tree:
    """``over`` without nulls in place of the base's sections, which NeMo-RL would look into."""
    return {
        name: _without_null_sections(value, base[name])
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        else value
        for name, value in over.items()
        if not (value is None and isinstance(base.get(name), Mapping))
    }


def _base_tree(recipe: Recipe) -> Tree:
    name = VISION_BASE if recipe.nemo_grpo.task.name.startswith(VISION_PREFIX) else BASE
    path = base_folder() / name
    compat.import_name("nemo_rl.utils.config:register_omegaconf_resolvers")()
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(compat.import_name("nemo_rl.utils.config:load_config")(path))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def base_folder() -> Path:
    """NeMo-RL's ``examples/configs``, beside the package.

    Raises: UserError: nemo_rl was installed without them.
    """
    import nemo_rl

    folder = Path(next(iter(nemo_rl.__path__))).parent / "examples" / "configs"
    if not (folder / BASE).is_file():
        raise UserError(
            f"{folder / BASE} is not there: NeMo-RL's own base configuration is needed; run from NeMo-RL's "
            "container, or clone its repository and put that on PYTHONPATH"
        )
    return folder


def _validated(tree: Tree) -> Any:
    from pydantic import ValidationError

    try:
        return compat.import_name("nemo_rl.algorithms.grpo:MasterConfig")(**tree)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"NeMo-RL refuses the configuration: {wrong}") from None
