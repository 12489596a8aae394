"""What a run goes on from, and whatever would stop it, found before any data is read."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from diffvision.analysis.curves import keep_metrics
from diffvision.training.durable.checkpoints import (
    RUN_KEY,
    SUFFIX,
    TEMPORARY,
    DamagedCheckpoint,
    checkpoints_in,
    clean,
    descriptor,
    is_remote,
    malformed,
    module_bytes,
    newest_valid,
    opened,
    record_path,
    states_not_finite,
    unwritable,
    verify,
)
from diffvision.training.durable.run_state import RunState, few

How = Literal["auto", "must", "never"]
Ranks = Literal["same", "any"]
NAMED = ("best", "last", "hpc")  # a ckpt_path that is no path: Lightning itself would look, and checks nothing
LOCK = ".lock"
OWN_DIRECTORY = "a directory of its own (the logger's version, or ModelCheckpoint's dirpath)"


@contextmanager
def prepared(
    trainer: pl.Trainer, module: pl.LightningModule, state: RunState, *, how: How, ranks: Ranks, ckpt_path: str | None
) -> Iterator[str | None]:
    """A run whose directories are locked, cleaned and writable, and the checkpoint that it goes on from, if any.

    Args:
        state: one of the trainer's callbacks.
        how: "auto": go on from the newest valid checkpoint of the run's directory, or begin where there is none;
            "must": that there is none is an error; "never": begin, and that there is one is an error.
        ranks: "any": a checkpoint of another number of processes will do.
        ckpt_path: the checkpoint that was given, which `how` may not replace.
    Raises:
        ValueError: nothing to resume from, or what must not be; or of another architecture or number of processes.
        OSError: a directory that cannot be written to, or is another run's.
    """
    if ckpt_path and how != "never":
        raise ValueError(f"ckpt_path is {ckpt_path} and resume is {how}: give one of them, for both say where to go on")
    if ckpt_path in NAMED:
        raise ValueError(f"ckpt_path is {ckpt_path}: give a file, or --resume auto, which checks what it finds")
    dry: bool = trainer.fast_dev_run  # type: ignore[attr-defined]  # Lightning sets it unannounced
    with ExitStack() as held, warnings.catch_warnings():
        # Of directories that are not empty: what would be at risk in them is refused or kept here.
        warnings.filterwarnings("ignore", message=r"(Checkpoint|Experiment logs) directory .* exists and is not empty")
        path = ckpt_path if ckpt_path or dry or how == "never" else _found(trainer, how)
        directories = [] if dry else run_directories(trainer)
        if how == "never" and not ckpt_path:
            _refuse_occupied(directories)
        needed = module_bytes(module)
        if path and not is_remote(path):
            state.path, state.saved = path, compare(path, module, world_size=trainer.world_size, ranks=ranks)
            needed = max(needed, os.path.getsize(path))
            if ckpt_path:
                _refuse_later(directories, path, state.saved["step"])
        if trainer.is_global_zero:
            for directory in directories:
                _refuse_unwritable(directory, needed=needed)
                held.enter_context(locked(directory))
                if removed := clean(directory):
                    rank_zero_info(f"removed what a killed run left: {few(map(str, removed))}")
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    keep_metrics(Path(logger.log_dir))
        held.enter_context(_loading(trainer, path))
        yield path


@contextmanager
def _loading(trainer: pl.Trainer, path: str | None) -> Iterator[None]:
    """Lightning loads this checkpoint or none, and names it where its states do not load.

    Where none is given it takes, unchecked, the last of an OnExceptionCheckpoint, and under SLURM any hpc_ckpt_* in
    default_root_dir.
    """
    connector: Any = trainer._checkpoint_connector
    replaced = {
        "_parse_ckpt_path": lambda *args, **kwargs: path,
        "_restore_modules_and_callbacks": partial(_load, connector._restore_modules_and_callbacks, path),
        "restore_training_state": partial(_load, connector.restore_training_state, path),
    }
    vars(connector).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(connector)[name]


def _load(load: Callable[..., None], path: str | None, *args: Any, **settings: Any) -> None:
    """Load states; an error that is no sentence is a ValueError that names the checkpoint."""
    try:
        load(*args, **settings)
    except (ValueError, OSError):
        raise
    except Exception as error:  # a state that does not fit fails what loads it in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"cannot resume from {path}: its states do not fit this run ({reason}): set what it was trained with, or "
            "start anew"
        ) from error


def run_directories(trainer: pl.Trainer) -> list[Path]:
    """Where the trainer's ModelCheckpoint callbacks write, by Lightning's rule; those of this machine."""
    directories = []
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        directory = callback.dirpath
        if directory is None:
            root = trainer.default_root_dir
            if trainer.loggers:
                logger: Any = trainer.loggers[0]
                version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
                root = os.path.join(logger.save_dir or root, str(logger.name), version)
            directory = os.path.join(root, "checkpoints")
        if not is_remote(directory):
            directories += [Path(directory), *_below(Path(directory), callback)]
    return list(dict.fromkeys(directories))


def _below(directory: Path, callback: ModelCheckpoint) -> list[Path]:
    """Directories which a callback's filename has made: "{epoch}-{val/acc1:.2f}" writes epoch=0-val/acc1=0.9.ckpt."""
    pattern = ""
    for place, part in enumerate(re.split(r"\{(.*?)(?::.*?)?\}", callback.filename or "")):
        metric = place % 2 == 1
        if not metric or callback.auto_insert_metric_name:
            pattern += glob.escape(part)
        if metric:
            pattern += f"{callback.CHECKPOINT_EQUALS_CHAR}*" if callback.auto_insert_metric_name else "*"
    folder, _, _ = pattern.rpartition("/")
    there = glob.glob(os.path.join(glob.escape(str(directory)), folder)) if folder else []
    return [Path(path) for path in sorted(there) if os.path.isdir(path)]


