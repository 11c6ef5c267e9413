"""Static view of a source tree, by griffe: definitions, signatures, calls. Nothing is imported or run.

A signature is a list of words, ``["data", "timer=", "*", "mbs=", "**more"]``; a call is its arguments without
their values, ``(_, *, prefix=_, **)``.
"""

import ast
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import griffe

from nemo_grpo.support.errors import UserError

Kind = inspect._ParameterKind


class _InnerFunctions(griffe.Extension):
    """Also reads what stands in a function's body."""

    def on_function_instance(self, *, node: Any, func: griffe.Function, agent: Any, **_kwargs: Any) -> None:
        if func.name != "__init__":  # griffe reads that
            outer, agent.current = agent.current, func
            agent.generic_visit(node)
            agent.current = outer


class Tree(griffe.ModulesCollection):
    """The Python modules below a folder, each read when it is asked for.

    Args: root: the folder that holds the package.  package: its name.
    """

    def __init__(self, root: Path, package: str) -> None:
        super().__init__()
        self.root, self.package = root, package
        self._extensions = griffe.load_extensions(_InnerFunctions)
        self._read: dict[str, griffe.Module] = {}
        self._texts: dict[str, str] = {}
        self._nodes: dict[str, list[ast.AST]] = {}

    def path_of(self, module: str) -> Path | None:
        """Find a module's file; None without one."""
        base = self.root / module.replace(".", "/")
        files = (base.with_suffix(".py"), base / "__init__.py")
        return next((path for path in files if path.is_file()), None)

    def text(self, module: str) -> str:
        """Read a module's source; empty without one."""
        if module not in self._texts:
            path = self.path_of(module)
            self._texts[module] = path.read_text(encoding="utf-8", errors="replace") if path else ""
        return self._texts[module]

    def get_member(self, key: str | Sequence[str]) -> Any:
        """Find the definition of a dotted name, for griffe; reads its module first."""
        parts = key.split(".") if isinstance(key, str) else list(key)
        for count in range(1, len(parts) + 1):
            if not self._module(".".join(parts[:count])):
                break
        return super().get_member(key)

    def _module(self, name: str) -> griffe.Module | None:
        folder, (above, _, last) = self.root / name.replace(".", "/"), name.rpartition(".")
        path = self.path_of(name) or folder / "__init__.py"
        if name not in self._read and (path.exists() or folder.is_dir()):
            parent = self._module(above) if above else None
            try:
                options: Any = {"extensions": self._extensions, "modules_collection": self}
                found = griffe.visit(last, path, self.text(name), parent=parent, **options)
            except SyntaxError as error:
                raise UserError(
                    f"{path}, line {error.lineno}, is not Python {sys.version_info.major}."
                    f"{sys.version_info.minor} ({error.msg}); run this with the package's own Python"
                ) from None
            self._read[name] = found
            (parent or self).members[last] = found
        return self._read.get(name)

    def find(self, name: str) -> Any:
        """Find the definition of ``module:name`` or ``module:outer.name``, by imports and bases, or None."""
        module, _, path = name.partition(":")
        try:
            found = self.get_member(module)
            for part in path.split("."):
                found = found.all_members[part]
                found = found.final_target if found.is_alias else found
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None
        return found

    @cached_property
    def _names(self) -> list[str]:
        files = sorted((self.root / self.package).rglob("*.py"))
        dotted = (".".join(path.relative_to(self.root).with_suffix("").parts) for path in files)
        return [module.removesuffix(".__init__") for module in dotted]

    def modules(self, prefix: str, *words: str) -> list[str]:
        """List the modules below a prefix whose text has every word."""
        below = (module for module in self._names if f"{module}.".startswith(f"{prefix}."))
        return [module for module in below if all(word in self.text(module) for word in words)]

    def nodes(self, module: str) -> list[ast.AST]:
        """List calls, conditions and subscripts of a module."""
        if module not in self._nodes:
            nodes = ast.walk(ast.parse(self.text(module)))
            self._nodes[module] = [one for one in nodes if isinstance(one, ast.Call | ast.If | ast.Subscript)]
        return self._nodes[module]

    def importers(self, name: str) -> list[str]:
        """List the modules that define or import ``module:name`` by that name."""
        module, _, attribute = name.partition(":")
        target, words = name.replace(":", "."), (attribute, module.rpartition(".")[2])
        found = {module}
        for one in self.modules(self.package, *words):
            members = self.get_member(one).members.values()
            if any(member.is_alias and member.target_path == target for member in members):
                found.add(one)
        return sorted(found)

    def calls(self, called: str, within: str, guard: str = "") -> list[str]:
        """List the arguments of all calls of ``name`` or ``receiver.name``, each once; see `Name.guard`."""
        receiver, _, name = called.rpartition(".")
        nodes = [node for module in self.modules(within, name, guard) for node in self.nodes(module)]
        if guard:
            ifs = [node for node in nodes if isinstance(node, ast.If) and guard in _named(node.test)]
            nodes = [node for one in ifs for part in one.body for node in ast.walk(part)]
        return sorted({shape(one) for one in nodes if isinstance(one, ast.Call) and _is(one, receiver, name)})

    def subscripts(self, module: str, name: str) -> set[str]:
        """List constant texts by which ``name[...]`` is read in a module."""
        return {
            node.slice.value
            for node in self.nodes(module)
            if isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node.value) == name
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        }

    def syntax(self, found: Any) -> tuple[list[str], Any]:
        """Return the lines of a definition and their syntax."""
        lines = self.text(found.module.path).splitlines()[(found.lineno or 1) - 1 : found.endlineno]
        return lines, ast.parse(textwrap.dedent("\n".join(lines))).body[0]

    def returned(self, found: Any) -> list[str]:
        """List the names in the longest tuple that a function returns; ``_`` for what is no name."""
        nodes = [node.value for node in ast.walk(self.syntax(found)[1]) if isinstance(node, ast.Return)]
        tuples = [node.elts for node in nodes if isinstance(node, ast.Tuple)]
        longest = max(tuples, key=len, default=[])
        return [element.id if isinstance(element, ast.Name) else "_" for element in longest]

    def code(self, found: Any) -> str:
        """Hash a definition without comments, blank lines and its docstring."""
        lines, node = self.syntax(found)
        if ast.get_docstring(node) is not None:
            del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
        kept = (re.sub(r"\s*#.*", "", line).strip() for line in lines)
        return hashlib.sha256("\n".join(filter(None, kept)).encode()).hexdigest()[:12]


