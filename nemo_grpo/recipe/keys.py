"""Valid keys of a recipe, and the nearest one for a misspelt key.

NeMo-RL accepts unknown keys, so that a typo would train with a default. Names are therefore checked against
NeMo-RL's `schema` and against our own models.
"""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from nemo_grpo.recipe.own import NemoGRPOSection
from nemo_grpo.recipe.schema import HEAD, V0_7_0, entries, free_form, nemo_rl_keys, unread_keys
from nemo_grpo.support.aliases import advice_on, advice_on_verl
from nemo_grpo.support.dotted import leaves, parents
from nemo_grpo.support.errors import did_you_mean, shown
from nemo_grpo.variants import OBJECTIVES

CHECKED_ELSEWHERE = ("nemo_grpo.task.", "nemo_grpo.rewards.")
"""Prefixes of keys that the task checks."""

OURS = ("loss_fn", "nemo_grpo")
"""Sections whose keys the variants, the tasks and our own models check."""


LATER = {
    "checkpointing.load_replay_buffer": 3583,
    "grpo.length_penalty": 3604,
    "policy.generation.fault_tolerance": 3505,
    "policy.megatron_cfg.zero_train_gen_mismatch": 3208,
}
"""Keys and sections of a NeMo-RL later than those recorded -> the pull request that adds it."""


@cache
def known_keys() -> frozenset[str]:
    """Collect every dotted leaf key that a recipe can have: NeMo-RL's, the variants' and ours."""
    variants = {f"loss_fn.{name}" for config in OBJECTIVES.values() for name in config.model_fields}
    ours = {f"nemo_grpo.{key}" for key, is_section in model_keys(NemoGRPOSection) if not is_section}
    return nemo_rl_keys() | variants | ours


@cache
def sections() -> frozenset[str]:
    """Collect every dotted key that has keys below it."""
    above = (parent for key in known_keys() for parent in parents(key))
    return frozenset(above).union(entries().keys() - nemo_rl_keys())


def is_known(key: str) -> bool:
    """True for a leaf or section of the lists, and for anything below a free-form section."""
    return key in known_keys() or key in sections() or _is_free(key) or key.startswith(CHECKED_ELSEWHERE)


def dotted_key_errors(tree: Mapping[str, Any], section: str = "") -> list[str]:
    """Return a message for each key written with dots, like an override: nothing would read it."""
    if _is_free(section) or f"{section}.".startswith(CHECKED_ELSEWHERE):
        return []
    errors = list[str]()
    for name, value in tree.items():
        key, below = f"{section}.{name}".removeprefix("."), f" below {section}" if section else ""
        if "." in str(name):
            nested = f"{': {'.join(str(name).split('.'))}: {shown(value)}" + "}" * str(name).count(".")
            errors.append(f"{key}={shown(value)}: a file nests its keys; write `{nested}`{below}")
        elif isinstance(value, Mapping):
            errors += dotted_key_errors(value, key)
    return errors


def unknown_key_errors(tree: Mapping[str, Any]) -> list[str]:
    """Return a message for each unknown key at the top level or in NeMo-RL's sections."""
    return [
        unknown_key_message(key, value)
        for key, value in leaves(tree)
        if key.split(".")[0] not in OURS and not is_known(key) and not _hangs_below_a_value(key)
    ]


def unknown_key_message(key: str, value: Any) -> str:
    """Write ``key=value: rule; remedy`` for a key that a recipe cannot have."""
    bad = next((part for part in [*parents(key), key] if not is_known(part)), key)
    if bad in LATER:
        return (
            f"{key}={shown(value)}: {bad} is of a later NeMo-RL (its pull request {LATER[bad]}) than "
            f"{V0_7_0} and {HEAD}, which this package knows and which would run without it; leave it out"
        )
    parent, _, name = bad.rpartition(".")
    siblings = _names_below(parent)
    where = f"is not a key of {parent}" if parent else "is not a section of a recipe"
    if other := advice_on_verl(key) or advice_on(name):
        return f"{key}={shown(value)}: {bad} {where}{other}"
    if not difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        elsewhere = sorted(known for known in known_keys() if known.endswith(f".{name}"))
        if elsewhere:
            return f"{key}={shown(value)}: {bad} {where}; did you mean {' or '.join(elsewhere[:3])}?"
    return f"{key}={shown(value)}: {bad} {where}{did_you_mean(name, siblings)}"


def unread_key_messages(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that is set and that no code of NeMo-RL reads."""
    for key, value in leaves(tree):
        if key in unread_keys() and value not in (None, False):
            yield f"{key}={shown(value)}: no code of NeMo-RL reads this key; {_read_instead(key)}"


def _read_instead(key: str) -> str:
    """Suggest a key of the same words in any order, or to remove it."""
    words = sorted(key.rpartition(".")[2].split("_"))
    read = sorted(known_keys() - unread_keys())
    same = [known for known in read if sorted(known.rpartition(".")[2].split("_")) == words]
    return f"did you mean {same[0]}?" if same else "remove it"


def _is_free(key: str) -> bool:
    return not free_form().isdisjoint((*parents(key), key))


def _hangs_below_a_value(key: str) -> bool:
    """True below a mapping that stands where a value belongs: a wrong type, not an unknown key."""
    return any(parent in known_keys() and parent not in sections() for parent in parents(key))


def _names_below(parent: str) -> set[str]:
    """List keys and sections directly below ``parent``; ``""`` is the top."""
    prefix = f"{parent}." if parent else ""
    return {key[len(prefix) :].split(".")[0] for key in known_keys() if key.startswith(prefix)}


def model_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the dotted keys of a model and of its sections, and whether each is a section."""
    for name, field in model.model_fields.items():
        nested = [t for t in (field.annotation, *get_args(field.annotation)) if _is_model(t)]
        yield f"{prefix}{name}", bool(nested)
        if nested:
            yield from model_keys(nested[0], f"{prefix}{name}.")


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
