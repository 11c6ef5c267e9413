r"""What math-verify overlooks in an answer that it takes for the reference, because it drops part of it.

A policy that is paid for ``41 = 42`` or ``42 \text{ (or any number)}`` learns to write such answers.
"""

import re

_RELATION = re.compile(
    r"=|\\(?:equiv|approx|simeq|cong|to|implies|iff)(?![A-Za-z])|\\(?:Long|long)?(?:[Ll]eft)?[Rr]ightarrow"
)
_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|times|cdot|div|pi|left|right|[,;:! ])")
_BASE = re.compile(r"\d_(?:\{(\w+)\}|(\w))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_CONJUNCTION = re.compile(r"\s*,?\s*(?:or|and)\s*")
_LISTED = re.compile(r"(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_UNIT = re.compile(r"[\sA-Za-z./^$%\u00b0-]*")
_HEDGES = {
    *("about", "all", "almost", "and", "any", "around", "approximately", "but", "either", "except", "if"),
    *("not", "or", "possibly", "probably", "unless"),
}
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:\{,\}|,)\d{3})+(?:\.\d+)?")


def is_qualified(reference: str, answer: str) -> bool:
    r"""Whether an answer says more than a value, a conjunction or a unit, in words or by a base.

    Words in the reference are for math-verify; so are answers that are words altogether.
    """
    bases = [first or second for first, second in _BASE.findall(answer)]
    if bases and bases != [first or second for first, second in _BASE.findall(reference)]:
        return True
    if _WRAPPED.search(reference) or _WRAPPED.fullmatch(answer.strip()):
        return False
    return any(
        not _UNIT.fullmatch(text) or not _HEDGES.isdisjoint(text.lower().split())
        for text in _WRAPPED.findall(answer)
        if not _CONJUNCTION.fullmatch(text)
    )


def claimed_values(reference: str, answer: str) -> list[str]:
    """The links without an unknown of a chain such as ``x = 6/8 = 3/4``: each must be the reference.

    Empty for a reference that is a relation itself, and for a list.
    """
    links = _RELATION.split(answer)
    if len(links) == 1 or _RELATION.search(reference) or len(members(answer)) > 1 or _LISTED.search(answer):
        return []
    return [link for link in links if link.strip() and not re.search(r"[A-Za-z]", _COMMAND.sub("", link))]


def members(answer: str) -> list[str]:
    """The values of a list without brackets, by its commas; the commas of ``1,000,000`` separate nothing."""
    if _THOUSANDS.fullmatch(re.sub(r"\s|\\!", "", answer)):
        return [answer]
    found, depth = [""], 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [member for member in found if member.strip()]