def _found(trainer: pl.Trainer, how: How) -> str | None:
    """The newest valid checkpoint of the run's directories, and what was passed over told."""
    logger: Any = trainer.loggers[0] if trainer.loggers else None
    opened = _adopt_version(logger)
    directories = run_directories(trainer)
    path, faults = newest_valid(directories)
    for damaged, reason in faults.items():
        rank_zero_warn(f"passed over {damaged}: it {reason}")
    if path is not None:
        rank_zero_info(f"resuming from {path}")
        return str(path)
    looked = few(map(str, directories)) or "ModelCheckpoint's directories, which are none of this machine"
    if how == "must":
        told = "".join(f"; {name.name} {reason}" for name, reason in faults.items())
        raise ValueError(
            f"resume is must, but there is no valid checkpoint in {looked}{told}: set resume to auto to begin"
        )
    rank_zero_info(f"nothing to resume from in {looked}: a new run")
    if opened:
        logger._version = None  # a directory of another run, or of nothing but damage: leave it as it is
    return None


def _adopt_version(logger: Any) -> bool:
    """A logger whose version is left open would open a new one; have it go on with the last that holds checkpoints."""
    if logger is None or getattr(logger, "_version", 0) is not None:
        return False
    folders = [f for f in Path(logger.root_dir).glob("version_*") if f.name.removeprefix("version_").isdigit()]
    versions = [int(f.name.removeprefix("version_")) for f in folders if any((f / "checkpoints").rglob(f"*{SUFFIX}"))]
    logger._version = max(versions, default=None)
    return bool(versions)


def _refuse_occupied(directories: list[Path]) -> None:
    for directory in directories:
        if there := checkpoints_in(directory):
            raise ValueError(
                f"{directory} already holds {len(there)} checkpoints ({few(p.name for p in there)}) and resume is "
                f"never: go on from them with --resume auto, or give this run {OWN_DIRECTORY}"
            )


def _refuse_later(directories: list[Path], path: str, step: int) -> None:
    """A run that is sent back writes beside what it is to forget: the next --resume auto would go on from that."""
    later, _ = newest_valid(directories)
    if later is not None and (reached := verify(later).step) > step:
        raise ValueError(
            f"ckpt_path is {path}, of step {step}, but {later} is of step {reached}, from which --resume auto would go "
            f"on once this run is interrupted: move what is later away, or give this run {OWN_DIRECTORY}"
        )


