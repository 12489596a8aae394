"""Mathematical questions: the share of right answers, greedily decoded, of one or several published sets.

The sets are those of arXiv 2410.05258 appendix C, whose prompts and rules of comparison the paper does not give: here
they are in `Prompting` and `answers`, and the same for all models.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffvision.data.shards.writer import write_lines
from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.samples import PerSample
from diffvision.lab.language.chats import asking, ends_of
from diffvision.lab.language.generations import Generation, Prompt, generate_rows, room_for
from diffvision.lab.mathematics.answers import (
    RULES,
    Extracted,
    equal,
    extract,
    has_math_verify,
    math_verify,
)
from diffvision.lab.mathematics.errors import KINDS, judge
from diffvision.lab.mathematics.sets import Question
from diffvision.opening import Model

QUESTION = "{question}"


@dataclass(frozen=True)
class Prompting:
    """How a question is asked.

    Attributes:
        template: what a model continues, with {question} in it. What stands before {question} stops an answer: there a
            model begins another question.
        examples: questions that come first, with their solutions after the template and a space.

    Raises:
        ValueError: the template has no {question}.
    """

    template: str = "Question: {question}\nAnswer:"
    examples: Sequence[Question] = ()

    def __post_init__(self) -> None:
        if QUESTION not in self.template:
            raise ValueError(f"the template {self.template!r} has no {QUESTION}: write it where the question belongs")

    def prompt(self, question: Question, left_out: int = 0) -> str:
        """Return what is asked.

        Args:
            question: the question.
            left_out: of the examples, the first ones.

        Raises:
            ValueError: the question is one of the examples.
        """
        if question.text in {example.text for example in self.examples}:
            raise ValueError(f"{question.id} is one of the examples, with its answer: give examples of another file")
        space = "" if self.template[-1].isspace() else " "
        shown = [f"{self._asked(example)}{space}{example.solution}\n\n" for example in self.examples[left_out:]]
        return "".join(shown) + self._asked(question)

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends an answer."""
        head = self.template.partition(QUESTION)[0].strip()
        return (head,) if head else ()

    def _asked(self, question: Question) -> str:
        return self.template.replace(QUESTION, question.text)


def mathematics(
    model: Model,
    questions: Sequence[Question],
    prompting: Prompting | None = None,
    *,
    new_tokens: int = 512,
    chat: str | None = None,
    folder: Path | None = None,
    settings: Any = None,
    batch_size: int = 8,
    progress: Progress = unseen,
) -> dict[str, PerSample | float]:
    """Return the accuracy of greedy answers, and what else there is to say of them.

    Args:
        model: with its tokenizer.
        questions: of one or several sets.
        prompting: how they are asked.
        new_tokens: the most of an answer.
        chat: as `chats.asking`.
        folder: for answers.jsonl, from which an evaluation that was ended resumes, and judged.jsonl.
        settings: as `generate_rows`.
        batch_size: questions at a time.
        progress: shows how far it is.

    Returns:
        For each SET (a key of `sets.LAYOUTS`): "SET/accuracy" by `answers.equal`; where math-verify is
        installed "SET/math_verify_accuracy", of answers that are equal or that it takes for right; "SET/without_answer"
        and "SET/cut", shares of texts in which no rule finds an answer, and that reached `new_tokens`;
        "SET/prompts_cut", of prompts without room for all examples; "SET/tokens" on average; "SET/found_by/RULE", of
        answers by each rule; "SET/accuracy_by_steps/K" where the set says the number of steps. Of `diffvision data
        make arithmetic` also shares of what went wrong (`errors.KINDS`), "SET/accuracy_by_distractors/D"
        and "SET/accuracy/K/D". Of several sets, "accuracy" (and "math_verify_accuracy")
        is the mean over sets.

    Raises:
        ValueError: no tokenizer; a question that is an example, or for which there is no room; more new tokens than
            the model reads; a file in the folder is of other questions or settings.
    """
    prompting = prompting or Prompting()
    written = generate_rows(
        model,
        _prompts(model, prompting, questions, new_tokens, chat),
        max_new_tokens=new_tokens,
        stops=(*prompting.stops, *ends_of(model, chat)),
        file=None if folder is None else folder / "answers.jsonl",
        settings=settings,
        batch_size=batch_size,
        progress=progress,
    )
    answers = [extract(one.output, question.answer) for one, question in zip(written, questions, strict=True)]
    right = [answer is not None and equal(q.answer, answer.text) for q, answer in zip(questions, answers, strict=True)]
    verdicts = {"accuracy": right}
    if has_math_verify():
        verdicts["math_verify_accuracy"] = [
            one or (answer is not None and math_verify(question.answer, answer.text))
            for one, question, answer in zip(right, questions, answers, strict=True)
        ]
    if folder is not None:
        _write(folder / "judged.jsonl", questions, answers, verdicts)
    return _metrics(questions, written, answers, verdicts)


