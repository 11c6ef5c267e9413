r"""Equality of two answers, each of which must be mathematics as a whole; a `worker` loads only this file.

Lists, relations, sets and brackets are split here; latex2sympy2_extended's grammar must read an expression to
its end. A list has no order; a tuple is a point or an interval with its brackets, or a matrix.
"""

import operator
import re
from functools import lru_cache, reduce
from itertools import accumulate, combinations, repeat
from typing import Any, NamedTuple

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy import Expr, I, MatrixBase, N, Rational, S, Set, Symbol, nan, oo, zoo
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

TOLERANCE = Rational(1, 10**6)
"""Largest relative difference if one of the answers has a decimal; whole numbers are compared exactly."""
DIGITS = 2000
"""Decimal places in which equal irrational numbers must agree."""
_DROPPED = {"Eval_at", "Transpose", "Degree", "Formatting_group", "Dot_product", "Elementary_transforms"}
"""Rules of the grammar that its converter reads only in part."""
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = ("(", "[", "{", r"\{", r"\begin"), (")", "]", "}", r"\}", r"\end")
_SIGNS = {"=": "==", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\neq": "!=", r"\in": "in"}
_OPERATIONS = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}
_SETS = {
    r"\emptyset": S.EmptySet,
    r"\mathbb{R}": S.Reals,
    r"\mathbb{Z}": S.Integers,
    r"\mathbb{N}": S.Naturals,
}


class Named(NamedTuple):
    """The value that an equation, an inequality or a membership gives to a name."""

    name: Any
    value: Any


def equal(reference: str, answer: str) -> bool:
    """True if both are mathematics and equal.  Raises: any exception: one of them is not."""
    return same(read(reference), read(answer), tolerance(reference + answer))


def tolerance(text: str) -> Rational:
    return TOLERANCE if re.search(r"\.\d", text) else S.Zero


@lru_cache(500)
def read(text: str) -> Any:
    """Read a value of sympy, a list, a tuple or `Named`.  Raises: as `equal`."""
    parts, _ = split(text := text.strip(), ",;")
    if len(parts) > 1:
        return listed(parts)
    if re.search(r"\\(pm|mp)(?![a-z])", text):
        return listed([re.sub(r"\\pm", a, re.sub(r"\\mp", b, text)) for a, b in ("+-", "-+")])
    sides, signs = split(text, _SIGNS)
    if signs:
        return related([read(side) for side in sides], [_SIGNS[sign] for sign in signs], tolerance(text))
    sets, operations = split(text, _OPERATIONS)
    if operations:
        first, *others = (as_set(read(one)) for one in sets)
        steps = zip(operations, others, strict=True)
        return reduce(lambda left, step: _OPERATIONS[step[0]](left, step[1]), steps, first)
    tokens = nested(text)
    if [depth for _, depth in tokens].index(0) < len(tokens) - 1 or not tokens[0][1] or text[0:2] == r"\b":
        return _SETS[text] if text in _SETS else expression(text)
    return bracketed(tokens[0][0], "".join(token for token, _ in tokens[1:-1]), tokens[-1][0])


def nested(text: str) -> list[tuple[str, int]]:
    """List the tokens, each with the number of brackets open after it."""
    tokens = _TOKEN.findall(text)
    return [*zip(tokens, accumulate((t in _OPEN) - (t in _CLOSE) for t in tokens), strict=True)]


def split(text: str, separators: Any) -> tuple[list[str], list[str]]:
    """Split at the separators outside brackets.  Returns: the parts, and the separators."""
    parts, found = [""], []
    for token, depth in nested(text):
        if depth == 0 and token in separators:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return parts, found


def listed(parts: list[str]) -> list[Any]:
    values = (read(part) for part in parts)
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def bracketed(opening: str, inside: str, closing: str) -> Any:
    parts, _ = split(inside, ",;")
    if opening == r"\{":
        return listed(parts) if inside.strip() else S.EmptySet
    if len(parts) == 1 or opening == "{":
        return read(inside)
    point = (opening + closing, *map(read, parts))
    return as_set(point) if any(one in (oo, -oo) for one in point) else point


def as_set(value: Any) -> Set:
    if isinstance(value, tuple) and len(value) == 3:
        brackets, start, end = value
        return sympy.Interval(start, end, "(" in brackets, ")" in brackets)
    return (
        value if isinstance(value, Set) else sympy.FiniteSet(*(value if isinstance(value, list) else [value]))
    )


def related(values: list[Any], signs: list[str], allowed: Rational) -> Any:
    first, last = values[0], values[-1]
    if signs == ["in"]:
        return Named(first, last)
    if set(signs) == {"=="}:
        known = [value for value in values if isinstance(value, Expr) and not symbols(value)]
        if not all(same(known[0], value, allowed) for value in known[1:]):
            raise ValueError("a chain that is false")
        if not symbols(first) or (isinstance(last, Symbol) and not isinstance(first, Symbol)):
            first, last = last, first
        return Named(first, last) if symbols(first) else first
    (unknown,) = set.union(*map(symbols, values))
    real = sympy.Dummy(real=True)
    sides = [value.subs(unknown, real) for value in values]
    sets = [sympy.Rel(*relation).as_set() for relation in zip(sides, sides[1:], signs, strict=False)]
    return Named(unknown, sympy.Intersection(*sets))


