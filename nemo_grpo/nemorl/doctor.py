"""Comparison of a NeMo-RL tree with the tested versions, in every name that this package uses or replaces.

`observe` describes the tree by its syntax and imports nothing; `diagnose` compares that with the records of
the tested versions in ``interfaces``.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nemo_grpo.nemorl import static_api
from nemo_grpo.nemorl.host_api import (
    BASE,
    CONTROLLER_ACTOR,
    EVERY_RUN,
    GRPO,
    GRPO_SYNC,
    HOST_API,
    SFT,
    SINGLE_CONTROLLER,
    TESTED,
    VISION_BASE,
    Name,
)
from nemo_grpo.nemorl.static_api import Tree, misfit
from nemo_grpo.support.errors import UserError

RECORDS = Path(__file__).with_name("interfaces")
"""One description of each version of `TESTED`, written by scripts/record_nemo_rl.py."""

TEXTS: dict[str, tuple[str, ...]] = {
    GRPO: ("timing/train", "gen_kl_error", "validation"),
    GRPO_SYNC: ("timing/train", "gen_kl_error", "validation"),
    SFT: ("timing/train",),
    CONTROLLER_ACTOR.partition(":")[0]: ("timing/train",),
}
"""Texts that we look for at run time, and the modules that write them."""

METRICS_READ = (GRPO, GRPO_SYNC)
"""Trainers that read ``metrics[...]`` of the loss; ours must give every name."""

FILES = (f"examples/configs/{BASE}", f"examples/configs/{VISION_BASE}")
"""Files that we read, from the repository's root."""

Description = Mapping[str, Any]
Interface = Mapping[str, Description]
"""Key of `HOST_API`, or a file or module -> its description; those that the tree lacks are left out."""
Verdict = Literal["supported", "untested", "broken"]


class Finding(NamedTuple):
    """Result for one name, file or module.

    Attributes: name: NeMo-RL's.  why: its purpose.  part: the part that needs it.  state: against the nearest
        tested version.  how: the change.  breaks: a run that needs it fails, or silently does something else.
    """

    name: str
    why: str
    part: str
    state: Literal["there", "changed", "gone"]
    how: str = ""
    breaks: bool = False

    def __str__(self) -> str:
        return f"{self.state} {self.name}{': ' * bool(self.how)}{self.how}"


class Diagnosis(NamedTuple):
    """Attributes: like: the tested version with the fewest differences.  findings: of every name.

    A single controller that does not fit breaks recipes with async_rl alone, and leaves the verdict as it is.
    """

    like: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """``supported`` only for exactly a tested version's interface."""
        if any(finding.breaks and finding.part != SINGLE_CONTROLLER for finding in self.findings):
            return "broken"
        return "untested" if self.differences else "supported"

    @property
    def differences(self) -> list[Finding]:
        """Findings that are not ``there``, breaking ones first."""
        return sorted((f for f in self.findings if f.state != "there"), key=lambda f: not f.breaks)


def diagnose_tree(root: Path) -> Diagnosis:
    """Diagnose the NeMo-RL repository in a folder."""
    if not (root / "nemo_rl" / "__init__.py").is_file():
        raise UserError(f"--nemo-rl {root} has no nemo_rl/__init__.py; give the folder of NeMo-RL's clone")
    return diagnose(observe(Tree(root, "nemo_rl")))


def observe(tree: Tree) -> dict[str, Any]:
    """Describe all that this package uses or replaces in a NeMo-RL tree."""
    found: dict[str, Any] = {key: _described(tree, name) for key, name in HOST_API.items()}
    for module, texts in TEXTS.items():
        if tree.text(module):
            found[f"texts of {module}"] = {text: text in tree.text(module) for text in texts}
    found |= {file: {} for file in FILES if (tree.root / file).is_file()}
    names = set().union(*(tree.subscripts(module, "metrics") for module in METRICS_READ))
    found["metrics that the trainers read"] = {"names": sorted(names)}
    return {key: description for key, description in found.items() if description is not None}


@cache
def recorded(version: str) -> Interface:
    """Read the interface of a version of `TESTED`."""
    record: Interface = json.loads((RECORDS / f"nemo_rl-{version}.json").read_text(encoding="utf-8"))
    return record


def diagnose(now: Interface) -> Diagnosis:
    """Compare an interface with the tested versions'."""
    required = [key for key, name in HOST_API.items() if name.is_required]

    def against(version: str) -> Diagnosis:
        then = recorded(version)
        keys = dict.fromkeys([*then, *required, *now])
        return Diagnosis(version, tuple(_finding(key, then.get(key), now) for key in keys))

    return min(map(against, TESTED), key=lambda d: (len(d.differences), d.like))


def _described(tree: Tree, name: Name) -> dict[str, Any] | None:
    found = tree.find(name.name)
    return found and (_used if name.is_used else _replaced)(tree, name, found)


def _replaced(tree: Tree, name: Name, found: Any) -> dict[str, Any]:
    description: dict[str, Any] = {"kind": static_api.kind(found), "parameters": static_api.parameters(found)}
    if name.returns:
        description["returns"] = tree.returned(found)
    if "." in name.name.partition(":")[2] or name.how == "overridden":
        description["calls"] = tree.calls(name.called or _last(name.name), name.within, name.guard)
        return description
    modules = tree.importers(name.name)
    description["bound_in"] = modules
    description["calls"] = sorted({c for module in modules for c in tree.calls(_last(name.name), module)})
    return description


