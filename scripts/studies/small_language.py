"""A small language model trained over tokens in memory, for studies: constant learning rate, then cooldown branches.

The learning rate is constant after its warm-up, so that one run serves several lengths: for each of them it branches
off, falls to zero over a fifth of that length, and goes back to the trunk (arXiv 2405.18392).
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import documents_of
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models.language import LanguageModel
from diffvision.ops.attention.choice import attention_backend
from diffvision.training.optim import param_groups

VOCABULARY, LENGTH, BATCH = 1024, 256, 4
TRAIN_TOKENS, VALIDATION_TOKENS = 8_000_000, 32_768
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


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Tokenise what `data/text.py` wrote, documents in random order, and write one file."""
    texts = {
        split: list(documents_of(ShardSet(source / split), TextMember("txt"))) for split in ("train", "validation")
    }
    for number, documents in enumerate(texts.values()):
        np.random.default_rng(number).shuffle(documents)
    tokenizer = train_tokenizer(texts["train"][:50_000], VOCABULARY)
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(file.with_suffix(".tokenizer.json"))
    content = {}
    for split, wanted in (("train", TRAIN_TOKENS), ("validation", VALIDATION_TOKENS + 1)):
        tokens: list[int] = []
        characters = 0
        for text in texts[split]:
            tokens += [*tokenizer.encode(text), tokenizer.eos_id]
            characters += len(text)
            if len(tokens) >= wanted:
                break
        print(f"{split}: {len(tokens):,} tokens, {characters / len(tokens):.2f} characters each")
        content[split] = torch.tensor(tokens[:wanted], dtype=torch.int16)
    torch.save(content, file)


class Data:
    """What `make_data` wrote."""

    def __init__(self, file: Path) -> None:
        content = torch.load(file, weights_only=True)
        self.train: Tensor = content["train"]
        self.validation: Tensor = content["validation"][: VALIDATION_TOKENS + 1]

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches [B, N + 1] of windows of the training text in random order, none of them twice."""
        count = (len(self.train) - 1) // LENGTH
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) * LENGTH
        for starts in order[: count // BATCH * BATCH].view(-1, BATCH):
            yield torch.stack([self.train[start : start + LENGTH + 1] for start in starts]).long()

    def loss(self, model: nn.Module) -> float:
        """Return a model's loss on the validation text, nats a token."""
        windows = torch.stack(
            [self.validation[i : i + LENGTH + 1] for i in range(0, len(self.validation) - LENGTH, LENGTH)]
        )
        with torch.no_grad():
            losses = [loss_of(model, batch.long()).item() * len(batch) for batch in windows.split(16)]
        return sum(losses) / len(windows)


class Batches(Protocol):
    """What a model is trained on and validated on."""

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield batches in an order that the seed decides."""

    def loss(self, model: nn.Module) -> float:
        """Return a model's loss on the validation data."""


# ---- training ------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of a model over windows [B, N + 1], nats a token."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return the optimizer of a model's training."""
    return torch.optim.AdamW(
        param_groups(model, SETTINGS["weight_decay"]),
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


def flops_of_step(model: LanguageModel) -> int:
    """Return the FLOPs of a training step: three forward passes, 2 a multiply-add.

    Maps are counted densely, and subtracted before they multiply the values, so that V1 counts as many as plain
    attention. What the backend that trains costs is seen in its seconds.
    """
    with attention_backend("eager"), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    return 3 * BATCH * int(counter.get_total_flops())


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
        cooldown = max(1, round(COOLDOWN * length))
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
