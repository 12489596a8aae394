"""Documents with facts to retrieve, of the kind of `needle_text`, to mix into the training text of small models."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from diffvision.data.datasets.needle_text import Form, as_form


def training_documents(
    form: str | Form = "synthetic",
    *,
    count: int,
    lengths: tuple[int, int] = (12, 140),
    most_needles: int = 16,
    seed: int = 0,
) -> Iterator[str]:
    """Yield documents to mix into training text, from which retrieval can be learned.

    Two of three have facts that are stated and asked for many times, from which a small model learns to look back. The
    third is a haystack with questions at its end, as in the evaluation, except that needles and questions are in random
    order.

    Args:
        form: a name in `FORMS`, or a form.
        count: the number of documents.
        lengths: least and most words of a document, short ones being the more frequent (log-uniform); a tokenizer makes
            one to two tokens of a word.
        most_needles: the most in a document; no more than a word in eight.
        seed: other seeds give other documents; the evaluation's are different ones, except by chance.

    Raises:
        ValueError: unknown form, or lengths without room for one needle and its question.
    """
    form = as_form(form)
    bare = _words(form.needle) + _words(form.answer)
    if not bare <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths is {lengths}: a needle and its question have {bare} words; give (least, most)")
    for number in range(count):
        draw = random.Random(f"training {seed} {number}")
        length = round(math.exp(draw.uniform(*map(math.log, lengths))))
        needles = draw.randint(1, max(1, min(most_needles, length // 8, len(form.cities))))
        cities = draw.sample(list(form.cities), needles)
        numbers = draw.sample(range(form.lowest, form.highest + 1), needles)
        pairs = [{"city": city, "number": str(value)} for city, value in zip(cities, numbers, strict=True)]
        yield (_interleave if number % 3 else _hide_facts)(form, draw, pairs, length)


def _interleave(form: Form, draw: random.Random, pairs: list[dict[str, str]], length: int) -> str:
    """Return facts one by one, and after each some questions for any of those so far."""
    stream = form.haystack(draw)
    stated: list[dict[str, str]] = []
    text, words = "", 0
    while words < length:
        kind = draw.random()
        if len(stated) < len(pairs) and (not stated or kind < 0.3):
            stated.append(pairs[len(stated)])
            part = " " + form.needle.format(**stated[-1])
        elif kind < 0.9:
            part = "\n" + form.answer.format(**draw.choice(stated))
        else:
            part = " " + next(stream)
        text, words = text + part, words + _words(part)
    return text.strip()


def _hide_facts(form: Form, draw: random.Random, pairs: list[dict[str, str]], length: int) -> str:
    """Return facts anywhere in a haystack, and a question for each of them."""
    sentences = [form.needle.format(**pair) for pair in pairs]
    stream, left = form.haystack(draw), length - len(pairs) * (_words(form.needle) + _words(form.answer))
    while left > 0:
        sentences.append(next(stream))
        left -= _words(sentences[-1])
    draw.shuffle(sentences)
    draw.shuffle(pairs)
    return " ".join(sentences) + "".join("\n" + form.answer.format(**pair) for pair in pairs)


def _words(text: str) -> int:
    return len(text.split())
