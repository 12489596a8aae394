"""The lab's language evaluations: how each is called with the options of the command."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffvision.evaluation.cache import files_digest
from diffvision.evaluation.language.documents import read_documents, rows_of
from diffvision.evaluation.language.needle import needle_samples
from diffvision.evaluation.language.options import needle_pair
from diffvision.evaluation.language.scoring import unseen
from diffvision.evaluation.language.tasks import LanguageEvaluation, Request, Work, model_identity, needles, reading_of
from diffvision.evaluation.records import fingerprint
from diffvision.evaluation.samples import PerSample
from diffvision.lab.faithfulness import judges
from diffvision.lab.faithfulness.options import JudgeOptions
from diffvision.lab.faithfulness.prompts import read_templates
from diffvision.lab.faithfulness.rows import Row, read_rows
from diffvision.lab.faithfulness.task import faithfulness
from diffvision.lab.language import figures
from diffvision.lab.language.associative_recall import associative_recall, frequent_bigrams
from diffvision.lab.language.attention_mass import attention_mass
from diffvision.lab.language.cache_pruning import asked_twice, cache_pruning
from diffvision.lab.language.chats import template_text
from diffvision.lab.language.label_mapping import label_mapping_tasks
from diffvision.lab.language.lookback import lookback
from diffvision.lab.language.low_bit import SCHEMES, Settings, low_bit
from diffvision.lab.language.many_shot import Task, many_shot, order_robustness, read_task
from diffvision.lab.language.options import LabOptions, lab_options
from diffvision.lab.language.outliers import outliers
from diffvision.lab.language.quantization import quantization
from diffvision.lab.language.recall_errors import recall_errors
from diffvision.lab.mathematics.answers import has_math_verify
from diffvision.lab.mathematics.sets import Question, read_questions
from diffvision.lab.mathematics.task import Prompting, mathematics


def _associative_recall(work: Work) -> dict[str, float]:
    options = lab_options(work.options)
    frequent = None
    if options.frequent_text is not None:
        tokenizer: Any = work.model.tokenizer
        texts = read_documents([options.frequent_text], tokenizer, reading_of(options))
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


def _recall_errors(work: Work) -> dict[str, PerSample]:
    options = lab_options(work.options)
    return recall_errors(
        work.model, facts=options.facts, lengths=work.lengths, batch_size=options.batch_size, **work.contexts
    )


def _lookback(work: Work) -> dict[str, float]:
    options = lab_options(work.options)
    return lookback(
        work.model, facts=options.facts, length=min(work.lengths), batch_size=options.batch_size, **work.contexts
    )


def _prepare_rows(request: Request) -> tuple[list[Row], Sequence[judges.Judge]]:
    """Return the rows of the data, and those who judge outputs about them."""
    options = lab_options(request.options)
    rows = read_rows(request.data or [], count=options.rows, seed=options.seed)
    if options.prompts is not None:
        read_templates(options.prompts, rows)
    replies = None if request.cache is None else request.cache / "replies"
    return rows, judges.open_judges(request.settings.get("judge", JudgeOptions()), rows, request.device, replies)


def _faithfulness(work: Work) -> dict[str, PerSample | float]:
    options = lab_options(work.options)
    rows, opened = work.inputs["faithfulness"]
    return faithfulness(
        work.model,
        rows,
        opened,
        new_tokens=options.new_tokens,
        templates=None if options.prompts is None else read_templates(options.prompts, rows),
        chat=options.chat,
        folder=_folder(work, "faithfulness"),
        settings=model_identity(work.model),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _faithfulness_identity(work: Work) -> dict[str, Any]:
    options = lab_options(work.options)
    rows, opened = work.inputs["faithfulness"]
    return {
        "rows": fingerprint([dataclasses.asdict(row) for row in rows]),
        "judges": [judge.identity for judge in opened],
        "chat": template_text(work.model, options.chat),
        "files": files_digest(*filter(None, [options.prompts])),
    }


def _prepare_questions(request: Request) -> tuple[list[Question], Prompting]:
    """Return the questions of the data, and how they are asked."""
    options = lab_options(request.options)
    examples = () if options.examples is None else read_questions([options.examples])[: options.shown]
    questions = read_questions(request.data or [], count=options.rows, seed=options.seed)
    return questions, Prompting(options.template, examples)


def _math(work: Work) -> dict[str, PerSample | float]:
    options = lab_options(work.options)
    questions, prompting = work.inputs["math"]
    return mathematics(
        work.model,
        questions,
        prompting,
        new_tokens=options.new_tokens,
        chat=options.chat,
        folder=_folder(work, "math"),
        settings=model_identity(work.model),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _math_identity(work: Work) -> dict[str, Any]:
    options = lab_options(work.options)
    questions, prompting = work.inputs["math"]
    return {
        "questions": fingerprint([questions, prompting.examples]),
        "math_verify": has_math_verify(),
        "chat": template_text(work.model, options.chat),
    }


def _folder(work: Work, task: str) -> Path | None:
    return None if work.folder is None else work.folder / task / work.model.name


def _attention_mass(work: Work) -> dict[str, float]:
    count, queries = needle_pair(work.options.needles[-1])
    return attention_mass(
        work.model.module,
        work.model.tokenizer,
        length=min(work.lengths),
        needles=count,
        queries=queries,
        **work.contexts,
    )


def _prepare_many_shot(request: Request) -> list[Task]:
    """Return the task of the user's files, or the synthetic ones.

    Raises:
        ValueError: there are too few words for the options.
    """
    options, files = lab_options(request.options), request.settings
    if files.get("demonstrations") is not None:
        return [read_task(files["demonstrations"], files["queries"])]
    return _synthetic_mappings(options)


def _synthetic_mappings(options: LabOptions) -> list[Task]:
    return label_mapping_tasks(options.mappings, classes=options.classes, queries=options.queries, seed=options.seed)


def _many_shot(work: Work) -> dict[str, float]:
    """Return accuracies by number of demonstrations, and how they vary with the demonstrations' order."""
    options, model = lab_options(work.options), work.model
    tasks = work.inputs.get("many_shot") or _synthetic_mappings(options)
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


