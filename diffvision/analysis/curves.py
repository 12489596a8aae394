"""Curves of a training run, read from the files of Lightning's CSVLogger; resumed runs are supported.

This is the only reader of metrics files; figures of the curves are in `figures`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

METRICS = "metrics.csv"
Points = dict[float, tuple[float, str | None]]  # step -> the value, and its epoch
_EARLIER = re.compile(r"metrics\.(\d+)\.csv")


class Curve(NamedTuple):
    """A value over steps."""

    steps: Sequence[float]
    values: Sequence[float]


def read_metrics(run: str | Path) -> dict[str, Curve]:
    """Return the curves of a run, by metric.

    The files of a resumed run are read in order: `metrics.1.csv`, `metrics.2.csv`, ..., `metrics.csv`. Rows of an
    earlier file after the step at which a later file begins belong to steps that were repeated, and are left out; so is
    an incomplete last row. `data/...` counts the samples of an epoch: only its last value in each epoch is returned.

    Args:
        run: the directory that CSVLogger wrote to.

    Raises:
        FileNotFoundError: the directory has no metrics file.
        ValueError: a file has a value that is not a number.
    """
    files = metrics_files(Path(run))
    if not files:
        raise FileNotFoundError(f"no {METRICS} in {run}: give the directory of a run")
    curves: dict[str, Points] = {}
    for file in files:
        later = _read(file)
        first = min((step for points in later.values() for step in points), default=float("inf"))
        # At its first step a later file may have only the values logged after the checkpoint; the others are kept.
        curves = {name: {s: v for s, v in points.items() if s <= first} for name, points in curves.items()}
        for name, points in later.items():
            curves[name] = curves.get(name, {}) | points
    curves = {name: _last_of_epochs(p) if name.startswith("data/") else p for name, p in curves.items() if p}
    return {name: Curve(list(points), [value for value, _ in points.values()]) for name, points in curves.items()}


def metrics_files(run: Path) -> list[Path]:
    """Return the files of a run in the order in which they were written."""
    earlier = {int(match[1]): file for file in run.glob("metrics.*.csv") if (match := _EARLIER.fullmatch(file.name))}
    return [earlier[number] for number in sorted(earlier)] + [file for file in [run / METRICS] if file.is_file()]


def keep_metrics(run: Path) -> None:
    """Rename the metrics files of a run that will be resumed, because CSVLogger deletes them when it starts."""
    if (file := run / METRICS).is_file() or file.is_symlink():
        numbers = [int(match[1]) for path in run.glob("metrics.*.csv") if (match := _EARLIER.fullmatch(path.name))]
        file.rename(run / f"metrics.{max(numbers, default=0) + 1}.csv")


def _read(file: Path) -> dict[str, Points]:
    """Read the values of one file, by metric; empty cells are left out."""
    curves: dict[str, Points] = {}
    for row in csv.DictReader(_complete_lines(file)):
        for name, value in row.items():
            if name not in ("step", "epoch") and value:
                curves.setdefault(name, {})[float(row["step"])] = float(value), row.get("epoch")
    return curves


def _last_of_epochs(points: Points) -> Points:
    """Return the last point of each epoch; a run that was extended within an epoch has two points for it."""
    steps = {epoch: step for step, (_, epoch) in points.items()}
    return {step: points[step] for step in steps.values()}


def _complete_lines(file: Path) -> Iterator[str]:
    with file.open(newline="", encoding="utf-8") as lines:
        yield from (line for line in lines if line.endswith("\n"))
