"""NeMo-RL's configuration of a recipe: the recipe merged into NeMo-RL's shipped base.

A recipe with NeMo-RL's own data is complete: only its loss is replaced, if it names a variant.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import CONTROLLER_CONFIG, GRPO, SFT, V0_7_0
from nemo_grpo.recipe import Recipe, host, load_recipe, refuse_unsupported
from nemo_grpo.recipe.cluster_rules import refit_sends_updated_weights
from nemo_grpo.recipe.interpolation import Tree, resolve
from nemo_grpo.recipe.loader import merge
from nemo_grpo.recipe.recipe import escaped
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.sections import OVERLAP, metric_key
from nemo_grpo.support.dotted import set_value
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

BASE, VISION_BASE = "grpo_math_1B_megatron.yaml", "vlm_grpo_3B_megatron.yaml"
"""NeMo-RL's base configurations in ``examples/configs``, for text and for images."""
FROM_THE_RECIPE = ("loss_fn", "nemo_grpo")
"""Sections that replace the base's as a whole, because the base's loss does not train."""

SFT_SECTIONS = ("policy", "data", "logger", "cluster", "checkpointing", "nemo_grpo")
"""Sections of the configuration for GRPO that supervised training has, too; the others are about rollouts."""
SFT_READS = {"use_linear_ce_fusion_loss": False}
"""Keys of policy.megatron_cfg that 0.7.0's supervised training reads and its base for GRPO lacks."""
ALL_BATCHES = -1


@dataclass(frozen=True)
class ClusterRun:
    """A validated recipe, and its NeMo-RL `MasterConfig`."""

    recipe: Recipe
    master_config: Any

    @property
    def has_images(self) -> bool:
        """True for tasks with images, and for data that NeMo-RL encodes for vision models."""
        return host.has_images(self.recipe)


def load_run(path: Path, overrides: Iterable[str] = ()) -> ClusterRun:
    """Read and check a recipe, and convert it to NeMo-RL's configuration."""
    recipe = load_recipe(path, overrides)
    if recipe.nemo_grpo.target != "cluster":
        raise UserError(
            f"nemo_grpo.target={recipe.nemo_grpo.target}: {path} is for the embedded engine (nemo-grpo "
            "train); start a cluster recipe from recipes/base/cluster.yaml"
        )
    if compat.version() == V0_7_0:
        refuse_unsupported(recipe, Scope.V0_7_0)
    for note in recipe.notes:
        log.info("%s", note)
    tree = host_tree(recipe) if recipe.nemo_grpo.task is None else nemo_rl_tree(recipe, _base_tree(recipe))
    gather_before_refits(recipe, tree)
    if recipe.loss_fn.learns_from_demonstrations:
        return ClusterRun(recipe, _validated(sft_tree(recipe, tree), SFT))
    return ClusterRun(recipe, _validated(tree, GRPO if recipe.async_rl is None else CONTROLLER_CONFIG))


def nemo_rl_tree(recipe: Recipe, base: Mapping[str, Any]) -> Tree:
    """Build NeMo-RL's configuration as a plain mapping; what the recipe left out keeps NeMo-RL's value.

    Args: base: NeMo-RL's shipped configuration, unresolved, so that dependent values follow the recipe's.
    """
    over = {name: section for name, section in recipe.settings.items() if name not in FROM_THE_RECIPE}
    kept = {name: section for name, section in base.items() if name not in FROM_THE_RECIPE}
    tree = resolve(merge(kept, escaped(_without_null_sections(over, kept)))).tree
    tree["loss_fn"] = loss_section(recipe)
    tree["nemo_grpo"] = recipe.nemo_grpo.model_dump(mode="json")
    scheduler = tree["policy"]["megatron_cfg"]["scheduler"]
    if scheduler.get("lr_decay_iters") is None:
        scheduler["lr_decay_iters"] = recipe.grpo.max_num_steps  # NeMo-RL moves the rate once per step
    # Resume with the recipe's schedule; megatron-core would refuse one that differs from the checkpoint's.
    scheduler["override_opt_param_scheduler"] = True
    # The base's limit is the longest sequence, which no response reaches: nothing would be penalised.
    tree["grpo"]["reward_shaping"] |= recipe.grpo.reward_shaping.model_dump()
    if (goal := metric_key(recipe.grpo.stop_at_validation_metric)) is not None:
        tree["grpo"]["stop_at_validation_metric"] = goal.removeprefix("validation/")
    for section, key in (("checkpointing", "checkpoint_dir"), ("logger", "log_dir")):
        tree[section][key] = str(Path(tree[section][key]).absolute())
    return tree


