"""Checks of checkpoints and of the files next to them that hold for all libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffvision.models.weight_files import read_json

PREPROCESS = ("mean", "std", "interpolation", "resize_mode")
"""Settings of a model's transform that a user may set."""

CONFIG = "config.json"
OPEN_CLIP = "open_clip_config.json"


def refuse_checkpoint(checkpoint: str | Path | None, spec: str) -> None:
    """Raise a ValueError if a checkpoint is passed with a model that comes with weights."""
    if checkpoint is not None:
        raise ValueError(f"checkpoint is {str(checkpoint)!r}, but {spec} is a model with weights: leave checkpoint out")


def run_of(path: Path | None) -> Path | None:
    """Return the directory of the run that a checkpoint is in: its folder or the parent of it, or None."""
    above = path.resolve().parents[:2] if path is not None and path.is_file() else ()
    return next((folder for folder in above if (folder / "config.yaml").is_file()), None)


def no_such_weights(checkpoint: str | Path, name: str, tags: list[str]) -> ValueError:
    """Return the error for a checkpoint that is neither a file nor one of the model's tags."""
    known = f"its pretrained weights are {', '.join(tags)}" if tags else "it has no pretrained weights"
    return ValueError(f"checkpoint {str(checkpoint)!r} is neither a file nor pretrained weights of {name!r}: {known}")


def check_name(trained: Any, name: str, path: Path) -> None:
    """Raise a ValueError if a file of weights records the name of another model."""
    if trained is not None and trained != name:
        raise ValueError(f"checkpoint {path} is of the model {trained!r}, not {name!r}: give the model {trained!r}")


def folder_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, empty if there is none."""
    file = folder / CONFIG
    return read_json(file) if file.is_file() else {}
