"""The choice of the checkpoint to resume from, and checks that are made before any data is read.

`exact` restores the run's state; `protection.protect` documents the arguments.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import (
    EXACT,
    FINAL,
    RUN_KEY,
    explain_unwritable,
    find_checkpoints,
    find_newest,
    read_checkpoint,
    remove_temporary_files,
    set_aside,
)
from diffvision.training.fault_tolerance.exact import LastCheckpoint, list_few, run_directories

Resume = Literal["auto", "must", "never"]
Ranks = Literal["same", "any"]
LOCK = ".lock"
SEPARATE = "a separate directory (the logger's version, or ModelCheckpoint's dirpath)"


@contextmanager
def prepare_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    last: LastCheckpoint,
    *,
    how: Resume,
    ranks: Ranks,
    ckpt_path: str | None,
) -> Iterator[str | None]:
    """Lock, clean and check the directories of a run; yield the checkpoint to resume from, or None."""
    if ckpt_path and how != "never":
        raise ValueError(f"ckpt_path must be null if resume is {how}, got {ckpt_path}: give one of them")
    with ExitStack() as stack, warnings.catch_warnings():
        lightning_internals.ignore_advice()  # of directories that hold files: what could be overwritten is refused
        path = ckpt_path
        if how != "never" and not lightning_internals.is_dry_run(trainer):
            path = _find_checkpoint(trainer, how)
        directories = run_directories(trainer) if last.enabled else []
        for directory in directories if how == "never" and not ckpt_path else ():
            if earlier := find_checkpoints(directory):
                raise ValueError(
                    f"{directory} already holds checkpoints: resume with --resume auto, or give this run {SEPARATE} "
                    f"({len(earlier)}: {list_few(p.name for p in earlier)})"
                )
        last.optimizers = None
        if path:
            content = check_resumable(path, module, world_size=trainer.world_size, ranks=ranks)
            last.optimizers = content.get(RUN_KEY, {}).get("optimizers")
            if lightning_internals.would_misplace_moments(trainer.strategy, content["optimizer_states"]):
                raise ValueError(
                    f"{path} was saved without sharding, and {type(trainer.strategy).__name__} would mix up its "
                    "moments: resume with the strategy that wrote it"
                )
            if ckpt_path:
                _refuse_later(directories, path, content["global_step"])
            del content
        for directory in directories if trainer.is_global_zero else ():
            stack.enter_context(lock_directory(directory))
            remove_temporary_files(directory)
            if path is None and (directory / FINAL).is_file():  # of another run; Lightning numbers its own files
                set_aside(directory / FINAL)
        lightning_internals.keep_logged_metrics(trainer)
        yield path


def _find_checkpoint(trainer: pl.Trainer, how: Resume) -> str | None:
    """Find the newest exact checkpoint in the run's directories, and warn of damaged ones."""
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    _adopt_version(logger)
    directories = run_directories(trainer)
    path, _, faults = find_newest(directories)
    for damaged, reason in faults.items():
        rank_zero_warn(f"skipped {damaged}: it {reason}")
    if path is not None:
        rank_zero_info(f"resuming from {path}")
        return str(path)
    searched = list_few(map(str, directories)) or "ModelCheckpoint's directories, none of which is on this machine"
    if how == "must":
        raise ValueError(f"resume is must, but {searched} has no valid checkpoint: set resume to auto to start")
    if faults:
        raise ValueError(
            f"no checkpoint can be resumed from: move {list_few(map(str, faults))} away, or set another logger version"
        )
    rank_zero_info(f"no checkpoint in {searched}: starting a new run")
    return None


def _adopt_version(logger: Any) -> None:
    """Let a logger without a chosen version continue the last one that can be resumed exactly."""
    if not lightning_internals.has_open_version(logger) or logger.root_dir is None:
        return
    found = (path for name in EXACT for path in Path(logger.root_dir).glob(f"version_*/checkpoints/{name}"))
    numbers = [path.parents[1].name.removeprefix("version_") for path in found]
    lightning_internals.set_version(logger, max(map(int, filter(str.isdecimal, numbers)), default=None))


def _refuse_later(directories: list[Path], path: str, step: int) -> None:
    """Raise ValueError if the directories hold a later checkpoint, which the next `--resume auto` would take."""
    later, reached, _ = find_newest(directories)
    if reached > step:
        raise ValueError(
            f"ckpt_path is {path}, of step {step}, but {later} is of step {reached}: move later ones away, or give "
            f"this run {SEPARATE}"
        )


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory for this process; the lock is released when the process ends, however it ends.

    A directory that holds nothing else at the end, of a run that was refused, is removed.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a")
    except OSError as error:
        raise explain_unwritable(error, directory) from error
    with file:
        try:
            # Not flock: workers would inherit that, and hold it after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise BlockingIOError(
                error.errno, f"another run writes to {directory}: wait for its end, or give this one {SEPARATE}"
            ) from error
        except OSError as error:  # a filesystem without locks
            rank_zero_warn(f"{directory} cannot be locked ({error.strerror}): make sure that no other run writes to it")
        try:
            yield
        finally:
            if os.listdir(directory) == [LOCK]:
                shutil.rmtree(directory, ignore_errors=True)


# --- comparing ---


def check_resumable(path: str, module: pl.LightningModule, *, world_size: int, ranks: Ranks) -> dict[str, Any]:
    """Check that a module can resume from a checkpoint in `world_size` processes; return its content."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}: give a local file, or --resume auto")
    try:
        checkpoint = read_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"cannot resume from {path}: it {error}; give another, or --resume auto") from error
    try:
        check: Any = getattr(module, "check_checkpoint", None)  # of our modules
        if check is not None:
            check(checkpoint)
            _compare_shapes(checkpoint["state_dict"], module.state_dict())
    except ValueError as error:
        raise ValueError(f"cannot resume from {path}: {error}") from error
    trained = checkpoint.get(RUN_KEY, {}).get("world_size") or world_size
    if trained != world_size and ranks == "same":
        raise ValueError(
            f"cannot resume from {path}: {trained} processes trained it, not {world_size}: run {trained} "
            "(trainer.devices x num_nodes), or --resume_ranks any"
        )
    return checkpoint


def _compare_shapes(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ValueError if two state_dicts have other keys or shapes."""
    before, now = ({(name, getattr(value, "shape", ())) for name, value in state.items()} for state in (saved, current))
    if differing := {name for name, _ in before ^ now}:
        names = list_few(sorted(differing))
        raise ValueError(f"it is of another architecture: {len(differing)} keys differ ({names}); set its model")
