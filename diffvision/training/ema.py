"""An exponential moving average of the weights, whose run can be interrupted anywhere."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


class EMA(EMAWeightAveraging):
    """Lightning's EMAWeightAveraging: validation and the weights of checkpoints are averages; training goes on from
    its own. `evaluate --checkpoint` therefore takes the averages.

    What is other than Lightning's, which Lightning 2.6 needs for a resumed run to be the one never stopped:
    a checkpoint of a moment at which averages stand in the module (within validation, and after training) holds both
    sets the right way round, and the epoch of the last update is kept. The averages lie on the training device, where
    Lightning's would be on the CPU; and sharded weights are refused, of which it would average each rank's part.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        device: str | None = None,
    ) -> None:
        """Average.

        Args:
            decay: weight of the average so far, from 0 to 1.
            update_every_n_steps: optimizer steps between updates; 0 for updates by the epoch alone.
            update_starting_at_step: the first step (from 0) that updates.
            update_starting_at_epoch: update at the ends of epochs too, from this one on; null: never.
            device: where the averages lie; by default where training does.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA's decay is {decay}; it weighs the average so far: from 0 to 1, such as 0.999")
        super().__init__(
            device=device,
            decay=decay,
            update_every_n_steps=update_every_n_steps,
            update_starting_at_step=update_starting_at_step,
            update_starting_at_epoch=update_starting_at_epoch,
        )
        self._swapped = False  # whether averages stand in the module, and its own weights in the average

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raises ValueError where the strategy shards the weights."""
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            name = type(trainer.strategy).__name__
            raise ValueError(f"{name} shards the weights, and EMA averages whole ones only: use ddp, or leave EMA out")
        self._swapped = False
        self._device = self._device or trainer.strategy.root_device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're using the WeightAveraging callback with a model that")
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_models(pl_module)  # rather than copied: a checkpoint may still be asked for

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._swapped = not self._swapped

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._latest_update_epoch = state_dict.get("latest_update_epoch", self._latest_update_epoch)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Outside of a fit there is no average to restore: the module gets the checkpoint's state_dict, which is it."""
        if self._average_model is not None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._swapped and self._average_model is not None:
            own, average = checkpoint["state_dict"], checkpoint["current_model_state"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = average, own
