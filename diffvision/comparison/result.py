"""The result of a comparison: numbers by model and their differences, as tables and as plain values."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffvision.analysis.curves import Curve
from diffvision.evaluation.intervals import Difference

TEXTS = ("", "model", "tower")  # heads of columns of text
FACTOR = 100  # accuracies and recalls are shown in percent
IN_NATS = ("nll", "perplexity", "bits_per_byte")
_SHORT = {"mean_per_class_recall": "mean class recall"}
_WIDTH, _LONGEST_LABEL = 80, 16


@dataclass
class Cost:
    """What one model costs.

    Attributes:
        parameters: of the whole model.
        flops: of a forward pass of one sample (an image, with a caption for image-text models; a row of tokens).
        per_second: samples or tokens a second in each round.
    """

    parameters: int
    flops: int
    per_second: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float | None:
        """The median over the rounds, in samples or tokens a second."""
        return statistics.median(self.per_second) if self.per_second else None

    def ratio(self, first: Cost) -> tuple[float, float, float] | None:
        """Return the speed over the first model's: median, lowest and highest over the rounds."""
        if not self.per_second or not first.per_second:
            return None
        ratios = [own / other for own, other in zip(self.per_second, first.per_second, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


@dataclass
class Row:
    """One metric of all models.

    Attributes:
        metric: its full name, such as "zero_shot/digits/acc1".
        count: samples that it is a mean over; None where that is not known.
        values: by model, one for each seed.
        differences: by model but the first, from the first.
    """

    metric: str
    count: int | None
    values: dict[str, list[float]]
    differences: dict[str, Difference]

    @property
    def factor(self) -> int:
        """The factor of displayed values: 100 for shares, 1 for losses."""
        return 1 if self.metric.rpartition("/")[2] in IN_NATS else FACTOR

    @property
    def name(self) -> str:
        """The metric without task and dataset, in the words of the field: "image R@1"."""
        last = self.metric.rpartition("/")[2]
        return _SHORT.get(last, last.replace("_retrieval_recall@", " R@"))


@dataclass
class ComparedModel:
    """One model: what its seeds are, what it costs, and what training logged.

    Attributes:
        label: in tables and figures.
        specs: for each seed the file or name that was opened.
        which: for each seed, what that is: "best val/acc1 0.9521", "last, step 786", "as given", "new weights";
            and whether the weights are averaged.
        cost: of the first seed.
        lambdas: by layer, one value for each seed; empty without differential layers.
        curves: by metric over steps, one for each seed that has them.
    """

    label: str
    specs: list[str]
    which: list[str]
    cost: Cost
    lambdas: dict[str, list[float]]
    curves: dict[str, list[Curve]]

    @property
    def memory(self) -> float | None:
        """Peak memory of a training process in GiB, on a GPU or CPU; None if it was not logged."""
        return max((max(curve.values) for curve in self.curves.get("train/memory_gib", ())), default=None)


@dataclass
class Comparison:
    """The numbers of several models; `print(comparison)` shows the tables.

    Attributes:
        kind: of the models: "an image-text model", ...
        models: the models; differences are from the first.
        rows: metrics.
        unit: what speed is counted in: "pairs" of an image and a caption, "images" or "tokens".
        notes: sentences on how the numbers were made.
    """

    kind: str
    models: list[ComparedModel]
    rows: list[Row]
    unit: str
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The models' labels, in order."""
        return [one.label for one in self.models]

    def __str__(self) -> str:
        console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_jupyter=False)
        self.show(console)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def show(self, console: Console | None = None) -> None:
        """Print the tables, on the terminal by default."""
        console = console or Console()
        for one in self.models:
            for model, which in zip(one.specs, one.which, strict=True):
                console.print(f"{one.label}: {model} ({which})", highlight=False, markup=False, soft_wrap=True)
        for title, heads, rows in self.tables():
            table = plain_table(title)
            for number, head in enumerate(heads):
                is_number = head not in TEXTS and "[" not in head
                column: Any = {"no_wrap": True} if not number and not head else {"overflow": "fold"}
                table.add_column(escape(head), justify="right" if is_number else "left", **column)
            for cells in rows:
                table.add_row(*map(escape, cells))
            console.print("", table, sep="\n")
        console.print()
        for note in self.notes:
            console.print(note, style="dim", highlight=False)

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield the title, the heads and the rows of each table: metrics, cost, lambda by layer, and sinks."""
        first = self.labels[0]
        reference = f"from {first}" if len(first) <= _LONGEST_LABEL else "from the first"
        for title, metrics in self.sections():
            unit = "%" if metrics[0].factor == FACTOR else "nats a token" if metrics[0].name == "nll" else "value"
            rows = [
                ["" if number else row.name, label, format_mean(values, row.factor), format_difference(row, label)]
                for row in metrics
                for number, (label, values) in enumerate(row.values.items())
            ]
            yield title, ["", "model", unit, f"{reference} [95% interval]"], rows
        costs = self.costs()
        yield "cost", ["model", *costs], [[*row] for row in zip(self.labels, *costs.values(), strict=True)]
        lambdas = [
            [one.label, tower, " ".join(f"{statistics.mean(values):.2f}" for values in layers)]
            for one in self.models
            for tower, layers in self.towers(one).items()
        ]
        if lambdas:
            yield "lambda by layer, from the first", ["model", "tower", ""], lambdas

    def sections(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield the metrics of each task and dataset, with a title that says the number of samples."""
        for name in dict.fromkeys(row.metric.rpartition("/")[0] for row in self.rows):
            rows = [row for row in self.rows if row.metric.rpartition("/")[0] == name]
            counts = sorted({row.count for row in rows if row.count is not None})
            shown = [f"{count:,}" for count in counts]
            over = f"{shown[0]} to {shown[-1]}" if len(shown) > 2 else " and ".join(shown)
            yield f"{name}, {over} samples" if counts else name, rows

    def costs(self) -> dict[str, list[str]]:
        """Return what the models cost, a text for each: parameters, FLOPs, and speed where it was measured."""
        first = self.models[0].cost
        costs = [one.cost for one in self.models]
        rows = {
            "parameters": [f"{cost.parameters:,}" for cost in costs],
            "FLOPs": [format_flops(cost.flops) for cost in costs],
        }
        if first.per_second:
            rows[f"{self.unit}/s"] = [f"{cost.speed:,.0f}" for cost in costs]
            ratios = [cost.ratio(first) for cost in costs[1:]]
            texts = ["" if ratio is None else "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) for ratio in ratios]
            rows["ratio [lowest, highest]"] = ["", *texts]
        if any(one.memory is not None for one in self.models):
            shown = ["–" if one.memory is None else f"{one.memory:.2f}" for one in self.models]
            rows["GiB in training"] = shown
        return rows

    def towers(self, one: ComparedModel) -> dict[str, list[Sequence[float]]]:
        """Return the lambdas of each of a model's towers, "image" or "text", in the order of its layers."""
        by_tower: dict[str, list[Sequence[float]]] = {}
        for name, values in one.lambdas.items():
            # timm's models and language models have a single tower, whose layers are named alike.
            is_image = name.startswith("visual") or (name.startswith("blocks") and self.unit != "tokens")
            by_tower.setdefault("image" if is_image else "text", []).append(values)
        return by_tower

    # ---- plain values ----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the curves as plain values, for JSON."""
        return {
            "kind": self.kind,
            "models": [self._model_to_dict(one) for one in self.models],
            "metrics": [
                {
                    "metric": row.metric,
                    "samples": row.count,
                    "values": row.values,
                    "differences": {label: describe_difference(one) for label, one in row.differences.items()},
                }
                for row in self.rows
            ],
            "notes": self.notes,
        }

    def _model_to_dict(self, one: ComparedModel) -> dict[str, Any]:
        """Return one model's costs and lambdas for the JSON."""
        ratio = one.cost.ratio(self.models[0].cost)
        return {
            "label": one.label,
            "models": [{"model": model, "which": which} for model, which in zip(one.specs, one.which, strict=True)],
            "parameters": one.cost.parameters,
            "flops": one.cost.flops,
            f"{self.unit}_per_second": one.cost.per_second,
            "training_memory_gib": one.memory,
            "speed_ratio": None if ratio is None else dict(zip(("median", "lowest", "highest"), ratio, strict=True)),
            "lambda": one.lambdas,
        }


def plain_table(title: str | None = None) -> Table:
    """Return an empty table for the terminal."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def format_mean(values: Sequence[float], factor: int) -> str:
    """Return the mean, and over several seeds the standard deviation."""
    digits = 1 if factor == FACTOR else 3
    mean = f"{factor * statistics.mean(values):.{digits}f}"
    return f"{mean} ± {factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def format_difference(row: Row, label: str) -> str:
    """Return a difference with its interval and its verdict, such as "-2.1 [-3.0, -1.2] lower"."""
    one = row.differences.get(label)
    if one is None:
        return ""
    digits = 1 if row.factor == FACTOR else 3
    value = f"{row.factor * one.value:+.{digits}f}"
    if one.low is None or one.high is None:
        return f"{value}, {one.method}"
    return f"{value} [{row.factor * one.low:+.{digits}f}, {row.factor * one.high:+.{digits}f}] {one.verdict}"


def format_flops(flops: int) -> str:
    """Return FLOPs with three digits, such as "17.6 G"."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return str(flops)


def describe_difference(one: Difference) -> dict[str, Any]:
    """Return a difference as plain values, each None where there is none."""
    return {
        "difference": one.value,
        "low": one.low,
        "high": one.high,
        "word": one.word,
        "method": one.method,
        "mcnemar_p": one.p,
    }
