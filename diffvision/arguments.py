"""Checks of a command's arguments that need no PyTorch, so that mistakes are reported at once.

Those of `fit`, `validate` and `test` are in `training.settings`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffvision.data.datasets import missing_data
from diffvision.mistakes import is_missing
from diffvision.opening.specs import check_spec, labelled
from diffvision.signatures import read_names

MODELS = ("model", "models", "versus")
"""Parameters that take models."""
PATHS = ("data", "runs", "source", "images", "image", "demonstrations", "queries", "prompts")
"""Parameters that take files or folders."""
LEAST = {
    **dict.fromkeys(
        ("batch_size", "copies", "documents", "evaluated", "max_tokens", "per_shard", "steps", "tokens"), 1
    ),
    **dict.fromkeys(("num_workers", "rounds", "seed"), 0),
}
"""A parameter -> its least value."""
TASKS = {
    "evaluate": ("diffvision.evaluation.suite", "EVALUATIONS", "GROUPS"),
    "evaluate-vlm": ("diffvision.evaluation.vision_language.scores", "TASKS"),
    "evaluate-language": ("diffvision.evaluation.language.tasks", "LANGUAGE_EVALUATIONS"),
}
"""A command -> the module and tables with the names of its tasks."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def check(command: str, values: Mapping[str, Any]) -> None:
    """Check the arguments of a command.

    Raises:
        FileNotFoundError, ValueError: a model, file or folder that is not there; an unknown device or task; a number
            that is too small.
    """
    given = {name: _split_values(value) for name, value in values.items() if value is not None}
    for name in given.keys() & LEAST.keys():
        if values[name] < LEAST[name]:
            raise ValueError(f"{name} is {values[name]}: give {LEAST[name]} or more")
    for device in given.get("device", []):
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"device {device!r} is not here: give auto, cpu, or cuda where torch finds a GPU")
    if command in TASKS:
        module, *tables = TASKS[command]
        known = [name for table in tables for name in read_names(module, table)]
        for task in given.get("tasks", []):
            if task not in known:
                raise ValueError(f"unknown task {task!r}: choose among {', '.join(known)}")
    for name in PATHS:
        for path in given.get(name, []):
            if is_missing(path):
                raise missing_data(name, path)
    for spec in [spec for name in MODELS for spec in given.get(name, [])]:
        check_spec(labelled(spec)[1])


def _split_values(value: Any) -> list[str]:
    """Return the texts of a value: a list, or one that may be several with commas between them."""
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    is_whole = not isinstance(value, str) or Path(value).exists()
    return [str(value)] if is_whole else [part.strip() for part in value.split(",")]
