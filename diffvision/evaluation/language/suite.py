"""All language evaluations by name, of one model (`evaluate_language`), and what the command writes of them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffvision.analysis.figures import language as figures
from diffvision.analysis.figures import png
from diffvision.evaluation.cache import Cache, digest, files_digest, tensor_digest
from diffvision.evaluation.intervals import with_intervals
from diffvision.evaluation.language.documents import read_documents, tokenised
from diffvision.evaluation.language.options import LanguageOptions
from diffvision.evaluation.language.records import fingerprint
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS, Work, model_identity, reading_of
from diffvision.evaluation.output import bar, write_bytes, write_json
from diffvision.evaluation.samples import PerSample
from diffvision.lab.faithfulness.options import JudgeOptions
from diffvision.lab.language.chats import template_text
from diffvision.lab.language.many_shot import Task
from diffvision.lab.mathematics.answers import has_math_verify
from diffvision.opening import Model


def evaluate_language(work: Work, tasks: Sequence[str]) -> dict[str, float]:
    """Return the metrics of one model, such as {"perplexity/nll": 3.2, "needle/4x2/accuracy": 0.8, ...}.

    Args:
        work: the model and what it is evaluated on.
        tasks: names of `LANGUAGE_EVALUATIONS`.

    Raises:
        ValueError: an unknown task; documents or a tokenizer missing; what the evaluations raise.
    """
    return with_intervals(measured(work, tasks))


def measured(work: Work, tasks: Sequence[str]) -> dict[str, PerSample | float]:
    """Return the metrics as `evaluate_language`, those that are means over samples with their samples."""
    for task in tasks:
        check([task], has_data=bool({"rows": work.rows, "questions": work.questions}.get(reads(task), work.documents)))
    if work.model.tokenizer is None and any(LANGUAGE_EVALUATIONS[task].reads != "documents" for task in tasks):
        raise ValueError(f"{work.model.name} came without a tokenizer: give one, such as a tokenizer.json")
    return {
        f"{task}/{metric}": value
        for task in tasks
        for metric, value in LANGUAGE_EVALUATIONS[task].function(work).items()
    }


_DATA = {
    "documents": "text: give data, files or folders of .txt or .jsonl, or shards",
    "rows": "documents with questions: give data, files of rows such as .jsonl or .parquet",
    "questions": "questions with answers: give data, files of GSM8K, MATH or others",
}
"""What tasks read as data."""


def check(tasks: Sequence[str], *, has_data: bool) -> None:
    """Raise a ValueError for an unknown task, one that needs data where there is none, or two that read other data."""
    by_kind: dict[str, str] = {}
    for task in tasks:
        if task not in LANGUAGE_EVALUATIONS:
            raise ValueError(f"unknown task {task!r}: choose among {', '.join(LANGUAGE_EVALUATIONS)}")
        if (kind := reads(task)) in _DATA:
            by_kind[kind] = task
            if not has_data:
                raise ValueError(f"{task} needs {_DATA[kind]}")
    if len(by_kind) > 1:
        (one, task), (other, another), *_ = by_kind.items()
        wanted = [_DATA[kind].partition(":")[0] for kind in (one, other)]
        raise ValueError(f"{task} reads {wanted[0]} and {another} {wanted[1]}: evaluate them in two commands")


def reads(task: str) -> str:
    """Return what a task reads, as in the table; nothing for an unknown one."""
    return LANGUAGE_EVALUATIONS[task].reads if task in LANGUAGE_EVALUATIONS else ""


def cached(work: Work, task: str, cache: Cache | None, shared: dict[str, Any]) -> dict[str, PerSample | float]:
    """Return a task's metrics as `measured`, from the cache where it has them."""
    if cache is None:
        return measured(work, [task])
    identity = digest(task=task, **shared)
    if (piece := cache.load(identity, task)) is not None:
        texts = "; its texts are where it was evaluated" if reads(task) in ("rows", "questions") else ""
        print(f"{work.model.name}: {task} is read from {cache.directory}{texts}", file=sys.stderr)
        rows, note = piece
        return {
            name: PerSample(rows[f"values {name}"], rows[f"units {name}"]) if value is None else value
            for name, value in note.items()
        }
    results = measured(work, [task])
    samples = {name: result for name, result in results.items() if isinstance(result, PerSample)}
    rows = {f"values {name}": each.values for name, each in samples.items()}
    rows |= {f"units {name}": each.units for name, each in samples.items()}
    cache.save(identity, task, rows, {name: None if name in samples else value for name, value in results.items()})
    return results


def cache_inputs(work: Work, device: str) -> dict[str, Any]:
    """Return all that a task's metrics depend on, besides the task; its digest identifies cached metrics."""
    model, options = work.model, work.options
    return {
        **model_identity(model),
        "documents": tensor_digest(work.documents),
        "num_bytes": work.num_bytes,
        "tasks": repr(work.tasks),
        "options": dataclasses.asdict(options),
        "rows": fingerprint([dataclasses.asdict(row) for row in work.rows]),
        "judges": [judge.identity for judge in work.judges],
        "questions": fingerprint(work.questions),
        "math_verify": has_math_verify(),
        "chat": template_text(model, options.chat),
        "files": files_digest(
            *filter(None, (options.haystack, options.frequent_text, options.prompts, options.examples))
        ),
        "device": device,
    }


def write_numbers(
    task: str,
    results: figures.Results,
    options: LanguageOptions,
    output: str | Path,
    judge: JudgeOptions | None = None,
) -> None:
    """Write TASK.json: the task's metrics of the models evaluated so far, NaN and infinity as null, and settings."""
    plain = {
        name: {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        for name, metrics in _of_task(results, task).items()
    }
    content = {"task": task, "models": plain, "options": dataclasses.asdict(options)}
    if judge is not None:
        content["judge"] = dataclasses.asdict(judge)
    write_json(Path(output) / f"{task}.json", content)


def write_picture(task: str, results: figures.Results, output: str | Path) -> None:
    """Write TASK.png: a figure of the task's metrics of all models."""
    write_bytes(Path(output) / f"{task}.png", png(LANGUAGE_EVALUATIONS[task].draw(_of_task(results, task))))


def prepared(model: Model, options: LanguageOptions, data: list[str] | None, tasks: list[Task]) -> Work:
    """Return a model's work, with the documents that its tokenizer makes of the data."""
    if data is None:
        return Work(model, options, tasks=tasks, progress=bar)
    if model.tokenizer is None:
        raise ValueError(
            f"{model.name} came without a tokenizer, which the data needs: give one, such as a tokenizer.json"
        )
    reading = reading_of(options)
    texts = read_documents(data, model.tokenizer, reading)
    documents, num_bytes = tokenised(texts, model.tokenizer, options.tokens)
    if reading.account.bad:
        print(f"of the data, {reading.account.summary()}", file=sys.stderr)
    return Work(model, options, documents, num_bytes, tasks, bar)


def _of_task(results: figures.Results, task: str) -> dict[str, dict[str, float]]:
    """Return the task's metrics of each model that has any."""
    prefix = f"{task}/"
    by_model = {
        name: {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        for name, metrics in results.items()
    }
    return {name: metrics for name, metrics in by_model.items() if metrics}
