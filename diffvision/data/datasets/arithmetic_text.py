"""Worded arithmetic: graphs of quantities as sentences, some of which distract, with solutions line by line.

    Rimu has 14 pears. Lano has 9 plums. Taba has 3 more pears than Rimu. How many pears does Taba have?

    Taba: 14 + 3 = 17
    #### 17

A problem of k steps has k lines in its solution: each takes the result of the one before it, or adds a quantity that is
given or was found earlier. Distracting sentences are of the same kinds, about other people or other things, and may
refer to quantities that matter; nothing that matters refers to them (compare GSM-IC, arXiv 2302.00093). Each person is
named by syllables that all names share, so that a name that was never seen has no token that was never seen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FIRST = "Ba Be Bi Da De Do Fa Fe Fi Ga Go Ha Ho Ja Jo Ka Ke Ki La Le Li Ma Mi Mo Na Ne No Pa Pe Ra Ri Ro Sa Se Si Ta"
_SECOND = "bo by da do fa ga ka ki la lin lo ma mu na ne nor pa ra rin ro sa sen so ta ti to va vi wen za"
_THINGS = (
    "pears plums nuts eggs books pens coins cards shells stones beads cups hats keys lamps maps boats bells balls "
    "kites roses seeds stamps toys"
)
_SENTENCES = {
    "given": "{name} has {number} {thing}.",
    "more": "{name} has {number} more {thing} than {of[0]}.",
    "fewer": "{name} has {number} fewer {thing} than {of[0]}.",
    "times": "{name} has {number} times as many {thing} as {of[0]}.",
    "sum": "{name} has as many {thing} as {of[0]} and {of[1]} together.",
}
_QUESTION = "How many {thing} does {name} have?"
_SIGNS = {"more": "+", "fewer": "-", "times": "x", "sum": "+"}
_LEAST, _LARGEST_NUMBER, _LARGEST_FACTOR = 2, 99, 5
MOST_PEOPLE = 200
LEAST_HIGHEST = 20


def all_names() -> tuple[list[str], list[str]]:
    """Return the names of training problems and those of test problems, none of them in both."""
    names = [first + second for first, second in itertools.product(_FIRST.split(), _SECOND.split())]
    random.Random("names").shuffle(names)
    return names[: len(names) * 3 // 4], names[len(names) * 3 // 4 :]


@dataclass(frozen=True)
class Quantity:
    """How many of a thing a person has.

    Attributes:
        name: of the person.
        thing: in the plural.
        value: the number of things.
        kind: a key of the sentences: "given", "more", "fewer", "times" or "sum".
        number: what its sentence says; None for a sum.
        of: the quantities that it follows from.
    """

    name: str
    thing: str
    value: int
    kind: str = "given"
    number: int | None = None
    of: tuple[Quantity, ...] = ()

    @property
    def sentence(self) -> str:
        """The sentence that says it."""
        names = [other.name for other in self.of]
        return _SENTENCES[self.kind].format(name=self.name, number=self.number, thing=self.thing, of=names)

    @property
    def line(self) -> str:
        """The line of a solution that computes it."""
        second = self.of[1].value if self.number is None else self.number
        return f"{self.name}: {self.of[0].value} {_SIGNS[self.kind]} {second} = {self.value}"

    @property
    def numbers(self) -> set[int]:
        """Its value, and the number in its sentence."""
        return {self.value} if self.number is None else {self.value, self.number}


@dataclass(frozen=True)
class Problem:
    """A question about the last of the quantities that matter.

    Attributes:
        stated: the quantities in the order of their sentences.
        needed: those that the answer depends on, in the same order.
    """

    stated: tuple[Quantity, ...]
    needed: tuple[Quantity, ...]

    @property
    def prompt(self) -> str:
        """The sentences and the question."""
        asked = self.needed[-1]
        question = _QUESTION.format(thing=asked.thing, name=asked.name)
        return " ".join([*(quantity.sentence for quantity in self.stated), question])

    @property
    def response(self) -> str:
        """The solution, a step a line, and the answer after `####`."""
        return "\n".join([*(quantity.line for quantity in self.needed if quantity.of), f"#### {self.answer}"])

    @property
    def answer(self) -> int:
        """The number that is asked for."""
        return self.needed[-1].value


def compose(draw: random.Random, names: Sequence[str], *, steps: int, distractors: int, highest: int) -> Problem:
    """Write a problem: a chain of needed sentences with distractors in between, and the question.

    Args:
        draw: the source of all random choices.
        names: of people.
        steps: lines of the solution.
        distractors: sentences that the answer does not depend on. Apart from factors, their numbers differ from those
            of the needed sentences.
        highest: the largest number.
    """
    people = iter(draw.sample(names, 2 * steps + distractors + 1))
    thing, *others = draw.sample(_THINGS.split(), 4)
    needed = _chain(draw, people, thing, steps, highest)
    taken = set().union(*(quantity.numbers for quantity in needed))
    # True is a quantity that matters: these stay in their order.
    slots = [True] * len(needed) + [False] * distractors
    draw.shuffle(slots)
    waiting, stated = iter(needed), list[Quantity]()
    for matters in slots:
        stated.append(next(waiting) if matters else _distractor(draw, people, thing, others, stated, taken, highest))
    return Problem(tuple(stated), tuple(needed))


def _chain(draw: random.Random, people: Iterator[str], thing: str, steps: int, highest: int) -> list[Quantity]:
    """Return the quantities that matter, each after those that it follows from."""
    chain = [_state(draw, next(people), thing, highest)]
    for _ in range(steps):
        last = chain[-1]
        if draw.random() < 0.2:
            # A leaf of the graph, unless the sum is with what was found earlier.
            fresh = len(chain) == 1 or draw.random() < 0.5
            other = _state(draw, next(people), thing, highest) if fresh else draw.choice(chain[:-1])
            if last.value + other.value <= highest:
                chain += [other] if fresh else []
                pair = (last, other) if draw.random() < 0.5 else (other, last)
                chain.append(Quantity(next(people), thing, last.value + other.value, "sum", None, pair))
                continue
        chain.append(_step(draw, next(people), last, highest))
    return chain


def _step(draw: random.Random, name: str, of: Quantity, highest: int) -> Quantity:
    """Return a quantity that follows from another one and a number; each is possible for some number."""
    most = {
        "more": min(_LARGEST_NUMBER, highest - of.value),
        "fewer": min(_LARGEST_NUMBER, of.value - 1),
        "times": min(_LARGEST_FACTOR, highest // of.value),
    }
    weights = {"more": 4, "fewer": 4, "times": 1}
    possible = [kind for kind, number in most.items() if number >= _LEAST]
    kind = draw.choices(possible, [weights[kind] for kind in possible])[0]
    number = draw.randint(_LEAST, most[kind])
    value = {"more": of.value + number, "fewer": of.value - number, "times": of.value * number}[kind]
    return Quantity(name, of.thing, value, kind, number, (of,))


def _state(draw: random.Random, name: str, thing: str, highest: int) -> Quantity:
    number = draw.randint(_LEAST, min(_LARGEST_NUMBER, highest))
    return Quantity(name, thing, number, number=number)


def _distractor(
    draw: random.Random,
    people: Iterator[str],
    thing: str,
    others: Sequence[str],
    stated: Sequence[Quantity],
    taken: set[int],
    highest: int,
) -> Quantity:
    """Return a quantity that does not matter, with numbers that do not, as far as there are any."""
    name = next(people)
    owned = {(quantity.name, quantity.thing) for quantity in stated}
    drawn = []
    for _ in range(50):
        same = [quantity for quantity in stated if quantity.thing == thing]
        if same and draw.random() < 0.5:
            quantity = _step(draw, name, draw.choice(same), highest)
        elif draw.random() < 0.5:
            quantity = _state(draw, name, thing, highest)
        else:
            known = [(other.name, kind) for other in stated for kind in others if (other.name, kind) not in owned]
            owner, kind = draw.choice(known) if known and draw.random() < 0.5 else (name, draw.choice(others))
            quantity = _state(draw, owner, kind, highest)
        drawn.append(quantity)
        if not ({quantity.value} if quantity.kind == "times" else quantity.numbers) & taken:
            break
    return drawn[-1]
