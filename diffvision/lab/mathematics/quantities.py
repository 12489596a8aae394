"""What an answer is: an exact number where it is one, its unit, and else its text without what does not matter.

Numbers are read without a computer algebra system, and without sums: an answer is computed, not a calculation. The
length of a text and the size of a number are bounded, for answers are a model's.
"""

from __future__ import annotations

import functools
import math
import re
import string
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from diffvision.lab.mathematics.units import canonical

NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d*)?|\.\d+"
_LONGEST_NUMBER = 1000  # characters
_MOST_BITS = 4000  # of a numerator or denominator
_MOST_LEVELS = 20

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_FRACTION_CHARACTERS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SIGNS = {
    **dict.fromkeys("−‐‑‒–", "-"),
    **dict.fromkeys("⁄∕÷", "/"),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    "×": r"\times ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "°": " degree ", "%": " percent ", "¢": " cent ", "€": " euro ", "£": " sterling ", "¥": " yen ", "₹": " rupee ",
}  # fmt: skip
_CURRENCY = re.compile(r"([-+]?)\s*((?:US)?\s*\\?\$|(?:euro|sterling|yen|rupee)(?![a-z]))\s*(?=[-+]?\s*[\d.\\(])")

# Letters in the order of the alphabet are variables: "3abc", which has a vowel as words have.
_PRODUCT = "?".join(string.ascii_lowercase) + "?"
_SHORT = r"(?:[cm]m|km|[km]g|ml|ft|lbs?|oz|hrs?|mph)"
_NO_UNIT = (
    r"(?:and|or|to|if|when|where|(?:arc)?(?:sin|cos|tan|sec|csc|cot)h?|log|exp|squared|cubed|base"
    r"|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|tau"
    r"|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?)"
)
# A unit is a word, not a product such as "3 a" or "3xy", nor a function, nor what makes another number of it.
_UNIT = re.compile(
    rf"((?<![\d.,])(?:{NUMBER})[)}}]*) *"
    rf"((?:{_SHORT}(?![A-Za-z])"
    rf"|(?!(?:(?<! ){_PRODUCT}|(?=[a-z]{{3}}(?![a-z])){_PRODUCT}|{_NO_UNIT})(?![A-Za-z]))"
    r"(?:(?:in|sq|USD|EUR|GBP)(?![A-Za-z])|(?=[A-Za-z]*[aeiou])[A-Za-z]{3,}))"
    r"(?:[ /]+[A-Za-z]+)*(?:\^?\{?[23]\}?)?)$"
)
_TEXT = r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}"
_UNIT_IN_TEXT = re.compile(rf"(?<=[\d}})])\s*{_TEXT}(\^\{{?[23]\}}?)?\s*$")
_MIXED = re.compile(r"(?<!\d)([-+]?\d+) +(\d+)/(\d+)")
_WITHOUT_MEANING = (
    (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"(?<=\d)\\[,!](?=\d{3})|\\!", ""),
    (r"\\(?:[,;:]| )|~", " "),
    (r"\\[cdt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:leq|le|leqslant)(?![a-zA-Z])", r"\\le "),
    (r"\\(?:geq|ge|geqslant)(?![a-zA-Z])", r"\\ge "),
    (r"\\(?:neq|ne)(?![a-zA-Z])", r"\\ne "),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", " degree "),
    (r"\\ percent", " percent"),
    (r"\\\(|\\\)|\\\[|\\\]", ""),
    (r"(?<=\d)\{,\}(?=\d{3})", ","),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt"),
    (r"\*\*", "^"),
    (r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2"),
)
_WITHOUT_MEANING_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement in _WITHOUT_MEANING)
# The name of what was asked for: x = 3, but not x = 3, y = 4.
NAME = re.compile(r"([A-Za-z])\s*(?:=|\\in(?![a-zA-Z]))\s*(?=[^=]*$)")
_MULTIPLES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


class Quantity(NamedTuple):
    """An answer as it is compared.

    Attributes:
        text: without spaces, sizes, and its unit; small letters for words.
        value: the number that it is, in its unit; None for another answer.
        unit: as `units.canonical` writes it; "" for none.
    """

    text: str
    value: Fraction | None
    unit: str


