"""Directories of training runs: which run a folder stands for, and which of its checkpoints is the best.

A run's directory has config.yaml and checkpoints/, as `diffvision fit` writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from diffvision.models.weight_files import read_json

CONFIG, OPEN_CLIP = "config.json", "open_clip_config.json"
RUN_CONFIG, CHECKPOINTS = "config.yaml", "checkpoints"
_MAX_DEPTH = 4


def find_run(folder: str | Path) -> Path | None:
    """Return the run that a folder stands for: the folder itself, or the one in it.

    Returns:
        The run's directory; None where there is no run, and for the folder of a model.

    Raises:
        ValueError: there are several runs in the folder.
    """
    folder = Path(folder)
    if not folder.is_dir() or any((folder / name).is_file() for name in (CONFIG, OPEN_CLIP)):
        return None
    if _is_run(folder):
        return folder
    every = list(runs_below(folder))
    # An attempt that failed leaves a run without checkpoints.
    runs = [run for run in every if any((run / CHECKPOINTS).glob("*.ckpt"))] or every
    if len(runs) > 1:
        names = ", ".join(str(run) for run in runs[:4])
        raise ValueError(
            f"{folder} has {len(runs)} runs in it: name one of them ({names}{', ...' if runs[4:] else ''})"
        )
    return runs[0] if runs else None


def best_checkpoint(run: Path) -> tuple[Path, str]:
    """Return a run's best checkpoint by the metric that it watched, or its last one, and which it is.

    Raises:
        ValueError: the run has no checkpoint, or a damaged one.
    """
    files = sorted((run / CHECKPOINTS).glob("*.ckpt"), key=lambda file: (file.stat().st_mtime, file.name))
    if not files:
        raise ValueError(f"{run} has no checkpoint in {CHECKPOINTS}/: train it first, or name another run")
    last = files[-1]
    # The newest one that says it, for a copy of a run may have other times.
    watched = next(filter(None, (_watched(file)[1] for file in reversed(files))), None)
    if watched:
        best = run / CHECKPOINTS / Path(watched["best_model_path"]).name
        if best.is_file():
            score = watched.get("best_model_score")
            shown = "" if score is None else f" {float(score):.4f}"
            return best, f"best {watched['monitor']}{shown}"
    return last, f"last, step {_content(last).get('global_step', 0):,}"


def best_score(run: Path) -> float:
    """Return the best value of the metric that a run watched, made such that higher is better; -inf for NaN.

    Raises:
        ValueError: its ModelCheckpoint watched no metric, or a file is damaged.
    """
    key, state = _watched(best_checkpoint(run)[0])
    if state.get("best_model_score") is None:
        raise ValueError(f"{run} has no best checkpoint: give the recipe a ModelCheckpoint with a monitor")
    sign = 1 if "'mode': 'max'" in key else -1  # keys are as "ModelCheckpoint{'monitor': 'val/x', 'mode': 'min', ...}"
    score = float(state["best_model_score"])
    return -math.inf if math.isnan(score) else sign * score


def _watched(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the key and the state of the ModelCheckpoint in a file that watched a metric, both empty without one."""
    for key, state in _content(file).get("callbacks", {}).items():
        if str(key).startswith("ModelCheckpoint") and state.get("monitor") and state.get("best_model_path"):
            return str(key), state
    return "", {}


def run_of(path: Path | None) -> Path | None:
    """Return the directory of the run that a checkpoint is in: its folder or the parent of it, or None."""
    above = path.resolve().parents[:2] if path is not None and path.is_file() else ()
    return next((folder for folder in above if (folder / RUN_CONFIG).is_file()), None)


def folder_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, empty if there is none."""
    file = folder / CONFIG
    return read_json(file) if file.is_file() else {}


def run_config(run: Path | None) -> dict[str, Any]:
    """Return the configuration of a run, empty without one.

    Raises:
        ValueError: it cannot be read.
    """
    if run is None or not (run / RUN_CONFIG).is_file():
        return {}
    try:
        content = yaml.safe_load((run / RUN_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{run / RUN_CONFIG} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def setting(config: Any, name: str) -> Any:
    """Return the value of a configuration at a dotted name, such as "data.init_args.train"; None if it has none."""
    for key in name.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _is_run(path: Path) -> bool:
    return (path / RUN_CONFIG).is_file() and (path / CHECKPOINTS).is_dir()


def runs_below(path: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Yield the folder itself if it is a run, or else the runs in it, by name."""
    if _is_run(path):
        yield path
        return
    if depth == 0:
        return
    # Folders may hold a million images: which are folders is known without asking for each.
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    for name in names:
        yield from runs_below(path / name, depth - 1)


def _content(file: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides its weights; the scores of its callbacks are small tensors."""
    from diffvision.models.checkpoint import read_content  # imports PyTorch

    try:
        return read_content(file, mmap=True)[0]
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: name another checkpoint of the run ({error})") from error
