"""The metrics of a question set's answers, by its task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diffvision.evaluation.per_sample import Metrics, fingerprint, means
from diffvision.evaluation.vision_language.chair import ObjectNames, chair
from diffvision.evaluation.vision_language.pope import PARSERS, pope
from diffvision.evaluation.vision_language.questions import QuestionSet, read_labels
from diffvision.evaluation.vision_language.vqa import vqa

Rows = Sequence[Mapping[str, Any]]


def _score_pope(rows: Rows, answers: Sequence[str], _: ObjectNames) -> Metrics:
    numbers: dict[str, int] = {}
    images = [numbers.setdefault(str(row["image"]), len(numbers)) for row in rows]
    return pope(answers, [read_labels(row)[0].lower() == "yes" for row in rows], images)


def _score_chair(rows: Rows, answers: Sequence[str], names: ObjectNames) -> Metrics:
    return chair(answers, [row["objects"] for row in rows], names)


def _score_vqa(rows: Rows, answers: Sequence[str], _: ObjectNames) -> Metrics:
    return vqa(answers, [read_labels(row) for row in rows], [str(row.get("kind", "")) for row in rows])


TASKS = {"pope": _score_pope, "chair": _score_chair, "vqa": _score_vqa}
"""Task -> the function that scores its answers."""
HEADLINES = ("accuracy", "f1", "chair_i", "chair_s", "exact_match")
"""Metrics that are also computed over held-out questions alone."""


def score(questions: QuestionSet, answers: Sequence[str], synonyms: str | None = None) -> Metrics:
    """Return the metrics of a set, named SET/METRIC; of questions that are `held_out` also SET/held_out/METRIC.

    Args:
        questions: the set.
        answers: to each question.
        synonyms: for CHAIR, a file of object names as its `synonyms.txt`; None for the set's `objects.txt`, or the
            objects of its rows.
    """
    task, rows, objects = TASKS[questions.task], questions.rows, questions.path.with_name("objects.txt")
    if synonyms is not None or objects.is_file():
        names = ObjectNames.read(synonyms or objects)
    else:
        names = ObjectNames(dict.fromkeys(name for row in rows for name in row.get("objects", [])))
    results = task(rows, answers, names)
    held_out = [number for number, row in enumerate(rows) if row.get("held_out")]
    if 0 < len(held_out) < len(rows):
        of_these = task([rows[number] for number in held_out], [answers[number] for number in held_out], names)
        results |= {f"held_out/{name}": of_these[name] for name in HEADLINES if name in of_these}
    return {f"{questions.name}/{name}": value for name, value in results.items()}


def average_sets(sets: Sequence[QuestionSet], results: Metrics) -> dict[str, float]:
    """Return the means of accuracy and F1 over several sets of POPE; LLaVA-1.5's POPE is the one of `llava/f1`."""
    names = [one.name for one in sets if one.task == "pope"]
    keys = [f"{parser}{metric}" for parser in PARSERS for metric in ("accuracy", "f1") if len(names) > 1]
    found = means(results)
    return {f"pope/{key}": statistics.mean(found[f"{name}/{key}"] for name in names) for key in keys}


def find_redundant_metrics(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the metrics without a row: those of other parsers that equal ours for every model, and question counts."""
    keys = [*next(iter(results.values()))]
    pairs = [
        (key, key.replace(f"/{parser}", "/")) for key in keys for parser in PARSERS if f"/{parser}" in key and parser
    ]
    repeated = [key for key, ours in pairs if all(str(one.get(key)) == str(one.get(ours)) for one in results.values())]
    return repeated + [key for key in keys if key.endswith("/questions")]


def describe_set(questions: QuestionSet) -> dict[str, str]:
    """Return what identifies a set: its name, task, size and a digest of its rows."""
    size, digest = f"{len(questions.rows):,} questions", fingerprint([*map(dict, questions.rows)])
    return {"set": questions.name, "task": questions.task, "questions": size, "digest": digest}