class _Converter(_Latex2Sympy):
    """Numbers are exact, and factors that stand side by side are a product."""

    def parse_number(self, text: str) -> Rational:
        return Rational(text)

    def convert_postfix_list(self, arr: list[Any], i: int = 0) -> Any:
        return reduce(operator.mul, map(self.convert_postfix, arr[i:]))


def expression(text: str) -> Any:
    converter = _Converter(config=ConversionConfig(lowercase_symbols=False))
    parser = converter.create_parser(text)  # which raises an exception at the first error
    tree = parser.expr()
    check(tree)
    value = converter.convert_expr(tree).doit()
    value = value.replace(lambda one: isinstance(one, AppliedUndef), lambda one: Symbol(str(one)))
    value = value.subs(Symbol("i"), I)
    if (
        parser.getCurrentToken().type != -1
        or value.has(nan, zoo)
        or not isinstance(value, (Expr, MatrixBase))
    ):
        raise ValueError("more than an expression, or none")
    return ("matrix", *value.shape, *value) if isinstance(value, MatrixBase) else value


def check(node: Any) -> None:
    """Check a tree.  Raises: ValueError: the converter would leave out part of it, or guess."""
    rule = type(node).__name__.removesuffix("Context")
    if (
        rule in _DROPPED
        or (rule in ("Number_subexpr", "Exp", "Exp_nofunc") and node.subexpr())
        or (rule == "Unary" and any(part.start.text[0] in ".0123456789" for part in node.postfix()[1:]))
        or (rule == "Func_single_arg_noparens" and node.mp_nofunc().getChildCount() > 1)
        or node.getText() in ("I", r"\gamma", r"\Gamma")
    ):
        raise ValueError(f"{rule} is ambiguous")
    for child in getattr(node, "children", None) or ():
        check(child)


def symbols(value: Any, marks: bool = False) -> set[Symbol]:
    """Collect the unknowns; with ``marks`` the units and words."""
    found = getattr(value, "free_symbols", ())
    return {one for one in found if one.name.startswith(("unit0", "word0")) == marks}


def same(one: Any, other: Any, allowed: Rational) -> bool:
    """True if a reference and an answer are equal, up to a relative difference."""
    if isinstance(one, Named) and isinstance(other, Named):
        return all(map(same, one, other, repeat(allowed))) or same_equation(one, other, allowed)
    if isinstance(other, Named):
        return same(one, other.value, allowed)
    if isinstance(one, Named):
        is_name = not one.name.has(sympy.Add) and one.name.atoms(sympy.Number) <= {-1}
        return is_name and same(one.value, other, allowed)
    if isinstance(one, Expr) and isinstance(other, Expr):
        return same_value(one, other, allowed)
    if isinstance(one, Set) or isinstance(other, Set):
        one, other = as_set(one), as_set(other)
    elif isinstance(one, list) or isinstance(other, list):
        ours, theirs = (value if isinstance(value, list) else [value] for value in (one, other))
        if len(ours) != len(theirs) or any(same(*two, allowed) for two in combinations(theirs, 2)):
            return False
        return all(any(same(value, x, allowed) for x in theirs) for value in ours)
    left, right = (x if isinstance(x, tuple) else getattr(x, "args", ()) for x in (one, other))
    if one == other or not left or type(one) is not type(other) or len(left) != len(right):
        return bool(one == other)
    return all(map(same, left, right, repeat(allowed)))


def same_equation(one: Named, other: Named, allowed: Rational) -> bool:
    """True if the differences between both sides are proportional."""
    if not isinstance(one.value, Expr) or not isinstance(other.value, Expr):
        return False
    left, right = one.name - one.value, other.name - other.value
    point = {symbol: i + Rational(3, 7) for i, symbol in enumerate(sorted(left.free_symbols, key=str))}
    return same(left * right.subs(point), right * left.subs(point), allowed)


def same_value(one: Expr, other: Expr, allowed: Rational) -> bool:
    """Compare units, which either side may lack, and values; with unknowns, at three points."""
    units, others, percent = symbols(one, marks=True), symbols(other, marks=True), Symbol("unit0percent")
    if units and others and units != others:
        return False
    if units != others:
        shares = (1, Rational(1, 100)) if percent in units | others else (1,)
        bare = [dict.fromkeys(units | others, 1) | {percent: share} for share in shares]
        return any(same_value(one.subs(values), other.subs(values), allowed) for values in bare)
    unknown = sorted(one.free_symbols | other.free_symbols, key=str)
    for signs in ((1, 1), (-1, -1), (1, -1))[: 3 if unknown else 1]:
        point = {x: signs[i % 2] * Rational(10 * i + 17, i + 7) for i, x in enumerate(unknown)}
        if not same_number(one.subs(point), other.subs(point), allowed):
            return False
    return True


def same_number(one: Expr, other: Expr, allowed: Rational) -> bool:
    difference = one - other
    if one == other or difference == 0:
        return True
    if allowed and not (one.is_integer and other.is_integer):
        return bool(abs(difference) <= allowed * sympy.Max(abs(one), abs(other)))
    try:
        return bool(N(difference, 2, maxn=DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True
