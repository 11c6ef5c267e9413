"""Support for NeMo-RL's own recipes, unchanged or with one of our variants added.

A recipe with ``data.train`` and without ``nemo_grpo.task`` keeps NeMo-RL's data, environments, processors
and backend. Without ``loss_fn.variant`` it also keeps NeMo-RL's loss and advantages. With a variant,
`adapted` replaces the settings of NeMo-RL's loss and advantages by the variant's, and notes each change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from nemo_grpo.recipe.loader import Tree, merge
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.support.dotted import set_value, value_of
from nemo_grpo.support.errors import UserError, as_yaml
from nemo_grpo.variants import REFUSED_STOCK_KEYS, variant_class
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss

ESTIMATOR = ("normalize_rewards", "use_leave_one_out_baseline")
"""Settings of NeMo-RL's own advantage estimator, which it reads from ``grpo`` and ``grpo.adv_estimator``."""
VISION_PROCESSOR = "vlm_hf_data_processor"
"""NeMo-RL's processor for data with images, audio or video."""
ROLLOUT_CORRECTIONS = (
    "force_on_policy_ratio",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)
"""Keys of ``loss_fn`` that correct differences between sampling and training, as with asynchronous rollouts
or FP8. They depend on the recipe's engines, not on its loss, so they stay with every variant that leaves
them a choice."""
OTHER_DRIVERS = {"env.sliding_puzzle_game": "examples/run_grpo_sliding_puzzle.py"}
"""Section of an environment -> NeMo-RL's driver that makes the data of this environment."""
SKIP_REFERENCE = "grpo.skip_reference_policy_logprobs_calculation"
"""Key that spares NeMo-RL the reference policy where the KL penalty is 0."""

OTHER_ALGORITHMS = {
    "distillation": ("distillation", "use NeMo-RL's own script"),
    "dpo": ("DPO", "use NeMo-RL's own script"),
    "eval": ("evaluation", "use `nemo-grpo eval`, or NeMo-RL's own script"),
    "ppo": ("PPO", "use NeMo-RL's own script, or a recipe for GRPO, which needs no value model"),
    "rm": ("reward models", "use NeMo-RL's own script"),
    "sft": ("supervised training", "use NeMo-RL's own script, or loss_fn.variant=sft with a nemo_grpo.task"),
}
"""Section that only recipes for another algorithm of NeMo-RL have -> (name of the algorithm, remedy)."""


def keeps_its_data(tree: Mapping[str, Any]) -> bool:
    """True for a recipe whose problems and rewards are NeMo-RL's ``data`` and ``env``."""
    return value_of(tree, "nemo_grpo.task") is None and value_of(tree, "data.train") is not None


def refuse_other_algorithms(tree: Mapping[str, Any]) -> None:
    """Refuse a recipe that NeMo-RL trains with another algorithm than GRPO, or with a special driver."""
    for section, (name, remedy) in OTHER_ALGORITHMS.items():
        if section in tree:
            raise UserError(f"{section}: this is a recipe for NeMo-RL's {name}, not for GRPO; {remedy}")
    for section, driver in OTHER_DRIVERS.items():
        if keeps_its_data(tree) and value_of(tree, section) is not None:
            raise UserError(
                f"{section}: NeMo-RL trains this recipe from {driver}, which makes its problems; every other "
                f"driver would train on data.train instead. Use that script, or remove {section}"
            )


def adapted(tree: Mapping[str, Any], is_stock: Callable[[str], bool]) -> tuple[Tree, list[str]]:
    """Adapt one of NeMo-RL's own recipes to the variant that it names.

    Every other recipe is returned unchanged.

    Args:
        tree: Resolved settings.
        is_stock: Function that is true for a key whose value came from NeMo-RL's own files.
    Returns: the adapted settings, and notes: one sentence for each setting that the variant replaces.
    """
    settings = merge({}, tree)
    sections = [settings.get(name, {}) for name in ("nemo_grpo", "loss_fn", "grpo")]
    # If one of them is not a section, the validation reports that later, with its key.
    are_sections = all(isinstance(section, dict) for section in sections)
    if not keeps_its_data(tree) or not are_sections:
        return settings, []
    _name_the_run(settings)
    loss = settings.setdefault("loss_fn", {})
    loss.setdefault("variant", None)
    try:
        config = NeMoRLLoss if loss["variant"] is None else variant_class(str(loss["variant"]), "")
    except UserError:
        # The validation of loss_fn reports the unknown variant, together with all other errors.
        return settings, []
    if config.is_stock:
        return settings, []
    # The order matters: `_score_the_reference` depends on whether `_replace_loss` has removed the penalty.
    notes = list(_replace_loss(loss, config, is_stock))
    notes += _replace_advantages(settings, config)
    notes += _score_the_reference(settings, config, is_stock)
    return settings, notes


