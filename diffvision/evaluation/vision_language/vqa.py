"""Short answers to questions about images: exact match after normalisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch

from diffvision.evaluation.per_sample import Metrics, by_kind
from diffvision.words import words

_ARTICLES = {"a", "an", "the"}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0", **{word: str(number) for number, word in enumerate(_NUMBERS)}}


def normalise(answer: str) -> str:
    """Return an answer's `words` without articles, numbers up to ten as digits.

    The rules are those of VQA's evaluation (Antol et al. 2015, arXiv 1505.00468; `vqaEval.py`), except that apostrophes
    are removed everywhere instead of being added to the contractions of a table, that an answer "A" stays, and that
    symbols and signs stay: "C++" is not "C", and "-5" is not "5".
    """
    text = re.sub(r"(?<=\d),(?=\d)|['’]|\.(?!\d)", "", answer)
    found = words(text)
    return " ".join(_DIGITS.get(word, word) for word in found if word not in _ARTICLES or len(found) == 1)


def vqa(answers: Sequence[str], labels: Sequence[Collection[str]], kinds: Sequence[str]) -> Metrics:
    """Return exact_match, and where questions have kinds (count, colour, ...) the one of each kind and their mean.

    Args:
        answers: what a model wrote, N.
        labels: the right answers of each question, N.
        kinds: of the questions, N; "" for one without.
    """
    right = [normalise(answer) in map(normalise, known) for answer, known in zip(answers, labels, strict=True)]
    return dict(by_kind("exact_match", torch.tensor(right), kinds))
