"""The public part of a training run's directory: configuration without private values, curves, steps and results.

Curves are read by `analysis.curves`; the text of the card is in `card.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffvision.analysis.curves import Curve, read_metrics
from diffvision.evaluation.suite import EVALUATIONS
from diffvision.opening.run_folders import run_config
from diffvision.training.fault_tolerance import step_of

RESULTS = ("val", "test", *EVALUATIONS)  # first parts of the names of metrics that are results
_SECRET = re.compile(r"(?i)(^|_)(token|secret|password|api_?key|credentials?)$")
_USER = re.compile(r"(?<=://)[^/@\s]+@")  # name and password in a URL


@dataclass(frozen=True)
class History:
    """The content of a run's directory.

    Attributes:
        config: its config.yaml without private values (see `redact`).
        curves: logged values by metric, including those before the run was resumed.
        step: optimizer steps at the checkpoint; None if no record next to it has the number.
        records: results of `diffvision evaluate` in JSON files of the directory.
    """

    config: dict[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    step: int | None = None
    records: tuple[dict[str, Any], ...] = ()

    def results(self) -> tuple[dict[str, float], int | None]:
        """Return the metrics of the last validation up to this checkpoint, and its step; ({}, None) without one."""
        last_points: dict[str, tuple[float, float]] = {}
        for name, curve in self.curves.items():
            if name.split("/")[0] in RESULTS:
                # A row's step counts from 0: after 262 steps it is 261.
                points = [p for p in zip(*curve, strict=True) if self.step is None or p[0] < self.step]
                last_points |= {name: points[-1]} if points else {}
        last = max((step for step, _ in last_points.values()), default=None)
        return {name: value for name, (step, value) in last_points.items() if step == last}, (
            None if last is None else int(last) + 1
        )

    def account(self) -> dict[str, int]:
        """Return the numbers of samples that were seen, skipped, substituted and left over, summed over the epochs."""
        names = {"seen": "seen", "skipped": "skipped", "substituted": "substituted", "tail": "left over"}
        curves = {label: self.curves.get(f"data/{name}") for name, label in names.items()}
        return {label: int(sum(curve.values)) for label, curve in curves.items() if curve is not None}


def read_history(run: Path, checkpoint: Path) -> History:
    """Read a run's directory, for one of its checkpoints. What is missing or unreadable is left out."""
    try:
        config = run_config(run)
    except ValueError:
        config = {}
    try:
        curves = read_metrics(run)
    except (OSError, ValueError, TypeError, LookupError):  # no metrics file, or one of another program
        curves = {}
    return History(redact(config), curves, step_of(checkpoint) or None, tuple(_records(run)))


def redact(value: Any, name: str = "") -> Any:
    """Return a configuration without private values.

    Absolute paths keep their last two parts, URLs lose user, password and query, and settings named like secrets
    ("api_key") become "...".
    """
    if isinstance(value, dict):
        return {key: redact(part, str(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [redact(part, name) for part in value]
    if not isinstance(value, str):
        return value
    if _SECRET.search(name):
        return "..."
    if Path(value).is_absolute():
        return "/".join(["...", *Path(value).parts[1:][-2:]])
    return _USER.sub("", value.partition("?")[0] if "://" in value else value)


def _records(run: Path) -> list[dict[str, Any]]:
    """Return the evaluation results in the JSON files of the directory: dictionaries with "metrics"."""
    records: list[Any] = []
    for file in sorted(run.rglob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        records += content if isinstance(content, list) else [content]
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("metrics"), dict)]
