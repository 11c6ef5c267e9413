"""Training and evaluation sets of the papers, read from `sources.yaml`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from nemo_grpo.data.fields import FILTERS, MAPPINGS, FieldMapping, Filter, complete
from nemo_grpo.data.local_folders import LocalFolder
from nemo_grpo.data.origins import Generated, GitFiles, Hub, Origin, generated
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import read_yaml

ORIGINS: dict[str, Callable[..., Origin]] = {"hub": Hub, "git": GitFiles, "folder": LocalFolder}


@dataclass(frozen=True)
class Expected:
    """Expected number of problems.

    Attributes: stated: the text that states it.  within: fraction by which a count may differ, if it rounds.
    """

    count: int
    stated: str
    within: float = 0.0

    def __str__(self) -> str:
        return f"{'about ' if self.within else ''}{self.count}"

    def matches(self, count: int) -> bool:
        return abs(count - self.count) <= self.count * self.within


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes:
        task: the task that scores it.  paper: papers that use it, with the passage.
        schema: source of the columns' names. ``files``: the published files; ``readers``: public programs or
            cards that read them.
        filters: `complete`, then the set's own, in order.
        made_here: generator of the same kind of problems, for `generate`.
    """

    name: str
    use: Literal["training", "evaluation"]
    task: str
    paper: str
    schema: Literal["files", "readers"]
    origin: Origin
    mapping: FieldMapping
    filters: tuple[Filter, ...]
    expected: Expected | None = None
    made_here: Generated | None = None

    def generate(self) -> Self:
        """Return the data set with `made_here` as its origin."""
        if self.made_here is None:
            able = ", ".join(source.name for source in SOURCES.values() if source.made_here)
            raise UserError(f"{self.name} cannot be generated; --generate is for {able}")
        return replace(self, origin=self.made_here, mapping=generated, filters=self.filters[:1])


def _source(name: str, entry: dict[str, Any]) -> Source:
    (origin,) = (make(**_tuples(entry.pop(key))) for key, make in ORIGINS.items() if key in entry)
    (mapping,) = (partial(read, **entry.pop(key)) for key, read in MAPPINGS.items() if key in entry)
    own = [FILTERS[key](**options) for key, options in entry.pop("filters", {}).items()]
    expected, made_here = entry.pop("expected", None), entry.pop("made_here", None)
    return Source(
        name,
        origin=origin,
        mapping=mapping,
        filters=(complete(), *own),
        expected=expected and Expected(**expected),
        made_here=made_here and Generated(**_tuples(made_here)),
        **entry,
    )


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


SOURCES: dict[str, Source] = {
    name: _source(name, entry) for name, entry in read_yaml(Path(__file__).with_name("sources.yaml")).items()
}
ALIASES = {"rs1": "open-s1", "rs2": "open-rs", "rs3": "open-rs", "math": "math-lighteval"}
"""Alias -> data set. Open-RS2 and Open-RS3 were trained on the same mix, with other rewards and lengths."""


def find_source(name: str) -> Source:
    """Find the data set of a name or alias."""
    name = ALIASES.get(name, name)
    if name not in SOURCES:
        raise UserError(f"unknown data set {name!r}{did_you_mean(name, [*SOURCES, *ALIASES])}")
    return SOURCES[name]
