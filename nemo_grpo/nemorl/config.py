"""A run on NeMo-RL: the recipe, NeMo-RL's configuration made of it, and the questions that both answer.

The YAML is read and resolved once, by `load_recipe`. NeMo-RL's configuration is the resolved recipe over
NeMo-RL's shipped base; only the base's own references are resolved here, because they follow the recipe's
values. A recipe with NeMo-RL's own data is complete: only its loss is replaced, if it names a variant.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import CONTROLLER_CONFIG, GRPO, SFT, V0_7_0
from nemo_grpo.nemorl.workarounds.stale_refit import gather_before_refits
from nemo_grpo.recipe import Recipe, host, load_recipe, refuse_unsupported
from nemo_grpo.recipe.interpolation import Tree, resolve
from nemo_grpo.recipe.loader import merge
from nemo_grpo.recipe.recipe import escaped
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.sections import metric_key
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

BASE = "grpo_math_1B_megatron.yaml"
"""NeMo-RL's base configuration in ``examples/configs`` for text."""
VISION_BASE = "vlm_grpo_3B_megatron.yaml"
"""NeMo-RL's base configuration for images."""
FROM_THE_RECIPE = ("loss_fn", "nemo_grpo")
"""Sections that replace the base's as a whole, because the base's loss does not train."""

SFT_SECTIONS = ("policy", "data", "logger", "cluster", "checkpointing", "nemo_grpo")
"""Sections of the configuration for GRPO that supervised training has, too; the others are about rollouts."""
SFT_READS = {"use_linear_ce_fusion_loss": False}
"""Keys of policy.megatron_cfg that 0.7.0's supervised training reads and its base for GRPO lacks."""
ALL_BATCHES = -1
"""NeMo-RL's val_batches for a validation on all problems."""
ASYNC_SAVE = "policy.megatron_cfg.checkpoint.async_save"

Trainer = Literal["sync", "sft", "single_controller"]
MASTER_CONFIGS: dict[Trainer, str] = {"sync": GRPO, "sft": SFT, "single_controller": CONTROLLER_CONFIG}
"""Trainer -> NeMo-RL's module with its `MasterConfig`."""


@dataclass(frozen=True)
class ClusterRun:
    """A validated recipe, and NeMo-RL's `MasterConfig` made of it.

    NeMo-RL's own defaults are in ``master_config`` alone, so the properties below read that one.
    """

    recipe: Recipe
    master_config: Any

    @property
    def trainer(self) -> Trainer:
        """Module of this package that sets up the trainer."""
        return trainer_of(self.recipe)

    @property
    def has_images(self) -> bool:
        """True for tasks with images, and for data that NeMo-RL encodes for vision models."""
        return host.has_images(self.recipe)

    @property
    def is_async(self) -> bool:
        """True if NeMo-RL's asynchronous trainer makes rollouts while it trains."""
        return bool(value_of(self.master_config, "grpo.async_grpo.enabled", False))

    @property
    def saves_async(self) -> bool:
        """True if Megatron's workers write checkpoints in the background."""
        return bool(value_of(self.master_config, ASYNC_SAVE, False))

    @property
    def fuses_linear_logprobs(self) -> bool:
        """True if NeMo-RL computes logprobs in one kernel with the output layer."""
        return bool(value_of(self.master_config, "policy.megatron_cfg.use_fused_linear_logprobs", False))

    @property
    def num_prompts_per_draw(self) -> int:
        """Prompts in one draw of NeMo-RL's data loader."""
        prompts = self.recipe.grpo.num_prompts_per_step
        if not self.recipe.grpo.use_dynamic_sampling:
            return prompts
        return int(prompts * value_of(self.master_config, "grpo.batch_multiplier", 1))

    @property
    def has_further_losses(self) -> bool:
        """True if NeMo-RL adds losses to the variant's: expert load balance, multi-token prediction, draft.

        These have a gradient even if all advantages are 0. A z loss that a model's Megatron-Bridge provider
        sets (EXAONE MoE) is not detected.
        """
        policy = value_of(self.master_config, "policy")
        balances = value_of(policy, "megatron_cfg.moe_router_load_balancing_type", "none")
        kinds = [balances] if isinstance(balances, str) else balances
        if any(kind != "none" for kind in kinds):
            return True
        if value_of(policy, "megatron_cfg.model_overrides.moe_z_loss_coeff", 0):
            return True
        predicts_further_tokens = value_of(policy, "megatron_cfg.mtp_num_layers", 0)
        if predicts_further_tokens and value_of(policy, "megatron_cfg.mtp_loss_scaling_factor", 0.1):
            return True
        return bool(value_of(policy, "draft.enabled", False))


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
    if trainer_of(recipe) == "sft":
        tree = sft_tree(recipe, tree)
    return ClusterRun(recipe, _validated(tree, MASTER_CONFIGS[trainer_of(recipe)]))


def trainer_of(recipe: Recipe) -> Trainer:
    """Name the module of this package that sets up the recipe's trainer."""
    if recipe.loss_fn.learns_from_demonstrations:
        return "sft"
    return "single_controller" if recipe.has_single_controller else "sync"