def _refuse_unwritable(directory: Path, needed: int) -> None:
    probe = directory / TEMPORARY.format("probe")  # by no process's number: it may be that of a run elsewhere
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.unlink(missing_ok=True)  # a link may have come with the directory
        probe.write_bytes(b"0")
        probe.unlink()
        if shutil.disk_usage(directory).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise unwritable(error, directory, needed=needed) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory for this process; the lock ends with the process, however that ends.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the lock file is a link, or no regular file.
    """
    with os.fdopen(descriptor(directory / LOCK, os.O_RDWR | os.O_APPEND), "a+") as file:
        try:
            # Not flock: workers would inherit that, and hold it after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise BlockingIOError(
                error.errno,
                f"another run ({file.read().strip() or 'unknown'}) writes to {directory}: wait for its end, or give "
                f"this one {OWN_DIRECTORY}",
            ) from error
        except OSError as error:  # a filesystem without locks
            rank_zero_warn(f"{directory} cannot be locked ({error.strerror}): see that no other run writes to it")
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        yield


# --- comparing ---


def compare(path: str, module: pl.LightningModule, *, world_size: int, ranks: Ranks) -> dict[str, Any]:
    """See that a checkpoint is one that this module in so many processes can go on from.

    Returns:
        What `RunState` compares once there are optimizers.
    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, holds objects, or is of another architecture or number of processes.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}: give a file that is there, or --resume auto")
    if Path(path).is_dir():
        # Sharded: Lightning's own loading tells of differences.
        return {"optimizer_states": [], "optimizers": [], "step": 0}
    checkpoint = _opened(path)
    if "optimizer_states" not in checkpoint:
        raise ValueError(f"cannot resume from {path}: it holds weights alone (save_weights_only), no optimizer state")
    if fault := malformed(checkpoint):
        raise ValueError(f"cannot resume from {path}: it {fault}; give another, or --resume auto")
    words = _own_words(module, checkpoint)
    differing = _differences(checkpoint["state_dict"], module, complete=bool(words))
    if differing or words:
        keys = f"it is of another architecture, {len(differing)} keys of the state_dict differ: {few(differing, '; ')}"
        remedy = words or "Set the model that it is of, or start anew"
        raise ValueError(f"cannot resume from {path}: {keys + '. ' if differing else ''}{remedy}")
    if bad := states_not_finite(checkpoint):
        raise ValueError(
            f"cannot resume from {path}: it holds NaN or infinity in {bad}; give another, or --resume auto"
        )
    run = checkpoint.get(RUN_KEY, {})
    if run.get("unfinished"):
        raise ValueError(f"cannot resume from {path}: it was taken {run['unfinished']}; give another, or --resume auto")
    trained = run.get("world_size") or world_size
    if trained != world_size and ranks == "same":
        raise ValueError(
            f"cannot resume from {path}: {trained} processes trained it and here are {world_size}, whose random "
            f"numbers would be others: run {trained} (trainer.devices x num_nodes), or accept it: --resume_ranks any"
        )
    return {**run, "optimizer_states": checkpoint["optimizer_states"], "step": checkpoint["global_step"]}


def _opened(path: str) -> dict[str, Any]:
    """A checkpoint's content, of bytes that are as they were saved where a record says which."""
    try:
        if record_path(path).exists():
            verify(path)
        return opened(path)
    except DamagedCheckpoint as error:
        raise ValueError(f"cannot resume from {path}: it {error}; give another, or --resume auto") from error


def _differences(theirs: dict[str, Any], module: pl.LightningModule, *, complete: bool) -> list[str]:
    """The keys of two state_dicts that are not in both, or not of one shape, each in words.

    Args:
        complete: those too that a module which is built later, in `configure_model`, may still get.
    """
    ours, lines = module.state_dict(), []
    for name, value in ours.items():
        here = _shape(value)
        if name not in theirs:
            lines += [f"{name} {here} only here"] if module.strict_loading else []
        elif (there := _shape(theirs[name])) != here:
            lines.append(f"{name} {there} there and {here} here")
    if complete or (module.strict_loading and not is_overridden("configure_model", module)):
        lines += [f"{name} {_shape(theirs[name])} only there" for name in theirs if name not in ours]
    return lines


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "no tensor"
    return f"{list(value.shape)}{' complex' if value.is_complex() else ''}"


def _own_words(module: pl.LightningModule, checkpoint: dict[str, Any]) -> str:
    """What a module that has `check_checkpoint` says of a checkpoint which is not its own: it may know what to set."""
    try:
        getattr(module, "check_checkpoint", lambda _: None)(checkpoint)
    except ValueError as error:
        return str(error)
    except Exception as error:  # it reads what a module wrote, whose types nobody has checked
        return f"what it says of its model cannot be read ({type(error).__name__}: {error})"
    return ""
