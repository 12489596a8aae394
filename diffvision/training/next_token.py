"""Base class of the modules that predict the next token: their training loss and validation.

The loss itself is in `cross_entropy`; the modules are in `language` and `vision_language`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from diffvision.data.batches import TokenBatch, VisionLanguageBatch
from diffvision.training.cross_entropy import IGNORED, SoftTargets, linear_cross_entropy
from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.module import TrainingModule
from diffvision.training.sharding import is_sharded


class NextTokenModule(TrainingModule):
    """A module that learns to predict the next token.

    The loss of an optimizer step is the mean over all predictions of its batches on all ranks; the logged loss is that
    of one batch.

    Attributes:
        model: has `hidden`, the input of the output projection, and `head_weight`, the weight of that projection.
        returns_logits: whether `compute_states` returns logits, because the model's head is more than `head_weight`.
        z_loss: weight of the penalty log(Z)^2, for training only.
    """

    data_class: ClassVar[type[Any]]  # of the data whose validation logs the metrics below
    loss_chunk = 1024  # tokens whose logits are in memory together
    returns_logits = False
    z_loss = 0.0
    _predictions: Tensor | None = None  # of this rank, in the batches of a step

    def compute_states(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the final hidden states [B, N, dim] or logits of a batch, and their targets [B, N] or IGNORED."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output projection."""
        weight: Tensor = self.model.head_weight
        return weight

    def soft_targets(self, batch: Any) -> SoftTargets | None:
        """Return distributions to train on in addition to the targets; None by default."""
        return None

    def log_penalty(self, nats: Tensor, excess: Tensor) -> None:
        """Log what the loss adds to the cross entropy `nats`, both per prediction; logs nothing by default."""

    def sum_losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over a batch: loss with its penalty, cross entropy in nats, and number of predictions."""
        states, targets = self.compute_states(batch)
        if self.returns_logits:
            logits = states.flatten(0, 1).to(torch.promote_types(states.dtype, torch.float32))
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
            return loss, loss.detach(), (targets != IGNORED).sum()
        loss, nll = linear_cross_entropy(
            states.flatten(0, 1),
            self.head_weight,
            targets.flatten(),
            z_loss=self.z_loss if self.training else 0.0,
            chunk=self.loss_chunk,
            soft=self.soft_targets(batch),
        )
        return loss, nll, (targets != IGNORED).sum()

    def on_train_start(self) -> None:
        """Begin the schedule, and the count of a step's predictions."""
        super().on_train_start()
        self._predictions = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the batch's mean loss; if batches differ in their number of predictions, its sum over `_divisor`."""
        loss, nll, count = self.sum_losses(batch)
        nats, excess, predictions = self.sum_if_logged(torch.stack([nll, loss.detach() - nll, count.to(nll.dtype)]))
        self.log_step(loss=nats / predictions.clamp(min=1))
        self.log_penalty(nats / predictions.clamp(min=1), excess / predictions.clamp(min=1))
        if "documents" not in batch and "learned" not in batch:
            return loss / count
        self._predictions = count if self._predictions is None else self._predictions + count
        return loss / self._divisor

    @property
    def _divisor(self) -> int:
        """Constant that every batch's loss sum is divided by before backward; near its number of predictions."""
        raise NotImplementedError

    def on_after_backward(self) -> None:
        """Divide the gradients by the predictions of the step's batches on all ranks, once it has them all.

        A mean of batch means would give tokens of batches with few predictions more weight.
        """
        if self._predictions is None or lightning_internals.is_accumulating(self.trainer):
            return
        self.sum_over_ranks(self._predictions)
        total = self._predictions.clamp(min=1)
        divided = self._divisor * self.trainer.accumulate_grad_batches * self.trainer.world_size
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(divided / total)
        self._predictions = None

    def validation_metrics(self, data: Any) -> list[str] | None:
        """Return the names of the metrics that validation logs; none without evaluation data."""
        if not isinstance(data, self.data_class):
            return None
        return [] if data.evaluation is None else ["val/loss", "val/perplexity", "val/tokens"]

    def on_validation_epoch_start(self) -> None:
        self.begin_sums(2)  # nats, predictions

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._any_rank_has_batch(working=True)
        with self._disable_gradients():
            _, nll, count = self.sum_losses(batch)
        self.add_sums(dataloader_idx, nll, count)

    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity, from sums over all ranks."""
        while self._any_rank_has_batch(working=False):
            with self._disable_gradients():
                self.model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        for loader, (nats, predictions) in self.reduce_sums():
            if not predictions:
                raise ValueError(f"val/loss{loader} has no samples: check its data, or leave them out")
            loss = nats / predictions
            perplexity = torch.tensor(loss, dtype=torch.float64).exp().item()  # infinite where Python's would raise
            self.log_means({f"val/loss{loader}": loss, f"val/perplexity{loader}": perplexity})
            self.log_means({f"val/tokens{loader}": predictions}, prog_bar=False)

    def _any_rank_has_batch(self, working: bool) -> bool:
        """Return whether any rank has a batch to validate.

        All ranks gather sharded layers together, so a rank that has run out of batches takes part until all are done.
        Without sharding, ranks do not communicate.
        """
        if not is_sharded(self.model):
            return working
        flag = torch.tensor(float(working), device=self.device)
        return bool(self.trainer.strategy.reduce(flag, reduce_op="sum"))

    @contextmanager
    def _disable_gradients(self) -> Iterator[None]:
        """Disable gradients, but without inference mode: the next training step reuses what FSDP2 gathers."""
        with torch.inference_mode(False), torch.no_grad():
            yield


def shift(batch: TokenBatch | VisionLanguageBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a batch's inputs, their targets (or IGNORED), and the documents of the inputs."""
    tokens, learned = batch["tokens"], batch.get("learned")
    documents: Tensor | None = batch.get("documents")  # type: ignore[assignment]  # a conversation's batch has none
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if learned is not None:
        targets = targets.masked_fill(~learned[:, 1:], IGNORED)
    if documents is None:
        return inputs, targets, None
    return inputs, targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED), documents[:, :-1]
