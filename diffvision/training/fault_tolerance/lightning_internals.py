"""Everything of Lightning that is private and still used here, behind functions with names of ours.

`NAMES` lists what the installed version must have; `missing` compares. Nothing of this package is imported here.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader

TESTED = ">=2.6.5,<2.7"  # as pyproject.toml has it

_TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_CHECKPOINTS = f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector"
_LOGS = f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector"
_DATA = f"{_CONNECTORS}.data_connector:_DataConnector"
_SOURCE = f"{_CONNECTORS}.data_connector:_DataLoaderSource"
_FIT = "lightning.pytorch.loops.fit_loop:_FitLoop"
_EPOCH = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_EVALUATION = "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop"
_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_AVERAGING = "lightning.pytorch.callbacks.weight_averaging:WeightAveraging"
_SAVING = "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint"

# module:class.name -> the parameters of a method that we call, replace or override; None: an attribute or property.
NAMES: dict[str, tuple[str, ...] | None] = {
    f"{_TRAINER}._accelerator_connector": None,
    f"{_TRAINER}._checkpoint_connector": None,
    f"{_TRAINER}._data_connector": None,
    f"{_TRAINER}._logger_connector": None,
    f"{_TRAINER}._signal_connector": None,
    f"{_TRAINER}.fit_loop": None,
    f"{_CONNECTORS}.accelerator_connector:_AcceleratorConnector.cluster_environment": None,
    f"{_CONNECTORS}.signal_connector:_SignalConnector.register_signal_handlers": ("self",),
    f"{_CHECKPOINTS}._parse_ckpt_path": ("self", "state_fn", "ckpt_path", "model_provided", "model_connected"),
    f"{_CHECKPOINTS}._restore_modules_and_callbacks": ("self", "checkpoint_path", "weights_only"),
    f"{_CHECKPOINTS}.restore_training_state": ("self",),
    f"{_DATA}._prepare_dataloader": ("self", "dataloader", "shuffle", "mode"),
    f"{_SOURCE}.is_defined": ("self",),
    f"{_SOURCE}.dataloader": ("self",),
    f"{_SOURCE}.instance": None,
    f"{_LOGS}.log_metrics": ("self", "metrics", "step"),
    f"{_LOGS}.metrics": None,
    f"{_LOGS}.should_update_logs": None,
    f"{_FIT}._combined_loader_states_to_load": None,
    f"{_FIT}._data_fetcher": None,
    f"{_FIT}._data_source": None,
    f"{_FIT}.epoch_loop": None,
    f"{_FIT}.epoch_progress": None,
    f"{_FIT}.max_batches": None,
    f"{_FIT}.max_epochs": None,
    f"{_EPOCH}._batches_that_stepped": None,
    f"{_EPOCH}._broadcast_sigterm_tensor": ("self",),
    f"{_EPOCH}._is_training_done": None,
    f"{_EPOCH}._restarting": None,
    f"{_EPOCH}._should_accumulate": ("self",),
    f"{_EPOCH}._should_check_val_fx": ("self", "data_fetcher"),
    f"{_EPOCH}.batch_progress": None,
    f"{_EPOCH}.max_steps": None,
    f"{_EPOCH}.val_loop": None,
    f"{_EVALUATION}._restart_stage": None,
    f"{_EVALUATION}._restarting": None,
    f"{_EVALUATION}.batch_progress": None,
    "lightning.pytorch.loops.evaluation_loop:RestartStage.RESTARTED_MID_EVALUATION": None,
    "lightning.pytorch.loops.fetchers:_DataFetcher.done": None,
    f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher._start_method": None,
    f"{_LAUNCHERS}.multiprocessing:_MultiProcessingLauncher.kill": ("self", "signum"),
    f"{_LAUNCHERS}.subprocess_script:_SubprocessScriptLauncher.procs": None,
    f"{_SAVING}._defer_save_until_validation": None,
    f"{_SAVING}._monitor_candidates": ("self", "trainer"),
    f"{_SAVING}._save_last_checkpoint": ("self", "trainer", "monitor_candidates"),
    f"{_SAVING}._save_topk_checkpoint": ("self", "trainer", "monitor_candidates"),
    f"{_SAVING}._last_checkpoint_saved": None,
    f"{_SAVING}._last_global_step_saved": None,
    f"{_SAVING}.current_score": None,
    f"{_AVERAGING}._average_model": None,
    f"{_AVERAGING}._device": None,
    f"{_AVERAGING}._latest_update_epoch": None,
    "lightning.pytorch.core.module:LightningModule._on_before_batch_transfer": ("self", "batch", "dataloader_idx"),
    "lightning.pytorch.core.module:LightningModule._trainer": None,
    "lightning.pytorch.loggers.csv_logs:CSVLogger._version": None,
    "lightning.pytorch.loggers.tensorboard:TensorBoardLogger._version": None,
    "lightning.pytorch.strategies.fsdp:FSDPStrategy._state_dict_type": None,
    "lightning.pytorch.strategies.model_parallel:ModelParallelStrategy._save_distributed_checkpoint": None,
    "lightning.pytorch.utilities.combined_loader:CombinedLoader._mode": None,
    "lightning.pytorch.cli:LightningCLI._parse_ckpt_path": ("self",),
    "lightning.pytorch.cli:LightningCLI._prepare_subcommand_parser": ("self", "klass", "subcommand", "kwargs"),
}

# --- comparing with the installed version ---


def missing() -> list[str]:
    """Return what the installed Lightning lacks of `NAMES`, each in a few words; an empty list if it lacks nothing."""
    return [fault for name, parameters in NAMES.items() if (fault := _fault(name, parameters))]


def require() -> None:
    """Check that the installed Lightning has all of `NAMES`.

    Raises:
        ValueError: it lacks some.
    """
    if lacking := missing():
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ValueError(
            f"lightning {version('lightning')} lacks what training relies on ({', '.join(lacking[:3])}{more}): "
            f"diffvision was tested with lightning {TESTED}; install one of these versions"
        )


def _fault(name: str, parameters: tuple[str, ...] | None) -> str:
    path, _, member = name.rpartition(".")
    module, _, owner_name = path.partition(":")
    try:
        owner = getattr(import_module(module), owner_name)
    except (ImportError, AttributeError):
        return path.replace(":", ".")
    short = f"{owner_name}.{member}"
    if parameters is None:
        return "" if hasattr(owner, member) or _is_assigned(owner, member) else short
    if not callable(method := getattr(owner, member, None)):
        return short
    actual = tuple(inspect.signature(method).parameters)
    return "" if actual == parameters else f"{short}({', '.join(parameters)})"


def _is_assigned(owner: type, name: str) -> bool:
    """Return whether a class's `__init__`, or that of one of its bases, assigns an attribute of this name."""
    constructors = [inspect.unwrap(vars(cls)["__init__"]) for cls in owner.__mro__ if "__init__" in vars(cls)]
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for constructor in constructors
        if inspect.isfunction(constructor)
        for instruction in dis.get_instructions(constructor)
    )


