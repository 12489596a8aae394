"""The steps of a comparison: open the models, measure each, and collect the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffvision.analysis.curves import Curve, read_metrics
from diffvision.analysis.lambdas import layer_lambdas
from diffvision.comparison.costs import Cost, costs
from diffvision.comparison.entries import Entry, Group, group_seeds, read_entries
from diffvision.comparison.measuring import find_data, measure_images, measure_texts, shared_window
from diffvision.comparison.result import IN_NATS, ComparedModel, Comparison, Row
from diffvision.evaluation.intervals import FEWEST_SAMPLES, FEWEST_SEEDS, PAIRED_RULE, RESAMPLES, RULE, difference
from diffvision.evaluation.options import InferenceSettings, Options
from diffvision.evaluation.per_sample import Metrics, PerSample, means
from diffvision.models.threads import limit_threads
from diffvision.opening import Model, check_spec, open_model
from diffvision.opening.model import KINDS


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
    if first.is_language and tasks not in (None, ["perplexity"]):
        raise ValueError(
            f"tasks are {', '.join(tasks or ())}, and language models are compared by perplexity: "
            "`diffvision evaluate-language` has the others"
        )
    window = shared_window(opened.values(), entries)
    labels = {entry.model: group.label for group in groups for entry in group.entries}
    with limit_threads(first.device, *(model.module for model in opened.values())):
        if first.is_language:
            metrics, inputs = measure_texts(opened, labels, data, window, settings.batch_size)
        else:
            metrics, inputs = measure_images(opened, labels, data, tasks, settings, options)
        by_group = costs([opened[group.entries[0].model] for group in groups], settings, window, rounds)
    models = [_describe_model(group, opened, inputs, cost) for group, cost in zip(groups, by_group, strict=True)]
    rows = _compare_metrics({group.label: [metrics[entry.model] for entry in group.entries] for group in groups})
    unit = {"open_clip": "pairs", "timm": "images"}.get(first.library, "tokens")
    return Comparison(kind, models, rows, unit, _notes(rows, first, window, rounds, settings))


def _require_one_kind(groups: Sequence[Group], opened: Mapping[str, Model]) -> str:
    """Return what all models are; raise a ValueError where they are not of one kind."""
    kinds = {group.label: KINDS[opened[entry.model].library] for group in groups for entry in group.entries}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{label} is {kind}" for label, kind in kinds.items())
        raise ValueError(f"{named}: compare models of one kind")
    return next(iter(kinds.values()))


def _compare_metrics(measured: Mapping[str, Sequence[Metrics]]) -> list[Row]:
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
        samples = {
            label: [of_seed for seed in seeds if isinstance(of_seed := seed[metric], PerSample)]
            for label, seeds in measured.items()
        }
        largest = math.inf if metric.rpartition("/")[2] in IN_NATS else 1.0
        differences = {
            label: difference(values[first], values[label], samples[first], samples[label], largest=largest)
            for label in others
        }
        count = samples[first][0].size if samples[first] else None
        rows.append(Row(metric, count, values, differences))
    return rows


def _describe_model(
    group: Group, opened: Mapping[str, Model], inputs: Mapping[str, Mapping[str, Tensor]], cost: Cost
) -> ComparedModel:
    """Return all but the metrics of one model; V2's lambda is the mean over `inputs`, a batch for each file."""
    lambdas: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    which = []
    for entry in group.entries:
        model = opened[entry.model]
        which.append("new weights" if model.weights is None else entry.which + model.average_note)
        for name, value in layer_lambdas(model.module, inputs[entry.model]).items():
            lambdas.setdefault(name, []).append(value)
        for name, curve in _read_curves(entry).items():
            curves.setdefault(name, []).append(curve)
    return ComparedModel(group.label, [entry.model for entry in group.entries], which, cost, lambdas, curves)


def _read_curves(entry: Entry) -> dict[str, Curve]:
    """Return the curves of a run over its steps; {} without a run, or with a metrics file of another program."""
    try:
        return read_metrics(entry.run) if entry.run is not None else {}
    except (OSError, ValueError, TypeError, LookupError):
        return {}


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