def _used(tree: Tree, use: Name, found: Any) -> dict[str, Any]:
    description: dict[str, Any] = {"kind": static_api.kind(found)}
    if use.how == "repeated":
        return description | {"code": tree.code(found)}
    if description["kind"] == "class":
        description["bases"] = [str(base) for base in found.bases]
        if "Protocol" in description["bases"]:
            description["members"] = sorted(found.members)
    if use.ours:
        description["abstract"] = static_api.abstract(found)
    if use.call or description["kind"].endswith("function"):
        description["parameters"] = static_api.parameters(found)
    if use.returns:
        description["returns"] = tree.returned(found)
    if use.reads:
        listed = static_api.keys(found) or [n for n in use.reads if tree.find(f"{use.name}.{n}") is not None]
        description["has"] = {name: name in listed for name in use.reads}
    return description


def _last(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]


def _finding(key: str, then: Description | None, interface: Interface) -> Finding:
    touched, now = HOST_API.get(key), interface.get(key)
    shown, why = key, ""
    if touched is not None and not touched.is_used:
        shown, why = touched.name, f"{touched.how}: {touched.why}"
    finding = Finding(shown, why, touched.part if touched else EVERY_RUN, "there")
    if now is None:
        return finding._replace(state="gone", breaks=touched is None or touched.is_required)
    faults = list(_breaks(touched, then or {}, now))
    if then == now and not faults:
        return finding
    how = "; ".join(faults or (_changes(then, now) if then is not None else ["new"]))
    return finding._replace(state="changed", how=how, breaks=bool(faults))


def _breaks(name: Name | None, then: Description, now: Description) -> Iterator[str]:
    """Yield differences that fail, or go wrong without an error."""
    yield from (f"lacks {text!r}" for text, has in now.items() if has is False)
    yield from (f"lacks {member}" for member, has in now.get("has", {}).items() if not has)
    if name is None:
        return
    if now.get("kind") != then.get("kind", now.get("kind")):
        yield f"was a {then['kind']}, is a {now['kind']}"
    yield from _moved("returns", then.get("returns"), now.get("returns"))
    yield from (_used_breaks if name.is_used else _replaced_breaks)(name, then, now)


def _used_breaks(name: Name, then: Description, now: Description) -> Iterator[str]:
    if "TypedDict" in now.get("bases", ()) and name.name.endswith(":MasterConfig"):
        yield "is a dictionary, whose values are no attributes"
    for method in now.get("abstract", ()):
        if _package().find(f"{name.ours}.{method}") is None:
            yield f"{name.ours.partition(':')[2]} does not define {method}"
    parameters = now.get("parameters")
    if name.call and parameters is not None:
        if why := misfit(parameters, name.call):
            yield f"our call {name.call}: {why}"
        count = name.call.count("_,") + name.call.endswith("_)") if "=" not in name.call else 0
        yield from _moved("parameters", (then.get("parameters") or [])[:count], parameters[:count])


def _replaced_breaks(name: Name, then: Description, now: Description) -> Iterator[str]:
    found = _package().find(name.ours)
    assert found is not None, f"{name.ours} is not there"
    ours = static_api.parameters(found) or now["parameters"]  # of a subclass without a constructor, NeMo-RL's
    for call in now.get("calls", ()):
        if why := misfit(ours, call):
            yield f"NeMo-RL calls {call}, which {name.ours.partition(':')[2]} does not take: {why}"
    if then.get("calls") and not now.get("calls"):
        yield "NeMo-RL calls it nowhere"
    known = {name.name.partition(":")[0], *name.also}
    for module in now.get("bound_in", ()):
        if module not in known:
            yield f"{module} imports it, where it would not be {name.how}"
    if name.how in ("replaced", "implemented"):
        yield from _moved("parameters", then.get("parameters"), now.get("parameters"))


@cache
def _package() -> Tree:
    return Tree(Path(__file__).parents[2], "nemo_grpo")


def _moved(what: str, then: list[str] | None, now: list[str] | None) -> Iterator[str]:
    """Compare lists that are read by position: their length, and the place of each name."""
    if then is None or now is None:
        return
    if what == "returns" and len(then) != len(now):
        yield f"returns {len(now)} values, not {len(then)}"
        return
    for place, (before, after) in enumerate(zip(then, now, strict=False)):
        if before != after and before != "_" and before in now:
            yield f"{what}: {before} is no longer number {place + 1}"
            return


def _changes(then: Description, now: Description) -> Iterator[str]:
    """Yield a sentence for each part of a description that differs."""
    for part in dict.fromkeys([*then, *now]):
        before, after = then.get(part), now.get(part)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            new = [f"+{word}" for word in after if word not in before]
            old = [f"-{word}" for word in before if word not in after]
            yield f"{part}: {' '.join([*new, *old]) or 'another order'}"
        elif part == "code":
            yield "its code has changed, which ours repeats"
        else:
            yield f"{part}: {before} -> {after}"