def _outliers(work: Work) -> dict[str, float]:
    return outliers(work.model.module, rows_of(work.documents, work.window), progress=work.progress)


def _needle_accuracy(work: Work) -> dict[str, Callable[[Any], float]] | None:
    """Return what is measured of a model in few bits besides its loss."""
    if not lab_options(work.options).quantised_needles:
        return None

    def accuracy(model: Any) -> float:
        options = dataclasses.replace(work.options, batch_size=1)  # unequal rows would share a scale with padding
        metrics = needles(dataclasses.replace(work, options=options, progress=unseen))
        return statistics.fmean([value for key, value in metrics.items() if key.endswith("/accuracy")])

    return {"needle_accuracy": accuracy}


def _quantization(work: Work) -> dict[str, float]:
    options = lab_options(work.options)
    return quantization(
        work.model.module,
        rows_of(work.documents, work.window),
        bits=options.bits,
        granularity=options.granularity,
        also=_needle_accuracy(work),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _low_bit(work: Work) -> dict[str, PerSample | float]:
    options = lab_options(work.options)
    return low_bit(
        work.model.module,
        rows_of(work.documents, work.window),
        schemes=options.schemes or tuple(SCHEMES),
        settings=Settings(options.granularity, options.recent),
        also=_needle_accuracy(work),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _cache_pruning(work: Work) -> dict[str, PerSample | float]:
    options, longest = lab_options(work.options), work.model.max_length
    # By default there is room for a question that is asked twice.
    lengths = work.lengths if options.lengths else [length * 7 // 8 for length in work.lengths]
    cells = itertools.product(map(needle_pair, options.needles), lengths, options.depths)
    samples = [
        sample
        for (count, queries), length, depth in cells
        for sample in needle_samples(
            work.model.tokenizer,
            length=length,
            depth=depth,
            needles=count,
            queries=queries,
            samples=options.samples,
            form=work.form,
            seed=options.seed,
        )
    ]
    needed = max(len(asked_twice(sample).tokens) for sample in samples)
    if longest is not None and needed > longest:
        raise ValueError(
            f"lengths has {max(lengths)}, and a question that is asked twice makes it {needed}, over the {longest} "
            f"tokens that {work.model.name} reads: give smaller ones"
        )
    return cache_pruning(
        work.model.module,
        rows_of(work.documents, work.window + 1),
        samples,
        continuation=options.continuation,
        methods=options.pruning_methods,
        ratios=options.pruning_ratios,
        window=options.pruning_window,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=work.progress,
    )


ASSOCIATIVE_RECALL = LanguageEvaluation(
    _associative_recall,
    figures.recall_bars,
    "documents",
    identity=lambda work: {"files": files_digest(*filter(None, [lab_options(work.options).frequent_text]))},
)
RECALL_ERRORS = LanguageEvaluation(_recall_errors, figures.error_curves, "tokenizer")
LOOKBACK = LanguageEvaluation(_lookback, figures.lookback_bars, "tokenizer")
FAITHFULNESS = LanguageEvaluation(
    _faithfulness,
    figures.faithfulness_bars,
    "rows",
    "documents with questions: give data, files of rows such as .jsonl or .parquet",
    _prepare_rows,
    _faithfulness_identity,
    ("judge",),
)
MATH = LanguageEvaluation(
    _math,
    figures.math_panels,
    "questions",
    "questions with answers: give data, files of GSM8K, MATH or others",
    _prepare_questions,
    _math_identity,
)
ATTENTION_MASS = LanguageEvaluation(_attention_mass, figures.attention_bars, "tokenizer")
MANY_SHOT = LanguageEvaluation(
    _many_shot,
    figures.many_shot_panels,
    "tokenizer",
    prepare=_prepare_many_shot,
    identity=lambda work: {"tasks": repr(work.inputs["many_shot"])},
)
OUTLIERS = LanguageEvaluation(_outliers, figures.outlier_bars, "documents")
QUANTIZATION = LanguageEvaluation(_quantization, figures.quantization_curves, "documents")
LOW_BIT = LanguageEvaluation(_low_bit, figures.low_bit_panels, "documents")
CACHE_PRUNING = LanguageEvaluation(_cache_pruning, figures.pruning_curves, "documents")
