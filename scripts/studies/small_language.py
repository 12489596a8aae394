"""A small language model trained over tokens in memory, for studies: constant learning rate, then cooldown branches.

The learning rate is constant after its warm-up, so that one run serves several lengths: for each of them it branches
off, falls to zero over a fifth of that length, and goes back to the trunk (arXiv 2405.18392).
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.models.language import LanguageModel
from diffvision.training.optim import OptimizerSettings, param_groups

COOLDOWN = 0.2  # of a length
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "clip_norm": 1.0}


class Branch(NamedTuple):
    """The end of one length.

    Attributes:
        steps: of training, cooldown included.
        loss: on the validation text, nats a token.
    """

    steps: int
    loss: float


class Trained(NamedTuple):
    """What `fit` did.

    Attributes:
        branches: of each length.
        seconds: of the processor, of all training steps.
        norm: the largest gradient norm after the warm-up, before clipping.
    """

    branches: list[Branch]
    seconds: float
    norm: float


class Batches(Protocol):
    """What a model is trained on and validated on."""

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield batches in an order that the seed decides."""

    def loss(self, model: nn.Module) -> float:
        """Return a model's loss on the validation data."""


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of a model over windows [B, N + 1], nats a token."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return the optimizer of a model's training."""
    return torch.optim.AdamW(
        param_groups(model, OptimizerSettings(weight_decay=SETTINGS["weight_decay"])),
        lr=rate,
        betas=SETTINGS["betas"],
        eps=SETTINGS["eps"],
        fused=True,
    )


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_of: Callable[[Any, Any], Tensor] = loss_of,
) -> tuple[float, float]:
    """Take one step on a batch, by default windows [B, N + 1]; return the loss and the norm before clipping."""
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_norm"])
    optimizer.step()
    return loss.item(), norm.item()


def cooldown_of(length: int) -> int:
    """Return the steps of the cooldown of a branch of a length in steps."""
    return max(1, round(COOLDOWN * length))


def steps_trained(lengths: Sequence[int]) -> int:
    """Return the steps that `fit` takes: the longest branch, and the cooldowns of the others."""
    return lengths[-1] + sum(map(cooldown_of, lengths[:-1]))


def fit(
    model: LanguageModel,
    data: Batches,
    *,
    rate: float,
    warmup: int,
    lengths: Sequence[int],
    seed: int,
    loss_of: Callable[[Any, Any], Tensor] = loss_of,
) -> Trained:
    """Train with AdamW at a constant learning rate, with a branch at each length.

    Args:
        model: with new weights; the last branch's are left in it.
        data: to train on and to validate.
        rate: the learning rate after the warm-up.
        warmup: steps.
        lengths: in steps, rising; a cooldown begins after the one before ended its trunk.
        seed: of the order of batches.
        loss_of: returns the mean loss of a model over a batch.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    optimizer = adamw(model, rate)
    batches = list(zip(range(lengths[-1]), data.batches(seed), strict=False))
    if len(batches) < lengths[-1]:
        raise SystemExit(f"{lengths[-1]:,} steps need as many batches: the data has {len(batches):,}")
    seconds, norm = 0.0, 0.0

    def train(first: int, last: int, cooldown: int = 0) -> None:
        nonlocal seconds, norm
        start = time.process_time()
        model.train()
        for step, batch in batches[first:last]:
            factor = (last - step) / cooldown if cooldown else min(1, (step + 1) / warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            loss, before = training_step(model, optimizer, batch, loss_of)
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {step}")
            norm = max(norm, before) if step > warmup else norm
        model.eval()
        seconds += time.process_time() - start

    branches, done = [], 0
    for index, length in enumerate(lengths):
        cooldown = cooldown_of(length)
        train(done, done := length - cooldown)
        trunk = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(done, length, cooldown)
        loss = data.loss(model)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the validation loss is {loss} after {length} steps")
        branches.append(Branch(length, round(loss, 5)))
        if index < len(lengths) - 1:
            model.load_state_dict(trunk[0])
            optimizer.load_state_dict(trunk[1])
    return Trained(branches, seconds, norm)
