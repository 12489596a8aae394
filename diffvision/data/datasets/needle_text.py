"""Texts with needles in them: N sentences that give a city its number, in a haystack, and R questions at the end.

Two forms of one text. "text" is the paper's protocol ("magic number of a city", arXiv 2410.05258 section 3.4), for
models that read English. "synthetic" has the same build from short words and two-digit numbers, for models of 1M to 30M
parameters.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_CITIES = (
    "Amsterdam Athens Auckland Baghdad Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Caracas "
    "Chicago Copenhagen Dakar Dallas Delhi Denver Dublin Edinburgh Florence Geneva Hamburg Hanoi Havana Helsinki "
    "Houston Istanbul Jakarta Kabul Kampala Karachi Kyoto Lagos Lima Lisbon London Lusaka Madrid Manila Melbourne "
    "Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Ottawa Paris Prague Quito Riga Rome Santiago "
    "Seoul Shanghai Singapore Sofia Stockholm Sydney Tallinn Tehran Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw "
    "Wellington Zagreb Zurich"
)
_WORDS = (
    "apple bread cloud dance earth field glass house iron jewel kite lamp moon night ocean paper queen river stone "
    "table under voice water year zebra bright cold dark early fast green high light near old quiet red slow tall warm"
)
_SENTENCES = (
    "The rain had stopped before the shops opened.",
    "A gardener watered the plants along the wall.",
    "Most of the letters were answered the same day.",
    "The train left the station a little late.",
    "Somebody had painted the old bridge in the spring.",
    "Two boats lay in the harbour without a crew.",
    "The library keeps its newspapers for many years.",
    "It is pleasant to walk by the river in the evening.",
    "The baker starts his work long before sunrise.",
    "Nobody could remember who had planted the tree.",
    "A new road now joins the village with the coast.",
    "The meeting was short and ended in agreement.",
)


def _random_sentences(draw: random.Random) -> Iterator[str]:
    while True:
        yield draw.choice(_SENTENCES)


def _random_words(draw: random.Random) -> Iterator[str]:
    while True:
        yield f"{' '.join(draw.choices(_WORDS.split(), k=3))};"


@dataclass(frozen=True)
class Form:
    """How needles, haystack and questions are written; {city}, {number} and {cities} are filled in."""

    needle: str
    question: str  # before the answers; may be empty
    answer: str  # one for each city that is asked for; "{number}" stands after a space
    lowest: int
    highest: int
    haystack: Callable[[random.Random], Iterator[str]]
    cities: Sequence[str] = field(default_factory=_CITIES.split)


FORMS = {
    "text": Form(
        needle="The special magic number of {city} is {number}.",
        question="What are the special magic numbers of {cities} mentioned in the text?",
        answer="The special magic number of {city} is {number}.",
        lowest=1_000_000,
        highest=9_999_999,
        haystack=_random_sentences,
    ),
    "synthetic": Form(
        needle="# {city} {number};",  # a mark before, so that every city has a space before it
        question="",
        answer="? {city} {number};",
        lowest=10,
        highest=99,
        haystack=_random_words,
    ),
}


@dataclass(frozen=True)
class NeedleText:
    """A text, with ranges of its characters as [start, stop)."""

    text: str  # haystack with needles, question, answers
    needle: tuple[int, int]  # of the first city that is asked for
    question: int  # where the haystack ends
    answers: tuple[tuple[int, int], ...]  # the numbers at the end, each with the space before it


def compose_to_length(
    form: Form,
    draw: random.Random,
    measure: Callable[[str], int],
    *,
    length: int,
    needles: int,
    queries: int,
    depth: float,
) -> NeedleText:
    """Write needles between the sentences of as much of the form's haystack as fits.

    Args:
        form: how needles, haystack and questions are written.
        draw: cities, numbers, the haystack, and where the distracting needles go.
        measure: length of a text, in tokens for instance.
        length: the most that the whole may measure.
        needles: N, pairs of city and number.
        queries: R of them that are asked for, in the question's order next to each other at `depth`; the others lie
            anywhere.
        depth: share of the length of filler and other needles that lies before them, 0 to 1. They start at the nearest
            border of two sentences.

    Raises:
        ValueError: counts or depth out of range; the needles and questions alone are longer.
    """
    most = len(form.cities)
    if not 1 <= queries <= needles <= most:
        raise ValueError(f"queries and needles must be 1 <= queries <= needles <= {most}, got {queries} and {needles}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be a share of the context, 0 to 1, got {depth}")
    cities = draw.sample(list(form.cities), needles)
    numbers = draw.sample(range(form.lowest, form.highest + 1), needles)  # no two alike: only one answer is right
    pairs = [{"city": city, "number": str(number)} for city, number in zip(cities, numbers, strict=True)]
    depths = [draw.random() for _ in pairs[queries:]]
    stream = form.haystack(random.Random(draw.random()))
    length_of = functools.cache(measure)

    def write(filler: Sequence[str]) -> NeedleText:
        written = [form.needle.format(**pair) for pair in pairs]
        context = list(filler)
        for distraction, share in zip(written[queries:], depths, strict=True):
            context.insert(_border(context, length_of, share), distraction)
        index = _border(context, length_of, depth)
        context[index:index] = written[:queries]
        return _ask(form, context, index, len(written[0]), pairs[:queries])

    bare = measure(write([]).text)
    if bare > length:
        raise ValueError(
            f"a context of {length} is too short for {needles} needles and {queries} questions, which alone take "
            f"{bare}: give a longer one or fewer needles"
        )
    filler: list[str] = []
    total = bare
    while total <= length:  # sentence by sentence, which is near enough; the whole is measured below
        filler.append(sentence := next(stream))
        total += length_of(f" {sentence}")
    text = write(filler)
    while filler and measure(text.text) > length:
        filler.pop()
        text = write(filler)
    return text


def _ask(form: Form, context: Sequence[str], index: int, size: int, pairs: Sequence[dict[str, str]]) -> NeedleText:
    """Return the context with the question for some pairs, whose first needle is sentence `index`, and the answers."""
    start = len(" ".join(context[:index]))
    needle = (start, start + size + (index > 0))
    text = " ".join(context)
    question = len(text)
    *first, last = [pair["city"] for pair in pairs]
    cities = f"{', '.join(first)} and {last}" if first else last
    text += f"\n{form.question.format(cities=cities)}" if form.question else ""
    answers = []
    for pair in pairs:
        before, _, after = form.answer.partition(" {number}")
        text += f"\n{before.format(**pair)}"
        answers.append((len(text), len(text) + 1 + len(pair["number"])))
        text += f" {pair['number']}{after.format(**pair)}"
    return NeedleText(text, needle, question, tuple(answers))


def _border(sentences: Sequence[str], measure: Callable[[str], int], depth: float) -> int:
    """Return the number of sentences before the border that is nearest to a share of their length."""
    ends = [0, *itertools.accumulate(measure(f" {sentence}") for sentence in sentences)]
    return min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