@functools.lru_cache(maxsize=100_000)
def quantity(answer: str) -> Quantity:
    """Return what an answer is."""
    text = _plain(answer)
    if len(text) > _LONGEST_NUMBER:
        return Quantity(_compact(text), None, "")
    text, currency = _without_currency(text[name.end() :] if (name := NAME.match(text)) else text)
    units = []
    if match := _UNIT_IN_TEXT.search(text):
        text, units = text[: match.start()], [f"{match[1]}{match[2] or ''}"]
    text = " ".join(re.sub(_TEXT, r"\1", text).split())
    text = re.sub(r"\\(frac|sqrt)\s*(\d)\s*", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    if match := _UNIT.search(text):
        text, units = text[: match.end(1)], [match[2], *units]
    words = " ".join(units).split()
    factor = 1
    while words and (multiple := _MULTIPLES.get(words[0].lower().removesuffix("s"))):
        factor *= multiple
        words = words[1:]
    # A comma before a space separates the elements of a list, and no thousands.
    value = _Reader(_compact(re.sub(r", +", ";", text))).number()
    compact = re.sub(r"^\(([A-Z])\)$", r"\1", _compact(text))
    if value is None and factor > 1:
        compact += f"*{factor}"
    return Quantity(
        compact.casefold() if re.fullmatch(r"[A-Za-z ]{2,}", compact) else compact,
        None if value is None else value * factor,
        canonical([*currency, *words]),
    )


def _plain(answer: str) -> str:
    """Return an answer without the characters and LaTeX commands that only change how it looks."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda run: f"^{{{run[0].translate(_SUPERSCRIPTS)}}}", answer)
    text = re.sub(
        f"[{_FRACTION_CHARACTERS}]",
        lambda one: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", one[0]).split("⁄")),
        text,
    )
    text = "".join(_SIGNS.get(character, character) for character in unicodedata.normalize("NFKC", text))
    text = text.strip().rstrip(".").strip()
    # In pairs they are LaTeX's; the first of an odd number is money's where a number follows.
    dollars = re.findall(r"(?<!\\)\$", text)
    if len(dollars) % 2 and (match := _CURRENCY.match(text)) and "$" in match[0]:
        text = match[0].replace("\\", "").replace("$", "\\$") + re.sub(r"(?<!\\)\$", "", text[match.end() :])
    else:
        text = re.sub(r"(?<!\\)\$", "", text)
    for pattern, replacement in _WITHOUT_MEANING_COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip()


def _without_currency(text: str) -> tuple[str, list[str]]:
    """Return a text without the currency before its number, and that currency."""
    if match := _CURRENCY.match(text):
        name = "dollar" if "$" in match[2] else match[2]
        return match[1] + text[match.end() :], [name]
    return text.replace(r"\$", ""), []


def _compact(text: str) -> str:
    # Between digits a space matters, but before three of them: 12 is not 1 2.
    return re.sub(r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))", "", " ".join(text.split()))


class _NoNumber(Exception):
    pass


class _Reader:
    r"""Reads a text from left to right as one number.

    That is: digits with commas, a decimal point or an exponent of ten, a/b, `\frac{a}{b}`, a mixed number, a power, a
    root that is rational, a number times powers of ten, and brackets around one.
    """

    _NUMBER = re.compile(rf"({NUMBER})(?:[eE]([-+]?\d{{1,4}})(?!\d))?")
    _TIMES_TEN = re.compile(r"(?:\\times|\\cdot|[x*])(?=10\^)")
    _ROOT = re.compile(r"\\sqrt(?:\[(\d{1,2})\])?(?=\{)")

    def __init__(self, text: str) -> None:
        self._text, self._at, self._level = text, 0, 0

    def number(self) -> Fraction | None:
        """Return the number; None where the text is none, or too long a one."""
        try:
            value = self._signed()
        except (_NoNumber, ZeroDivisionError):
            return None
        return value if self._at == len(self._text) else None

    def _signed(self) -> Fraction:
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise _NoNumber
        sign = -1 if self._takes("-") else 1
        if sign == 1:
            self._takes("+")
        value = self._power()
        if self._takes("/"):
            value = _check_bounds(value / self._power())
        while match := self._TIMES_TEN.match(self._text, self._at):
            self._at = match.end()
            value = _check_bounds(value * self._power())
        self._level -= 1
        return sign * value

    def _power(self) -> Fraction:
        start = self._at
        base = self._atom()
        if self._text[start : self._at].isdigit() and self._text.startswith(r"\frac{", self._at):
            base += self._atom()
        if not self._takes("^"):
            return base
        exponent = self._signed()
        if exponent.denominator != 1 or abs(exponent) * _bits(base) > _MOST_BITS:
            raise _NoNumber
        return Fraction(base ** int(exponent))

    def _atom(self) -> Fraction:
        if match := self._NUMBER.match(self._text, self._at):
            self._at = match.end()
            value = Fraction(match[1].replace(",", "").rstrip("."))
            return _check_bounds(value * Fraction(10) ** int(match[2])) if match[2] else value
        if self._takes(r"\frac"):
            return _check_bounds(self._group("{", "}") / self._group("{", "}"))
        if match := self._ROOT.match(self._text, self._at):
            self._at = match.end()
            return _root(self._group("{", "}"), int(match[1] or 2))
        return self._group("(", ")") if self._text.startswith("(", self._at) else self._group("{", "}")

    def _group(self, first: str, last: str) -> Fraction:
        start = self._at
        if not self._takes(first):
            raise _NoNumber
        value = self._signed()
        # (1,234) is a pair.
        if not self._takes(last) or (first == "(" and "," in self._text[start : self._at]):
            raise _NoNumber
        return value

    def _takes(self, words: str) -> bool:
        found = self._text.startswith(words, self._at)
        self._at += len(words) * found
        return found


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_bounds(value: Fraction) -> Fraction:
    if _bits(value) > _MOST_BITS:
        raise _NoNumber
    return value


def _root(value: Fraction, degree: int) -> Fraction:
    """Return a root that is a rational number."""
    if value < 0 or degree == 0:
        raise _NoNumber
    root = Fraction(_whole_root(value.numerator, degree), _whole_root(value.denominator, degree))
    if root**degree != value:
        raise _NoNumber
    return root


def _whole_root(value: int, degree: int) -> int:
    """Return the largest whole number whose power is at most a value."""
    if degree == 2:
        return math.isqrt(value)
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low
