"""Answers to mathematical questions: taken from a text, and compared without a computer algebra system.

An answer is what stands in LaTeX's last box, after the last `####`, after the last "answer is", or the last number; or
the whole text, where that is equal to the right one.
Two are equal as fractions, or as strings without what does not matter in LaTeX. `math_verify` compares by the library
of that name, where it is installed. Programs differ in these rules, and by several points of accuracy: report which.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import string
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple

Rule = Literal["boxed", "hashes", "answer is", "last number", "whole"]
"""What marked an answer."""
RULES: tuple[Rule, ...] = ("boxed", "hashes", "answer is", "last number", "whole")

_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d*)?|\.\d+"
_LAST_NUMBER = re.compile(rf"(?<![\w.])[-+]?(?:{_NUMBER})(?:/(?:{_NUMBER}))?")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:)[\s:*]*(?:\\\[\s*|\$\$\s*)?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![\s.])(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)\.(?:\s|$)")
_PLAIN = re.compile(rf"([-+]?)({_NUMBER})(?:/({_NUMBER}))?")
_FRACTION = re.compile(rf"([-+]?)(\d*)\\frac\{{([-+]?(?:{_NUMBER}))\}}\{{({_NUMBER})\}}")
_LONGEST_NUMBER = 1000  # characters: Python refuses to read numbers of a few thousand
_MIXED = re.compile(r"(?<!\d)([-+]?\d+) +(\d+)/(\d+)")
# Letters in the order of the alphabet are variables: "3abc", which has a vowel as words have.
_PRODUCT = "?".join(string.ascii_lowercase) + "?"
# A unit is a word, not a product such as "3 a" or "3xy", nor a function, nor what makes another number of it.
_UNIT = re.compile(
    rf"((?<![\d.,])(?:{_NUMBER})\}}?) *"
    rf"(?!(?:(?<! ){_PRODUCT}|(?=[a-z]{{3}}(?![a-z])){_PRODUCT})(?![A-Za-z]))"
    r"(?!(?:and|or|to|if|when|where|(?:arc)?(?:sin|cos|tan|sec|csc|cot)h?|log|exp|squared|cubed|base"
    r"|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|tau|hundred|thousand|(?:m|b|tr)illion"
    r"|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?)(?![A-Za-z]))"
    r"(?:[ckm]m|[km]g|ml|ft|lbs?|oz|hrs?|mph|(?=[A-Za-z]*[aeiou])[A-Za-z]{3,})(?:[ /]+[A-Za-z]+)*(?:\^?[23])?$"
)
_TEXT = r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}"
_WITHOUT_MEANING = (
    (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"(?<=\d)\\[,!](?=\d{3})|\\!", ""),
    (r"\\(?:[,;:]| )", " "),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:leq|le|leqslant)(?![a-zA-Z])", r"\\le "),
    (r"\\(?:geq|ge|geqslant)(?![a-zA-Z])", r"\\ge "),
    (r"\\(?:neq|ne)(?![a-zA-Z])", r"\\ne "),
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|°", ""),
    (r"\\\(|\\\)|\\\[|\\\]|\\?\$|\\?%", ""),
    (r"(?<=\d)\{,\}(?=\d{3})", ","),
    (r"−", "-"),
    (r"([\^_])\s*\{\s*(\w)\s*\}", r"\1\2"),
)
# The name of what was asked for: x = 3, but not x = 3, y = 4.
_NAME = re.compile(r"([A-Za-z])\s*(?:=|\\in(?![a-zA-Z]))\s*(?=[^=]*$)")


class Extracted(NamedTuple):
    """An answer, and the rule that found it."""

    text: str
    rule: Rule


def extract(text: str, gold: str) -> Extracted | None:
    """Return the answer of a solution by the first rule that finds one; None if none does.

    Args:
        text: the solution.
        gold: the right answer. A text that is nothing else, such as "yes" or "(x - 1)(x + 2)", is the answer itself.
    """
    found = next((Extracted(one, rule) for rule, find in _FINDERS.items() if (one := find(text))), None)
    if found is None or found.rule == "last number":
        whole = text.strip()
        if not (found and equal(gold, found.text)) and equal(gold, whole):
            return Extracted(whole, "whole")
    return found


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{}` or `\fbox{}` has in its braces, balanced, or after `\boxed` without braces."""
    closed = _closing_braces(text)
    for match in reversed(list(re.finditer(r"\\f?boxed\s*(\{)?|\\fbox\s*(\{)", text))):
        if not (match[1] or match[2]):
            word = re.compile(r"[^\s$]+").match(text, match.end())
            return word[0] if word else None
        if (end := closed.get(match.end() - 1)) is not None:
            return text[match.end() : end].strip() or None
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return where each brace is closed. One after a backslash is part of an answer, such as a set's."""
    opened: list[int] = []
    closed: dict[int, int] = {}
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed[opened.pop()] = brace.start()
    return closed


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`."""
    _, marker, rest = text.rpartition("####")
    return (rest.strip().split("\n")[0].strip().strip("*").strip() or None) if marker else None


def _after_words(text: str) -> str | None:
    """Return the rest of the line after the last "answer is" or "answer:", up to the end of its sentence."""
    if not (markers := list(_ANSWER_IS.finditer(text))):
        return None
    line = text[markers[-1].end() :].split("\n")[0]
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip().strip("*").strip() or None


def _last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


_FINDERS: dict[Rule, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hashes": after_hashes,
    "answer is": _after_words,
    "last number": _last_number,
}


def normalised(answer: str) -> str:
    """Return an answer without what does not change it: spaces, `$`, `%`, degrees, units after a number, sizes."""
    text = answer.strip().rstrip(".").strip()
    for pattern, replacement in _WITHOUT_MEANING:
        text = re.sub(pattern, replacement, text)
    text = re.sub(rf"(?<=[\d}}])\s*{_TEXT}(?:\^\{{?\d\}}?)?\s*$", "", text)
    text = re.sub(_TEXT, r"\1", text).strip()
    text = re.sub(r"\\(frac|sqrt)\s*(\d)\s*", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _UNIT.sub(r"\1", text)
    text = text[name.end() :] if (name := _NAME.match(text)) else text
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    # Between digits a space matters, but before three of them: 12 is not 1 2.
    compact = re.sub(r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))", "", " ".join(text.split()))
    return compact.casefold() if re.fullmatch(r"[A-Za-z ]{2,}", text) else compact


def as_fraction(answer: str) -> Fraction | None:
    r"""Return the number that an answer is: digits with commas, decimals, a/b, `\frac{a}{b}`; None for another one."""
    if len(answer) > _LONGEST_NUMBER:
        return None
    text = normalised(answer)
    if match := _PLAIN.fullmatch(text):
        sign, whole, top, bottom = match[1], "0", match[2], match[3] or "1"
    elif match := _FRACTION.fullmatch(text):
        sign, whole, top, bottom = match[1], match[2] or "0", match[3], match[4]
    else:
        return None
    numbers = [Fraction(number.replace(",", "").rstrip(".")) for number in (whole, top, bottom)]
    if not numbers[2]:
        return None
    value = numbers[0] + numbers[1] / numbers[2]
    return -value if sign == "-" else value


def equal(gold: str, answer: str) -> bool:
    """Return whether two answers are equal as fractions, or as strings that are `normalised`."""
    names = [match[1].casefold() for one in (gold, answer) if (match := _NAME.match(one.strip(" $\n")))]
    if len(set(names)) > 1:  # the lines x = 3 and y = 3
        return False
    fractions = as_fraction(gold), as_fraction(answer)
    if None not in fractions:
        return fractions[0] == fractions[1]
    return normalised(gold) == normalised(answer)


def has_math_verify() -> bool:
    """Return whether the library math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def math_verify(gold: str, answer: str) -> bool:
    """Return whether math-verify takes an answer for the right one; it must be installed.

    Its limits of time need the main thread. The right answer comes first: the library treats the two differently.
    """
    verifier, gold_parsed = _math_verify(), _parsed(gold)
    return bool(verifier.verify(gold_parsed, _parsed(answer)))


@functools.cache
def _math_verify() -> Any:
    import math_verify

    return math_verify


@functools.lru_cache(maxsize=100_000)
def _parsed(answer: str) -> Any:
    # LaTeX is recognised between dollars alone.
    return _math_verify().parse(f"${answer.strip().strip('$')}$")