def nemo_rl_tree(recipe: Recipe, base: Mapping[str, Any]) -> Tree:
    """Build NeMo-RL's configuration as a plain mapping; a key that the recipe omits keeps NeMo-RL's value.

    Args:
        recipe: a recipe with a task of ours.
        base: NeMo-RL's shipped configuration, unresolved, so that dependent values follow the recipe's.
    """
    recipe_sections = {name: value for name, value in recipe.settings.items() if name not in FROM_THE_RECIPE}
    base_sections = {name: value for name, value in base.items() if name not in FROM_THE_RECIPE}
    recipe_sections = _without_null_sections(recipe_sections, base_sections)
    # The recipe is already resolved, so a ${..} in it is plain text. Only the base's are still references.
    tree = resolve(merge(base_sections, escaped(recipe_sections))).tree
    tree["loss_fn"] = loss_section(recipe)
    tree["nemo_grpo"] = recipe.nemo_grpo.model_dump(mode="json")
    scheduler = tree["policy"]["megatron_cfg"]["scheduler"]
    if scheduler.get("lr_decay_iters") is None:
        # NeMo-RL moves the rate once per step.
        scheduler["lr_decay_iters"] = recipe.grpo.max_num_steps
    # Resume with the recipe's schedule: without this key megatron-core refuses one that differs from the
    # checkpoint's.
    scheduler["override_opt_param_scheduler"] = True
    # The base's limit is the longest sequence, which no response reaches: nothing would be penalised.
    tree["grpo"]["reward_shaping"] |= recipe.grpo.reward_shaping.model_dump()
    goal = metric_key(recipe.grpo.stop_at_validation_metric)
    if goal is not None:
        tree["grpo"]["stop_at_validation_metric"] = goal.removeprefix("validation/")
    for section, key in (("checkpointing", "checkpoint_dir"), ("logger", "log_dir")):
        tree[section][key] = str(Path(tree[section][key]).absolute())
    return tree


def host_tree(recipe: Recipe) -> Tree:
    """Build NeMo-RL's configuration of a recipe that keeps NeMo-RL's data."""
    tree = merge({}, recipe.settings)
    if not recipe.loss_fn.is_stock:
        tree["loss_fn"] |= loss_section(recipe)
    tree["nemo_grpo"] = recipe.nemo_grpo.model_dump(mode="json")
    return tree


def sft_tree(recipe: Recipe, tree: Mapping[str, Any]) -> Tree:
    """Build NeMo-RL's configuration for supervised training.

    Args:
        recipe: a recipe that learns from demonstrations.
        tree: the configuration for GRPO, see `nemo_rl_tree`.
    """
    sections = {name: tree[name] for name in SFT_SECTIONS}
    sections["policy"] = {name: value for name, value in tree["policy"].items() if name != "generation"}
    sections["policy"]["megatron_cfg"] = SFT_READS | sections["policy"]["megatron_cfg"]
    sections["sft"] = sft_section(recipe)
    return sections


def sft_section(recipe: Recipe) -> dict[str, Any]:
    """Build NeMo-RL's section ``sft`` from the recipe's ``grpo``.

    One validation batch holds all problems. Its size is rounded up to whole microbatches on all ranks;
    NeMo-RL pads a batch that is not full.
    """
    grpo = recipe.grpo
    microbatch = recipe.policy.logprob_batch_size
    rows_per_pass = microbatch * recipe.data_parallel_size
    num_passes = math.ceil(grpo.num_val_problems / rows_per_pass)
    return {
        "max_num_steps": grpo.max_num_steps,
        "max_num_epochs": grpo.max_num_epochs,
        "val_period": grpo.val_period,
        "val_batches": ALL_BATCHES,
        "val_global_batch_size": num_passes * rows_per_pass,
        "val_micro_batch_size": microbatch,
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
    section: Tree = {
        "reference_policy_kl_penalty": 0.0,
        "token_level_loss": recipe.loss_fn.aggregation == "token_mean",
    }
    for name, value in recipe.loss_fn.model_dump().items():
        if value is not None:
            section[name] = value
    return section


def _without_null_sections(over: Mapping[str, Any], base: Mapping[str, Any]) -> Tree:
    """Leave out nulls that would replace a section of the base: NeMo-RL reads keys of these sections."""
    tree: Tree = {}
    for name, value in over.items():
        base_value = base.get(name)
        if not isinstance(base_value, Mapping):
            tree[name] = value
        elif isinstance(value, Mapping):
            tree[name] = _without_null_sections(value, base_value)
        elif value is not None:
            tree[name] = value
    return tree


def _base_tree(recipe: Recipe) -> Tree:
    """Read NeMo-RL's base configuration with its interpolations unresolved."""
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
    """Make the `MasterConfig` of NeMo-RL's module ``algorithm``."""
    from pydantic import ValidationError

    try:
        return compat.import_name(f"{algorithm}:MasterConfig")(**tree)
    except ValidationError as error:
        reasons = []
        for mistake in error.errors():
            key = ".".join(map(str, mistake["loc"]))
            reasons.append(f"{key}: {mistake['msg']}")
        raise UserError(f"NeMo-RL refuses the configuration: {'; '.join(reasons)}") from None
