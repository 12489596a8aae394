"""Checkpoints on disk: written whole or not at all, and the newest one that a run resumes from exactly.

A save writes a temporary file in the same directory, syncs it and renames it: whenever the process is killed, the name
is that of the old file or of the new one. What makes a checkpoint exact is in `exact`.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

RUN_KEY = "diffvision_run"  # in a checkpoint: what a run needs besides Lightning's keys; in files, so never rename it
LAST, PREEMPTED, FINAL = "last.ckpt", "preempted.ckpt", "final.ckpt"
EXACT = (LAST, PREEMPTED)  # names of the files that runs resume from
TEMPORARY = ".saving-{}.tmp"
SUFFIX, REPLACED = ".ckpt", ".replaced"


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's CheckpointIO with atomic writes: a local file is complete or absent.

    Remote stores replace objects atomically, so remote checkpoints are written by fsspec.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: it cannot be written.
            ValueError: it holds objects that cannot be loaded with weights_only=True. An existing file is kept in
                both cases.
        """
        if is_remote(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        path = Path(path)
        temporary = path.parent / TEMPORARY.format(os.getpid())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # left by a killed run, or a link that came with the directory
            with temporary.open("xb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if unsafe := sorted(get_unsafe_globals_in_checkpoint(temporary)):
                raise ValueError(
                    f"{path} would hold objects of {', '.join(unsafe[:3])}, which weights_only=True refuses: save only "
                    "tensors and plain values in it"
                )
            os.replace(temporary, path)
            sync_directory(path.parent)
        except (OSError, RuntimeError) as error:
            # Where a write fails, torch.save says "unexpected pos", in the context of the system's reason.
            reason = error if isinstance(error, OSError) else error.__context__
            if not isinstance(reason, OSError):
                raise
            raise explain_unwritable(reason, path) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint: only tensors and plain values, unless weights_only=False is passed explicitly."""
        return super().load_checkpoint(path, map_location, weights_only is None or weights_only)


def sync_directory(directory: Path) -> None:
    """Sync a directory to disk: otherwise a power failure may undo a rename."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- finding and reading ---


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Open a checkpoint, memory-mapped, after checking all its bytes.

    Raises:
        ValueError: it is damaged, holds objects, or is not a checkpoint with an optimizer; the message begins with a
            verb, for a caller to put the file's name before it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() is not None
        content = {} if damaged else torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("holds more than tensors and plain values, or is not a checkpoint") from error
    except Exception as error:  # a file that is no checkpoint can fail in any way
        raise ValueError(f"is damaged or not a checkpoint ({type(error).__name__})") from error
    if damaged:
        raise ValueError("has other bytes than were saved")
    if not isinstance(content, dict) or not content.keys() >= {"state_dict", "global_step", "optimizer_states"}:
        raise ValueError("is not a checkpoint with an optimizer's state")
    return content


def find_newest(directories: Iterable[Path]) -> tuple[Path | None, int, dict[Path, str]]:
    """Find the checkpoint with the highest step among those that a run resumes from exactly.

    Returns:
        Its path or None, its step, and for each file that was skipped the reason.
    """
    faults: dict[Path, str] = {}
    found: list[tuple[int, float, Path]] = []
    for path in (directory / name for directory in directories for name in EXACT):
        if not os.path.lexists(path):
            continue
        try:
            content = read_checkpoint(path)
            if content.get(RUN_KEY, {}).get("exact") is True:
                found.append((content["global_step"], path.stat().st_mtime, path))
            else:
                faults[path] = "does not say that it resumes exactly: give it with --ckpt_path"
        except ValueError as error:
            faults[path] = str(error)
    step, _, newest = max(found, default=(0, 0.0, None))
    return newest, step, faults


def find_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints below a directory, sorted by name."""
    return sorted(directory.rglob(f"*{SUFFIX}"))


def read_step(path: Path) -> int:
    """Return the step of a checkpoint; 0 if the file is not a checkpoint."""
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # such a file can fail torch's reader in any way
        return 0


def set_aside(path: Path) -> None:
    """Rename a checkpoint that the run will write again; otherwise ModelCheckpoint would choose another name."""
    path.rename(path.with_name(path.name + REPLACED))


def remove_temporary_files(directory: Path) -> None:
    """Remove temporary files that killed runs have left."""
    for path in directory.glob(TEMPORARY.format("*")):
        path.unlink(missing_ok=True)


# --- files ---


def explain_unwritable(error: OSError, path: Path) -> OSError:
    """Return an OSError that says which checkpoint cannot be written, why, and what to do."""
    return OSError(
        error.errno,
        f"no checkpoint can be written to {path}: {error.strerror or error}: make room, or set ModelCheckpoint's "
        "dirpath. Checkpoints saved before are untouched",
    )


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL of a remote filesystem, such as s3."""
    return "://" in str(path)
