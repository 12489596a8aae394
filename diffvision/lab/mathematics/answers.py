"""Answers to mathematical questions: taken from a text, and compared without a computer algebra system.

An answer is what stands in LaTeX's last box, after the last `####`, after the last "answer is", or the last number; or
the whole text, where that is equal to the right one.
Two are equal as exact numbers, or as strings without what does not matter in LaTeX, with the same unit where both have
one (`quantities`, `units`). `math_verify` compares by the library of that name, where it is installed. Programs differ
in these rules, and by several points of accuracy: report which.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from diffvision.lab.mathematics.quantities import NAME, NUMBER, Quantity, quantity
from diffvision.lab.mathematics.units import compatible
from diffvision.limited_process import LimitedProcess, LimitExceeded

Rule = Literal["boxed", "hashes", "answer is", "last number", "whole"]
"""What marked an answer."""
RULES: tuple[Rule, ...] = ("boxed", "hashes", "answer is", "last number", "whole")

_LAST_NUMBER = re.compile(rf"(?<![\w.])[-+]?(?:{NUMBER})(?:/(?:{NUMBER}))?")
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:)[\s:*]*(?:\\\[\s*|\$\$\s*)?", re.IGNORECASE)
_OPEN, _CLOSE = "([{", ")]}"
_LONGEST_BRACKETS = 1000  # characters
_SENTENCE_END = re.compile(r"(?<![\s.])(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)\.(?:\s|$)")


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


def as_fraction(answer: str) -> Fraction | None:
    """Return the number that an answer is, in its unit, as `quantities` reads it; None for another one."""
    return quantity(answer).value


def equal(gold: str, answer: str) -> bool:
    """Return whether two answers are the same number, the same text, or brackets with the same answers in them.

    Units that differ make them unequal, and a missing one does not.
    """
    return _comparable(gold, answer) and _equal(quantity(gold), quantity(answer))


def _comparable(gold: str, answer: str) -> bool:
    """Return whether neither answer is empty, and their names and units do not differ."""
    names = [match[1].casefold() for one in (gold, answer) if (match := NAME.match(one.strip(" $\n")))]
    if len(set(names)) > 1:  # the lines x = 3 and y = 3
        return False
    one, other = quantity(gold), quantity(answer)
    return bool(one.text and other.text) and compatible(one.unit, other.unit)


def _equal(one: Quantity, other: Quantity) -> bool:
    if one.value is None or other.value is None:
        return one.value == other.value and (one.text == other.text or _same_elements(one.text, other.text))
    if one.unit == "percent" and not other.unit:
        return other.value in (one.value, one.value / 100)
    if other.unit == "percent" and not one.unit:
        return one.value in (other.value, other.value / 100)
    return one.value == other.value


def _same_elements(text: str, other: str) -> bool:
    """Return whether two texts are tuples or intervals of equal answers, or sets of them in any order."""
    first, second = _split_brackets(text), _split_brackets(other)
    if first is None or second is None or first[0] != second[0] or len(first[1]) != len(second[1]):
        return False
    left = list(second[1])
    for element in first[1]:
        among = left if first[0] == "{}" else left[:1]
        found = next((number for number, each in enumerate(among) if equal(element, each)), None)
        if found is None:
            return False
        del left[found]
    return True


def _split_brackets(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets around a text, and what the commas between them separate."""
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    if not (text[:1] in _OPEN and text[-1:] in _CLOSE) or len(text) > _LONGEST_BRACKETS:
        return None
    level, start, elements = 0, 1, []
    for at, character in enumerate(text):
        level += (character in _OPEN) - (character in _CLOSE)
        if level == 0 and at < len(text) - 1:
            return None  # (1, 2) and (3, 4)
        if (level == 1 and character == ",") or level == 0:
            elements.append(text[start:at])
            start = at + 1
    return text[0] + text[-1], elements


def has_math_verify() -> bool:
    """Return whether the library math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def math_verify(gold: str, answer: str) -> bool:
    """Return whether math-verify takes an answer for the right one; it must be installed.

    It is asked about what is not a number of ours on both sides, and where units do not differ, which it does not
    compare. An answer that takes it more time or memory than a child process may have is not the right one.

    Raises:
        ValueError: the library is missing.
    """
    if not _comparable(gold, answer):
        return False
    one, other = quantity(gold), quantity(answer)
    if one.value is not None and other.value is not None:
        return _equal(one, other)
    try:
        return _verified([gold, answer])
    except LimitExceeded:
        return False


_verified = LimitedProcess(Path(__file__).with_name("verify_program.py"))
