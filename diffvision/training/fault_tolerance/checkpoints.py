"""Checkpoints on disk: written whole or not at all, and the newest valid one found among others.

A save of `last.ckpt` writes a temporary file in the same directory and syncs it; writes `last.ckpt.json`, the record,
which describes both the new bytes and the old ones while a file is replaced; then renames the temporary file. Whenever
the process is killed, `last.ckpt` is the old file or the new one, and its record knows which. What is resumed from a
checkpoint, and how, is in `resume` and `run_state`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from diffvision.files import sha256
from diffvision.training.fault_tolerance.content import find_bad_states, find_bad_weights, find_fault, read_checkpoint
from diffvision.training.fault_tolerance.files import (
    explain_unwritable,
    is_remote,
    sync_directory,
    tensor_bytes,
    write_file,
)
from diffvision.training.fault_tolerance.records import (
    RECORD,
    SUFFIX,
    TEMPORARY,
    DamagedCheckpoint,
    Record,
    describe,
    read_records,
    readable_records,
    record_path,
    write_records,
)
from diffvision.training.fault_tolerance.rotation import Rotation


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin that saves, loads and removes checkpoints; this one never leaves half of a file.

    Directories of sharded checkpoints (save_distributed_checkpoint: true) are not written through it, and remote ones
    are left to fsspec, whose stores replace an object at once; neither has records.

    Attributes:
        rotation: what stays of replaced and removed checkpoints until the next step; None: they go at once.
    """

    rotation: Rotation | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint and its record.

        Raises:
            OSError: it cannot be written; a file that was there before is untouched.
            ValueError: it holds objects that cannot be loaded with weights_only=True.
            FloatingPointError: it holds weights that are NaN or infinite; a file that was there before is untouched.
        """
        if bad := find_bad_weights(checkpoint):
            raise FloatingPointError(
                f"no checkpoint is written to {path}: {bad} has NaN or infinity: resume an earlier one with a lower "
                "optimizer.lr"
            )
        if is_remote(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, but a local file takes none: leave it out")
        path = Path(path)
        temporary = path.parent / TEMPORARY.format(os.getpid())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size, digest = write_file(temporary, lambda file: torch.save(checkpoint, file))
            _refuse_objects(temporary, path)
            self._put_in_place(temporary, path, describe(checkpoint, size, digest))
        except OSError as error:
            raise explain_unwritable(error, path, needed=tensor_bytes(checkpoint)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _put_in_place(self, temporary: Path, path: Path, record: Record) -> None:
        """Rename a new file to a checkpoint, with a record that describes the old file too until that is replaced."""
        replaced = readable_records(path) if path.is_file() else []
        if self.rotation is not None and path.is_file():
            self.rotation.before_replacing(path)
        write_records(path, [record, *replaced])
        os.replace(temporary, path)
        sync_directory(path.parent)
        if self.rotation is not None:
            self.rotation.saved(path)
        if replaced:
            write_records(path, [record])

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; only tensors and plain values, unless weights_only=False is asked for by name.

        Raises:
            ValueError: it lies behind a URL of the web.
        """
        if str(path).startswith(("http://", "https://")):
            raise ValueError(
                f"{path} is a URL: download it, compare its sha256 with the publisher's, and give the file"
            )
        return super().load_checkpoint(path, map_location, weights_only is None or weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint and its record, or leave that to the rotation."""
        if is_remote(path):
            super().remove_checkpoint(path)
        elif self.rotation is None or not self.rotation.removing(Path(path)):
            super().remove_checkpoint(path)
            record_path(path).unlink(missing_ok=True)  # last, so that no checkpoint is ever without a record

    def teardown(self) -> None:
        """Remove at a run's end what the rotation has kept, unless the last step was skipped."""
        super().teardown()
        if self.rotation is not None and not self.rotation.skipping:
            self.rotation.step_finite()
            self.rotation = None


def _refuse_objects(written: Path, path: Path) -> None:
    if unsafe := sorted(get_unsafe_globals_in_checkpoint(written)):
        raise ValueError(
            f"{path} would hold objects of {', '.join(unsafe[:3])}, which weights_only=True refuses: save only "
            "tensors and plain values in it"
        )


# --- finding and checking ---


def verify(path: str | Path) -> Record:
    """Return the record of a checkpoint whose bytes are those that were saved.

    Raises:
        DamagedCheckpoint: they are not; the message says how.
    """
    path, reason = Path(path), ""
    for record in read_records(path):
        if not (reason := _find_file_fault(path, record)):
            return record
    raise DamagedCheckpoint(reason)


def find_newest_valid(directories: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """Find the checkpoint of the highest step that can be resumed from.

    Returns:
        It, or None; and the checkpoints that were skipped, with the reason.
    """
    faults: dict[Path, str] = {}
    candidates: list[tuple[int, float, Path, Record]] = []
    for path in (path for directory in directories for path in checkpoints_in(directory)):
        try:
            candidates += [(record.step, record.saved, path, record) for record in read_records(path)]
        except DamagedCheckpoint as error:
            faults[path] = str(error)
    for _, _, path, record in sorted(candidates, key=lambda c: c[:2], reverse=True):
        unusable = "" if record.resumable else "holds weights alone, or was not taken between two steps"
        reason = _find_file_fault(path, record) or unusable or _find_content_fault(path, record)
        if not reason:
            faults.pop(path, None)  # killed while it was replaced: the file is the former one, and whole
            return path, faults
        faults.setdefault(path, reason)
    return None, faults


def checkpoints_in(directory: Path) -> list[Path]:
    """List the checkpoints of a directory by name, without symbolic links (save_last="link") to some of them."""
    return sorted(p for p in directory.glob(f"*{SUFFIX}") if not p.is_symlink())


def clean(directory: Path) -> list[Path]:
    """Remove what killed runs left: temporary files, and records whose checkpoint was never finished or is gone."""
    orphans = [*directory.glob(TEMPORARY.format("*") + "*")]
    records = directory.glob(f"*{SUFFIX}{RECORD}")
    orphans += [record for record in records if not record.with_suffix("").exists()]
    for orphan in orphans:
        orphan.unlink(missing_ok=True)
    return orphans


def _find_file_fault(path: Path, record: Record) -> str:
    """Say what is wrong with a file, going by a record of it; return "" where it is as it was saved."""
    if path.is_dir():
        return "is a directory: sharded checkpoints have no sha256; give it with --ckpt_path"
    if not path.is_file():
        return "is gone"
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return "is empty" if not size else f"has {size:,} bytes of the {record.bytes:,} that were saved"
        same = sha256(path) == record.sha256
    except OSError as error:  # a bad block, or no permission: an earlier checkpoint may be readable
        return f"cannot be read ({error.strerror or error})"
    return "" if same else "has other bytes than were saved (sha256)"


def _find_content_fault(path: Path, record: Record) -> str:
    """Say what is wrong with the content of a file whose bytes are those that were saved; return "" for no fault."""
    try:
        content = read_checkpoint(path)
    except DamagedCheckpoint as error:
        return str(error)
    if fault := find_fault(content):
        return fault
    if (step := content["global_step"]) != record.step:
        return f"is of step {step}, and its record of step {record.step}"
    return f"holds NaN or infinity in {bad}" if (bad := find_bad_states(content)) else ""
