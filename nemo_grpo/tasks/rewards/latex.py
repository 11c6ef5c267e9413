r"""Spelling of answers: from any notation to one spelling of LaTeX, and to what `equality` reads."""

import re
import unicodedata

_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "}
    | {"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\neq ", "\u221e": r"\infty ", "\u03c0": r"\pi "}
    | {"\u2205": r"\emptyset ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm "}
    | {"\u00b0": r"^\circ ", "\u2248": r"\approx ", "\u2261": r"\equiv ", "\u2192": r"\to ", "\u00f7": "/"}
    | dict.fromkeys("\u20ac\u00a3\u00a5\u20b9")  # currencies, left out like \$
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_ROOT = re.compile("\u221a" r"\s?(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_MIXED = re.compile(r"(?<![\w./^])(\d+)(?:\s+(\d+)/(\d+)(?![\w./])|\s*\\frac\{(\d+)\}\{(\d+)\})")
_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **{"lt": "<", "gt": ">", "ne": r"\neq", "leq": r"\le", "leqslant": r"\le", "geq": r"\ge"},
    **{"geqslant": r"\ge", "varnothing": r"\emptyset", "lbrace": r"\{", "rbrace": r"\}"},
    **{"degree": r"^\circ", "left": "", "right": "", "displaystyle": ""},
}
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?<![\w\\.])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d+)(?![\w.^])", r"\1\\cdot 10^{\2}"),
        (r"(?<!\\)\\\\(?=[A-Za-z]{2})", r"\\"),
        (
            r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,?\\[,! ]\s*| +)\d{3})+(?![\d,])",
            lambda m: re.sub(r"\D", "", m[0]),
        ),
        (r"\\!|\\?\$", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~|\s+", " "),
        (r"\\([a-z]+)(?![A-Za-z])", lambda m: _COMMANDS.get(m[1], m[0])),
        (r"(\\frac|\\sqrt)\s*(\d|[A-Za-z]|\\pi)", r"\1{\2}"),
        (r"(\\frac\{[^{}]*\})\s*(\d|[A-Za-z]|\\pi)", r"\1{\2}"),
        (r"\^\s*(-\w+|\([^()]*\))", r"^{\1}"),
        (r"([<>!])=", lambda m: {"<": r"\le ", ">": r"\ge ", "!": r"\neq "}[m[1]]),
        (r":=|==", "="),
        (r"\^\s*\{\s*\\circ\s*\}|\^[\s^]*\\circ(?![a-z])", r"^\\circ "),
        (r"^\s*\*\*(.*)\*\*\s*$", r"\1"),
        (r"(?<![.,;:\s])\s*[.,;:]\s*$", ""),  # a final ... says that more follows
    )
)
CONJUNCTION = re.compile(r",?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*,?")
WRAPPER = re.compile(r"\\(?:text|math|m)(?:|rm|bf|it|sf|normal|box)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")

_UNITS = {
    name: names.split()[0]
    for names in re.split(
        ",",
        "mm millimeter millimetre,cm centimeter centimetre,dm,m meter metre,km kilometer kilometre,in inch,"
        "ft foot feet,yd yard,mi mile,mg milligram,g gram,kg kilogram,lb pound,oz ounce,ton tonne,ms,"
        "s sec second,min minute,h hr hour,day,week,month,yr year,mL ml milliliter,L liter litre,gal gallon,"
        "degree deg,rad radian,C Celsius,F Fahrenheit,K kelvin,N newton,J joule,kJ,W watt,kW,V volt,mol mole,"
        "Pa pascal,kPa,Hz hertz,mph,kmh,unit,dollar USD,cent,euro EUR,GBP,yuan,rupee Rs,AM am,PM pm,"
        "percent % percentage pct",
    )
    for name in names.split()
}
"""The unit that a name stands for; a single letter only upright and beside a value, else it is a letter."""
_NAME, _PLURAL = re.compile("[A-Za-z]+|%"), re.compile("(?<=ch)es$|(?<=[a-z]{2})s$")
_BARE_UNIT = re.compile(r"(?<=[\d})])(\s*)(([A-Za-z]+)(?:[\s./]|\^?\{?[23]\}?|[A-Za-z])*)$")


