"""Checkpoints on disk: written whole or not at all, and the newest one that a run resumes from exactly.

A save writes a temporary file in the same directory, syncs it and renames it: whenever the process is killed, the name
is that of the old file or of the new one. What makes a checkpoint exact is in `exact`.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

RUN_KEY = "diffvision_run"  # in a checkpoint: what a run needs besides Lightning's keys; in files, so never rename it
LAST, PREEMPTED, FINAL = "last.ckpt", "preempted.ckpt", "final.ckpt"
EXACT = (LAST, PREEMPTED)  # names of the files that runs resume from
TEMPORARY = ".saving-{}.tmp"
SUFFIX, REPLACED = ".ckpt", ".replaced"


class DamagedCheckpoint(ValueError):
    """A file is no checkpoint that can be resumed from; the message is the reason."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin that saves, loads and removes checkpoints; this one never leaves half of a file.

    Directories of sharded checkpoints (save_distributed_checkpoint: true) are not written through it, and remote ones
    are left to fsspec, whose stores replace an object at once.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint.

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
        path = Path(path)
        temporary = path.parent / TEMPORARY.format(os.getpid())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # left by a killed run, or a link that came with the directory
            with temporary.open("xb") as file:
                _save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if unsafe := sorted(get_unsafe_globals_in_checkpoint(temporary)):
                raise ValueError(
                    f"{path} would hold objects of {', '.join(unsafe[:3])}, which weights_only=True refuses: save only "
                    "tensors and plain values in it"
                )
            os.replace(temporary, path)
            _sync_directory(path.parent)
        except OSError as error:
            raise explain_unwritable(error, path, needed=tensor_bytes(checkpoint)) from error
        finally:
            temporary.unlink(missing_ok=True)

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


def _save(checkpoint: dict[str, Any], file: Any) -> None:
    """Write with torch.save; raise the OSError that it reports as "unexpected pos"."""
    failed: list[OSError] = []
    write = file.write

    class Writer:
        flush = staticmethod(file.flush)

        @staticmethod
        def write(data: Any) -> int:
            try:
                return write(data)
            except OSError as error:
                failed.append(error)
                raise

    writer: Any = Writer()
    try:
        torch.save(checkpoint, writer)
    except RuntimeError as error:
        raise (failed[0] if failed else error) from error


def _sync_directory(directory: Path) -> None:
    """Sync a directory to the disk, because a power failure may otherwise undo a rename."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- finding and reading ---


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Open a checkpoint and check all its bytes; its tensors are read only when they are used.

    Raises:
        DamagedCheckpoint: it is damaged, no checkpoint with an optimizer, or holds objects, NaN or infinity.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise DamagedCheckpoint("has other bytes than were saved")
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except DamagedCheckpoint:
        raise
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint("holds more than tensors and plain values, or is none") from error
    except Exception as error:  # a file that is no checkpoint can fail in any way
        raise DamagedCheckpoint(f"is damaged or no checkpoint ({type(error).__name__})") from error
    if not isinstance(content, dict) or "state_dict" not in content or "global_step" not in content:
        raise DamagedCheckpoint("is no checkpoint of Lightning")
    if "optimizer_states" not in content:
        raise DamagedCheckpoint("holds weights alone, no optimizer state")
    if bad := find_bad_states(content):
        raise DamagedCheckpoint(f"holds NaN or infinity in {bad}")
    return content


def is_exact(checkpoint: dict[str, Any]) -> bool:
    """Return whether a checkpoint says that a run resumes from it exactly."""
    run = checkpoint.get(RUN_KEY)
    return isinstance(run, dict) and run.get("exact") is True


def find_newest(directories: Iterable[Path]) -> tuple[Path | None, int, dict[Path, str]]:
    """Find the checkpoint of the highest step that is resumed from exactly.

    Returns:
        Its path or None, its step, and the reason for each file that was passed over.
    """
    faults: dict[Path, str] = {}
    found: list[tuple[int, float, Path]] = []
    for path in (directory / name for directory in directories for name in EXACT):
        if not os.path.lexists(path):
            continue
        try:
            content = read_checkpoint(path)
            if is_exact(content):
                found.append((content["global_step"], path.stat().st_mtime, path))
            else:
                faults[path] = "does not say that it resumes exactly: give it with --ckpt_path"
        except DamagedCheckpoint as error:
            faults[path] = str(error)
    step, _, newest = max(found, default=(0, 0.0, None))
    return newest, step, faults


def checkpoints_in(directory: Path) -> list[Path]:
    """List the checkpoints of a directory, and of those below it, by name."""
    return sorted(directory.rglob(f"*{SUFFIX}"))


def step_of(path: Path) -> int:
    """Return the step of a checkpoint; 0 for a file that is none."""
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # such a file can fail torch's reader in any way
        return 0


def set_aside(path: Path) -> None:
    """Rename a checkpoint that a run will write again: ModelCheckpoint would give the new one another name."""
    path.rename(path.with_name(path.name + REPLACED))


def clean(directory: Path) -> list[Path]:
    """Remove the temporary files that killed runs left."""
    left = [*directory.glob(TEMPORARY.format("*"))]
    for path in left:
        path.unlink(missing_ok=True)
    return left


# --- numbers that are not finite ---


def find_bad_states(checkpoint: dict[str, Any]) -> str:
    """Name the first few weights and optimizer states that hold NaN or infinity; "" where all are finite."""
    moments = (
        {f"{name} of parameter {index}": value for name, value in state.items()}
        for optimizer in checkpoint["optimizer_states"]
        for index, state in optimizer["state"].items()
        if isinstance(state, dict)
    )
    return find_bad_weights(checkpoint) or next(filter(None, map(find_bad_tensors, moments)), "")


def find_bad_weights(checkpoint: dict[str, Any]) -> str:
    """Apply `find_bad_tensors` to a checkpoint's weights; with EMA there are two sets of them."""
    sets = (checkpoint.get(name, {}) for name in ("state_dict", "current_model_state"))
    return next(filter(None, map(find_bad_tensors, sets)), "")


