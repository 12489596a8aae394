"""The evaluations of a comparison: data from the arguments or the runs, and each model's metrics sample by sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from diffvision.comparison.entries import Entry
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.cache import tensor_digest
from diffvision.evaluation.features import Features
from diffvision.evaluation.language.language_options import LanguageOptions
from diffvision.evaluation.language.language_suite import prepare
from diffvision.evaluation.language.perplexity import perplexity, perplexity_samples
from diffvision.evaluation.options import InferenceSettings, Options
from diffvision.evaluation.output_files import bar
from diffvision.evaluation.per_sample import Metrics, means
from diffvision.evaluation.prompts import check_prompts, prompts_of
from diffvision.evaluation.suite import expand, folder_kind, measure, plan
from diffvision.opening import Model
from diffvision.opening.run_folders import setting

Planned = list[tuple[EvaluationFolder, list[str]]]
_SETTINGS = ("cost", "fewshot_k", "acc_ci95")  # that probes report among their metrics
WINDOW = 2048  # tokens that a language model reads at a time, at most


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


def image_plan(data: Sequence[str], tasks: Sequence[str] | None, library: str, options: Options) -> Planned:
    """Return which evaluations run on which folders, checked before any of them starts.

    Args:
        data: evaluation folders, or folders that hold some.
        tasks: names of evaluations; None for those that fit the models.
        library: of the models: timm's are for `classification`.
        options: as `suite.plan`.
    """
    names = expand(tasks) if tasks is not None else ["classification"] if library == "timm" else None
    folders = [folder for path in data for folder in find_folders(path, folder_kind(names))]
    unique = {folder.path.resolve(): folder for folder in folders}
    planned = plan(list(unique.values()), names, options)
    check_prompts(planned, options)
    return planned


def measure_images(
    model: Model, label: str, planned: Planned, settings: InferenceSettings, options: Options
) -> Metrics:
    """Return the finite metrics of a model; its features of each folder are computed once."""
    settings = dataclasses.replace(settings, progress=_make_bar(label))
    features = Features(model.module, model.transform, model.tokenizer, settings)
    metrics: Metrics = {}
    for folder, names in planned:
        metrics |= measure(features, folder, names, options)
    return {
        metric: metrics[metric]
        for metric, value in means(metrics).items()
        if math.isfinite(value) and metric.rpartition("/")[2] not in _SETTINGS
    }


def first_inputs(model: Model, planned: Planned, options: Options, count: int = 16) -> dict[str, Tensor]:
    """Return the first images of the first folder and, if the model reads text, its captions or else its prompts."""
    folder = planned[0][0]
    batch = next(iter(folder.batches(model.transform, split=options.split, batch_size=count)))
    inputs = {"image": batch["image"].to(model.device)}
    if model.tokenizer is not None:
        captions = [text for of_image in batch.get("captions", []) for text in of_image]
        texts = captions or [of_class[0] for of_class in prompts_of(folder, options).texts()]
        inputs["text"] = model.tokenizer(texts[:count]).to(model.device)
    return inputs


def _make_bar(label: str) -> Any:
    return lambda batches, description: bar(batches, f"{label}: {description}")


# ---- text ----------------------------------------------------------------------------------------------------------


class Documents(NamedTuple):
    """Texts as one model's tokens."""

    tokens: Sequence[Tensor]
    num_bytes: int | None
    digest: str


def read_text(model: Model, data: Sequence[str]) -> Documents:
    """Return the data as the model's tokens; ValueError where it came without a tokenizer."""
    work = prepare(model, LanguageOptions(), list(data))
    return Documents(work.documents, work.num_bytes, tensor_digest(work.documents))


def shared_window(models: Sequence[Model], entries: Sequence[Entry]) -> int:
    """Return how many tokens all models read at a time: the least that one was trained with or can read."""
    trained = [setting(entry.config, "data.init_args.length") for entry in entries]
    lengths = [length for length in (*trained, *(model.max_length for model in models)) if isinstance(length, int)]
    return min([WINDOW, *lengths])


def measure_text(
    model: Model, label: str, documents: Documents, window: int, *, same_tokens: bool, batch_size: int
) -> Metrics:
    """Return nll and perplexity if all models have the same tokens, and else bits_per_byte alone."""
    shared: dict[str, Any] = {"window": window, "batch_size": batch_size, "progress": _make_bar(label)}
    if same_tokens:
        samples = perplexity_samples(model.module, documents.tokens, **shared)
        return {f"perplexity/text/{metric}": of_metric for metric, of_metric in samples.items()}
    metrics = perplexity(model.module, documents.tokens, num_bytes=documents.num_bytes, **shared)
    if "bits_per_byte" not in metrics:
        raise ValueError(
            "the models have different tokens, and the data has no text: give text as --data, to compare bits per byte"
        )
    return {"perplexity/text/bits_per_byte": metrics["bits_per_byte"]}
