"""All language evaluations by name, of one model (`evaluate_language`), and what the command writes of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision import tables
from diffvision.analysis.figures import language as figures
from diffvision.analysis.figures import png
from diffvision.data.made.needle_text import FORMS, Form, sentences_of
from diffvision.data.shards.report import Limits
from diffvision.evaluation.cache import Cache, digest, files_digest, model_digest, tensor_digest
from diffvision.evaluation.intervals import PARTS, with_intervals
from diffvision.evaluation.language.associative_recall import associative_recall, frequent_bigrams
from diffvision.evaluation.language.attention_mass import attention_mass
from diffvision.evaluation.language.cache_pruning import evaluate_pruning
from diffvision.evaluation.language.documents import Reading, read_documents, read_texts, rows_of, tokenised
from diffvision.evaluation.language.faithfulness.judges import Judge
from diffvision.evaluation.language.faithfulness.options import JudgeOptions
from diffvision.evaluation.language.faithfulness.prompts import read_templates
from diffvision.evaluation.language.faithfulness.rows import Row
from diffvision.evaluation.language.faithfulness.task import faithfulness
from diffvision.evaluation.language.label_mapping import label_mapping_tasks
from diffvision.evaluation.language.lookback import lookback
from diffvision.evaluation.language.low_bit import SCHEMES, Settings, low_bit
from diffvision.evaluation.language.many_shot import Task, many_shot, order_robustness
from diffvision.evaluation.language.needle import needle
from diffvision.evaluation.language.options import LanguageOptions, needle_pair
from diffvision.evaluation.language.outliers import outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.position_nll import position_nll
from diffvision.evaluation.language.quantization import quantization
from diffvision.evaluation.language.recall_errors import recall_errors
from diffvision.evaluation.language.records import fingerprint
from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.output import bar, write_bytes, write_json
from diffvision.evaluation.samples import PerSample
from diffvision.opening import Model

PROBE = "Probe, 1 2 3: Ein großer Hund. 你好 🙂\n\tdef f(x):"  # distinguishes tokenizers
LENGTHS = (512, 1024, 2048, 4096)


@dataclass
class Work:
    """A model, and what it is evaluated on and how."""

    model: Model
    options: LanguageOptions = field(default_factory=LanguageOptions)
    documents: Sequence[Tensor] = ()  # int64 [N] each
    num_bytes: int | None = None  # of their text
    tasks: Sequence[Task] = ()  # of many-shot learning; none for the synthetic ones
    progress: Progress = unseen
    rows: Sequence[Row] = ()  # of faithfulness
    judges: Sequence[Judge] = ()
    folder: Path | None = None  # for what a task writes besides its numbers and picture

    @property
    def window(self) -> int:
        """Tokens that the model reads at a time.

        Raises:
            ValueError: options.window is over what it can read.
        """
        longest = self.model.max_length
        if self.options.window is None:
            return min(longest or 2048, 2048)
        if longest is not None and self.options.window > longest:
            raise ValueError(
                f"window is {self.options.window}, over the {longest} tokens that {self.model.name} reads: give less"
            )
        return self.options.window

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of contexts with needles; ValueError for one over what the model can read."""
        longest = self.model.max_length or max(LENGTHS)
        if self.options.lengths is None:
            return tuple(length for length in LENGTHS if length <= longest) or (longest,)
        if over := [length for length in self.options.lengths if length > longest]:
            raise ValueError(
                f"lengths has {over[0]}, over the {longest} tokens that {self.model.name} reads: give smaller ones"
            )
        return self.options.lengths

    @property
    def form(self) -> Form:
        """How needles are written, in the user's haystack if there is one."""
        form = FORMS[self.options.form]
        if self.options.haystack is None:
            return form
        return dataclasses.replace(
            form, haystack=sentences_of("\n".join(read_texts([self.options.haystack], _reading(self.options))))
        )


