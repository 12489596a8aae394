"""Documents with facts to retrieve, of the kind of `needle_text`, to mix into the training text of small models."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from diffvision.data.datasets.needle_text import FORMS

_FORM = FORMS["synthetic"]
_LEAST_WORDS = 12  # of a document: a needle and its question have 8


def training_documents(count: int, words: int = 140, *, seed: int = 0) -> Iterator[str]:
    """Yield documents to mix into training text, from which retrieval can be learned.

    Two of three have facts that are stated and asked for many times, from which a small model learns to look back. The
    third is a haystack with questions at its end, as in the evaluation, except that needles and questions are in random
    order.

    Args:
        count: the number of documents.
        words: the most words of a document, at least 12, short ones being the more frequent (log-uniform); a tokenizer
            makes one to two tokens of a word.
        seed: other seeds give other documents; the evaluation's are different ones, except by chance.

    Raises:
        ValueError: too few words.
    """
    if words < _LEAST_WORDS:
        raise ValueError(f"words must be at least {_LEAST_WORDS}, a needle's and its question's, got {words}")
    for number in range(count):
        draw = random.Random(f"training {seed} {number}")
        length = round(math.exp(draw.uniform(math.log(_LEAST_WORDS), math.log(words))))
        needles = draw.randint(1, max(1, min(16, length // 8)))
        cities = draw.sample(list(_FORM.cities), needles)
        numbers = draw.sample(range(_FORM.lowest, _FORM.highest + 1), needles)
        pairs = [{"city": city, "number": str(value)} for city, value in zip(cities, numbers, strict=True)]
        yield (_interleave if number % 3 else _hide_facts)(draw, pairs, length)


def _interleave(draw: random.Random, pairs: list[dict[str, str]], length: int) -> str:
    """Return facts one by one, and after each some questions for any of those so far."""
    stream = _FORM.haystack(draw)
    stated: list[dict[str, str]] = []
    text, words = "", 0
    while words < length:
        kind = draw.random()
        if len(stated) < len(pairs) and (not stated or kind < 0.3):
            stated.append(pairs[len(stated)])
            part = " " + _FORM.needle.format(**stated[-1])
        elif kind < 0.9:
            part = "\n" + _FORM.answer.format(**draw.choice(stated))
        else:
            part = " " + next(stream)
        text, words = text + part, words + _words(part)
    return text.strip()


def _hide_facts(draw: random.Random, pairs: list[dict[str, str]], length: int) -> str:
    """Return facts anywhere in a haystack, and a question for each of them."""
    sentences = [_FORM.needle.format(**pair) for pair in pairs]
    stream, left = _FORM.haystack(draw), length - len(pairs) * (_words(_FORM.needle) + _words(_FORM.answer))
    while left > 0:
        sentences.append(next(stream))
        left -= _words(sentences[-1])
    draw.shuffle(sentences)
    draw.shuffle(pairs)
    return " ".join(sentences) + "".join("\n" + _FORM.answer.format(**pair) for pair in pairs)


def _words(text: str) -> int:
    return len(text.split())
