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

    Attributes:
        count: the number.
        stated: the text that states the number.
        within: fraction by which the count may differ, for a text that rounds.
    """

    count: int
    stated: str
    within: float = 0.0

    def __str__(self) -> str:
        return f"about {self.count}" if self.within else str(self.count)

    def matches(self, count: int) -> bool:
        return abs(count - self.count) <= self.count * self.within


@dataclass(frozen=True)
class Source:
    """One data set.

    Attributes:
        name: name of the data set and of its files.
        use: training or evaluation, as in the papers.
        task: name of the task that scores responses to it.
        paper: papers that use it, with the passage.
        schema: where the names of the columns come from. ``files`` means the published files, ``readers``
            public programs or cards that read them.
        origin: where the rows come from.
        mapping: converts a row to an entry.
        filters: `complete`, then the filters of this data set, in order.
        expected: number of problems that a text states; None if no text states one.
        made_here: generator of problems of the same kind, for `generate`; None if there is none.
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
            names = [source.name for source in SOURCES.values() if source.made_here]
            raise UserError(f"{self.name} cannot be generated; --generate is for {', '.join(names)}")
        # The other filters select from published problems. Generated ones only have to be complete.
        return replace(self, origin=self.made_here, mapping=generated, filters=self.filters[:1])


def _source(name: str, entry: dict[str, Any]) -> Source:
    """Build a data set from its entry in `sources.yaml`, which has one origin and one mapping."""
    [origin_kind] = [key for key in ORIGINS if key in entry]
    origin = ORIGINS[origin_kind](**_tuples(entry.pop(origin_kind)))
    [mapping_name] = [key for key in MAPPINGS if key in entry]
    mapping = partial(MAPPINGS[mapping_name], **entry.pop(mapping_name))
    filters = [complete()]
    for filter_name, options in entry.pop("filters", {}).items():
        filters.append(FILTERS[filter_name](**options))
    expected = entry.pop("expected", None)
    made_here = entry.pop("made_here", None)
    return Source(
        name,
        origin=origin,
        mapping=mapping,
        filters=tuple(filters),
        expected=None if expected is None else Expected(**expected),
        made_here=None if made_here is None else Generated(**_tuples(made_here)),
        **entry,
    )


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert YAML's lists to tuples, the type that the fields of these dataclasses have."""
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
