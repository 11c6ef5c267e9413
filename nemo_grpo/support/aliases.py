"""Names that other libraries have for a recipe's keys.

They serve the advice on an unknown key, and the table of docs/coming_from.md.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from nemo_grpo.support.files import read_yaml

LIBRARIES = ("TRL", "verl", "OpenRLHF", "slime", "prime-rl")
"""Libraries of the table, in the order of its columns. vime has slime's names."""
NOT_AVAILABLE = "not available"
"""Text in place of a key, for a setting that this package does not have."""
VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model")
"""Sections of a verl config that no recipe here has, so a key below them was copied from verl."""


class Alias(NamedTuple):
    """One key of a recipe, and its names in other libraries.

    Attributes:
        key: Key of the recipe; empty if this package has no such setting.
        trl, verl, openrlhf, slime, prime_rl: Names in that library, separated by spaces; may be empty.
        remark: Difference in meaning.
    """

    key: str
    trl: str = ""
    verl: str = ""
    openrlhf: str = ""
    slime: str = ""
    prime_rl: str = ""
    remark: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in each library, in the order of `LIBRARIES`."""
        return (self.trl, self.verl, self.openrlhf, self.slime, self.prime_rl)


@cache
def table() -> tuple[Alias, ...]:
    """Read the rows of `aliases.yaml`."""
    return tuple(Alias(**row) for row in read_yaml(Path(__file__).with_suffix(".yaml")))


def advice_on(name: str, *, also_same: bool = False) -> str:
    """Return advice on a key that another library has, such as ``"; TRL's delta is loss_fn.ratio_clip_c"``.

    Args:
        name: Name of an unknown key, without its section.
        also_same: True to advise on names that a key here has, too, because the user wrote the name in
            another section.

    Returns:
        The end of an error message; empty if no library has a key of this name.
    """
    owners: dict[Alias, list[str]] = {}
    for alias in table():
        has_same_name = alias.key.endswith(f".{name}")
        if has_same_name and not also_same:
            continue
        for library, names in zip(LIBRARIES, alias.names, strict=True):
            if name in names.split():
                owners.setdefault(alias, []).append(f"{library}'s")
    clauses = []
    for alias, libraries in owners.items():
        remark = f" ({alias.remark})" if alias.remark else ""
        clauses.append(f"{' and '.join(libraries)} {name} is {alias.key or NOT_AVAILABLE}{remark}")
    return f"; {', '.join(clauses)}" if clauses else ""


def advice_on_verl(key: str) -> str:
    """Return advice on a key below one of `VERL_SECTIONS`, in the form of `advice_on`; else an empty text."""
    section = key.partition(".")[0]
    name = key.rpartition(".")[2]
    if section not in VERL_SECTIONS:
        return ""
    # verl's value model and reward model have keys of the policy's names. This package has neither model, so
    # advice on the policy's key would be wrong.
    if section not in ("critic", "reward_model"):
        advice = advice_on(name, also_same=True)
        if advice:
            return advice
    return "; it is verl's, and no key here stands for it; leave it out"


def markdown() -> str:
    """Write the table of docs/coming_from.md."""
    titles = [library.replace("slime", "slime, vime") for library in LIBRARIES]
    lines: list[tuple[str, ...]] = [("here", *titles, "remark"), ("---",) * (len(titles) + 2)]
    for alias in table():
        key = f"`{alias.key}`" if alias.key else NOT_AVAILABLE
        cells = [", ".join(f"`{name}`" for name in names.split()) for names in alias.names]
        lines.append((key, *cells, alias.remark))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
