"""Reads what a source tree defines and calls, by its syntax: nothing is imported or run.

`Tree` finds a definition by ``module:name``, through imports and base classes;
`signatures` compares arguments.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl.signatures import listed, shape

Function = ast.FunctionDef | ast.AsyncFunctionDef

SPECIAL = {"staticmethod", "classmethod", "property"}


class Found(NamedTuple):
    """A definition, and the module that holds it."""

    node: ast.AST
    module: str


class Tree:
    """The Python modules below a folder.

    Args: root: the folder that holds the package.  package: its name.  parse: one that remembers, if many
        trees are read.
    """

    def __init__(self, root: Path, package: str, parse: Callable[[str], ast.Module] = ast.parse) -> None:
        self.root, self.package, self._parse = root, package, parse
        self._texts: dict[str, str] = {}
        self._parsed: dict[str, ast.Module] = {}

    def path_of(self, module: str) -> Path | None:
        """A module's file; None: there is none."""
        base = self.root / module.replace(".", "/")
        return next(
            (path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None
        )

    def text(self, module: str) -> str:
        """A module's source; empty if there is none."""
        if module not in self._texts:
            path = self.path_of(module)
            self._texts[module] = path.read_text(encoding="utf-8", errors="replace") if path else ""
        return self._texts[module]

    def parsed(self, module: str) -> ast.Module:
        """A module's syntax; empty if there is none.

        Raises: UserError: it is written for a newer Python than this one.
        """
        if module not in self._parsed:
            try:
                self._parsed[module] = self._parse(self.text(module))
            except SyntaxError as error:
                raise UserError(
                    f"{self.path_of(module)}, line {error.lineno}, is not Python "
                    f"{sys.version_info.major}.{sys.version_info.minor} ({error.msg}); run this "
                    "with the Python that the package is for"
                ) from None
        return self._parsed[module]

    def modules(self, prefix: str, *words: str) -> Iterator[str]:
        """Names of the modules from a prefix on whose text has every word."""
        for module in self._names:
            if f"{module}.".startswith(f"{prefix}.") and all(word in self.text(module) for word in words):
                yield module

    @cached_property
    def _names(self) -> list[str]:
        files = sorted((self.root / self.package).rglob("*.py"))
        dotted = (".".join(path.relative_to(self.root).with_suffix("").parts) for path in files)
        return [module.removesuffix(".__init__") for module in dotted]

    def find(self, name: str) -> Found | None:
        """The definition behind ``module:name`` or ``module:outer.name``, through imports and bases."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        found = self._in_module(module, first)
        for part in rest:
            found = self._within(found, part) if found else None
        return found

    def _in_module(self, module: str, name: str) -> Found | None:
        if not self.text(module):
            return None
        imported = None
        for node in _statements(self.parsed(module).body):
            if name in _bound(node):
                return Found(node, module)
            if isinstance(node, ast.ImportFrom) and (source := self._source(module, node)):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = f"{source}:{alias.name}"
        if imported is None or not imported.startswith(self.package):
            return None
        return self.find(imported)

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path_of(module)
        is_package = path is not None and path.name == "__init__.py"
        above = module.split(".")[: len(module.split(".")) - node.level + is_package]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _within(self, found: Found, name: str) -> Found | None:
        node, module = found
        if isinstance(node, ast.ClassDef):
            for holder in self.classes(found):
                assert isinstance(holder.node, ast.ClassDef)
                for inner in _statements(holder.node.body):
                    if name in _bound(inner):
                        return Found(inner, holder.module)
                for node in ast.walk(holder.node):
                    if _sets_on_self(node, name):
                        return Found(node, holder.module)
            return None
        inner_nodes = (
            inner
            for inner in ast.walk(node)
            if isinstance(inner, Function | ast.ClassDef) and inner is not node
        )
        return next((Found(inner, module) for inner in inner_nodes if inner.name == name), None)

    def classes(self, found: Found) -> Iterator[Found]:
        """A class and its bases of this package, in order of search."""
        yield found
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            name = ast.unparse(base).partition("[")[0]
            above = self._in_module(found.module, name) if name.isidentifier() else None
            if above is not None and isinstance(above.node, ast.ClassDef):
                yield from self.classes(above)

    def parameters(self, found: Found) -> list[str] | None:
        """What a function or a class takes, without ``self``; None: it cannot be known."""
        node = found.node
        if isinstance(node, ast.ClassDef):
            made = self._within(found, "__init__")
            return self.parameters(made) if made else self._fields(found)
        if not isinstance(node, Function):
            return None
        words = listed(node.args)
        is_method = words[:1] in (["self"], ["cls"]) and "staticmethod" not in _decorators(node)
        return words[1:] if is_method else words

    def _fields(self, found: Found) -> list[str] | None:
        """Fields of a dataclass, named tuple, typed dictionary or pydantic model, as keywords."""
        fields: dict[str, str] = {}
        for holder in reversed(list(self.classes(found))):
            assert isinstance(holder.node, ast.ClassDef)
            for node in holder.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    optional = node.value is not None or "NotRequired" in ast.unparse(node.annotation)
                    fields[node.target.id] = f"{node.target.id}{'=' * optional}"
        return list(fields.values()) or None

    def abstract(self, found: Found) -> list[str]:
        """Methods that a subclass must define."""
        seen: dict[str, bool] = {}
        for holder in self.classes(found):
            assert isinstance(holder.node, ast.ClassDef)
            for node in holder.node.body:
                if isinstance(node, Function):
                    seen.setdefault(node.name, "abstractmethod" in _decorators(node))
        return sorted(name for name, is_abstract in seen.items() if is_abstract)

    def members(self, found: Found) -> list[str]:
        """Names that a class's own body binds."""
        assert isinstance(found.node, ast.ClassDef)
        return sorted(set().union(*map(_bound, found.node.body)))

    def importers(self, name: str) -> list[str]:
        """Modules that define or import ``module:name`` by that name."""
        module, _, attribute = name.partition(":")
        found = {module}
        for other in self.modules(self.package, attribute, module.rpartition(".")[2]):
            for node in _nodes(self.parsed(other), ast.ImportFrom):
                if self._source(other, node) == module:
                    found |= {other for alias in node.names if alias.name == attribute}
        return sorted(found)

    def calls(self, called: str, within: str, guard: str = "") -> list[str]:
        """Argument lists of all calls of ``name`` or ``receiver.name``, each once.

        Args: guard: see `Hook`.
        """
        receiver, _, name = called.rpartition(".")
        shapes = set()
        for module in self.modules(within, name, guard):
            tree = self.parsed(module)
            for scope in _guarded(tree, guard) if guard else (tree,):
                nodes = _nodes(scope, ast.Call)
                shapes |= {shape(node) for node in nodes if _is_called(node.func, receiver, name)}
        return sorted(shapes)

    def code(self, found: Found) -> str:
        """Digest of a definition without comments, blank lines and its docstring."""
        node = found.node
        assert isinstance(node, Function | ast.ClassDef)
        lines = self.text(found.module).splitlines()[node.lineno - 1 : node.end_lineno]
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            assert first.end_lineno is not None
            del lines[first.lineno - node.lineno : first.end_lineno - node.lineno + 1]
        kept = (re.sub(r"\s*#.*", "", line).strip() for line in lines)
        return hashlib.sha256("\n".join(filter(None, kept)).encode()).hexdigest()[:12]


def kind(found: Found) -> str:
    """What a definition is."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, Function):
        special = sorted(SPECIAL & set(_decorators(node)))
        return " ".join(["async"] * isinstance(node, ast.AsyncFunctionDef) + special + ["function"])
    value = getattr(node, "value", None)
    return "mapping" if isinstance(value, ast.Dict) else "value"


def bases(found: Found) -> list[str]:
    """A class's bases, as they are written."""
    assert isinstance(found.node, ast.ClassDef)
    return [ast.unparse(base) for base in found.node.bases]


def keys(found: Found) -> list[str]:
    """Constant keys of a mapping."""
    value = getattr(found.node, "value", None)
    nodes = value.keys if isinstance(value, ast.Dict) else []
    return sorted(str(node.value) for node in nodes if isinstance(node, ast.Constant))


def returned(found: Found) -> list[str]:
    """Names in the longest tuple that a function returns; ``_`` for what is no name."""
    tuples = [
        node.value.elts
        for node in ast.walk(found.node)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    longest = max(tuples, key=len, default=[])
    return [element.id if isinstance(element, ast.Name) else "_" for element in longest]


def subscripts(tree: ast.AST, name: str) -> set[str]:
    """Constant texts by which ``name[...]`` is read."""
    return {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }


def _nodes(tree: Any, kind: type) -> list[Any]:
    """Calls or imports below a node; kept with the node, since every hook asks for them."""
    if not hasattr(tree, "found"):
        tree.found = {ast.Call: [], ast.ImportFrom: []}
        for node in ast.walk(tree):
            if type(node) in tree.found:
                tree.found[type(node)].append(node)
    found: list[Any] = tree.found[kind]
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, also those under ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _sets_on_self(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(
        isinstance(target, ast.Attribute)
        and target.attr == name
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
        for target in targets
    )


def _decorators(node: Function) -> list[str]:
    """Last names: ``abstractmethod`` of ``@abc.abstractmethod``, ``wrap`` of ``@wrap("name")``."""
    calls = (
        decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list
    )
    return [ast.unparse(decorator).rpartition(".")[2] for decorator in calls]


def _is_called(function: ast.expr, receiver: str, name: str) -> bool:
    if isinstance(function, ast.Name):
        return function.id == name and not receiver
    if not (isinstance(function, ast.Attribute) and function.attr == name):
        return False
    if not receiver:
        return True
    before = ast.unparse(function.value)
    return before.endswith(receiver)


def _guarded(tree: ast.AST, guard: str) -> Iterator[ast.AST]:
    """Bodies of every ``if`` whose condition names ``guard``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and guard in {getattr(n, "id", "") for n in ast.walk(node.test)}:
            yield ast.Module(node.body, [])