def _prompts(
    model: Model, prompting: Prompting, questions: Sequence[Question], new_tokens: int, chat: str | None = None
) -> list[Prompt]:
    """Return the prompts in tokens, each with as many of the last examples as there is room for."""
    ask, room = asking(model, chat), room_for(model, new_tokens)
    prompts = []
    for question in questions:
        for left_out in range(len(prompting.examples) + 1):
            tokens = ask(prompting.prompt(question, left_out))
            if room is None or len(tokens) <= room:
                prompts.append(Prompt(question.id, tokens, left_out))
                break
        else:
            raise ValueError(
                f"{question.id} has a prompt of {len(tokens)} tokens, over the room of {room}: leave it out, or "
                "lower new_tokens"
            )
    return prompts


def _metrics(
    questions: Sequence[Question],
    written: Sequence[Generation],
    answers: Sequence[Extracted | None],
    verdicts: dict[str, list[bool]],
) -> dict[str, PerSample | float]:
    sets = list(dict.fromkeys(question.set for question in questions))
    results: dict[str, PerSample | float] = {}
    values: dict[str, list[Any]] = {
        **verdicts,
        "without_answer": [answer is None for answer in answers],
        "cut": [one.stopped_by == "length" for one in written],
        "prompts_cut": [one.cut > 0 for one in written],
        "tokens": [float(one.tokens) for one in written],
        **{f"found_by/{rule}": [answer is not None and answer.rule == rule for answer in answers] for rule in RULES},
    }
    for name in sets:
        rows = _rows(questions, name)
        results |= {f"{name}/{key}": _of(one, rows) for key, one in values.items()}
        right = verdicts["accuracy"]
        results |= _by(f"{name}/accuracy_by_steps", right, rows, lambda number: questions[number].steps)
        if name == "arithmetic":
            results |= _arithmetic(name, questions, written, right, rows)
    if len(sets) > 1:
        accuracies = {key: [_of(one, _rows(questions, name)).mean() for name in sets] for key, one in verdicts.items()}
        results |= {key: statistics.mean(each) for key, each in accuracies.items()}
    return results


def _rows(questions: Sequence[Question], name: str) -> list[int]:
    """Return the numbers of a set's questions."""
    return [number for number, question in enumerate(questions) if question.set == name]


def _arithmetic(
    name: str, questions: Sequence[Question], written: Sequence[Generation], right: list[bool], rows: Sequence[int]
) -> dict[str, PerSample | float]:
    """Return what went wrong in worded problems, and the accuracy by distractors."""
    kinds = {
        number: judge(questions[number].text, questions[number].solution, written[number].output).kind
        for number in rows
    }
    results: dict[str, PerSample | float] = {
        f"{name}/{kind}": PerSample(torch.tensor([kinds[number] == kind for number in rows]), torch.tensor(rows))
        for kind in KINDS
    }
    results |= _by(f"{name}/accuracy_by_distractors", right, rows, lambda number: questions[number].distractors)
    cells = {number: f"{questions[number].steps}/{questions[number].distractors}" for number in rows}
    return results | _by(f"{name}/accuracy", right, rows, lambda number: cells[number])


def _by(
    name: str, right: list[bool], rows: Sequence[int], group: Callable[[int], int | str | None]
) -> dict[str, PerSample | float]:
    """Return the accuracy of each group of rows; None is no group."""
    groups: dict[int | str, list[int]] = {}
    for number in rows:
        if (key := group(number)) is not None:
            groups.setdefault(key, []).append(number)
    return {
        f"{name}/{key}": _of(right, groups[key]) for key in sorted(groups, key=lambda key: (isinstance(key, str), key))
    }


def _of(values: Sequence[Any], rows: Sequence[int]) -> PerSample:
    return PerSample(torch.tensor([values[number] for number in rows]), torch.tensor(rows))


def _write(
    path: Path, questions: Sequence[Question], answers: Sequence[Extracted | None], verdicts: dict[str, list[bool]]
) -> None:
    """Write for each question the right answer, the one that was found and by which rule, and whether it is right."""
    rows = (
        {
            "id": question.id,
            "set": question.set,
            "gold": question.answer,
            "answer": answer.text if answer else None,
            "rule": answer.rule if answer else None,
            **{name: verdict[number] for name, verdict in verdicts.items()},
        }
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, map(json.dumps, rows))