def _name_the_run(tree: Tree) -> None:
    """Fill in the section ``nemo_grpo``: the run's name and folder are those of its checkpoints."""
    section = tree.setdefault("nemo_grpo", {})
    section.setdefault("task", None)
    section.setdefault("target", "cluster")
    folder = value_of(tree, "checkpointing.checkpoint_dir")
    if isinstance(folder, str) and "run_name" not in section and "runs_dir" not in section:
        section["run_name"] = Path(folder).name
        section["runs_dir"] = str(Path(folder).parent)


def _replace_loss(loss: Tree, config: Any, is_stock: Callable[[str], bool]) -> Iterator[str]:
    """Remove the loss parameters that come from NeMo-RL's files, so that the variant's defaults apply.

    Parameters that the recipe's author wrote stay. The rule holds for all parameters, also for the KL
    penalty: a comparison of variants would otherwise mix a paper's values with those of some NeMo-RL file.
    """
    if config.stock_switch:
        # This switch turns on NeMo-RL's own form of the same objective, which the variant replaces.
        loss.pop(config.stock_switch, None)
    changes = dict[str, bool]()
    if is_stock("loss_fn.token_level_loss"):
        changes |= _drop_stock_reduction(loss, config)
    else:
        yield from _replace_own_reduction(loss, config)
    stock_defaults = NeMoRLLoss.keys()
    exempt = ["variant", *(key for key in ROLLOUT_CORRECTIONS if not _is_fixed(config, key))]
    keys = [key for key in loss if key in stock_defaults and key not in exempt]
    stock_keys = [key for key in keys if is_stock(f"loss_fn.{key}")]
    own_keys = [key for key in keys if key not in stock_keys]
    changes |= _drop_stock_values(loss, config, stock_keys)
    yield from _drop_terms_of_nemo_rl(loss, config, own_keys)
    if changes:
        can_be_kept = any(changes.values())
        remedy = "; write a key that it has beside loss_fn.variant to keep a value" if can_be_kept else ""
        yield (
            f"loss_fn: values of NeMo-RL's files give way to {loss['variant']}'s own: {', '.join(changes)}"
            f"{remedy}"
        )


def _is_fixed(config: Any, key: str) -> bool:
    """True if the variant allows the key one value only, as DPPO does, whose ratio is the correction."""
    annotation = config.model_fields[key].annotation if key in config.model_fields else None
    return annotation is type(None) or (get_origin(annotation) is Literal and len(get_args(annotation)) == 1)


def _drop_stock_reduction(loss: Tree, config: Any) -> dict[str, bool]:
    """Remove the ``token_level_loss`` of NeMo-RL's files, and return the change like `_drop_stock_values`."""
    by_tokens = loss.pop("token_level_loss")
    aggregation = _aggregation_of(loss, config)
    if aggregation == _aggregation_named(by_tokens):
        return {}
    return {f"token_level_loss={as_yaml(by_tokens)} -> aggregation={aggregation}": True}


def _drop_stock_values(loss: Tree, config: Any, keys: Iterable[str]) -> dict[str, bool]:
    """Remove loss parameters that come from NeMo-RL's files.

    Returns: the changes in words, such as ``ratio_clip_max=0.2 -> 0.28``. A change's value is True if the
        variant has this key, so that the recipe's author can keep the old value by writing it.
    """
    changes = {}
    for key in keys:
        value = loss.pop(key)
        field = config.model_fields.get(key)
        if field is not None and value != field.default:
            changes[f"{key}={as_yaml(value)} -> {as_yaml(field.default)}"] = True
        # If the variant lacks the term, only a value that had turned the term on is worth a note.
        if field is None and value != NeMoRLLoss.keys()[key]:
            changes[f"{key}={as_yaml(value)} -> none"] = False
    return changes


def _drop_terms_of_nemo_rl(loss: Tree, config: Any, keys: Iterable[str]) -> Iterator[str]:
    """Remove the author's parameters for terms that the variant lacks, and yield a note about each."""
    for key in keys:
        if key in config.model_fields:
            continue
        is_off = loss[key] == NeMoRLLoss.keys()[key] and loss[key] in (None, False)
        if is_off:
            # The term is off, as in the variant, so nothing changes and no note is needed.
            del loss[key]
        elif key not in REFUSED_STOCK_KEYS:
            yield _replaced(f"loss_fn.{key}", loss.pop(key), f"{loss['variant']} has no such term")


def _aggregation_of(loss: Tree, config: Any) -> str:
    """Return the aggregation that a variant will use."""
    return str(loss.get("aggregation", config.model_fields["aggregation"].default))


def _aggregation_named(token_level_loss: bool) -> str:
    """Translate NeMo-RL's ``token_level_loss`` to the name of an aggregation."""
    return "token_mean" if token_level_loss else "sequence_mean"


