"""The evaluations of a comparison: data from the arguments or the runs, and each model's metrics sample by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from diffvision.comparison.entries import Entry
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.evaluation.blind import Blind
from diffvision.evaluation.cache import Cache, tensor_digest
from diffvision.evaluation.features import Features
from diffvision.evaluation.language.options import LanguageOptions
from diffvision.evaluation.language.perplexity import perplexity, perplexity_samples
from diffvision.evaluation.language.suite import prepared
from diffvision.evaluation.options import Options, Precision
from diffvision.evaluation.output import bar
from diffvision.evaluation.prompts import prompts_of
from diffvision.evaluation.samples import PerSample
from diffvision.evaluation.suite import EVALUATIONS, check_prompts, expand, plan
from diffvision.opening import Model

Planned = list[tuple[EvaluationFolder, list[str]]]
_SETTINGS = ("cost", "fewshot_k", "acc_ci95")  # that probes report among their metrics
WINDOW = 2048  # tokens that a language model reads at a time, at most


class Measured(NamedTuple):
    """A metric of one model, and its samples where it is a mean over them."""

    value: float
    samples: PerSample | None = None


@dataclass(frozen=True)
class Settings:
    """How the models are run; the arguments of `compare`."""

    batch_size: int = 64
    num_workers: int = 2
    device: str = "cpu"
    precision: Precision = "fp32"
    cache: Cache | None = None
    blind: Blind | None = None
    options: Options = field(default_factory=Options)


def data_of(entries: Sequence[Entry]) -> list[str]:
    """Return the evaluation data that the runs' configurations name, each once.

    Raises:
        ValueError: they name none, or some that is not here.
    """
    named: dict[str, None] = {}
    for entry in entries:
        for setting in ("evaluations", "evaluation"):
            given = entry.setting("data", "init_args", setting) or []
            named |= {path: None for path in ([given] if isinstance(given, str) else given) if isinstance(path, str)}
    if not named:
        raise ValueError("no data to compare on: the models' runs name no evaluation data; give --data FOLDERS")
    for path in named:
        if not Path(path).exists() and "=" not in path and ":" not in path:
            raise ValueError(f"the runs were evaluated on {path}, which is not here: give --data FOLDERS")
    return list(named)


# ---- images --------------------------------------------------------------------------------------------------------


def image_plan(data: Sequence[str], tasks: Sequence[str] | None, host: str, options: Options) -> Planned:
    """Return which evaluations run on which folders, checked before any of them starts.

    Args:
        data: evaluation folders, or folders that hold some.
        tasks: names of evaluations; None for those that fit the models.
        host: of the models: timm's are for `classification`.
        options: as `suite.plan`.
    """
    folders = [folder for path in data for folder in find_folders(path)]
    unique = {folder.path.resolve(): folder for folder in folders}
    names = expand(tasks) if tasks is not None else ["classification"] if host == "timm" else None
    planned = plan(list(unique.values()), names, options)
    check_prompts(planned, options)
    return planned


def measure_images(model: Model, planned: Planned, settings: Settings) -> dict[str, Measured]:
    """Return the metrics of a model; its features of each folder are computed once."""
    features = Features(
        model.module,
        model.transform,
        model.tokenizer,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        device=settings.device,
        precision=settings.precision,
        progress=lambda batches, description: bar(batches, f"{model.name}: {description}"),
        cache=settings.cache,
        blind=settings.blind,
    )
    measured: dict[str, Measured] = {}
    for folder, names in planned:
        for name in names:
            evaluation = EVALUATIONS[name]
            results: Mapping[str, PerSample | float]
            if evaluation.samples is not None:
                results = evaluation.samples(features, folder, settings.options)
            else:
                values = evaluation.function(features, folder, settings.options)
                results = {metric: value for metric, value in values.items() if metric not in _SETTINGS}
            for metric, result in results.items():
                one = Measured(result.mean(), result) if isinstance(result, PerSample) else Measured(result)
                if math.isfinite(one.value):
                    measured[f"{name}/{folder.name}/{metric}"] = one
    return measured


def few_images(model: Model, planned: Planned, settings: Settings, count: int = 16) -> dict[str, Tensor]:
    """Return a few images of the first folder, and texts of it for a model that reads them."""
    folder = planned[0][0]
    batch = next(iter(folder.batches(model.transform, split=settings.options.split, batch_size=count)))
    inputs = {"image": batch["image"].to(settings.device)}
    if model.tokenizer is not None:
        captions = [text for of_image in batch.get("captions", []) for text in of_image]
        texts = captions or [of_class[0] for of_class in prompts_of(folder, settings.options).texts()]
        inputs["text"] = model.tokenizer(texts[:count]).to(settings.device)
    return inputs


# ---- text ----------------------------------------------------------------------------------------------------------


class Documents(NamedTuple):
    """Texts as one model's tokens."""

    tokens: Sequence[Tensor]
    num_bytes: int | None
    digest: str


def read_text(model: Model, data: Sequence[str]) -> Documents:
    """Return the data as the model's tokens; ValueError where it came without a tokenizer."""
    work = prepared(model, LanguageOptions(), list(data), [])
    return Documents(work.documents, work.num_bytes, tensor_digest(work.documents))


def shared_window(models: Sequence[Model], entries: Sequence[Entry]) -> int:
    """Return how many tokens all models read at a time: the least that one was trained with or can read."""
    trained = [entry.setting("data", "init_args", "length") for entry in entries]
    lengths = [length for length in (*trained, *(model.max_length for model in models)) if isinstance(length, int)]
    return min([WINDOW, *lengths])


def measure_text(
    model: Model, documents: Documents, window: int, *, same_tokens: bool, batch_size: int
) -> dict[str, Measured]:
    """Return nll and perplexity where all models have the same tokens, and else bits_per_byte alone."""
    shared: dict[str, Any] = {
        "window": window,
        "batch_size": batch_size,
        "progress": lambda batches, description: bar(batches, f"{model.name}: {description}"),
    }
    if same_tokens:
        samples = perplexity_samples(model.module, documents.tokens, **shared)
        return {f"perplexity/text/{metric}": Measured(each.mean(), each) for metric, each in samples.items()}
    metrics = perplexity(model.module, documents.tokens, num_bytes=documents.num_bytes, **shared)
    if "bits_per_byte" not in metrics:
        raise ValueError(
            "the models have different tokens, and the data is tokens without text: give text as --data, on which "
            "their bits per byte can be compared"
        )
    return {"perplexity/text/bits_per_byte": Measured(metrics["bits_per_byte"])}
