"""The model card of a folder: README.md, written from the model and, if there is one, its training run.

Its text is in `templates/README.md`, the metadata above it are huggingface_hub's `ModelCardData`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import jinja2
from huggingface_hub import ModelCard, ModelCardData

from diffvision import __version__
from diffvision.analysis.curves import Curve, read_metrics
from diffvision.evaluation.suite import EVALUATIONS
from diffvision.export.describe import PLAIN, attention_layers, describe, text, variants
from diffvision.models import language
from diffvision.models.language import LanguageModel
from diffvision.opening import Model
from diffvision.training.fault_tolerance import read_step

HUB_LIBRARY = {"open_clip": "open_clip", "timm": "timm", "language": "transformers"}
TASK = {"open_clip": "zero-shot-image-classification", "timm": "image-classification", "language": "text-generation"}
_PACKAGES = {"open_clip": ("torch", "open_clip_torch", "timm"), "timm": ("torch", "timm"),
             "language": ("torch", "transformers")}  # fmt: skip
RESULTS = ("val", "test", *EVALUATIONS)
"""First parts of the names of metrics that are results."""
_PAPERS = {
    "v2": "ye2026differential",
    "gda": "lim2025grouped",
    "v1_dint": "cang2025dint",
    "gated": "qiu2025gated",
    "v1_gated": "qiu2025gated",
    "v2_gated": "qiu2025gated",
    "integral": "kobyzev2025integral",
    "dna": "campos2026dna",
    "coda": "maio2026coda",
    "vca": "pu2025linear",
    "dex": "kong2025understanding",
}
"""A variant's own paper, an entry of `templates/sources.bib`."""


def write_card(folder: Path, model: Model, license: str | None = None) -> None:
    """Write README.md into a model's folder.

    Args:
        license: of the weights, by its identifier on the Hub; the card has no license if it is None.
    """
    curves: Mapping[str, Curve] = {}
    with suppress(OSError, ValueError, TypeError, LookupError):  # no run, no metrics file, or one of another program
        curves = {} if model.run is None else read_metrics(model.run)
    if model.library == "language" and not (folder / "tokenizer.json").is_file():
        model = dataclasses.replace(model, tokenizer=None)
    results = last_results(curves, read_step(Path(model.weights or "")) or None)
    ModelCard(model_card(model, *results, license=license)).save(folder / "README.md")


def model_card(
    model: Model,
    metrics: Mapping[str, float] = {},
    step: int | None = None,
    *,
    license: str | None = None,
) -> str:
    """Return the text of README.md; sections without known content are left out.

    Args:
        metrics: of the last validation.
        step: optimizer steps before it.
        license: as in `write_card`.
    """
    towers = attention_layers(model.module)
    kinds = variants(towers)
    tags = ["diffvision", *(["differential-attention"] if kinds - PLAIN else [])]
    head = ModelCardData(
        library_name=HUB_LIBRARY[model.library], pipeline_tag=TASK[model.library], tags=tags, license=license
    )
    origin = language.origin_of(model.weights) if model.library == "language" and model.weights else None
    card = _template().render(
        head=head.to_yaml(),
        name=model.name,
        description=describe(model, towers),
        is_average=bool(model.average_note),
        origin=(origin or "").splitlines(),
        library=model.library,
        hub_library=HUB_LIBRARY[model.library],
        has_our_layers=bool(towers) and model.library != "language",
        has_tokenizer=model.tokenizer is not None,
        loads_by_code=isinstance(model.module, LanguageModel) and model.module.config.variant == "v2",
        metrics=metrics,
        step=step,
        versions=[f"diffvision {__version__}", *(f"{name} {version(name)}" for name in _PACKAGES[model.library])],
        sources=bibtex(kinds, model.name, model.library),
    )
    return card.rstrip("\n") + "\n"


def last_results(curves: Mapping[str, Curve], step: int | None) -> tuple[dict[str, float], int | None]:
    """Return the metrics of the last validation up to a step, and its step; ({}, None) without one.

    Args:
        curves: of the run.
        step: optimizer steps at the checkpoint; None if that is not known.
    """
    last_points: dict[str, tuple[float, float]] = {}
    for name, curve in curves.items():
        if name.split("/")[0] in RESULTS:
            # A row's step counts from 0: after 262 steps it is 261.
            points = [point for point in zip(*curve, strict=True) if step is None or point[0] < step]
            last_points |= {name: points[-1]} if points else {}
    last = max((at for at, _ in last_points.values()), default=None)
    metrics = {name: value for name, (at, value) in last_points.items() if at == last}
    return metrics, None if last is None else int(last) + 1


def bibtex(kinds: Iterable[str], name: str, library: str) -> str:
    """Return the entries for a model.

    Args:
        kinds: keys of `diffvision.nn.ATTENTION`, or "vca", that its layers are of.
        name: of the model in its library.
        library: open_clip, timm or language.
    """
    file = resources.files("diffvision.export") / "templates" / "sources.bib"
    entries = re.findall(r"(@\w+{(\w+),.*?\n})", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    known = {key: entry for entry, key in entries}
    keys: list[str] = []
    for variant in kinds:
        keys += [] if variant in PLAIN else ["ye2025differential"]
        keys += [_PAPERS[variant]] if variant in _PAPERS else []
    if library == "open_clip":
        keys += ["hammoud2025diffclip"] if keys and "diffclip" in name.lower() else []
        keys.append("radford2021learning")
    if library == "timm" and "vit" in name:
        keys.append("dosovitskiy2021image")
    return "\n\n".join(known[key] for key in dict.fromkeys(keys))


@functools.cache
def _template() -> jinja2.Template:
    # It writes Markdown: names and values pass through `text`, which escapes them for it.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("diffvision.export"), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"text": text, "number": _number}
    return environment.get_template("README.md")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) and abs(value) > 1 else f"{value:.4f}"
