"""All language evaluations by name, of one model (`evaluate_language`), and what the command writes of them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffvision.analysis.figures import language_results as figures
from diffvision.analysis.figures import png
from diffvision.evaluation.cache import Cache, digest, files_digest, tensor_digest
from diffvision.evaluation.intervals import with_intervals
from diffvision.evaluation.language.language_options import LanguageOptions
from diffvision.evaluation.language.read_documents import read_documents, tokenised
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS, Work, model_identity, reading_of
from diffvision.evaluation.output_files import bar, write_bytes, write_json
from diffvision.evaluation.per_sample import PerSample
from diffvision.opening import Model
from diffvision.tables import plain


def evaluate_language(work: Work, tasks: Sequence[str]) -> dict[str, float]:
    """Return the metrics of one model, such as {"perplexity/nll": 3.2, "needle/4x2/accuracy": 0.8, ...}.

    Args:
        work: the model and what it is evaluated on.
        tasks: names of `LANGUAGE_EVALUATIONS`.

    Raises:
        ValueError: an unknown task; documents or a tokenizer missing; what the evaluations raise.
    """
    return with_intervals(measure(work, tasks))


def measure(work: Work, tasks: Sequence[str]) -> dict[str, PerSample | float]:
    """Return the metrics as `evaluate_language`, those that are means over samples with their samples."""
    for task in tasks:
        check([task], has_data=True)
        given = work.documents if LANGUAGE_EVALUATIONS[task].reads == "documents" else work.inputs.get(task)
        check([task], has_data=bool(given))
    if work.model.tokenizer is None and any(LANGUAGE_EVALUATIONS[task].reads != "documents" for task in tasks):
        raise ValueError(f"{work.model.name} came without a tokenizer: give one, such as a tokenizer.json")
    return {
        f"{task}/{metric}": value
        for task in tasks
        for metric, value in LANGUAGE_EVALUATIONS[task].function(work).items()
    }


def check(tasks: Sequence[str], *, has_data: bool) -> None:
    """Raise a ValueError for an unknown task, one that needs data where there is none, or two that read other data."""
    by_kind: dict[str, str] = {}
    for task in tasks:
        if task not in LANGUAGE_EVALUATIONS:
            raise ValueError(f"unknown task {task!r}: choose among {', '.join(LANGUAGE_EVALUATIONS)}")
        evaluation = LANGUAGE_EVALUATIONS[task]
        if evaluation.reads != "tokenizer":
            by_kind[evaluation.reads] = task
            if not has_data:
                raise ValueError(f"{task} needs {evaluation.data}")
    if len(by_kind) > 1:
        one, other, *_ = by_kind.values()
        wanted = [LANGUAGE_EVALUATIONS[task].data.partition(":")[0] for task in (one, other)]
        raise ValueError(f"{one} reads {wanted[0]} and {other} {wanted[1]}: evaluate them in two commands")


def cached(work: Work, task: str, cache: Cache | None, device: str) -> dict[str, PerSample | float]:
    """Return a task's metrics as `measure`, from the cache where it has them."""
    if cache is None:
        return measure(work, [task])
    identity = digest(task=task, **cache_inputs(work, task, device))
    if (piece := cache.load(identity, task)) is not None:
        has_texts = LANGUAGE_EVALUATIONS[task].reads not in ("documents", "tokenizer")
        texts = "; its texts are where it was evaluated" if has_texts else ""
        print(f"{work.model.name}: {task} is read from {cache.directory}{texts}", file=sys.stderr)
        rows, note = piece
        return {
            name: PerSample(rows[f"values {name}"], rows[f"units {name}"]) if value is None else value
            for name, value in note.items()
        }
    results = measure(work, [task])
    samples = {name: result for name, result in results.items() if isinstance(result, PerSample)}
    rows = {f"values {name}": each.values for name, each in samples.items()}
    rows |= {f"units {name}": each.units for name, each in samples.items()}
    cache.save(identity, task, rows, {name: None if name in samples else value for name, value in results.items()})
    return results


def cache_inputs(work: Work, task: str, device: str) -> dict[str, Any]:
    """Return all that a task's metrics depend on; its digest identifies cached metrics."""
    identity = LANGUAGE_EVALUATIONS[task].identity
    return {
        **model_identity(work.model),
        "documents": tensor_digest(work.documents),
        "num_bytes": work.num_bytes,
        "options": dataclasses.asdict(work.options),
        "files": files_digest(*filter(None, [work.options.haystack])),
        "inputs": None if identity is None else identity(work),
        "device": device,
    }


def write_numbers(
    task: str,
    results: figures.Results,
    options: LanguageOptions,
    output: str | Path,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write TASK.json: the task's metrics of the models evaluated so far, NaN and infinity as null, and settings."""
    metrics = {
        name: {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        for name, metrics in _of_task(results, task).items()
    }
    content = {"task": task, "models": metrics, "options": dataclasses.asdict(options)}
    for name in LANGUAGE_EVALUATIONS[task].recorded:
        content[name] = plain((settings or {})[name])
    write_json(Path(output) / f"{task}.json", content)


def write_picture(task: str, results: figures.Results, output: str | Path) -> None:
    """Write TASK.png: a figure of the task's metrics of all models."""
    write_bytes(Path(output) / f"{task}.png", png(LANGUAGE_EVALUATIONS[task].draw(_of_task(results, task))))


def prepare(model: Model, options: LanguageOptions, data: list[str] | None) -> Work:
    """Return a model's work, with the documents that its tokenizer makes of the data."""
    if data is None:
        return Work(model, options, progress=bar)
    if model.tokenizer is None:
        raise ValueError(
            f"{model.name} came without a tokenizer, which the data needs: give one, such as a tokenizer.json"
        )
    reading = reading_of(options)
    texts = read_documents(data, model.tokenizer, reading)
    documents, num_bytes = tokenised(texts, model.tokenizer, options.tokens)
    if reading.account.bad:
        print(f"of the data, {reading.account.summary()}", file=sys.stderr)
    return Work(model, options, documents, num_bytes, progress=bar)


def _of_task(results: figures.Results, task: str) -> dict[str, dict[str, float]]:
    """Return the task's metrics of each model that has any."""
    prefix = f"{task}/"
    by_model = {
        name: {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        for name, metrics in results.items()
    }
    return {name: metrics for name, metrics in by_model.items() if metrics}
