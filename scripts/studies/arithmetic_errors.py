"""What went wrong in the solution of a worded problem of `diffvision data make arithmetic`."""

from __future__ import annotations

import itertools
import re
from typing import Any, Literal, NamedTuple

Kind = Literal["correct", "distracted", "fabricated", "miscalculated", "malformed"]
KINDS: tuple[Kind, ...] = ("correct", "distracted", "fabricated", "miscalculated", "malformed")
_NUMBER = r"-?\d{1,1000}"  # Python refuses to read numbers of a few thousand digits, which models do repeat
_LINE = re.compile(
    rf"\s*(?P<name>\w+): (?P<first>{_NUMBER}) (?P<sign>[-+x]) (?P<second>{_NUMBER}) = (?P<result>{_NUMBER})\s*"
)
_ANSWER = re.compile(rf"\s*#### ({_NUMBER})\s*")


class Step(NamedTuple):
    """A line of a solution, such as "Taba: 14 + 3 = 17"."""

    name: str
    operands: tuple[int, int]
    sign: str
    result: int

    @property
    def meaning(self) -> tuple[str, tuple[int, ...], str, int]:
        """The same for two lines that differ in the order of what they add or multiply."""
        operands = self.operands if self.sign == "-" else tuple(sorted(self.operands))
        return self.name, operands, self.sign, self.result


class Judgement(NamedTuple):
    """What became of a solution.

    Attributes:
        kind: "correct" if the answer is right, whatever its steps are. Else it is about the first wrong step:
            "distracted" if it is about a person, or uses a number of the problem, that does not matter; "fabricated"
            if it uses a number that is neither in the problem nor an earlier step's result; "miscalculated" if only
            its choice among the numbers that matter, its sign or its result is wrong. "malformed" if there is no answer
            after `####`, or the first wrong line is no step.
        first_wrong: number of the first step that is not as in the right solution, from 1; the answer counts as the
            last. None if there is none.
    """

    kind: Kind
    first_wrong: int | None


def check(solution: str) -> None:
    """Raise a ValueError where a solution is none of `diffvision data make arithmetic`."""
    steps, answer = _parse(solution)
    if answer is None or None in steps:
        raise ValueError(
            f"the solution {solution[-60:]!r} is not one of `diffvision data make arithmetic`: write 'Taba: 14 + 3 "
            "= 17' and last '#### 17'"
        )


def judge(prompt: str, solution: str, written: str) -> Judgement:
    """Return what became of a written solution.

    Args:
        prompt: the problem.
        solution: the right solution.
        written: what a model wrote.

    Raises:
        ValueError: the right solution is none of `diffvision data make arithmetic`.
    """
    check(solution)
    right, answer = _parse(solution)
    steps, given = _parse(written)
    first_wrong = _first_difference(steps, right)
    if first_wrong is None and given != answer:
        first_wrong = len(right) + 1
    if given == answer:
        return Judgement("correct", first_wrong)
    if given is None or first_wrong is None:
        return Judgement("malformed", first_wrong)
    index = first_wrong - 1
    if index < len(steps):
        step = steps[index]
        if step is None:
            return Judgement("malformed", first_wrong)
        name, used = step.name, set(step.operands)
    else:
        name, used = "", {given}
    return Judgement(_kind(prompt, solution, name, used, [step.result for step in steps[:index] if step]), first_wrong)


def _kind(prompt: str, solution: str, name: str, used: set[int], results: list[int]) -> Kind:
    """Return what a wrong step is, by the person that it is about and the numbers that it uses."""
    in_problem, needed = _numbers(prompt), _numbers(solution)
    people = set(re.findall(r"\w+(?=:)", solution))
    if used & (in_problem - needed) or (name and name not in people and re.search(rf"\b{name}\b", prompt)):
        return "distracted"
    if used - in_problem - set(results):
        return "fabricated"
    return "miscalculated"


def _parse(text: str) -> tuple[list[Step | None], int | None]:
    """Return the steps before the answer, None for a line that is no step, and the answer; None if there is none."""
    steps: list[Step | None] = []
    for line in text.strip().split("\n"):
        if answer := _ANSWER.fullmatch(line):
            return steps, int(answer[1])
        match = _LINE.fullmatch(line)
        steps.append(
            Step(match["name"], (int(match["first"]), int(match["second"])), match["sign"], int(match["result"]))
            if match
            else None
        )
    return steps, None


def _first_difference(steps: list[Step | None], right: list[Step | None]) -> int | None:
    """Return the number of the first step that differs, from 1; None if all are equal."""
    for number, (step, other) in enumerate(itertools.zip_longest(steps, right, fillvalue="missing"), start=1):
        if _meaning(step) != _meaning(other):
            return number
    return None


def _meaning(step: Step | str | None) -> Any:
    return step.meaning if isinstance(step, Step) else step


def _numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}
