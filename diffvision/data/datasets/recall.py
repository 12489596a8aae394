"""`recall`: synthetic text that can only be continued from its context, for the training text of small models.

Facts to retrieve (`needle_text`) and words with made-up names (`mapping_text`), in documents of a few to a few hundred
words. The synthetic forms of the needle and many-shot evaluations ask for what is learned here.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path

from diffvision.data.datasets.mapping_text import KINDS, TEMPLATE, draw_mapping
from diffvision.data.datasets.needle_text import FORMS
from diffvision.data.shards.writer import refuse_existing, write_shards

_PER_SHARD = 4000
_FORM = FORMS["synthetic"]
_LEAST_WORDS = 12  # of a document with needles: a needle and its question have 8


def make_recall(directory: str | Path, documents: int = 60_000, words: int = 140, seed: int = 0) -> str:
    """Write synthetic text of facts to retrieve and made-up names, to mix into training text.

    There are three documents with needles for each with a mapping; the result is their number of characters.

    Args:
        directory: the folder to write; it must have no shards yet.
        documents: the number of documents.
        words: the most in a document with needles. A tokenizer trained on this text makes about 1.6 tokens of one, and
            a model learns to look back no further than its training text requires.
        seed: other seeds give other documents.

    Raises:
        ValueError: the directory has shards already, fewer than 4 documents, or fewer than 12 words.
    """
    if documents < 4:
        raise ValueError(f"documents must be at least 4, three with needles and one with a mapping, got {documents}")
    if words < _LEAST_WORDS:
        raise ValueError(f"words must be at least {_LEAST_WORDS}, a needle's and its question's, got {words}")
    refuse_existing(Path(directory))
    texts = list(recall_documents(documents, words, seed))
    write_shards(directory, ({"__key__": f"{n:07d}", "txt": text} for n, text in enumerate(texts)), _PER_SHARD)
    return f"{sum(map(len, texts)):,} characters"


def recall_documents(count: int, words: int = 140, seed: int = 0) -> Iterator[str]:
    """Yield the documents, every fourth with a mapping; arguments as `make_recall`.

    Of three documents with needles two have facts that are stated and asked for many times, from which a small model
    learns to look back. The third is a haystack with questions at its end, as in the evaluation, except that needles
    and questions are in random order. Short documents are the more frequent (log-uniform).
    """
    for number in range(count):
        if number % 4 == 3:
            yield _map_words(random.Random(f"mapping training {seed} {number // 4}"))
            continue
        needle = number - number // 4  # its number among those with needles
        draw = random.Random(f"training {seed} {needle}")
        length = round(math.exp(draw.uniform(math.log(_LEAST_WORDS), math.log(words))))
        needles = draw.randint(1, max(1, min(16, length // 8)))
        cities = draw.sample(list(_FORM.cities), needles)
        numbers = draw.sample(range(_FORM.lowest, _FORM.highest + 1), needles)
        pairs = [{"city": city, "number": str(value)} for city, value in zip(cities, numbers, strict=True)]
        yield (_interleave if needle % 3 else _hide_facts)(draw, pairs, length)


def _map_words(draw: random.Random) -> str:
    """Return 8 to 64 words of two to eight kinds, each with the name of its kind."""
    names = draw_mapping(draw, draw.randint(2, 8))
    kinds = draw.choices(list(names), k=draw.randint(8, 64))
    return "".join(TEMPLATE.format(text=draw.choice(KINDS[kind].split()), label=names[kind]) for kind in kinds)


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
