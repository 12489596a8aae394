"""What our LightningModules share: hyperparameters, learning rate, batches by name, sums of an evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from diffvision.data.batches import named
from diffvision.training.durable.finite import StepGuard
from diffvision.training.optim import OptimizerSettings, WarmupDecay

# Warnings of other libraries at their own code, which nobody who trains can do anything about.
OTHERS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's loaders, of torch
    r"torch\.distributed\.nn\.functional\.all_gather is deprecated",  # OpenCLIP's loss, of torch, at every step
    "Total length of `list` across ranks is zero",  # of our data without an evaluation
    # Lightning advises to save the weights of before the step; ours resume after it, as everyone's do.
    "Using ModelCheckpoint with manual optimization",
)


class TrainingModule(pl.LightningModule):
    """A LightningModule around a host's model, for scripts and the command line alike.

    Its arguments are its hyperparameters, as plain values, so that `load_from_checkpoint(path)` needs no others.
    Batches reach its steps and the callbacks as dictionaries, whatever the loader gives. `test_step` does what
    `validation_step` does; the names of its metrics begin with "test" instead of "val".

    Attributes:
        settings: AdamW and its schedule.
    """

    keys: ClassVar[tuple[str, ...]]  # of a batch, in the order of a tuple
    needed: ClassVar[tuple[str, ...]]  # of them, what a step cannot do without
    model: Any

    def __init__(self, arguments: Mapping[str, Any], default: OptimizerSettings) -> None:
        """
        Args:
            arguments: those of the subclass, by name; `locals()` will do.
            default: settings of the optimizer that `arguments["optimizer"]`, if it is a dictionary, does not have.
        """
        super().__init__()
        given = arguments["optimizer"]
        self.settings = given if isinstance(given, OptimizerSettings) else replace(default, **given)
        kept = {key: value for key, value in arguments.items() if key not in ("self", "__class__")}
        self.save_hyperparameters(kept | {"optimizer": plain(self.settings)})

    def setup(self, stage: str) -> None:
        for message in OTHERS:
            warnings.filterwarnings("ignore", message=message)

    @property
    def lr(self) -> float:
        """The highest learning rate, where Lightning's `Tuner.lr_find` looks for it; it can be set."""
        return self.settings.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.settings = replace(self.settings, lr=lr)
        self.hparams["optimizer"] = plain(self.settings)
        for config in [] if self._trainer is None else self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, WarmupDecay):
                config.scheduler.set_lr(lr)

    def configure_callbacks(self) -> list[pl.Callback]:
        """A new StepGuard for each fit; the other stages keep the one that the trainer has."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it unannounced
        guards = [callback for callback in callbacks if isinstance(callback, StepGuard)]
        if guards and not self.fitting:
            return []
        for guard in guards:
            if guard.of_module:  # and of an earlier fit: Lightning would replace it too, with a message
                callbacks.remove(guard)
        guard = StepGuard(self.settings.clip_norm, self.settings.max_skipped)
        guard.of_module = True
        return [guard]

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int | None = None) -> Any:
        """Lightning's, around the public hook, which would replace a data module's if it were overridden here.

        Args:
            dataloader_idx: None: it is no loader's batch, but an input of `forward` (Lightning's summary and exports).
        """
        batch = super()._on_before_batch_transfer(batch, dataloader_idx or 0)
        return batch if dataloader_idx is None else self.as_read(batch)

    def as_read(self, batch: Any) -> Any:
        """A loader's batch as the steps read it. ValueError where it cannot be."""
        batch = named(batch, self.keys)
        if missing := [key for key in self.needed if key not in batch]:
            raise ValueError(
                f"a batch has no {', '.join(missing)} (it has {', '.join(batch)}): {type(self).__name__} reads a "
                f"dictionary with {', '.join(self.keys)}, or a tuple of these"
            )
        return batch

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def begin_sums(self, size: int) -> None:
        """Begin an evaluation, with so many sums for each of its loaders."""
        loaders = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        self._sums = torch.zeros(len(loaders), size, dtype=torch.float64, device=self.device)

    def add_sums(self, loader: int, *sums: Tensor | float) -> None:
        """Add those of a batch."""
        self._sums[loader] += torch.stack([torch.as_tensor(s, dtype=torch.float64, device=self.device) for s in sums])

    def all_sums(self) -> Iterator[tuple[str, str, list[float]]]:
        """Of each loader what its metrics' names begin and end with, and its sums over all ranks.

        Ranks need not have equal batches, so nothing is divided before.
        """
        stage = "test" if self.trainer.testing else "val"
        rows = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        for index, row in enumerate(rows):
            yield f"{stage}/", f"/dataloader_idx_{index}" if len(rows) > 1 else "", row

    def log_means(self, values: dict[str, float], prog_bar: bool = True) -> None:
        """Log what all ranks have alike, by names that say already which loader's it is."""
        self.log_dict(values, prog_bar=prog_bar, sync_dist=True, add_dataloader_idx=False)

    @property
    def fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The hyperparameters of a checkpoint ask for no other file of weights: it has them itself."""
        checkpoint["hyper_parameters"] = dict(self.hparams) | self.rebuilt()

    def rebuilt(self) -> dict[str, Any]:
        """Arguments that a module which gets its weights from a checkpoint is built with instead of its own."""
        raise NotImplementedError


def plain(settings: OptimizerSettings) -> dict[str, Any]:
    """Settings as values that a checkpoint may hold."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}