def gather_before_refits(recipe: Recipe, tree: Tree) -> None:
    """Set overlap_param_gather to false where the refit would send the weights from before the step."""
    is_mended = hasattr(
        compat.import_name("nemo_rl.models.policy.lm_policy:Policy"), "sync_params_before_refit"
    )
    for reason in () if is_mended else refit_sends_updated_weights(recipe):
        log.warning("%s", reason)
        set_value(tree, OVERLAP, False)


def host_tree(recipe: Recipe) -> Tree:
    """Build NeMo-RL's configuration of a recipe that keeps NeMo-RL's data."""
    tree = merge({}, recipe.settings)
    if not recipe.loss_fn.is_stock:
        tree["loss_fn"] |= loss_section(recipe)
    tree["nemo_grpo"] = recipe.nemo_grpo.model_dump(mode="json")
    return tree


def sft_tree(recipe: Recipe, tree: Mapping[str, Any]) -> Tree:
    """Build NeMo-RL's configuration for supervised training.

    Args: tree: the one for GRPO, see `nemo_rl_tree`.
    """
    kept = {name: tree[name] for name in SFT_SECTIONS}
    kept["policy"] = {name: value for name, value in tree["policy"].items() if name != "generation"}
    kept["policy"]["megatron_cfg"] = SFT_READS | kept["policy"]["megatron_cfg"]
    return kept | {"sft": sft_section(recipe)}


def sft_section(recipe: Recipe) -> dict[str, Any]:
    """Build NeMo-RL's section ``sft`` from the recipe's ``grpo``.

    One validation batch holds all problems. Its size is rounded up to whole microbatches on all ranks;
    NeMo-RL pads a batch that is not full.
    """
    grpo, micro = recipe.grpo, recipe.policy.logprob_batch_size
    unit = micro * recipe.data_parallel_size
    return {
        "max_num_steps": grpo.max_num_steps,
        "max_num_epochs": grpo.max_num_epochs,
        "val_period": grpo.val_period,
        "val_batches": ALL_BATCHES,
        "val_global_batch_size": -(-grpo.num_val_problems // unit) * unit,
        "val_micro_batch_size": micro,
        "val_at_start": grpo.val_at_start,
        "val_at_end": grpo.val_at_end,
        "seed": grpo.seed,
        "only_unmask_final": False,
    }


def loss_section(recipe: Recipe) -> Tree:
    """Build the section ``loss_fn`` for NeMo-RL, which reads some of the variant's parameters.

    It loads the reference policy if reference_policy_kl_penalty > 0, and makes its own loss of the section,
    before ours takes its place. Its types allow no null, so nulls are left out.
    """
    given = {name: value for name, value in recipe.loss_fn.model_dump().items() if value is not None}
    by_token = recipe.loss_fn.aggregation == "token_mean"
    return {"reference_policy_kl_penalty": 0.0, "token_level_loss": by_token} | given


def _without_null_sections(over: Mapping[str, Any], base: Mapping[str, Any]) -> Tree:
    """Leave out nulls for sections of the base, into which NeMo-RL looks."""
    return {
        name: _without_null_sections(value, base[name])
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        else value
        for name, value in over.items()
        if not (value is None and isinstance(base.get(name), Mapping))
    }


def _base_tree(recipe: Recipe) -> Tree:
    from omegaconf import OmegaConf

    name = VISION_BASE if recipe.task.needs_images else BASE
    path = compat.package_folder().parent / "examples" / "configs" / name
    if not path.is_file():
        raise UserError(
            f"{path} is missing: NeMo-RL's own base configuration is needed; run in NeMo-RL's container, or "
            "clone its repository and put that on PYTHONPATH"
        )
    compat.import_name("nemo_rl.utils.config:register_omegaconf_resolvers")()
    tree = OmegaConf.to_container(compat.import_name("nemo_rl.utils.config:load_config")(path))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _validated(tree: Tree, algorithm: str) -> Any:
    from pydantic import ValidationError

    try:
        return compat.import_name(f"{algorithm}:MasterConfig")(**tree)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"NeMo-RL refuses the configuration: {wrong}") from None
