r"""The notations that people use besides LaTeX, in the one that graders read."""

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\neq ", "\u221e": r"\infty ", "\u03c0": r"\pi "}
    | {"\u2205": r"\emptyset ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in "}
    | {"\u00b0": r"^\circ ", "\u2248": r"\approx ", "\u2261": r"\equiv ", "\u2192": r"\to "}
    | dict.fromkeys("\u20ac\u00a3\u00a5\u20b9")  # currencies, left out like $
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_ROOT = re.compile("\u221a" r"\s?(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_EXPONENT = re.compile(r"(?<![\w\\.])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d+)(?![\w.^])")
_MIXED = re.compile(r"(?<![\w./^])(\d+)\s+(\d+)/(\d+)(?![\w./])")
_UNIT = re.compile(
    r"(?<=[\d}$])\s*\$?\s*(?:dollars?|cents?|euros?|USD|EUR|GBP|\^\\circ\s*[CF]|(?:[cdkm]m|ft|in|yd|mi)\^\{?[23]\}?"
    r"|(?:[ckm]m|ft|mi|[km]g|m[lL]|(?<=\s)[mgL])/(?:s|h|hr|min|mol|m?L)(?:\^\{?[23]\}?)?)\$?$"
)
"""Units that math-verify takes for a product of variables; it knows ``cm``, ``hours`` and many others."""


def plain(answer: str) -> str:
    r"""The answer as LaTeX with ASCII characters, without what does not change its value.

    Digits of every script, Unicode's mathematics (``x^{2}``, ``\frac{1}{2}``, ``\sqrt{2}``), ``1e-5`` as
    ``1\cdot 10^{-5}``, mixed numbers as ``1\frac{1}{2}``. Bold, a final punctuation mark, currencies and some
    units are left out.
    """
    answer = answer.strip()
    if answer.startswith("**") and answer.endswith("**"):
        answer = answer.strip("*")
    answer = re.sub(r"(?<![.,;:\s])\s*[.,;:]$", "", answer)  # a final ... says that more follows
    if not answer.isascii():
        answer = _SUPERSCRIPT.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", answer)
        answer = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", answer)
        answer = "".join(map(_plain_character, answer)).translate(_CHARACTERS)
    answer = _EXPONENT.sub(r"\1\\cdot 10^{\2}", answer)
    answer = _MIXED.sub(lambda number: _mixed(*number.groups()), answer)
    return _UNIT.sub("", answer.strip()).strip()


def _mixed(whole: str, above: str, below: str) -> str:
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else f"{whole} {above}/{below}"


def _plain_character(character: str) -> str:
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}" if slash and below else character
