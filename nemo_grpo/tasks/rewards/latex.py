r"""Spelling of answers: any notation as LaTeX, and one text for answers that differ only in spelling."""

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\neq ", "\u221e": r"\infty ", "\u03c0": r"\pi "}
    | {"\u2205": r"\emptyset ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm "}
    | {"\u00b0": r"^\circ ", "\u00f7": "/"}
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_ROOT = re.compile("\u221a" r"\s?(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_EXPONENT = re.compile(r"(?<![\w\\.])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d+)(?![\w.^])")
"""A number as Python writes it, and so one of a JSON file: ``1e-05``."""
# The order matters: spaces of LaTeX become plain ones, text loses its command, and then the spaces between
# tokens go; the full stop at the end is seen only when they have gone.
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\?\$|\\!|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~|\s+", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(le|ge)(?:q|qslant)(?![A-Za-z])", r"\\\1"),
        (r"\\(?:text|math)(?:bf|it|rm|sf|normal)?\s*\{([^{}]*)\}|\\mbox\s*\{([^{}]*)\}", r" \1\2 "),
        (r" +", " "),
        (r"([_^])\{(\w)\}", r"\1\2"),
        (r"^\s*\*\*(.*)\*\*\s*$", r"\1"),
        # A space between letters or digits stays: \pi r is not \pir, and 1 2 is not 12. So does one after an
        # option's mark: A: 12 is no ratio.
        (r"(?<!(?:[^\W_]|[).:])) | (?![^\W_])", ""),
        # A full stop at the end; a final ... says that more follows.
        (r"(?<![.,;:])[.,;:]$", ""),
    )
)


def as_latex(answer: str) -> str:
    """Rewrite Unicode's digits, fractions, powers, roots and signs, and Python's numbers, in LaTeX."""
    answer = _EXPONENT.sub(r"\1\\cdot 10^{\2}", answer.strip())
    if answer.isascii():
        return answer
    answer = _SUPERSCRIPT.sub(_latex_power, answer)
    answer = _ROOT.sub(_latex_root, answer)
    return "".join(map(_ascii_character, answer)).translate(_CHARACTERS)


def _latex_power(superscript: re.Match[str]) -> str:
    exponent = unicodedata.normalize("NFKC", superscript[0])
    return f"^{{{exponent}}}"


def _latex_root(root: re.Match[str]) -> str:
    in_brackets, single = root.groups()
    radicand = in_brackets if in_brackets else single
    return f"\\sqrt{{{radicand}}}"


def _ascii_character(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    # A fraction of one character, such as one half, decomposes into digits around a fraction slash. The
    # character "1 over" has nothing below.
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    if slash and below:
        return rf"\frac{{{above}}}{{{below}}}"
    return character


def normalized(answer: str) -> str:
    """Normalise an answer, so that those that differ only in spelling become equal texts."""
    answer = as_latex(answer)
    before = None
    # Repeated, because one spelling uncovers another, as in \text{\textbf{A}}.
    while answer != before:
        before = answer
        for pattern, spelling in _SPELLINGS:
            answer = pattern.sub(spelling, answer)
    return answer