# --- loops ---


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether the last batch leaves gradients to which the next batch adds."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_training_done(trainer: pl.Trainer) -> bool:
    """Return whether no batch is left of the epoch, or no step of the run."""
    return trainer.fit_loop.epoch_loop._is_training_done


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Return whether a validation follows the last batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(_fetcher(trainer))


def end_epoch(trainer: pl.Trainer) -> None:
    """Let the epoch end without another batch."""
    _fetcher(trainer).done = True


def begin_epoch(trainer: pl.Trainer) -> None:
    """Let the next epoch begin as one that was not interrupted."""
    trainer.fit_loop.epoch_loop._restarting = False


def restart_validation(trainer: pl.Trainer) -> None:
    """Let the validation that is due begin from its first batch."""
    from lightning.pytorch.loops.evaluation_loop import RestartStage

    validation = trainer.fit_loop.epoch_loop.val_loop
    validation._restarting, validation._restart_stage = False, RestartStage.RESTARTED_MID_EVALUATION


def count_step(trainer: pl.Trainer) -> None:
    """Count one more batch that made a step, as the end of a step does."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def _fetcher(trainer: pl.Trainer) -> Any:
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return fetcher


# --- checkpoints ---

# Attributes of a ModelCheckpoint that its `state_dict` leaves out. They are keys in our checkpoints: never rename them.
SAVE_STATE = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "current_score")


def set_last_save(callback: ModelCheckpoint, step: int, path: str) -> None:
    """Let a ModelCheckpoint know which file it saved last, and at which step."""
    callback._last_global_step_saved, callback._last_checkpoint_saved = step, path


def last_saved_step(callback: ModelCheckpoint) -> int:
    """Return the step of what a ModelCheckpoint saved last; 0 if it has saved nothing."""
    return callback._last_global_step_saved


def save_unmonitored(callback: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Let a ModelCheckpoint that monitors nothing save now, under its names, as at a validation's end."""
    candidates = callback._monitor_candidates(trainer)
    callback._save_topk_checkpoint(trainer, candidates)
    callback._save_last_checkpoint(trainer, candidates)