class LanguageEvaluation(NamedTuple):
    """One evaluation in the table `LANGUAGE_EVALUATIONS`."""

    function: Callable[[Work], Mapping[str, PerSample | float]]
    draw: Callable[[figures.Results], Any]  # a matplotlib Figure
    reads: str  # "documents" (text and a tokenizer), "rows" (of faithfulness), or "tokenizer"


def _perplexity(work: Work) -> dict[str, float]:
    return perplexity(
        work.model.module,
        work.documents,
        window=work.window,
        stride=work.options.stride,
        num_bytes=work.num_bytes,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _position_nll(work: Work) -> dict[str, float]:
    return position_nll(
        work.model.module,
        work.documents,
        length=work.window,
        points=work.options.points,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _associative_recall(work: Work) -> dict[str, float]:
    options = work.options
    frequent = None
    if options.frequent_text is not None:
        tokenizer: Any = work.model.tokenizer
        texts = read_documents([options.frequent_text], tokenizer, _reading(options))
        token_ids = (tokenizer.encode(text) if isinstance(text, str) else text for text in texts)
        frequent = frequent_bigrams(map(torch.tensor, token_ids), options.frequent_count)
    return associative_recall(
        work.model.module,
        work.documents,
        window=work.window,
        frequent=frequent,
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _needle(work: Work) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for pair in work.options.needles:
        needles, queries = needle_pair(pair)
        accuracy = needle(
            work.model.module,
            work.model.tokenizer,
            lengths=work.lengths,
            depths=work.options.depths,
            needles=needles,
            queries=queries,
            samples=work.options.samples,
            form=work.form,
            seed=work.options.seed,
            batch_size=work.options.batch_size,
            progress=work.progress,
        )
        metrics |= {f"{pair}/{metric}": value for metric, value in accuracy.items()}
    return metrics


def _recall_errors(work: Work) -> dict[str, PerSample]:
    return recall_errors(
        work.model,
        facts=work.options.facts,
        lengths=work.lengths,
        depths=work.options.depths,
        samples=work.options.samples,
        form=work.form,
        seed=work.options.seed,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _lookback(work: Work) -> dict[str, float]:
    return lookback(
        work.model,
        facts=work.options.facts,
        length=min(work.lengths),
        depths=work.options.depths,
        samples=work.options.samples,
        form=work.form,
        seed=work.options.seed,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _faithfulness(work: Work) -> dict[str, PerSample | float]:
    options = work.options
    return faithfulness(
        work.model,
        work.rows,
        work.judges,
        new_tokens=options.new_tokens,
        templates=None if options.prompts is None else read_templates(options.prompts),
        folder=None if work.folder is None else work.folder / "faithfulness" / work.model.name,
        settings=_model_identity(work.model),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _attention_mass(work: Work) -> dict[str, float]:
    needles, queries = needle_pair(work.options.needles[-1])
    return attention_mass(
        work.model.module,
        work.model.tokenizer,
        length=min(work.lengths),
        depths=work.options.depths,
        needles=needles,
        queries=queries,
        samples=work.options.samples,
        form=work.form,
        seed=work.options.seed,
        progress=work.progress,
    )


def _many_shot(work: Work) -> dict[str, float]:
    options, model = work.options, work.model
    tasks = work.tasks or synthetic_mappings(options)
    shared: dict[str, Any] = {
        "max_length": model.max_length,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "progress": work.progress,
    }
    metrics = many_shot(model.module, model.tokenizer, tasks, shots=options.shots, **shared)
    orders = order_robustness(
        model.module,
        model.tokenizer,
        tasks,
        shots=options.order_shots,
        permutations=options.permutations,
        **shared,
    )
    return metrics | {f"order/{metric}": value for metric, value in orders.items()}


def synthetic_mappings(options: LanguageOptions) -> list[Task]:
    """Return the synthetic tasks of many-shot learning; ValueError if there are too few words for the options."""
    return label_mapping_tasks(options.mappings, classes=options.classes, queries=options.queries, seed=options.seed)


def _outliers(work: Work) -> dict[str, float]:
    return outliers(work.model.module, rows_of(work.documents, work.window), progress=work.progress)


def _needle_accuracy(work: Work) -> dict[str, Callable[[Any], float]] | None:
    """Return what is taken of a model in few bits besides its loss."""
    if not work.options.quantised_needles:
        return None

    def accuracy(model: Any) -> float:
        options = dataclasses.replace(work.options, batch_size=1)  # unequal rows would share a scale with padding
        metrics = _needle(dataclasses.replace(work, options=options, progress=unseen))
        return _mean([value for key, value in metrics.items() if key.endswith("/accuracy")])

    return {"needle_accuracy": accuracy}


def _quantization(work: Work) -> dict[str, float]:
    return quantization(
        work.model.module,
        rows_of(work.documents, work.window),
        bits=work.options.bits,
        granularity=work.options.granularity,
        also=_needle_accuracy(work),
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _low_bit(work: Work) -> dict[str, float]:
    return low_bit(
        work.model.module,
        rows_of(work.documents, work.window),
        schemes=work.options.schemes or tuple(SCHEMES),
        settings=Settings(work.options.granularity, work.options.recent),
        also=_needle_accuracy(work),
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


LANGUAGE_EVALUATIONS = {
    "perplexity": LanguageEvaluation(_perplexity, figures.perplexity_bars, "documents"),
    "position_nll": LanguageEvaluation(_position_nll, figures.position_curves, "documents"),
    "associative_recall": LanguageEvaluation(_associative_recall, figures.recall_bars, "documents"),
    "needle": LanguageEvaluation(_needle, figures.needle_maps, "tokenizer"),
    "recall_errors": LanguageEvaluation(_recall_errors, figures.error_curves, "tokenizer"),
    "lookback": LanguageEvaluation(_lookback, figures.lookback_bars, "tokenizer"),
    "faithfulness": LanguageEvaluation(_faithfulness, figures.faithfulness_bars, "rows"),
    "attention_mass": LanguageEvaluation(_attention_mass, figures.attention_bars, "tokenizer"),
    "many_shot": LanguageEvaluation(_many_shot, figures.many_shot_panels, "tokenizer"),
    "outliers": LanguageEvaluation(_outliers, figures.outlier_bars, "documents"),
    "quantization": LanguageEvaluation(_quantization, figures.quantization_curves, "documents"),
    "cache_pruning": LanguageEvaluation(evaluate_pruning, figures.pruning_curves, "documents"),
    "low_bit": LanguageEvaluation(_low_bit, figures.low_bit_panels, "documents"),
}


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
        check([task], has_data=bool(work.rows if reads_rows(task) else work.documents))
    if work.model.tokenizer is None and any(LANGUAGE_EVALUATIONS[task].reads != "documents" for task in tasks):
        raise ValueError(f"{work.model.name} came without a tokenizer: give one, such as a tokenizer.json")
    return {
        f"{task}/{metric}": value
        for task in tasks
        for metric, value in LANGUAGE_EVALUATIONS[task].function(work).items()
    }


def check(tasks: Sequence[str], *, has_data: bool) -> None:
    """Raise a ValueError for an unknown task, one that needs data where there is none, or two that read other data."""
    for task in tasks:
        if task not in LANGUAGE_EVALUATIONS:
            raise ValueError(f"unknown task {task!r}: choose among {', '.join(LANGUAGE_EVALUATIONS)}")
        reads = LANGUAGE_EVALUATIONS[task].reads
        if reads == "documents" and not has_data:
            raise ValueError(f"{task} needs text: give data, files or folders of .txt or .jsonl, or shards")
        if reads == "rows" and not has_data:
            raise ValueError(f"{task} needs documents with questions: give data, files of JSON lines")
    by_kind = {LANGUAGE_EVALUATIONS[task].reads: task for task in tasks}
    if {"documents", "rows"} <= set(by_kind):
        raise ValueError(
            f"{by_kind['documents']} reads text and {by_kind['rows']} rows of documents and questions: evaluate them "
            "in two commands"
        )


def reads_rows(task: str) -> bool:
    """Return whether a task's data are rows of documents and questions."""
    return task in LANGUAGE_EVALUATIONS and LANGUAGE_EVALUATIONS[task].reads == "rows"


def cached(work: Work, task: str, cache: Cache | None, shared: dict[str, Any]) -> dict[str, PerSample | float]:
    """Return a task's metrics as `measured`, from the cache where it has them."""
    if cache is None:
        return measured(work, [task])
    identity = digest(task=task, **shared)
    if (piece := cache.load(identity, task)) is not None:
        print(f"{work.model.name}: {task} is read from {cache.directory}", file=sys.stderr)
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
        **_model_identity(model),
        "documents": tensor_digest(work.documents),
        "num_bytes": work.num_bytes,
        "tasks": repr(work.tasks),
        "options": dataclasses.asdict(options),
        "rows": fingerprint([dataclasses.asdict(row) for row in work.rows]),
        "judges": [judge.identity for judge in work.judges],
        "files": files_digest(*filter(None, (options.haystack, options.frequent_text, options.prompts))),
        "device": device,
    }


def _model_identity(model: Model) -> dict[str, Any]:
    """Return what outputs of a model depend on besides its input."""
    tokenizer = model.tokenizer
    return {
        "model": model_digest(model.module),
        "tokenizer": None if tokenizer is None else [tokenizer.vocab_size, tokenizer.encode(PROBE)],
        "max_length": model.max_length,
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
    reading = _reading(options)
    texts = read_documents(data, model.tokenizer, reading)
    documents, num_bytes = tokenised(texts, model.tokenizer, options.tokens)
    if reading.account.bad:
        print(f"of the data, {reading.account.summary()}", file=sys.stderr)
    return Work(model, options, documents, num_bytes, tasks, bar)


def _reading(options: LanguageOptions) -> Reading:
    return Reading(options.text_key, Limits(options.max_bad_fraction))


def _of_task(results: figures.Results, task: str) -> dict[str, dict[str, float]]:
    """Return the task's metrics of each model that has any."""
    prefix = f"{task}/"
    by_model = {
        name: {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
        for name, metrics in results.items()
    }
    return {name: metrics for name, metrics in by_model.items() if metrics}


def show(results: figures.Results) -> None:
    """Print the headline numbers (those without a position or length in their names), and the paired differences."""
    from rich.table import Column, Table

    table = Table(Column("metric", no_wrap=True), *results)
    keys = dict.fromkeys(itertools.chain.from_iterable(results.values()))
    derived = {f"{key}{end}" for key in keys for end in PARTS}
    headlines = [key for key in keys if not any(part.replace(".", "", 1).isdecimal() for part in key.split("/"))]
    for key in (key for key in headlines if key not in derived):
        table.add_row(key, *(_cell(metrics, key) for metrics in results.values()))
    paired = Table(Column("difference", no_wrap=True), "model", f"from {next(iter(results))}", "McNemar's p")
    for key, (name, metrics) in itertools.product(headlines, results.items()):
        if f"{key}_difference" in metrics:
            p = metrics.get(f"{key}_mcnemar_p")
            paired.add_row(key, name, _cell(metrics, f"{key}_difference"), "" if p is None else f"{p:.2g}")
    tables.show(table, *([paired] if paired.row_count else []), data=results)


def _cell(metrics: Mapping[str, float], key: str) -> str:
    """Return a number, and its interval where there is one."""
    if key not in metrics:
        return ""
    ends = [metrics[f"{key}{end}"] for end in ("_low", "_high") if f"{key}{end}" in metrics]
    if not ends:
        return f"{metrics[key]:.4g}"
    return f"{metrics[key]:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
