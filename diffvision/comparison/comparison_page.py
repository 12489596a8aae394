"""The page of a comparison: its tables, curves and lambda in one HTML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures.layer_panels import LayerPanel, layer_panels
from diffvision.analysis.figures.training_runs import run_curves
from diffvision.analysis.html_page import Code, Picture, Section, Table, Text, html_page
from diffvision.comparison.result import Comparison
from diffvision.evaluation.output_files import write_bytes, write_json
from diffvision.tables import plain

_FIRST = ("train/loss", "val/loss")  # curves that are always shown, in this order
_HEADLINES = ("/acc1", "/acc", "retrieval_recall@1", "/group_score", "/auc")
_MOST = 4  # panels in a row of curves


def page(comparison: Comparison) -> str:
    """Return the page."""
    lead = f"Differences are from {comparison.labels[0]}."
    tables = [Section(title, [Table(heads, rows)]) for title, heads, rows in comparison.tables()]
    notes = Section("How the numbers were made", [*map(Text, comparison.notes)])
    sections = [*tables, notes, *_training(comparison), *_lambdas(comparison), _models(comparison)]
    return html_page(" and ".join(comparison.labels), lead, sections, "Written by `diffvision compare`.")


def _training(comparison: Comparison) -> list[Section]:
    panels = _panels({one.label: one.curves for one in comparison.models if one.curves})
    if not panels:
        return []
    caption = f"{', '.join(panels)} over steps. Bands are one standard deviation over seeds."
    return [Section("Training", [Picture(run_curves(panels), caption)])]


def _panels(by_model: Mapping[str, Mapping[str, Sequence[Curve]]]) -> dict[str, dict[str, Sequence[Curve]]]:
    """Return the metrics to draw: losses, then the evaluations' headlines."""
    names = dict.fromkeys(name for curves in by_model.values() for name in curves)
    wanted = [name for name in _FIRST if name in names]
    wanted += [name for name in names if name.endswith(_HEADLINES) and name not in wanted]
    return {
        name: {label: curves[name] for label, curves in by_model.items() if name in curves} for name in wanted[:_MOST]
    }


def _lambdas(comparison: Comparison) -> list[Section]:
    panels: dict[str, dict[str, dict[str, Sequence[Sequence[float]]]]] = {}
    for one in comparison.models:
        for tower, layers in comparison.towers(one).items():
            panels.setdefault(tower, {})[one.label] = {"": layers}
    if not panels:
        return []
    figure = layer_panels([LayerPanel(f"λ, {tower} tower", runs) for tower, runs in panels.items()])
    return [Section("Lambda", [Picture(figure, "The weight of the second map, by layer; dots are seeds.")])]


def _models(comparison: Comparison) -> Section:
    rows = [
        [one.label, model, which]
        for one in comparison.models
        for model, which in zip(one.specs, one.which, strict=True)
    ]
    command = shlex.join(["diffvision", "compare", *(model for _, model, _ in rows)])
    return Section("The models", [Table(["label", "model", "which"], rows), Code(command)])


def write(comparison: Comparison, path: str | Path) -> None:
    """Write a page (.html), or everything but the curves (.json)."""
    path = Path(path)
    if path.suffix == ".json":
        write_json(path, plain(comparison.to_dict()))  # NaN is null
    else:
        write_bytes(path, page(comparison).encode())