@contextmanager
def checkpoint_to_load(trainer: pl.Trainer, path: str | None, load: Callable[..., None]) -> Iterator[None]:
    """Let fits of a block load this checkpoint, or none; `load` is called with each function that loads states.

    Lightning by itself would take, where no path is given, the last file of an OnExceptionCheckpoint, and under SLURM
    any hpc_ckpt_* in default_root_dir.
    """
    connector: Any = trainer._checkpoint_connector

    def loading(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: load(function, *args, **kwargs)

    replaced = {
        "_parse_ckpt_path": lambda *args, **kwargs: path,
        "_restore_modules_and_callbacks": loading(connector._restore_modules_and_callbacks),
        "restore_training_state": loading(connector.restore_training_state),
    }
    vars(connector).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(connector)[name]


def sharded_checkpoint_setting(strategy: Any) -> tuple[str, str] | None:
    """Return the setting with which a strategy saves sharded checkpoints, and the value with which it does not."""
    if getattr(strategy, "_save_distributed_checkpoint", False):
        return "save_distributed_checkpoint", "false"
    if getattr(strategy, "_state_dict_type", "full") == "sharded":
        return "state_dict_type", "full"
    return None


# --- data and logs ---


def training_loaders(trainer: pl.Trainer) -> tuple[list[Any], str]:
    """Return the loaders of the fit that begins, divided over ranks as Lightning will, and how they are combined."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() and source.instance is not None else None
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
    prepare = trainer._data_connector._prepare_dataloader
    return [prepare(one, shuffle=True, mode=RunningStage.TRAINING) for one in combined.flattened], combined._mode


def loader_states(trainer: pl.Trainer) -> list[Any]:
    """Return the states of loaders in the checkpoint that a fit resumes from."""
    return trainer.fit_loop._combined_loader_states_to_load


def metrics_to_log(trainer: pl.Trainer) -> dict[str, float]:
    """Return the metrics that are logged after the step that was just made."""
    connector = trainer._logger_connector
    if not connector.should_update_logs or not trainer.loggers:
        return {}
    return {name: float(value) for name, value in connector.metrics["log"].items()}


def log_metrics(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Hand metrics to the loggers."""
    trainer._logger_connector.log_metrics(metrics)  # type: ignore[arg-type]  # numbers will do


def has_open_version(logger: Any) -> bool:
    """Return whether a logger will choose the next free version by itself."""
    return logger is not None and getattr(logger, "_version", 0) is None


def set_version(logger: Any, number: int | None) -> None:
    """Set the version that a logger writes to; None leaves it open."""
    logger._version = number


# --- processes and signals ---


def cluster_environment(trainer: pl.Trainer) -> Any:
    """Return the ClusterEnvironment that a trainer runs in."""
    return trainer._accelerator_connector.cluster_environment


def disable_signal_handlers(trainer: pl.Trainer) -> None:
    """Keep Lightning from setting its signal handlers, and from the broadcast that it makes before each batch."""
    vars(trainer._signal_connector)["register_signal_handlers"] = _do_nothing
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = _do_nothing


def _do_nothing() -> None:
    pass


def forks_ranks(launcher: Any) -> bool:
    """Return whether a launcher forks or spawns all ranks, so that this process only waits for them."""
    return hasattr(launcher, "_start_method")


def take_started_ranks(launcher: Any) -> list[Any]:
    """Return the processes that a launcher has started as ranks, and stop the launcher from watching them."""
    from lightning.pytorch.strategies import launchers

    if not isinstance(launcher, launchers._SubprocessScriptLauncher):
        return []
    started = list(launcher.procs)
    launcher.procs.clear()
    return started


# --- averages of weights ---


def has_average(callback: WeightAveraging) -> bool:
    """Return whether a callback holds averages: since the beginning of its first fit."""
    return callback._average_model is not None


def set_default_device(callback: WeightAveraging, device: Any) -> None:
    """Set where the averages are kept, unless a device was given."""
    callback._device = callback._device or device


def get_last_averaged_epoch(callback: WeightAveraging) -> int:
    """Return the epoch at whose end the averages were last updated; -1 for none."""
    return callback._latest_update_epoch


def set_last_averaged_epoch(callback: WeightAveraging, epoch: int) -> None:
    """Set the epoch at whose end the averages were last updated."""
    callback._latest_update_epoch = epoch


# --- modules and the command line ---


def attached_trainer(module: pl.LightningModule) -> Any:
    """Return the trainer of a module, or None if it has none: `module.trainer` would raise."""
    return module._trainer


class BatchHook:
    """A base for LightningModules: `as_read` changes each batch of a loader before any public hook sees it.

    The public hook on_before_batch_transfer would replace a data module's if a module overrode it.
    """

    def as_read(self, batch: Any) -> Any:
        """Return a loader's batch as the steps read it."""
        return batch

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int | None = None) -> Any:
        # None: no loader's batch, but an input of `forward` in Lightning's summary and exports.
        batch = super()._on_before_batch_transfer(batch, dataloader_idx or 0)  # type: ignore[misc]
        return batch if dataloader_idx is None else self.as_read(batch)


class CommandLineHooks:
    """A base before LightningCLI: arguments for one subcommand, and no settings taken from a checkpoint."""

    def add_arguments_to_subcommand(self, parser: Any, subcommand: str) -> None:
        """Add arguments to the parser of one subcommand."""

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)  # type: ignore[misc]
        self.add_arguments_to_subcommand(parser, subcommand)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as it was given."""
