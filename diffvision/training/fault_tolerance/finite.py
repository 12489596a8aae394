"""Steps whose loss or gradient is not finite are skipped and reported; after too many in a row the run stops.

Which checkpoints are kept meanwhile is decided in `rotation`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO
from diffvision.training.fault_tolerance.files import open_for_writing
from diffvision.training.fault_tolerance.lightning_internals import is_dry_run
from diffvision.training.fault_tolerance.rotation import Rotation

FILE = "skipped_steps.jsonl"
LEAST_SCALE = 1.0  # below it a gradient scaler has no overflow left to avoid: the gradients themselves are infinite
REMEDIES = "lower optimizer.lr, set optimizer.clip_norm, train in bf16-mixed or 32-true, or look for damaged data"


class StepGuard(pl.Callback):
    """Clips the gradient before each step and logs its norm; a step whose loss or gradient is not finite is skipped.

    All ranks decide alike without a message between them: the gradients are those after the strategy's reduction, into
    which a rank whose loss is not finite has put NaN. A skipped step changes no weight, moment or running statistic.
    The trainer's step and the schedule advance; a line in `skipped_steps.jsonl` next to the logs reports it, and
    `train/skipped_steps` counts. Only the first process writes.

    A gradient scaler (16-mixed) skips overflows by itself while it searches its scale: they count only where a loss
    was not finite, or the scale has fallen below 1.

    Attributes:
        skipped: steps that were skipped in this run, also before it was resumed.
        in_a_row: steps that were skipped since the last step that was made.
        of_module: whether a TrainingModule made it, for one fit.
    """

    of_module = False

    def __init__(self, clip_norm: float | None = None, max_skipped: int = 10) -> None:
        """Set the limits.

        Args:
            clip_norm: the gradient's norm is clipped to this; None: no clipping.
            max_skipped: limit on skipped steps in a row; one more stops the run. 0 stops it at the first.
        """
        self.clip_norm, self.max_skipped = clip_norm, max_skipped
        self.skipped = self.in_a_row = 0
        self._losses: list[Tensor] = []  # of the current step: one for each backward pass
        self._batches: list[int] = []
        self._batch: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect the writer of checkpoints, which keeps replaced ones while steps are skipped."""
        self._statistics = Statistics(pl_module)
        self._rotation = Rotation(skipping=self.in_a_row > 0)
        if isinstance(writer := trainer.strategy.checkpoint_io, DurableCheckpointIO):
            writer.rotation = self._rotation

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch, to report it if its step is skipped."""
        self._batches.append(batch_idx)
        self._batch = batch

    def on_train_batch_end(self, *args: Any) -> None:
        self._batch = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Note the loss, and let one that is not finite spread to all ranks."""
        self._losses.append(loss.detach())
        spread_nan(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Clip the gradient, or skip the step.

        Raises:
            FloatingPointError: on all ranks, where more than `max_skipped` steps in a row are not finite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gradient_norm(parameters)
        if torch.isfinite(norm):
            if self.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
            self._statistics.keep()
            self._rotation.step_finite()
            self.in_a_row = 0
        else:
            self._statistics.restore()
            self._skip(trainer, parameters, norm)
        self._losses, self._batches = [], []
        pl_module.log("train/grad_norm", norm)
        pl_module.log("train/skipped_steps", float(self.skipped))

    def _skip(self, trainer: pl.Trainer, parameters: list[nn.Parameter], norm: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        blame = max(gather(trainer, own_blame := self._rate_blame()))
        if scaler is not None and not blame and scaler.get_scale() >= LEAST_SCALE:
            return
        for parameter in parameters:
            parameter.grad = None  # the optimizer skips what has no gradient: no decay, no moments
        description = self._describe(trainer) if own_blame == blame else None
        blamed = [rank for rank in gather(trainer, description) if rank]
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        self._rotation.step_skipped()
        step = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batches": self._batches}
        file = _append(trainer, {**step, "norm": str(norm.item()), "in_a_row": self.in_a_row, "ranks": blamed})
        where = f"step {trainer.global_step} (batch {self._batches[-1]} of epoch {trainer.current_epoch})"
        which = ", ".join(f"{rank['loss']} on rank {rank['rank']}" for rank in blamed)
        what = f"the gradient's norm is {norm.item()} at {where}, the loss {which}"
        if self.in_a_row > self.max_skipped:
            raise FloatingPointError(
                f"{what}: steps {trainer.global_step + 1 - self.in_a_row} to {trainer.global_step} were not finite, "
                f"over optimizer.max_skipped={self.max_skipped}: see their batches in {file}; {REMEDIES}"
                + self._list_kept()
            )
        rank_zero_warn(f"{what}: it is skipped ({self.in_a_row} in a row); {file} lists its samples")

    def _list_kept(self) -> str:
        """Name the checkpoints to resume from that newer ones would have replaced."""
        kept = ", ".join(str(path) for path in self._rotation.kept)
        return f". Kept from before these steps: {kept}" if kept else ""

    def _rate_blame(self) -> int:
        """Return how likely this rank is the cause: 2 if its batch is not finite, 1 if only its loss, 0 otherwise."""
        if self._bad_rows():
            return 2
        return int(not all(torch.isfinite(loss).all() for loss in self._losses))

    def _bad_rows(self) -> list[int]:
        """Return the samples of the last batch that hold NaN or infinity."""
        values = self._batch.values() if isinstance(self._batch, dict) else ()
        floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.ndim]
        return sorted({row for v in floats for row in (~v.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()})

    def _describe(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return this rank's loss and, if the loader knows them, the samples that are not finite, or all of them."""
        bad = [loss for loss in self._losses if not torch.isfinite(loss).all()]
        description: dict[str, Any] = {"rank": trainer.global_rank, "loss": str(bad[0].item()) if bad else "finite"}
        names = getattr(trainer.train_dataloader, "names", None)
        if names is not None:
            if rows := self._bad_rows():
                last = names(trainer.current_epoch, self._batches[-1])
                description["samples"] = [last[row] for row in rows]
            else:
                samples = [name for batch in self._batches for name in names(trainer.current_epoch, batch)]
                description["samples"] = samples
        return description


class Statistics:
    """Batch norms' running statistics as of the last finite step: a forward pass changes them before the loss."""

    def __init__(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
        self.live = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self.kept = [buffer.clone() for buffer in self.live]

    def keep(self) -> None:
        """Keep the current statistics."""
        for kept, live in zip(self.kept, self.live, strict=True):
            kept.copy_(live)

    def restore(self) -> None:
        """Restore the statistics that were kept last."""
        for kept, live in zip(self.kept, self.live, strict=True):
            live.copy_(kept)


def spread_nan(loss: Tensor) -> None:
    """Make all gradients of a loss that is not finite NaN, so that their reduction shows it to every rank.

    They could be finite otherwise. Gradients of a finite loss are multiplied by one, which changes no bit. The GPU
    is not waited for.
    """
    if loss.requires_grad:
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
        loss.register_hook(lambda gradient: gradient * factor)


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, over all shards of those that are sharded."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # each rank holds a part of the norm


def gather(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return each rank's value, by rank."""
    values = [value] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def _append(trainer: pl.Trainer, record: dict[str, Any]) -> str:
    """Append a line to the file of skipped steps and return its path; warn where it cannot be written."""
    directory = trainer.log_dir or trainer.default_root_dir  # a collective: the first rank broadcasts it
    file = Path(directory, FILE)
    if not trainer.is_global_zero or is_dry_run(trainer):
        return str(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_for_writing(file, os.O_WRONLY | os.O_APPEND), "a") as lines:
            lines.write(json.dumps(record) + "\n")
    except OSError as error:
        rank_zero_warn(f"{file} cannot be written ({error.strerror}); of a skipped step it would say {record}")
    return str(file)
