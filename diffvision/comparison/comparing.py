"""The steps of a comparison: open the models, measure each, and collect the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from diffvision.analysis.curves import Curve, over_seconds, read_metrics
from diffvision.analysis.lambdas import layer_lambdas
from diffvision.analysis.sinks import count_sinks
from diffvision.comparison.costs import Cost, costs
from diffvision.comparison.entries import Entry, Group, group_seeds, read_entries
from diffvision.comparison.measuring import (
    find_data,
    first_inputs,
    image_plan,
    measure_images,
    measure_text,
    read_text,
    shared_window,
)
from diffvision.comparison.result import IN_NATS, Comparison, Contestant, Row
from diffvision.evaluation.intervals import FEWEST_SAMPLES, FEWEST_SEEDS, PAIRED_RULE, RESAMPLES, RULE, difference
from diffvision.evaluation.options import InferenceSettings, Options
from diffvision.evaluation.per_sample import Metrics, PerSample, means
from diffvision.models.threads import limit_threads
from diffvision.opening import Model, check_spec, open_model
from diffvision.opening.model import KINDS
from diffvision.opening.run_folders import setting

_SINK_SAMPLES = 8


def compare_models(
    specs: Sequence[str],
    data: Sequence[str] | None,
    tasks: Sequence[str] | None,
    settings: InferenceSettings,
    options: Options,
    rounds: int,
) -> Comparison:
    """Compare models; the arguments are those of `compare`, with the device resolved.

    Raises:
        ValueError, FileNotFoundError: fewer than two models, models of several kinds or of one label, no data; what
            opening and the evaluations raise.
    """
    entries = read_entries(specs)
    groups = group_seeds(entries)
    data = find_data(entries) if data is None else data
    for entry in entries:
        check_spec(entry.model)  # before the first is opened
    opened = {entry.model: open_model(entry.model, device=settings.device or "cpu") for entry in entries}
    kind = _require_one_kind(groups, opened)
    first = opened[entries[0].model]
    window = shared_window(list(opened.values()), entries)
    measure_one: Callable[[str, str], Metrics]  # of a model, with its label
    if first.is_language:
        if tasks not in (None, ["perplexity"]):
            raise ValueError(f"tasks are {', '.join(tasks or ())}, and language models are compared by perplexity: "
                             "`diffvision evaluate-language` has the others")  # fmt: skip
        documents = {name: read_text(model.for_text(), data) for name, model in opened.items()}
        reading: Any = {"same_tokens": len({text.digest for text in documents.values()}) == 1}
        reading["batch_size"] = min(settings.batch_size, 8)
        inputs = {
            name: {"tokens": texts.tokens[0][None, :window].to(first.device)} for name, texts in documents.items()
        }

        def measure_one(model: str, label: str) -> Metrics:
            return measure_text(opened[model], label, documents[model], window, **reading)

    else:
        planned = image_plan(data, tasks, first.library, options)
        inputs = {name: first_inputs(model, planned, options) for name, model in opened.items()}

        def measure_one(model: str, label: str) -> Metrics:
            return measure_images(opened[model], label, planned, settings, options)

    with limit_threads(first.device, *(model.module for model in opened.values())):
        measured = {group.label: [measure_one(entry.model, group.label) for entry in group.entries] for group in groups}
        by_model = costs([opened[group.entries[0].model] for group in groups], settings, window, rounds)
    contestants = [_contestant(group, opened, inputs, cost) for group, cost in zip(groups, by_model, strict=True)]
    metrics = _rows(measured)
    unit = {"open_clip": "pairs", "timm": "images"}.get(first.library, "tokens")
    return Comparison(kind, contestants, metrics, unit, _notes(metrics, first, window, rounds, settings))


def _require_one_kind(groups: Sequence[Group], opened: Mapping[str, Model]) -> str:
    """Return what all models are; raise a ValueError where they are not of one kind."""
    kinds = {group.label: KINDS[opened[entry.model].library] for group in groups for entry in group.entries}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{label} is {kind}" for label, kind in kinds.items())
        raise ValueError(f"{named}: compare models of one kind")
    return next(iter(kinds.values()))


def _rows(measured: Mapping[str, Sequence[Metrics]]) -> list[Row]:
    """Return the metrics that all models have, with the differences from the first model.

    Args:
        measured: by label, the metrics of each seed.
    """
    first, *others = measured
    rows = []
    for metric in measured[first][0]:
        if not all(metric in seed for seeds in measured.values() for seed in seeds):
            continue
        values = {label: [means(seed)[metric] for seed in seeds] for label, seeds in measured.items()}
        runs = {
            label: [one for seed in seeds if isinstance(one := seed[metric], PerSample)]
            for label, seeds in measured.items()
        }
        samples = {label: of_model[0] if of_model else None for label, of_model in runs.items()}
        largest = math.inf if metric.rpartition("/")[2] in IN_NATS else 1.0
        differences = {
            label: difference(
                values[first],
                values[label],
                (samples[first], samples[label]),
                runs=(runs[first], runs[label]),
                largest=largest,
            )
            for label in others
        }
        counted = samples[first]
        rows.append(Row(metric, None if counted is None else counted.size, values, differences))
    return rows


# ---- models --------------------------------------------------------------------------------------------------------


def _contestant(
    group: Group, opened: Mapping[str, Model], inputs: Mapping[str, Mapping[str, Tensor]], cost: Cost
) -> Contestant:
    """Return one model's part of the comparison; V2's lambda and sinks are means over `inputs`, a batch a file."""
    lambdas: dict[str, list[float]] = {}
    for entry in group.entries:
        for name, value in layer_lambdas(opened[entry.model].module, inputs[entry.model]).items():
            lambdas.setdefault(name, []).append(value)
    sinks: dict[str, list[float]] = {}
    for entry in group.entries:
        # A caption is padded: sinks are counted in images, or in the text of a language model.
        batch = {name: rows[:_SINK_SAMPLES] for name, rows in inputs[entry.model].items() if name != "text"}
        with suppress(ValueError):  # a model whose attention cannot be captured
            for kind, share in count_sinks(opened[entry.model].module, batch).items():
                sinks.setdefault(kind, []).append(share)
    curves, timed = _curves(group.entries)
    specs = [entry.model for entry in group.entries]
    which = [
        "new weights" if opened[entry.model].weights is None else entry.which + opened[entry.model].average_note
        for entry in group.entries
    ]
    return Contestant(group.label, specs, which, cost, lambdas, sinks, curves, timed)


def _curves(entries: Sequence[Entry]) -> tuple[dict[str, list[Curve]], dict[str, list[Curve]]]:
    """Return the curves of the runs over steps, and over seconds."""
    over_steps: dict[str, list[Curve]] = {}
    over_time: dict[str, list[Curve]] = {}
    for entry in entries:
        try:
            curves = read_metrics(entry.run) if entry.run is not None else {}
        except (OSError, ValueError, TypeError, LookupError):  # no metrics file, or one of another program
            continue
        size = setting(entry.config, "data.init_args.batch_size")
        batches = setting(entry.config, "trainer.accumulate_grad_batches") or 1
        timed = over_seconds(curves, size * batches) if isinstance(size, int) else {}
        for kept, of_run in ((over_steps, curves), (over_time, timed)):
            for name, curve in of_run.items():
                kept.setdefault(name, []).append(curve)
    return over_steps, over_time


def _notes(rows: Sequence[Row], first: Model, window: int, rounds: int, settings: InferenceSettings) -> list[str]:
    """Return the notes below the tables: how intervals, FLOPs and speed were computed."""
    methods = {one.method for row in rows for one in row.differences.values()}
    notes = []
    if "paired" in methods:
        notes.append(
            f"Paired: both models saw the same samples. 95% CIs from {RESAMPLES:,} bootstrap resamples of images or "
            f"documents. {PAIRED_RULE} One run of each says nothing about other seeds."
        )
    if any(len(values) > 1 for row in rows for values in row.values.values()):
        notes.append(
            "Across seeds: mean ± standard deviation. Intervals are Welch's 95% CIs of the difference of two means"
            + ", or the bootstrap's over seeds and samples where that is wider" * ("seeds and samples" in methods)
            + f". {RULE}"
        )
    if any(method.startswith(("too few", "no spread")) for method in methods):
        notes.append(
            f"No verdict with fewer than {FEWEST_SAMPLES} independent samples (images or documents) or {FEWEST_SEEDS} "
            "seeds, or without any spread: the interval would be too narrow."
        )
    what = f"a row of {window} tokens" if first.is_language else "an image"
    what += " and a caption" if first.tokenizer is not None and not first.is_language else ""
    notes.append(
        f"FLOPs: a forward pass of {what}; matmuls and convolutions, 2 FLOPs per multiply-accumulate, attention by its "
        "formula."
    )
    if rounds:
        on_gpu, threads = first.device.type == "cuda", torch.get_num_threads()
        machine = torch.cuda.get_device_name() if on_gpu else f"a CPU, {threads} thread{'s' * (threads > 1)}"
        notes.append(
            f"Speed: forward passes on {machine}, {settings.precision}, models interleaved, {rounds} "
            f"round{'s' * (rounds > 1)}; the ratio is the median over the rounds."
        )
    return notes