def parameters(found: Any) -> list[str] | None:
    """List the parameters of a function or class, without ``self``; None if unknown."""
    if found.is_class:
        made = found.all_members.get("__init__")
        return _fields(found) if made is None else parameters(made)
    if not found.is_function:
        return None
    kinds = {kind.description: kind for kind in Kind}
    taken = []
    for one in found.parameters:  # griffe gives variadic ones a default
        has_default = one.default is not None and "variadic" not in one.kind.value
        default = None if has_default else inspect.Parameter.empty
        taken.append(inspect.Parameter(one.name.lstrip("*"), kinds[one.kind.value], default=default))
    words = [word for word in str(inspect.Signature(taken))[1:-1].replace("=None", "=").split(", ") if word]
    is_method = words[:1] in (["self"], ["cls"]) and "staticmethod" not in found.labels
    return words[1:] if is_method else words


def _fields(found: Any) -> list[str] | None:
    """List fields of a dataclass, named tuple, typed dictionary or pydantic model, as keywords."""
    fields = [
        f"{name}{'=' * (field.value is not None or 'NotRequired' in str(field.annotation))}"
        for holder in reversed([found, *found.mro()])
        for name, field in holder.attributes.items()
        if field.annotation is not None and "property" not in field.labels
    ]
    return list({field.rstrip("="): field for field in fields}.values()) or None


def abstract(found: Any) -> list[str]:
    """List the methods that a subclass must define."""
    return sorted(name for name, one in found.all_members.items() if "abstractmethod" in one.labels)


def kind(found: Any) -> str:
    """Name the kind of a definition."""
    if found.is_class:
        return "class"
    special = sorted(found.labels & {"staticmethod", "classmethod", "property"})
    if found.is_function or special:
        return " ".join([*(["async"] if "async" in found.labels else []), *special, "function"])
    return "mapping" if isinstance(found.value, griffe.ExprDict) else "value"


def keys(found: Any) -> list[str]:
    """List the constant keys of a mapping."""
    names = map(str, found.value.keys) if kind(found) == "mapping" else ()
    return sorted(ast.literal_eval(name) for name in names if name[0] in "'\"")


def shape(call: ast.Call) -> str:
    """Write a call's arguments without their values."""
    parts = ["*" if isinstance(argument, ast.Starred) else "_" for argument in call.args]
    named = sorted(f"{keyword.arg}=_" for keyword in call.keywords if keyword.arg)
    return f"({', '.join([*parts, *named, *(['**'] * any(not k.arg for k in call.keywords))])})"


def misfit(parameters: list[str], call: str) -> str:
    """Say why a call does not fit; empty if it does. Contents of ``*`` and ``**`` fit."""
    words = [word.strip() for word in call.strip("()").split(",") if word.strip()]
    named = {word.partition("=")[0]: None for word in words if "=" in word}
    taken = ", ".join(f"{word}None" if word.endswith("=") else word for word in parameters)
    signature = inspect.signature(eval(f"lambda {taken}: None"))  # identifiers alone
    is_open = any(word.startswith("*") for word in words)
    try:
        (signature.bind_partial if is_open else signature.bind)(*[None] * words.count("_"), **named)
    except TypeError as error:
        return str(error)
    return ""


def _named(test: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}


def _is(call: ast.Call, receiver: str, name: str) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == name and ast.unparse(call.func.value).endswith(receiver)
    return isinstance(call.func, ast.Name) and call.func.id == name and not receiver
