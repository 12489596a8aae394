"""The evaluations of a comparison: data from the arguments or the runs, and each model's metrics sample by sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.comparison.entries import Entry
from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.evaluation.language.language_options import LanguageOptions
from diffvision.evaluation.language.language_suite import prepare
from diffvision.evaluation.language.perplexity import perplexity, perplexity_samples
from diffvision.evaluation.options import InferenceSettings, Options
from diffvision.evaluation.output_files import bar
from diffvision.evaluation.per_sample import Metrics, means
from diffvision.evaluation.prompts import check_prompts, prompts_of
from diffvision.evaluation.suite import measure, plan_data
from diffvision.opening import Model
from diffvision.opening.run_folders import setting

Models = Mapping[str, Model]
"""The opened models, by what opened them."""
Measured = tuple[dict[str, Metrics], dict[str, dict[str, Tensor]]]
"""By model: its metrics, and a batch of the data, over which lambda is averaged."""
WINDOW = 2048  # tokens that a language model reads at a time, at most
_SETTINGS = ("cost", "fewshot_k", "acc_ci95")  # that probes report among their metrics
_MOST_INPUTS = 16  # images, and captions or prompts, in the batch of a model
_MOST_WINDOWS = 8  # of tokens in a batch


def find_data(entries: Sequence[Entry]) -> list[str]:
    """Return the evaluation data that the runs' configurations name, each once.

    Raises:
        ValueError: they name none, or some that does not exist.
    """
    named: dict[str, None] = {}
    for entry in entries:
        for name in ("evaluations", "evaluation"):
            given = setting(entry.config, f"data.init_args.{name}") or []
            named |= {path: None for path in ([given] if isinstance(given, str) else given) if isinstance(path, str)}
    if not named:
        raise ValueError("no data to compare on: the models' runs name no evaluation data; give --data FOLDERS")
    for path in named:
        if not Path(path).exists() and "=" not in path and ":" not in path:
            raise ValueError(f"the runs were evaluated on {path}, which is not here: give --data FOLDERS")
    return list(named)


# ---- images --------------------------------------------------------------------------------------------------------


def image_plan(
    data: Sequence[str], tasks: Sequence[str] | None, library: str, options: Options
) -> list[tuple[EvaluationFolder, list[str]]]:
    """Return which evaluations run on which folders, checked before any of them starts.

    Args:
        data: evaluation folders, or folders that hold some.
        tasks: names of evaluations; None for those that fit the models.
        library: of the models: timm's are for `classification`.
        options: as `suite.plan`.
    """
    if tasks is None and library == "timm":
        tasks = ["classification"]
    planned = plan_data(data, tasks, options)
    check_prompts(planned, options)
    return planned


def measure_images(
    models: Models,
    labels: Mapping[str, str],
    data: Sequence[str],
    tasks: Sequence[str] | None,
    settings: InferenceSettings,
    options: Options,
) -> Measured:
    """Return the finite metrics of each model; its features of each folder are computed once.

    `labels` of the models are for progress bars; the other arguments are as in `image_plan`.
    """
    planned = image_plan(data, tasks, next(iter(models.values())).library, options)
    inputs = {name: _first_inputs(model, planned[0][0], options) for name, model in models.items()}
    metrics = {}
    for name, model in models.items():
        inference = dataclasses.replace(settings, progress=partial(_labelled_bar, labels[name]))
        features = Features(model.module, model.transform, model.tokenizer, inference)
        found: Metrics = {}
        for folder, evaluations in planned:
            try:
                found |= measure(features, folder, evaluations, options)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        metrics[name] = {
            metric: found[metric]
            for metric, value in means(found).items()
            if math.isfinite(value) and metric.rpartition("/")[2] not in _SETTINGS
        }
    return metrics, inputs


def _first_inputs(model: Model, folder: EvaluationFolder, options: Options) -> dict[str, Tensor]:
    """Return the first images of a folder and, if the model reads text, its captions or else its prompts."""
    batch = next(iter(folder.batches(model.transform, split=options.split, batch_size=_MOST_INPUTS)))
    inputs = {"image": batch["image"].to(model.device)}
    if model.tokenizer is not None:
        captions = [text for of_image in batch.get("captions", []) for text in of_image]
        texts = captions or [of_class[0] for of_class in prompts_of(folder, options).texts()]
        inputs["text"] = model.tokenizer(texts[:_MOST_INPUTS]).to(model.device)
    return inputs


def _labelled_bar(label: str, batches: Any, description: str) -> Iterable[Any]:
    return bar(batches, f"{label}: {description}")


# ---- text ----------------------------------------------------------------------------------------------------------


def shared_window(models: Iterable[Model], entries: Sequence[Entry]) -> int:
    """Return how many tokens all models read at a time: the least that one was trained with or can read."""
    trained = [setting(entry.config, "data.init_args.length") for entry in entries]
    lengths = [length for length in (*trained, *(model.max_length for model in models)) if isinstance(length, int)]
    return min([WINDOW, *lengths])


def measure_texts(
    models: Models, labels: Mapping[str, str], data: Sequence[str], window: int, batch_size: int
) -> Measured:
    """Return nll and perplexity of each model if all have the same tokens, and else bits_per_byte alone.

    Raises:
        ValueError: a model came without a tokenizer; the tokens differ and the data is not text.
    """
    works = {name: prepare(model.for_text(), LanguageOptions(), list(data)) for name, model in models.items()}
    first, *others = [work.documents for work in works.values()]
    has_same_tokens = all(len(one) == len(first) and all(map(torch.equal, one, first)) for one in others)
    metrics: dict[str, Metrics] = {}
    for name, work in works.items():
        module = models[name].module
        shared: dict[str, Any] = {"window": window, "batch_size": min(batch_size, _MOST_WINDOWS)}
        shared["progress"] = partial(_labelled_bar, labels[name])
        if has_same_tokens:
            samples = perplexity_samples(module, work.documents, **shared)
            metrics[name] = {f"perplexity/text/{metric}": of_metric for metric, of_metric in samples.items()}
            continue
        found = perplexity(module, work.documents, num_bytes=work.num_bytes, **shared)
        if "bits_per_byte" not in found:
            raise ValueError(
                "the models have different tokens, and the data has no text: give text as --data, to compare bits per "
                "byte"
            )
        metrics[name] = {"perplexity/text/bits_per_byte": found["bits_per_byte"]}
    inputs = {
        name: {"tokens": work.documents[0][None, :window].to(models[name].device)} for name, work in works.items()
    }
    return metrics, inputs