def plain(answer: str) -> str:
    """Rewrite an answer in LaTeX and ASCII, without bold, dollar signs and final punctuation."""
    if not answer.isascii():
        answer = _SUPERSCRIPT.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", answer)
        answer = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", answer)
        answer = "".join(map(_plain_character, answer)).translate(_CHARACTERS)
    for pattern, spelling in _SPELLINGS:
        answer = pattern.sub(spelling, answer)
    return answer.strip()


def readable(answer: str) -> str:
    """Rewrite a plain answer for `equality`: units and words as symbols, mixed numbers as sums."""
    answer = whole[1] if (whole := WRAPPER.fullmatch(answer)) else answer
    number = _THOUSANDS.sub(lambda digits: digits[0].replace(",", ""), answer)
    answer = answer if re.search(r"[,(\[]|\\\{", number) else number
    answer = re.sub(r"\^\\circ\s*([CF](?![A-Za-z]))?", r"\\text{degree \1}", answer)
    answer = re.sub(r"\\?%", r"\\text{%}", answer)
    answer = _BARE_UNIT.sub(_bare_unit, _MIXED.sub(_mixed, answer))
    return CONJUNCTION.sub(",", WRAPPER.sub(_unwrapped, answer))


def words_of(readable_answer: str) -> set[str]:
    """Return the words of a readable answer that are no units."""
    return set(re.findall(r"\{word0(\w+)\}", readable_answer))


def _bare_unit(match: re.Match[str]) -> str:
    """Wrap units and words at the end; a letter, or letters without space before them, may be variables."""
    space, words, first = match.groups()
    words = re.sub("[{}]", "", words)
    is_unit = units_of(words) and (len(first) > 1 or (space and "/" in words))
    return rf"\text{{{words}}}" if is_unit or (len(first) > 2 and space) else match[0]


def _unwrapped(match: re.Match[str]) -> str:
    """Rewrite upright text as units; as itself: a letter, number or conjunction; else as one word."""
    text, before = match[1].strip(), match.string[: match.start()].rstrip()
    if CONJUNCTION.fullmatch(text):
        return f" {text} "
    is_unit = len(text) > 1 or re.search(r"[\w})\]!/]$|\\frac\{$|\}\{$", before)
    if is_unit and (units := units_of(text)):
        return rf"\cdot {units}" if re.search(r"[\w})\]!]$", before) else units
    word = "".join(re.findall("[A-Z0-9]", text.upper()))
    return rf"\variable{{word0{word}}}" if len(text) > 1 and not word.isdigit() else text


def units_of(text: str) -> str | None:
    """Rewrite ``cm^2``, ``miles per hour``, ``square units`` with symbols; None for other words."""
    text = re.sub(r"\bper\b", "/", text.replace(".", ""))
    for power, prefix in (("2", "square|sq"), ("3", "cubic|cu")):
        text = re.sub(rf"\b(?:{prefix})\s+(\w+)", rf"\1^{power}", text)
    units = {
        name: _UNITS.get(name) or _UNITS.get(_PLURAL.sub("", name.lower())) for name in _NAME.findall(text)
    }
    is_known = all(units.values()) and re.fullmatch(r"[\s/%^23*A-Za-z]*[A-Za-z%][23^]*", text)
    return _NAME.sub(lambda name: rf"\variable{{unit0{units[name[0]]}}}", text) if is_known else None


def _mixed(number: re.Match[str]) -> str:
    whole, above, below = (part for part in number.groups() if part is not None)
    return rf"({whole}+\frac{{{above}}}{{{below}}})" if int(above) < int(below) else number[0]


def _plain_character(character: str) -> str:
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}" if slash and below else character
