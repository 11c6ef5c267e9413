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
    keys = set(nemo_rl_keys())
    for config in OBJECTIVES.values():
        keys.update(f"loss_fn.{name}" for name in config.model_fields)
    keys.update(f"nemo_grpo.{key}" for key, is_section in model_keys(NemoGRPOSection) if not is_section)
    return frozenset(keys)


@cache
def sections() -> frozenset[str]:
    """Collect every dotted key that has keys below it."""
    # Some sections of NeMo-RL's schema have no recorded key below them.
    sections = set(entries().keys() - nemo_rl_keys())
    for key in known_keys():
        sections.update(parents(key))
    return frozenset(sections)


def is_known(key: str) -> bool:
    """True for a leaf or section of the lists, and for anything below a free-form section."""
    return key in known_keys() or key in sections() or _is_free(key) or key.startswith(CHECKED_ELSEWHERE)


def dotted_key_errors(tree: Mapping[str, Any], section: str = "") -> list[str]:
    """Return a message for each key written with dots, like an override: nothing would read it."""
    if _is_free(section) or f"{section}.".startswith(CHECKED_ELSEWHERE):
        return []
    errors = list[str]()
    place = f" below {section}" if section else ""
    for name, value in tree.items():
        key = f"{section}.{name}" if section else str(name)
        if "." in str(name):
            remedy = f"write `{_nested(str(name), value)}`{place}"
            errors.append(f"{key}={shown(value)}: a file nests its keys; {remedy}")
        elif isinstance(value, Mapping):
            errors += dotted_key_errors(value, key)
    return errors


def _nested(dotted_name: str, value: Any) -> str:
    """Write ``a.b=1`` as YAML nests it: ``a: {b: 1}``."""
    names = dotted_name.split(".")
    opened = ": {".join(names)
    return f"{opened}: {shown(value)}{'}' * (len(names) - 1)}"


def unknown_key_errors(tree: Mapping[str, Any]) -> list[str]:
    """Return a message for each unknown key at the top level or in NeMo-RL's sections."""
    errors = []
    for key, value in leaves(tree):
        is_checked_elsewhere = key.split(".")[0] in OURS or _hangs_below_a_value(key)
        if not is_checked_elsewhere and not is_known(key):
            errors.append(unknown_key_message(key, value))
    return errors


def unknown_key_message(key: str, value: Any) -> str:
    """Write ``key=value: rule; remedy`` for a key that a recipe cannot have."""
    # The outermost part that is wrong: in polcy.model_name it is the section.
    wrong_part = next((part for part in [*parents(key), key] if not is_known(part)), key)
    if wrong_part in LATER:
        return (
            f"{key}={shown(value)}: {wrong_part} is of a later NeMo-RL (its pull request "
            f"{LATER[wrong_part]}) than {V0_7_0} and {HEAD}, which this package knows and which would run "
            "without it; leave it out"
        )
    parent, _, name = wrong_part.rpartition(".")
    if parent:
        rule = f"{wrong_part} is not a key of {parent}"
    else:
        rule = f"{wrong_part} is not a section of a recipe"
    return f"{key}={shown(value)}: {rule}{_remedy(key, name, parent)}"


def _remedy(key: str, name: str, parent: str) -> str:
    """Suggest what to write in place of an unknown key.

    Args:
        key: The key as it was written.
        name: Its first part that is unknown.
        parent: The section of that part.
    """
    # Another library's name first: it is exact, while a similar key may be a coincidence.
    advice = advice_on_verl(key) or advice_on(name)
    if advice:
        return advice
    siblings = _names_below(parent)
    if not difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        same_name = sorted(known_key for known_key in known_keys() if known_key.endswith(f".{name}"))
        if same_name:
            return f"; did you mean {' or '.join(same_name[:3])}?"
    return did_you_mean(name, siblings)


def unread_key_messages(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that is set and that no code of NeMo-RL reads."""
    for key, value in leaves(tree):
        if key in unread_keys() and value not in (None, False):
            yield f"{key}={shown(value)}: no code of NeMo-RL reads this key; {_read_instead(key)}"


def _read_instead(key: str) -> str:
    """Suggest a key of the same words in any order, or to remove it."""
    words = _words(key)
    for read_key in sorted(known_keys() - unread_keys()):
        if _words(read_key) == words:
            return f"did you mean {read_key}?"
    return "remove it"


def _words(key: str) -> list[str]:
    """List the words of a key's last part, sorted."""
    return sorted(key.rpartition(".")[2].split("_"))


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
        # An optional section has the model among the arguments of its union.
        types = (field.annotation, *get_args(field.annotation))
        section = next((annotation for annotation in types if _is_model(annotation)), None)
        yield f"{prefix}{name}", section is not None
        if section is not None:
            yield from model_keys(section, f"{prefix}{name}.")


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
