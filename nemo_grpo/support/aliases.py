"""Names that other libraries have for a recipe's keys: advice on unknown keys, docs/coming_from.md."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from nemo_grpo.support.files import read_yaml

LIBRARIES = ("TRL", "verl", "OpenRLHF", "slime", "prime-rl")
"""vime's names are slime's."""
NOT_AVAILABLE = "not available"
"""Stands for the key of a setting that nothing here does."""
VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model")
"""Sections of verl's files whose names no section here has."""


class Alias(NamedTuple):
    """One key and its other names.

    Attributes:
        key: Key of the recipe; empty: nothing here does it.
        trl, verl, openrlhf, slime, prime_rl: Names there, separated by spaces; empty: none.
        remark: Difference between them.
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
        """Names of each of `LIBRARIES`, in their order."""
        return (self.trl, self.verl, self.openrlhf, self.slime, self.prime_rl)


@cache
def table() -> tuple[Alias, ...]:
    """Read the rows of `aliases.yaml`."""
    return tuple(Alias(**row) for row in read_yaml(Path(__file__).with_suffix(".yaml")))


def advice_on(name: str, *, also_same: bool = False) -> str:
    """Return ``"; TRL's delta is loss_fn.ratio_clip_c"`` with the remark for another library's name; else "".

    Args:
        name: Name of a key, without its section.
        also_same: Also for keys of the same name here, because it stood in another section.
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
    """Return advice like `advice_on`'s for a key below one of verl's sections; else empty."""
    section = key.partition(".")[0]
    name = key.rpartition(".")[2]
    if section not in VERL_SECTIONS:
        return ""
    # The value model and the reward model have names of the policy's keys, and nothing here for them.
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
