"""Which checkpoint a run resumes from, and what would stop the run, checked before any data is read.

How the run then continues exactly is in `exact`; `protect` in `protection` has the arguments.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from diffvision.analysis.curves import keep_metrics
from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import (
    REPLACED,
    RUN_KEY,
    SUFFIX,
    TEMPORARY,
    DamagedCheckpoint,
    checkpoints_in,
    clean,
    explain_unwritable,
    find_newest,
    is_remote,
    module_bytes,
    open_for_writing,
    read_checkpoint,
    set_aside,
)
from diffvision.training.fault_tolerance.exact import LastCheckpoint, list_few, run_directories, settings_of

Resume = Literal["auto", "must", "never"]
Ranks = Literal["same", "any"]
NAMED = ("best", "last", "hpc")  # values of ckpt_path that Lightning resolves to a file by itself, without checking it
LOCK = ".lock"
SEPARATE = "a separate directory (the logger's version, or ModelCheckpoint's dirpath)"


@contextmanager
def prepare(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    last: LastCheckpoint,
    *,
    how: Resume,
    ranks: Ranks,
    ckpt_path: str | None,
) -> Iterator[str | None]:
    """Lock, clean and check the directories of a run; yield the checkpoint that it resumes from, or None.

    Raises:
        ValueError: there is nothing to resume from, or something that must not be resumed from; or the checkpoint is
            of another architecture or number of processes.
        OSError: a directory cannot be written to, or another run holds it.
    """
    if ckpt_path and how != "never":
        raise ValueError(
            f"ckpt_path is {ckpt_path} and resume is {how}: give one of them, because both say where to resume from"
        )
    if ckpt_path in NAMED:
        raise ValueError(f"ckpt_path is {ckpt_path}: give a file, or --resume auto, which checks what it finds")
    fast_dev_run = lightning_internals.is_dry_run(trainer)
    with ExitStack() as stack, warnings.catch_warnings():
        # These directories may hold files: what a run could overwrite in them is refused or kept below.
        warnings.filterwarnings("ignore", message=r"(Checkpoint|Experiment logs) directory .* exists and is not empty")
        path = ckpt_path if ckpt_path or fast_dev_run or how == "never" else _find_checkpoint(trainer, how)
        directories = run_directories(trainer) if last.enabled else []
        for directory in directories if how == "never" and not ckpt_path else ():
            if earlier := checkpoints_in(directory):
                raise ValueError(
                    f"{directory} already holds checkpoints: resume with --resume auto, or give this run {SEPARATE} "
                    f"({len(earlier)}: {list_few(p.name for p in earlier)})"
                )
        needed = module_bytes(module)
        if path and not is_remote(path):
            content = check_resumable(path, module, world_size=trainer.world_size, ranks=ranks)
            last.path, last.saved = (
                path,
                content.get(RUN_KEY, {}) | {"groups": settings_of(content["optimizer_states"])},
            )
            if lightning_internals.renumbers_moments(trainer.strategy, content["optimizer_states"]):
                raise ValueError(
                    f"{path} is of a run without sharding, whose moments {type(trainer.strategy).__name__} would mix "
                    "up: resume with the strategy that wrote it"
                )
            needed = max(needed, os.path.getsize(path))
            if ckpt_path:
                _refuse_later(directories, path, content["global_step"])
            del content
        for directory in directories if trainer.is_global_zero else ():
            _refuse_unwritable(directory, needed=needed)
            stack.enter_context(lock(directory))
            if removed := clean(directory):
                rank_zero_info(f"removed what a killed run left: {list_few(map(str, removed))}")
            if path is None and (earlier := sorted(directory.glob(f"*{SUFFIX}"))):
                rank_zero_info(f"renamed {list_few(p.name for p in earlier)} in {directory} to *{SUFFIX}{REPLACED}")
                for checkpoint in earlier:
                    set_aside(checkpoint)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                keep_metrics(Path(logger.log_dir))
        try:
            yield path
        except (ValueError, OSError):
            raise
        except Exception as error:  # torch and Lightning raise many kinds of error for a state that does not fit
            if path is None or not _is_of_loading(error):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"cannot resume from {path}: its states do not fit this run ({reason}): set what it was trained with, "
                "or begin a new run"
            ) from error


def _is_of_loading(error: Exception) -> bool:
    """Return whether an error was raised where Lightning restores the states of a checkpoint."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("checkpoint_connector" in frame.filename and "restore" in frame.name for frame in frames)


def _find_checkpoint(trainer: pl.Trainer, how: Resume) -> str | None:
    """Find the newest exact checkpoint of the run's directories, and say which are passed over."""
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    adopted = _adopt_version(logger)
    directories = run_directories(trainer)
    path, _, faults = find_newest(directories)
    for damaged, reason in faults.items():
        rank_zero_warn(f"passed over {damaged}: it {reason}")
    if path is not None:
        rank_zero_info(f"resuming from {path}")
        return str(path)
    searched = list_few(map(str, directories)) or "ModelCheckpoint's directories, none of which is on this machine"
    if how == "must":
        skipped = "".join(f"; {damaged.name} {reason}" for damaged, reason in faults.items())
        raise ValueError(
            f"resume is must, but there is no valid checkpoint in {searched}{skipped}: set resume to auto to begin"
        )
    if adopted:
        lightning_internals.set_version(logger, None)  # leave alone a directory with damaged checkpoints only
        directories = run_directories(trainer)
    for damaged, reason in faults.items():
        if damaged.parent in directories:
            raise ValueError(
                f"no checkpoint in {damaged.parent} can be resumed from: move them away, or set another logger version "
                f"({damaged.name} {reason})"
            )
    others = list_few([version.name for version in _versions_with_checkpoints(logger)])
    elsewhere = f" (there are checkpoints of {others} in {logger.root_dir})" if others else ""
    rank_zero_info(f"nothing to resume from in {searched}: a new run{elsewhere}")
    return None


