"""Exponential moving average (EMA) of the weights: Lightning's, without device synchronisation."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(EMAWeightAveraging):
    """Lightning's EMAWeightAveraging: validation and checkpoints use the averages, training the current weights.

    `evaluate` of a checkpoint therefore evaluates the averages. Unlike Lightning's, the averages are on the training
    device, an update does not wait for it, and sharded weights are refused.
    """

    def __init__(self, decay: float = 0.999) -> None:
        """Set the decay.

        Args:
            decay: weight of the previous average, from 0 to 1.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA's decay must be from 0 to 1, such as 0.999, got {decay}")
        super().__init__(decay=decay)
        self.decay = decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create the averages before a fit; raise ValueError if the strategy shards the weights."""
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            name = type(trainer.strategy).__name__
            raise ValueError(f"EMA cannot average the sharded weights of {name}: use ddp, or remove EMA")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that layers are not sharded
            super().setup(trainer, pl_module, stage)
        if stage == "fit":
            (averages,) = (value for value in vars(self).values() if isinstance(value, AveragedModel))
            Averages.convert(averages, self.decay)
            averages.module.to(trainer.strategy.root_device)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the averages for a fit; in other stages the module loads them, as the checkpoint's state_dict."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


class Averages(AveragedModel):
    """torch's AveragedModel with its count of updates on the CPU, so that an update does not wait for the device."""

    @classmethod
    def convert(cls, model: AveragedModel, decay: float) -> None:
        """Change the AveragedModel that Lightning created into this class, in place."""
        model.__class__ = cls
        model.multi_avg_fn, model.n_averaged = get_ema_multi_avg_fn(decay), torch.tensor(0)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the averages of parameters and buffers with a few kernels per dtype; the first update copies."""
        assert self.multi_avg_fn is not None
        pairs: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for average, current in zip(parameters_and_buffers(self.module), parameters_and_buffers(model), strict=True):
            if not self.n_averaged:
                average.copy_(current)
            pairs.setdefault(average.dtype, []).append((average.detach(), current.detach().to(average.device)))
        for same in pairs.values() if self.n_averaged else ():
            averages, currents = map(list, zip(*same, strict=True))
            self.multi_avg_fn(averages, currents, self.n_averaged)
        self.n_averaged += 1


def parameters_and_buffers(module: nn.Module) -> chain[torch.Tensor]:
    """Return the parameters and buffers of a module."""
    return chain(module.parameters(), module.buffers())