def _replace_own_reduction(loss: Tree, config: Any) -> Iterator[str]:
    """Replace the ``token_level_loss`` that the recipe's author wrote by an aggregation.

    False becomes the sequence mean if the variant's default is the token mean. Another default is kept, and a
    note says so if it differs.
    """
    by_tokens = loss.pop("token_level_loss", None)
    if by_tokens is None:
        return
    if by_tokens is False and config.model_fields["aggregation"].default == "token_mean":
        loss.setdefault("aggregation", "sequence_mean")
    aggregation = _aggregation_of(loss, config)
    if aggregation != _aggregation_named(by_tokens):
        instead = f"{loss['variant']} has loss_fn.aggregation={aggregation}"
        yield _replaced("loss_fn.token_level_loss", by_tokens, instead)


def _replace_advantages(tree: Tree, config: Any) -> Iterator[str]:
    """Set the keys of NeMo-RL's advantage estimator to the values that the variant trains with."""
    loss = tree["loss_fn"]
    for key in ESTIMATOR:
        field = config.model_fields.get(key)
        if field is None:
            trained = loss.get(key, False)
            instead = "has advantages of its own"
        else:
            trained = loss.get(key, field.default)
            instead = f"has loss_fn.{key}={as_yaml(trained)}"
        differing = [
            place
            for place in (f"grpo.{key}", f"grpo.adv_estimator.{key}")
            if value_of(tree, place) not in (None, trained)
        ]
        if differing:
            # One note is enough for both places. It names adv_estimator, which NeMo-RL prefers.
            place = differing[-1]
            yield _replaced(place, value_of(tree, place), f"{loss['variant']} {instead}")
        for place in differing:
            set_value(tree, place, trained)


def _score_the_reference(tree: Tree, config: Any, is_stock: Callable[[str], bool]) -> Iterator[str]:
    """Turn the reference policy on again if NeMo-RL's files skip it and the variant's penalty needs it.

    NeMo-RL's files skip it because their own penalty is 0, and the variant's default has replaced that value.
    """
    penalty = "reference_policy_kl_penalty"
    field = config.model_fields.get(penalty)
    has_default_penalty = field is not None and penalty not in tree["loss_fn"] and field.default > 0
    skips_by_stock_file = value_of(tree, SKIP_REFERENCE) is True and is_stock(SKIP_REFERENCE)
    if has_default_penalty and skips_by_stock_file:
        set_value(tree, SKIP_REFERENCE, False)
        yield (
            f"{SKIP_REFERENCE}=true of NeMo-RL's files gives way to false: {tree['loss_fn']['variant']} has "
            f"loss_fn.{penalty}={as_yaml(field.default)}"
        )


def _replaced(key: str, value: Any, instead: str) -> str:
    return f"{key}={as_yaml(value)} is a setting of NeMo-RL's own loss and advantages; {instead}"


def data_sets(recipe: Recipe) -> list[tuple[str, Tree]]:
    """List the recipe's NeMo-RL data sets.

    Returns: pairs of the key, such as ``data.train``, and the data set's settings merged onto
        ``data.default``.
    """
    data_sets = []
    for split in ("train", "validation"):
        sets = getattr(recipe.data, split) or []
        # NeMo-RL takes one data set as a mapping, and several as a list.
        if isinstance(sets, dict):
            sets = [sets]
        for settings in sets:
            data_sets.append((f"data.{split}", {**(recipe.data.default or {}), **settings}))
    return data_sets


def has_images(recipe: Recipe) -> bool:
    """True for tasks with images, and for data that NeMo-RL encodes for vision models."""
    task = recipe.nemo_grpo.task
    if task is not None:
        return task.needs_images
    if recipe.env.should_use_nemo_gym:
        return recipe.policy.is_vlm
    return any(data.get("processor") == VISION_PROCESSOR for _, data in data_sets(recipe))


def prompt_file(name: str, repository: Path) -> Path:
    """Find a prompt's file, whose path is relative to the working directory or NeMo-RL's repository."""
    # The working directory comes first: there a user may have an edited copy of NeMo-RL's prompt.
    for path in (Path(name), repository / name):
        if path.is_file():
            return path
    raise UserError(
        f"data: the prompt {name} is neither in {Path.cwd()} nor in NeMo-RL's repository {repository}; "
        "correct the path"
    )


@rule(Scope.CLUSTER)
def environments_of_the_data_are_configured(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.task is not None:
        return
    for key, data in data_sets(recipe):
        name = data.get("env_name")
        if name not in recipe.env.settings:
            yield (
                f"{key}.env_name={as_yaml(name)}: NeMo-RL looks its settings up in env, which has "
                f"{', '.join(recipe.env.settings) or 'none'}; add env.{name}, or name one of these"
            )


@rule(Scope.ALL)
def task_settings_need_a_task(recipe: Recipe) -> Iterator[str]:
    section = recipe.nemo_grpo
    if section.task is not None:
        return
    for key in ("prompt", "rewards", "new_model"):
        default = type(section).model_fields[key].get_default(call_default_factory=True)
        if getattr(section, key) != default:
            yield (
                f"nemo_grpo.{key}: without nemo_grpo.task prompts and rewards are those of NeMo-RL's data "
                "and env; set a task, or remove it"
            )