def _adopt_version(logger: Any) -> bool:
    """Let a logger without a chosen version continue the last one with checkpoints; return whether there is one."""
    if not lightning_internals.has_open_version(logger):
        return False
    names = [version.name for version in _versions_with_checkpoints(logger)]
    numbers = [int(name.removeprefix("version_")) for name in names if re.fullmatch(r"version_\d+", name)]
    lightning_internals.set_version(logger, max(numbers, default=None))
    return bool(numbers)


def _versions_with_checkpoints(logger: Any) -> list[Path]:
    """Return the directories of a logger's versions that hold checkpoints."""
    root = getattr(logger, "root_dir", None)
    versions = Path(root).glob("*") if root else ()
    return sorted(version for version in versions if any((version / "checkpoints").rglob(f"*{SUFFIX}")))


def _refuse_later(directories: list[Path], path: str, step: int) -> None:
    """Raise ValueError where the directories hold later checkpoints: the next --resume auto would take one of those."""
    later, reached, _ = find_newest(directories)
    if reached > step:
        raise ValueError(
            f"ckpt_path is {path}, of step {step}, but {later} is of step {reached}: move later ones away, or give "
            f"this run {SEPARATE}"
        )


def _refuse_unwritable(directory: Path, needed: int) -> None:
    """Raise OSError where a directory cannot be written to, or has fewer than `needed` bytes free."""
    probe = directory / TEMPORARY.format("probe")  # without a process number: one of another machine may be the same
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.unlink(missing_ok=True)  # a link may have come with the directory
        probe.write_bytes(b"0")
        probe.unlink()
        if shutil.disk_usage(directory).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise explain_unwritable(error, directory, needed=needed) from error


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Lock a directory for this process; the lock ends with the process, however that ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the lock file is a link, or no regular file.
    """
    with os.fdopen(open_for_writing(directory / LOCK, os.O_RDWR | os.O_APPEND), "a+") as file:
        try:
            # Not flock: workers would inherit that, and hold it after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise BlockingIOError(
                error.errno,
                f"another run ({file.read().strip() or 'unknown'}) writes to {directory}: wait for its end, or give "
                f"this one {SEPARATE}",
            ) from error
        except OSError as error:  # a filesystem without locks
            rank_zero_warn(f"{directory} cannot be locked ({error.strerror}): see that no other run writes to it")
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield


# --- comparing ---


def check_resumable(path: str, module: pl.LightningModule, *, world_size: int, ranks: Ranks) -> dict[str, Any]:
    """Check that this module, in so many processes, can resume from a checkpoint; return its content.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, holds objects, or is of another architecture or number of processes.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}: give a file that exists, or --resume auto")
    if Path(path).is_dir():  # sharded: Lightning reports differences when it loads them
        return {"optimizer_states": [], "global_step": 0}
    try:
        checkpoint = read_checkpoint(path)
    except DamagedCheckpoint as error:
        raise ValueError(f"cannot resume from {path}: it {error}; give another, or --resume auto") from error
    mismatch = _model_mismatch(module, checkpoint)
    # Modules with `check_checkpoint` are ours, which are whole from the start.
    complete = bool(mismatch) or hasattr(module, "check_checkpoint")
    differing = _differences(checkpoint["state_dict"], module, complete=complete)
    if differing or mismatch:
        keys = f"it is of another architecture, {len(differing)} keys differ: {list_few(differing, '; ')}"
        remedy = mismatch or "Set the model that it is of, or begin a new run"
        raise ValueError(f"cannot resume from {path}: {keys + '. ' if differing else ''}{remedy}")
    trained = checkpoint.get(RUN_KEY, {}).get("world_size") or world_size
    if trained != world_size and ranks == "same":
        raise ValueError(
            f"cannot resume from {path}: {trained} processes trained it, not {world_size}: run {trained} "
            "(trainer.devices x num_nodes), or --resume_ranks any"
        )
    return checkpoint


def _differences(saved: dict[str, Any], module: pl.LightningModule, *, complete: bool) -> list[str]:
    """Describe the keys of two state_dicts that are not in both, or that differ in shape.

    Args:
        saved: a checkpoint's state_dict.
        module: the module that is compared with it.
        complete: report keys of the checkpoint alone even where `configure_model` may still add them to the module.
    """
    current, lines = module.state_dict(), []
    for name, value in current.items():
        shape = _shape(value)
        if name not in saved:
            lines += [f"{name} {shape} only in the model"] if module.strict_loading else []
        elif (saved_shape := _shape(saved[name])) != shape:
            lines.append(f"{name} {saved_shape} in the checkpoint and {shape} in the model")
    if complete or (module.strict_loading and not is_overridden("configure_model", module)):
        lines += [f"{name} {_shape(saved[name])} only in the checkpoint" for name in saved if name not in current]
    return lines


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "no tensor"
    return f"{list(value.shape)}{' complex' if value.is_complex() else ''}"


def _model_mismatch(module: pl.LightningModule, checkpoint: dict[str, Any]) -> str:
    """Return the error of the module's `check_checkpoint`; "" where it accepts the checkpoint or does not exist."""
    try:
        getattr(module, "check_checkpoint", lambda _: None)(checkpoint)
    except ValueError as error:
        return str(error)
    except Exception as error:  # the checkpoint's description of its model may have any content
        return f"its description of its model cannot be read ({type(error).__name__}: {error})"
    return ""
