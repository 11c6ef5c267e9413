"""Valid keys of a recipe, and the suggestion of a valid key for a misspelt one.

NeMo-RL accepts unknown keys, so a run with a misspelt key would train with the default. The names are
therefore checked here, against NeMo-RL's `schema` and against our own models.
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
"""Prefixes of keys that are not checked here, because the task checks them."""

OURS = ("loss_fn", "nemo_grpo")
"""Sections that are not checked here: the models of the variants, the tasks and this package check them."""
LATER = {
    "checkpointing.load_replay_buffer": 3583,
    "grpo.length_penalty": 3604,
    "policy.generation.fault_tolerance": 3505,
    "policy.megatron_cfg.zero_train_gen_mismatch": 3208,
}
"""Key or section of a later NeMo-RL than the recorded ones -> number of the pull request that adds it."""


@cache
def known_keys() -> frozenset[str]:
    """Collect all dotted keys that a recipe can set, without sections: NeMo-RL's, the variants' and ours."""
    keys = set(nemo_rl_keys())
    for config in OBJECTIVES.values():
        keys.update(f"loss_fn.{name}" for name in config.model_fields)
    keys.update(f"nemo_grpo.{key}" for key, is_section in model_keys(NemoGRPOSection) if not is_section)
    return frozenset(keys)


@cache
def sections() -> frozenset[str]:
    """Collect the dotted keys of all sections."""
    # Some sections of NeMo-RL's schema have no recorded key below them.
    sections = set(entries().keys() - nemo_rl_keys())
    for key in known_keys():
        sections.update(parents(key))
    return frozenset(sections)


def is_known(key: str) -> bool:
    """True for a known key or section, for a key in a free-form section, and for a key that a task checks."""
    return key in known_keys() or key in sections() or _is_free(key) or key.startswith(CHECKED_ELSEWHERE)


def dotted_key_errors(tree: Mapping[str, Any], section: str = "") -> list[str]:
    """Return a message for each key that a file writes with dots, like an override: nothing would read it."""
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
    # The outermost wrong part is named. In polcy.model_name it is the section, polcy.
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
        name: Name of the first part that is unknown.
        parent: Section of that part.
    """
    # The name of another library's key comes first: the match is exact, while a similar key may be a
    # coincidence.
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
    """Yield a warning for each key that is set although no code of NeMo-RL reads it."""
    for key, value in leaves(tree):
        if key in unread_keys() and value not in (None, False):
            yield f"{key}={shown(value)}: no code of NeMo-RL reads this key; {_read_instead(key)}"


def _read_instead(key: str) -> str:
    """Suggest a key whose name has the same words in another order, or the removal of the key."""
    words = _words(key)
    for read_key in sorted(known_keys() - unread_keys()):
        if _words(read_key) == words:
            return f"did you mean {read_key}?"
    return "remove it"


def _words(key: str) -> list[str]:
    """List the words of a key's name, without its section, in alphabetical order."""
    return sorted(key.rpartition(".")[2].split("_"))


def _is_free(key: str) -> bool:
    return not free_form().isdisjoint((*parents(key), key))


def _hangs_below_a_value(key: str) -> bool:
    """True for a key below a mapping in place of a plain value: the type is wrong, not the key's name."""
    return any(parent in known_keys() and parent not in sections() for parent in parents(key))


def _names_below(parent: str) -> set[str]:
    """List the names of the keys and sections directly below ``parent``; ``""`` is the top level."""
    prefix = f"{parent}." if parent else ""
    return {key[len(prefix) :].split(".")[0] for key in known_keys() if key.startswith(prefix)}


def model_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each dotted key of a model and of its sections, with True if the key is a section."""
    for name, field in model.model_fields.items():
        # The annotation of an optional section is a union of the model and None.
        types = (field.annotation, *get_args(field.annotation))
        section = next((annotation for annotation in types if _is_model(annotation)), None)
        yield f"{prefix}{name}", section is not None
        if section is not None:
            yield from model_keys(section, f"{prefix}{name}.")


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
