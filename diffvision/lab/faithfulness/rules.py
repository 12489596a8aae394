"""Judges without a model: what can be decided by looking for strings."""

from __future__ import annotations

import re
from typing import NamedTuple

from diffvision.lab.faithfulness.rows import Row
from diffvision.words import composed, fold, is_punctuation


class Judgement(NamedTuple):
    """Whether an output is accurate; None where the judge cannot say, which counts as not accurate."""

    accurate: bool | None
    reason: str
    spans: tuple[str, ...] = ()  # of the output, that the judge finds unfaithful


_DIGITS = r"\d+(?:,\d{3}(?!\d))*(?:\.\d+)*(?!\w)"  # a comma stands between thousands, or between two numbers
_WORD = re.compile(rf"{_DIGITS}|\w+")
_NUMBER = re.compile(rf"(?<!\w){_DIGITS}")
_CAPITAL = "[" + "".join(filter(str.isupper, map(chr, range(0x530)))) + "]"  # Latin, Greek, Cyrillic
_CAPITALISED = re.compile(rf"(?<!\w)(?!I\b){_CAPITAL}[\w'’-]*(?: (?!I\b){_CAPITAL}[\w'’-]*)*")
_SENTENCE = re.compile(r"(?:^|[.!?:]\s+|\n\s*|[\"“(*-]\s*)$")


def contains(row: Row, output: str) -> Judgement:
    """Judge an answer by whether one of the right ones is in it, after `normalised`.

    Source: best_subspan_em of Liu et al. 2023 (arXiv 2307.03172), as Lookback Lens uses it.
    """
    text = normalised(output)
    hit = next((answer for answer in row.answers if normalised(answer) and normalised(answer) in text), None)
    return Judgement(hit is not None, "no answer is in it" if hit is None else f"it has {hit!r}")


def grounded(row: Row, output: str) -> Judgement:
    """Judge an output by whether all its numbers and names are in the document or the question.

    It finds invented numbers and names, and nothing else: an output may have none (then it cannot say), or put right
    names into a wrong sentence. A capitalised word at a sentence's start is no name.
    """
    text, output = _words(f"{row.document}\n{row.question or ''}"), composed(output)
    spans = [*(match[0] for match in _NUMBER.finditer(output)), *_names(output)]
    if not spans:
        return Judgement(None, "no number or name to look for")
    strange = [span for span in spans if _words(span) not in text]
    return Judgement(not strange, "not all are in the document" if strange else "all are in it", tuple(strange))


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and runs of spaces.

    Source: SQuAD's evaluation (Rajpurkar et al. 2016), except that symbols stay: "C++" is not "C".
    """
    text = "".join(character for character in fold(text) if not is_punctuation(character))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _words(text: str) -> str:
    """Return words and numbers in lower case, each between spaces; 1,999 is 1999."""
    return f" {' '.join(word.replace(',', '') for word in _WORD.findall(fold(text)))} "


def _names(text: str) -> list[str]:
    names = []
    for match in _CAPITALISED.finditer(text):
        words = match[0].split()
        if _SENTENCE.search(text[: match.start()]):
            words = words[1:]
        if words:
            names.append(" ".join(words).removesuffix("'s").removesuffix("’s"))
    return names