def find_bad_tensors(weights: dict[str, Any], few: int = 3) -> str:
    """Name the first few tensors of a state_dict that hold NaN or infinity; return "" where all are finite.

    A mask of zeros and -inf, which some models keep among their buffers, counts as finite.
    """
    names = [name for name, value in weights.items() if isinstance(value, Tensor) and not _is_finite(value)]
    return ", ".join(names[:few]) + (f" and {len(names) - few} more" if len(names) > few else "")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; tensors of 0 and -inf are masks, and pass."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.half()  # aminmax takes no float8
    least, most = tensor.aminmax()  # one pass without a temporary; NaN propagates
    return bool((least.isfinite() & most.isfinite()) or ((tensor == 0) | (tensor == -torch.inf)).all())


# --- files ---


def explain_unwritable(error: OSError, path: Path, *, needed: int) -> OSError:
    """Return the error to raise where a checkpoint cannot be written: which, why, the bytes it takes and a remedy."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} are free"
    except OSError:
        free = "its directory cannot be read"
    return OSError(
        error.errno,
        f"no checkpoint can be written to {path}: {error.strerror or error}. It takes {needed:,} bytes and {free}: "
        "make room, or set another directory (ModelCheckpoint's dirpath). Checkpoints saved before are untouched",
    )


def refuse_link(path: Path) -> None:
    """Raise OSError if a file that will be written to is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link to {os.readlink(path)}, which would be written to: remove it")


def open_for_writing(path: Path, flags: int) -> int:
    """Open a file for writing, and create it if it is missing; return its descriptor.

    Raises:
        OSError: it cannot be written, is no regular file, or is a link: then another file would be written to.
    """
    refuse_link(path)
    if path.exists() and not path.is_file():  # opening a FIFO may wait for ever
        raise OSError(errno.EINVAL, f"{path} is no regular file (a directory, FIFO or device): remove it")
    opened = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if os.fstat(opened).st_nlink > 1:
        os.close(opened)
        raise OSError(errno.EMLINK, f"{path} has another name too (a hard link), and would be written to: remove it")
    return opened


def tensor_bytes(content: Any) -> int:
    """Count the bytes of all tensors in nested containers, about what a checkpoint of them takes."""
    if isinstance(content, Tensor):
        return content.nbytes
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return sum(map(tensor_bytes, values))


def module_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's weights, the least that a checkpoint of it takes."""
    return tensor_bytes([*module.parameters(), *module.buffers()])


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL, of a remote filesystem such as s3."""
    return "://" in str(path)
