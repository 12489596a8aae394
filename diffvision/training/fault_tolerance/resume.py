"""The choice of the checkpoint to resume from, and checks that are made before any data is read.

`exact` restores the run's state; `protection.protect` documents the arguments.
"""

from __future__ import annotations

import fcntl
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from diffvision.analysis.curves import keep_metrics
from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import (
    REPLACED,
    RUN_KEY,
    SUFFIX,
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
        # These directories may hold files: what a run could overwrite in them is refused or kept below.
        warnings.filterwarnings("ignore", message=r"(Checkpoint|Experiment logs) directory .* exists and is not empty")
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
            if path is None and (earlier := sorted(directory.glob(f"*{SUFFIX}"))):
                rank_zero_info(f"renamed {list_few(p.name for p in earlier)} in {directory} to *{SUFFIX}{REPLACED}")
                for checkpoint in earlier:
                    set_aside(checkpoint)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, CSVLogger):
                keep_metrics(Path(logger.log_dir))
        yield path


def _find_checkpoint(trainer: pl.Trainer, how: Resume) -> str | None:
    """Find the newest exact checkpoint in the run's directories, and warn of damaged ones."""
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    adopted = _adopt_version(logger)
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
    if adopted:
        lightning_internals.set_version(logger, None)  # leave alone a directory with damaged checkpoints only
        directories = run_directories(trainer)
    if held := [damaged for damaged in faults if damaged.parent in directories]:
        raise ValueError(
            f"no checkpoint in {held[0].parent} can be resumed from: move {list_few(p.name for p in held)} away, or "
            "set another logger version"
        )
    rank_zero_info(f"no checkpoint in {searched}: starting a new run")
    return None


def _adopt_version(logger: Any) -> bool:
    """Let a logger without a chosen version continue the last one with checkpoints; return whether there is one."""
    if not lightning_internals.has_open_version(logger) or logger.root_dir is None:
        return False
    names = {path.parents[1].name for path in Path(logger.root_dir).glob(f"version_*/checkpoints/*{SUFFIX}")}
    numbers = [int(name.removeprefix("version_")) for name in names if re.fullmatch(r"version_\d+", name)]
    lightning_internals.set_version(logger, max(numbers, default=None))
    return bool(numbers)


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
    """Lock a directory for this process; the lock is released when the process ends, however it ends."""
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
        yield


# --- comparing ---


def check_resumable(path: str, module: pl.LightningModule, *, world_size: int, ranks: Ranks) -> dict[str, Any]:
    """Check that a module can resume from a checkpoint in `world_size` processes; return its content."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}: give a local file, or --resume auto")
    try:
        checkpoint = read_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"cannot resume from {path}: it {error}; give another, or --resume auto") from error
    check = getattr(module, "check_checkpoint", None)  # of our modules, which are whole from the start
    try:
        if check is not None:
            check(checkpoint)
    except ValueError as error:
        raise ValueError(f"cannot resume from {path}: {error}") from error
    whole = check is not None or (module.strict_loading and not is_overridden("configure_model", module))
    if differing := _differences(checkpoint["state_dict"], module.state_dict()) if whole else []:
        raise ValueError(
            f"cannot resume from {path}: it is of another architecture, {len(differing)} keys differ: "
            f"{list_few(differing, '; ')}. Set its model, or start a new run"
        )
    trained = checkpoint.get(RUN_KEY, {}).get("world_size") or world_size
    if trained != world_size and ranks == "same":
        raise ValueError(
            f"cannot resume from {path}: {trained} processes trained it, not {world_size}: run {trained} "
            "(trainer.devices x num_nodes), or --resume_ranks any"
        )
    return checkpoint


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Describe keys that only one of two state_dicts has, or whose shapes differ."""
    before, now = (
        {name: list(getattr(value, "shape", ())) for name, value in state.items()} for state in (saved, current)
    )
    return [
        f"{name} {before.get(name, 'missing')} in the checkpoint and {now.get(name, 'missing')} in the model"
        for name in now | before
        if before.get(name) != now.get(name)
    ]
