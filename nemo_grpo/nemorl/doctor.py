"""Check of a NeMo-RL tree against the signatures of `HOST_API`, by griffe: nothing is imported."""

from pathlib import Path
from typing import Any, NamedTuple

import griffe
from griffe import ParameterKind as Kind

from nemo_grpo.nemorl.host_api import HOST_API, Name
from nemo_grpo.support.errors import UserError


class Misfit(NamedTuple):
    """A name that is gone, or whose signature is not the expected one.

    Attributes:
        name: the table's row.
        signature: the tree's; None if the name is gone.
    """

    name: Name
    signature: str | None

    def __str__(self) -> str:
        if self.signature is None:
            return f"{self.name.name} is gone"
        return f"{self.name.name} has the signature {self.signature}, expected: {self.name.signature}"


def check_tree(root: Path) -> list[Misfit]:
    """Find the names of `HOST_API` that are gone or changed in a tree of NeMo-RL.

    Args:
        root: NeMo-RL's repository, or the site-packages that has it.
    """
    if not (root / "nemo_rl" / "__init__.py").is_file():
        raise UserError(f"--nemo-rl {root} has no nemo_rl/__init__.py; give the folder of NeMo-RL's clone")
    loader = griffe.GriffeLoader(search_paths=[root], allow_inspection=False)
    package = loader.load("nemo_rl", try_relative_path=False)
    misfits = []
    for name in HOST_API:
        definition = _find(package, name.name)
        if definition is None:
            if not name.optional:
                misfits.append(Misfit(name, None))
        elif name.signature is not None:
            signature = _signature(definition)
            if not fits(name.signature, signature):
                misfits.append(Misfit(name, signature))
    return misfits


def _find(package: Any, name: str) -> Any:
    """Find the definition of ``module:Class.name`` through imports and bases; None if it is gone."""
    definition = package
    try:
        for part in name.replace(":", ".").split(".")[1:]:
            definition = definition.all_members[part]
            if definition.is_alias:
                definition = definition.final_target
    except (KeyError, AttributeError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    return definition


def _signature(definition: Any) -> str:
    """Write a definition's signature like ``(a, b=, *, c, **more)``, without ``self``.

    A class without a constructor is written with its fields as parameters.
    """
    if not definition.is_class and not definition.is_function:
        return "of no function"
    words = []
    if definition.is_class and "__init__" not in definition.all_members:
        for name, field in definition.all_members.items():
            if field.is_attribute:
                words.append(f"{name}=" if field.value is not None else name)
        return f"({', '.join(words)})"
    for parameter in definition.parameters:
        has_star = any(word.startswith("*") for word in words)
        if parameter.kind is Kind.keyword_only and not has_star:
            words.append("*")
        stars = {Kind.var_positional: "*", Kind.var_keyword: "**"}.get(parameter.kind, "")
        # griffe gives variadic parameters a default, too.
        has_default = parameter.default is not None and not stars
        words.append(f"{stars}{parameter.name}{'=' if has_default else ''}")
    if words[:1] in (["self"], ["cls"]):
        del words[0]
    return f"({', '.join(words)})"


def fits(expected: str, actual: str) -> bool:
    """Return True if a function with the signature ``actual`` is what ``expected`` of the table describes."""
    if not expected.endswith("...)"):
        return actual == expected
    # The last word is the "...", which allows parameters that callers may leave out.
    expected_names = [word.rstrip("=") for word in expected[1:-1].split(", ")[:-1]]
    positional = expected_names
    if "*" in expected_names:
        positional = expected_names[: expected_names.index("*")]
    actual_words = actual[1:-1].split(", ") if actual != "()" else []
    actual_names = [word.rstrip("=") for word in actual_words]
    if actual_names[: len(positional)] != positional:
        return False
    missing_names = set(expected_names) - {"*"} - set(actual_names)
    if missing_names:
        return False
    further = [word for word in actual_words if word.rstrip("=") not in expected_names]
    return all(word.endswith("=") or word.startswith("*") for word in further)
