"""Run language evaluations on one model, and write their metrics."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from diffvision.data.shards.report import Limits
from diffvision.evaluation.language.language_options import LanguageOptions
from diffvision.evaluation.language.read_documents import Reading, read_documents, tokenise
from diffvision.evaluation.language.table import Results
from diffvision.evaluation.language.tasks import LANGUAGE_EVALUATIONS, Work
from diffvision.evaluation.output_files import bar, write_json
from diffvision.evaluation.per_sample import PerSample
from diffvision.opening import Model


def measure(work: Work, task: str) -> dict[str, PerSample | float]:
    """Return the metrics of one model on one task, such as {"perplexity/nll": 3.2, "perplexity/tokens": 4000.0}.

    Raises:
        ValueError: the tokenizer is missing; what the evaluation raises.
    """
    evaluation = LANGUAGE_EVALUATIONS[task]
    if work.model.tokenizer is None and evaluation.reads != "documents":
        raise ValueError(f"{work.model.name} came without a tokenizer: give one, such as a tokenizer.json")
    return {f"{task}/{metric}": value for metric, value in evaluation.function(work).items()}


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


def write_numbers(task: str, results: Results, options: LanguageOptions, output: str | Path) -> None:
    """Write TASK.json: the task's metrics of the models evaluated so far, NaN and infinity as null, and options."""
    prefix = f"{task}/"
    models: dict[str, dict[str, float | None]] = {}
    for name, metrics in results.items():
        of_task = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        if of_task:
            models[name] = {key: value if math.isfinite(value) else None for key, value in of_task.items()}
    write_json(Path(output) / f"{task}.json", {"task": task, "models": models, "options": dataclasses.asdict(options)})


def prepare(model: Model, options: LanguageOptions, data: list[str] | None) -> Work:
    """Return a model's work, with the documents that its tokenizer makes of the data."""
    if data is None:
        return Work(model, options, progress=bar)
    if model.tokenizer is None:
        raise ValueError(
            f"{model.name} came without a tokenizer, which the data needs: give one, such as a tokenizer.json"
        )
    reading = Reading(options.text_key, Limits(options.max_bad_fraction))
    texts = read_documents(data, model.tokenizer, reading)
    documents, num_bytes = tokenise(texts, model.tokenizer, options.tokens)
    if reading.account.bad:
        print(f"of the data, {reading.account.summary()}", file=sys.stderr)
    return Work(model, options, documents, num_bytes, progress=bar)
