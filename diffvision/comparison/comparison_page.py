"""The page of a comparison: tables, intervals, curves and lambda in one HTML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures.layer_panels import LayerPanel, layer_panels
from diffvision.analysis.figures.training_runs import run_curves
from diffvision.analysis.html_page import Code, Part, Picture, Section, Table, Text, bars, html_page
from diffvision.comparison.result import FACTOR, SINKS, Comparison, format_difference
from diffvision.evaluation.output_files import write_bytes, write_json
from diffvision.tables import plain

_FIRST = ("train/loss", "val/loss")  # curves that are always shown, in this order
_HEADLINES = ("/acc1", "/acc", "retrieval_recall@1", "/group_score", "/auc")
_COSTS = {"FLOPs": "FLOPs of a forward pass", "ratio [lowest, highest]": "ratio of speeds [lowest, highest]"}
_MOST = 4  # panels in a row of curves


def page(comparison: Comparison) -> str:
    """Return the page."""
    sections = [_results(comparison), _costs(comparison), *_training(comparison), *_lambdas(comparison)]
    sections += [*_sinks(comparison), _models(comparison)]
    return html_page(f"{' and '.join(comparison.labels)}", _lead(comparison), sections)


def _lead(comparison: Comparison) -> str:
    """Say what the intervals say, metric by metric."""
    first, *others = comparison.labels
    sentences = []
    for label in others:
        words: dict[str, list[str]] = {}
        for row in comparison.rows:
            if row.metric.endswith(_HEADLINES) or row.name in ("nll", "bits_per_byte"):
                task, dataset, _ = row.metric.split("/", 2)
                word = row.differences[label].word or "without a verdict"
                words.setdefault(word, []).append(f"{task} {row.name} on {dataset}".replace("_", "-"))
        said = "; ".join(f"{word} in {_and(metrics)}" for word, metrics in words.items())
        sentences.append(f"{label} next to {first}: {said}." if said else f"{label} next to {first}.")
    return " ".join(sentences)


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _results(comparison: Comparison) -> Section:
    first, *others = comparison.labels
    rows: list[list] = []
    for title, metrics in comparison.sections():
        rows.append([title])
        for row in metrics:
            scaled = {label: row.values[label] for label in comparison.labels}
            digits = 1 if row.factor == FACTOR else 3
            top = 100 if row.factor == FACTOR else None
            cells = bars(scaled, factor=row.factor, digits=digits, top=top)
            unit = ", %" if row.factor == FACTOR else ""
            rows.append([f"{row.name}{unit}", *cells, *(format_difference(row, label) for label in others)])
    heads = [f"{label} − {first} [95%]" for label in others] if len(others) > 1 else ["difference [95% interval]"]
    table = Table(["", *comparison.labels, *heads], rows, models=comparison.labels)
    return Section("Results", [table, *map(Text, _notes(comparison, ("Paired", "Across seeds", "No verdict")))])


def _costs(comparison: Comparison) -> Section:
    costs = comparison.costs()
    rows = [[_COSTS.get(name, name), *(cell or "1" for cell in cells)] for name, cells in costs.items()]
    return Section("Cost", [Table(["", *comparison.labels], rows), *map(Text, _notes(comparison, ("FLOPs", "Speed")))])


def _training(comparison: Comparison) -> list[Section]:
    parts: list[Part] = []
    for name, xlabel in (("curves", "step"), ("timed", "seconds of training")):
        by_model = {one.label: getattr(one, name) for one in comparison.contestants if getattr(one, name)}
        shown = _panels(by_model)
        if shown:
            names = ", ".join(shown)
            parts.append(Picture(run_curves(shown, xlabel), f"{names} over {xlabel} of {', '.join(by_model)}"))
    if not parts:
        return []
    note = "Seconds are those of training steps; evaluations are left out. Bands are one standard deviation over seeds."
    return [Section("Training", [*parts, Text(note)])]


def _panels(by_model: Mapping[str, Mapping[str, Sequence[Curve]]]) -> dict[str, dict[str, Sequence[Curve]]]:
    """Return the metrics to draw: losses, then the evaluations' headlines."""
    names = dict.fromkeys(name for curves in by_model.values() for name in curves)
    wanted = [name for name in _FIRST if name in names]
    wanted += [name for name in names if name.endswith(_HEADLINES) and name not in wanted]
    panels = {
        name: {label: curves[name] for label, curves in by_model.items() if name in curves} for name in wanted[:_MOST]
    }
    return panels


def _lambdas(comparison: Comparison) -> list[Section]:
    panels: dict[str, dict[str, dict[str, Sequence[Sequence[float]]]]] = {}
    for one in comparison.contestants:
        for tower, layers in comparison.towers(one).items():
            panels.setdefault(tower, {})[one.label] = {"": layers}
    if not panels:
        return []
    figure = layer_panels([LayerPanel(f"λ, {tower} tower", runs) for tower, runs in panels.items()])
    caption = "The weight of the second map, by layer; dots are seeds."
    return [Section("Lambda", [Picture(figure, "Lambda by layer", caption)])]


def _sinks(comparison: Comparison) -> list[Section]:
    if not (rows := comparison.sinks()):
        return []
    note = Text(
        "A head has a sink if one token receives 30% or more of its attention: NOP where that token's value is small, "
        "broadcast where the head adds the same to all tokens. `diffvision inspect` has them by layer."
    )
    return [Section("Sinks", [Table([SINKS, "with a sink", "NOP", "broadcast"], rows, models=[]), note])]


def _models(comparison: Comparison) -> Section:
    rows = [
        [one.label, model, which]
        for one in comparison.contestants
        for model, which in zip(one.models, one.which, strict=True)
    ]
    models = [model for one in comparison.contestants for model in one.models]
    return Section(
        "The models",
        [Table(["label", "model", "which"], rows, models=[]), Code(shlex.join(["diffvision", "compare", *models]))],
    )


def _notes(comparison: Comparison, beginnings: tuple[str, ...]) -> list[str]:
    return [note for note in comparison.notes if note.startswith(beginnings)]


def write(comparison: Comparison, path: str | Path) -> None:
    """Write a page (.html), or everything but the curves (.json)."""
    path = Path(path)
    if path.suffix == ".json":
        write_json(path, plain(comparison.to_dict()))  # NaN is null
    else:
        write_bytes(path, page(comparison).encode())
