"""Tiny runs of each task that can be interrupted anywhere, with everything random turned on, and all that they leave.

Tests of exact resuming compare their outcomes bit by bit; `resume_matrix.py` lists where they are interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from training_fits import noise, trainer

from diffvision.data.conversations import VisionLanguageData
from diffvision.data.images.image_data import ImageLabelData, ImageTextData
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.data.text.text_data import TextData
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.training.callbacks import DataReport, LambdaMonitor, Throughput
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO, find_newest
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.random_state import capture_random_state
from diffvision.training.fault_tolerance.resume import Ranks, prepare_run
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings
from diffvision.training.vision_language import VisionLanguageModule

# Samples of a batch and batches of an epoch; some samples are left over.
BATCH, BATCHES, EPOCHS = 4, 6, 2
# Tokens of a sequence of text, and the tokenizer's size.
LENGTH, VOCABULARY = 12, 270
# Logged values that depend on time.
UNEQUAL = ("train/samples_per_second", "train/tokens_per_second", "train/data_wait", "train/memory_gib")
SETTINGS = OptimizerSettings(lr=3e-3, warmup_steps=2, clip_norm=0.5)
TASKS = ("clip", "classification", "language")
MONITORS = dict.fromkeys((*TASKS, "vision-language"), "val/loss") | {"clip": "zero_shot/eval/acc1"}
# What ends a run. Lightning's loops differ where it is a number of steps.
LENGTHS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": EPOCHS, "max_steps": -1},
    "steps": {"max_epochs": -1, "max_steps": EPOCHS * BATCHES},
    "steps, without validation": {"max_epochs": -1, "max_steps": EPOCHS * BATCHES, "limit_val_batches": 0},
}


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        task: one of TASKS, or "vision-language".
        ema: whether weights are averaged.
        accumulate: accum_freq of the contrastive task, accumulate_grad_batches of the others.
        by: key of LENGTHS.
    """

    task: str
    ema: bool = False
    accumulate: int = 1
    by: str = "epochs"


@dataclass(frozen=True)
class Cut:
    """Where a run is interrupted: in a hook, at the batch of that number in the whole run.

    "saved" is after all callbacks' on_train_batch_end.
    """

    hook: str
    batch: int


class Interrupted(Exception):
    """Ends a run."""


@dataclass
class Outcome:
    """All that a run leaves.

    Attributes:
        checkpoint: the one taken at its end: weights, averages, optimizer, schedule, loops, callbacks.
        generators: their states at its end.
        metrics: that callbacks watch, at its end.
        samples: batch's number in the run -> a digest of every sample as the model saw it.
        rows: step -> what was logged.
        files: checkpoints on disk.
        began: number of the first batch each time that the run began.
        resumed: names of the checkpoints that it was resumed from.
    """

    checkpoint: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)


# --- data ---


LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["".join(LETTERS[(i * k) % 26] for k in range(3, 8)) for i in range(1, 27)]
TEXTS = [" ".join(WORDS[(n * k) % 26] for k in range(1, 4)) for n in range(1, 22)]


def write_texts(folder: Path, texts: list[str]) -> None:
    write_shards(folder, ({"__key__": f"{n:03d}", "txt": text} for n, text in enumerate(texts)), per_shard=7)


def write_data(root: Path) -> None:
    """Write shards of 26 images with captions and classes, an evaluation folder, and shards of text."""
    texts_and_classes = {"txt": lambda i: f"number {i}", "cls": lambda i: i % 3}
    write_shards(root / "images", noise(BATCH * BATCHES + 2, **texts_and_classes), per_shard=10)
    classes = {"classnames": ["one", "two", "three"], "templates": ["a photo of a {c}"]}
    write_evaluation_split(root / "zero_shot" / "eval" / "test", noise(24, cls=lambda i: i % 3), **classes)
    write_texts(root / "text", TEXTS)
    train_tokenizer(TEXTS, VOCABULARY).save(root / "tokenizer.json")

    def talk(number: int) -> str:
        return json.dumps({"texts": [{"user": "a" * (1 + number % 5), "assistant": "b" * (1 + number % 7)}]})

    write_shards(root / "vision-language", noise(BATCH * BATCHES + 2, **texts_and_classes, json=talk), per_shard=10)


def words_to_tokens(texts: list[str], length: int = 24) -> torch.Tensor:
    """Tokenise into 100 tokens, of which the largest is the end: the model's 49,408 would be most of the work."""
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        data = [1 + byte % 98 for byte in text.encode()[: length - 1]] + [99]
        row[: len(data)] = torch.tensor(data)
    return tokens


def data_of(root: Path, module: pl.LightningModule, task: str, workers: int) -> pl.LightningDataModule:
    common = {"num_workers": workers, "seed": 5, "window": 2}
    if task == "language":
        text = str(root / "text")
        return TextData(text, BATCH, LENGTH, text, str(root / "tokenizer.json"), eval_batch_size=16, **common)
    if task == "vision-language":
        talks = str(root / task)
        return VisionLanguageData(talks, BATCH, 60, talks, eval_batch_size=16, **common)
    common |= {"transform": module.transform, "eval_transform": module.eval_transform}
    if task == "classification":
        folder = str(root / "zero_shot" / "eval")
        return ImageLabelData(str(root / "images"), BATCH, folder, eval_batch_size=8, **common)
    folders = [str(root / "zero_shot")]
    return ImageTextData(str(root / "images"), BATCH, folders, tokenizer=words_to_tokens, **common)


def module_of(setting: Setting, root: Path | None = None) -> pl.LightningModule:
    """Return a new module with dropout in all its layers; that of vision and language needs the data's folder."""
    module: Any
    if setting.task == "vision-language":
        return VisionLanguageModule(
            "diff-vlm-debug",
            language_args={"vocab_size": VOCABULARY, "max_length": 64},
            tokenizer=str(root),
            train=["tower", "projector", "language_model"],
            optimizer=SETTINGS,
            projector_lr=1e-3,
            lora={"r": 2, "dropout": 0.1},
        )
    if setting.task == "language":
        small = {"vocab_size": VOCABULARY, "dim": 16, "depth": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 24}
        module = LanguageModule("diff-debug", model_args=small, optimizer=SETTINGS)
    elif setting.task == "classification":
        module = ClassificationModule(
            "diff_vit_debug",
            num_classes=3,
            model_args={"drop_path_rate": 0.2, "depth": 2},
            augmentation={"scale": [0.5, 1.0], "color_jitter": 0.3, "re_prob": 0.3},
            mixup={"mixup_alpha": 0.8, "cutmix_alpha": 1.0},
            label_smoothing=0.1,
            optimizer=SETTINGS,
        )
    else:
        crops = {"scale": [0.5, 1.0], "color_jitter": [0.3, 0.3, 0.3, 0.1], "color_jitter_prob": 0.8, "use_timm": True}
        lion = replace(SETTINGS, name="lion")
        module = ContrastiveModule(
            "DiffCLIP-debug",
            augmentation=crops,
            optimizer=lion,
            text_layer_decay=0.5,
            accum_freq=setting.accumulate,
        )
        module.model.token_embedding = nn.Embedding(100, 64)
        module.tokenizer = words_to_tokens
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.1
        if hasattr(layer, "attn_drop"):
            layer.attn_drop = 0.1
    return module


def plain_checkpoint(state: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
    """Return the least that a checkpoint of Lightning holds."""
    empty = {"callbacks": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {"fit_loop": {}}}
    return {"pytorch-lightning_version": pl.__version__, "epoch": 0, "global_step": step, "state_dict": state} | empty


# --- runs ---


HOOKS = (
    *("on_train_epoch_start", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_end"),
)


class Cutter(pl.Callback):
    """Records what the model is given, and ends the run where it must be cut."""

    def __init__(self, cut: Cut | None) -> None:
        self.cut, self.samples = cut, {}

    def reached(self, hook: str, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.cut and (hook, trainer.fit_loop.total_batch_idx) == (self.cut.hook, self.cut.batch):
            raise Interrupted

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rows = zip(*(value for _, value in sorted(batch.items())), strict=True)
        digests = [hashlib.sha256(b"".join(part.numpy().tobytes() for part in row)).hexdigest() for row in rows]
        self.samples[trainer.fit_loop.total_batch_idx] = digests
        self.reached("on_train_batch_start", trainer)


def _cutting(hook: str) -> Callable[..., None]:
    return lambda self, trainer, *_: self.reached(hook, trainer)


for _hook in HOOKS:
    setattr(Cutter, _hook, _cutting(_hook))


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {key: float(value) for key, value in metrics.items() if not key.startswith(UNEQUAL)}
        self.rows.setdefault(step or 0, {}).update(values)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """There are none."""


def checkpoints(kept: Path, task: str) -> list[ModelCheckpoint]:
    """Return callbacks that save the best two of validation, and after each epoch."""
    mode = "max" if task == "clip" else "min"
    return [
        ModelCheckpoint(kept, "best-{step}", MONITORS[task], mode=mode, save_top_k=2),
        ModelCheckpoint(kept, "epoch-{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True),
    ]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def once(
    data: Path, kept: Path, setting: Setting, outcome: Outcome, cut: Cut | None, *, workers: int = 0,
    ranks: Ranks = "same", every: int | None = 1, **settings: Any,
) -> bool:  # fmt: skip
    """Begin a run, or resume the one in `kept`; return whether it came to its end.

    Args:
        outcome: what the run leaves is added to it.
        every: steps between two saves.
        settings: of the trainer.
    """
    resumes = find_newest([kept])[0] is not None
    # A run is resumed with generators in another state than it was saved with.
    seed(1000 + len(outcome.began) if resumes else 7)
    module, last, cutter, memory = module_of(setting, data), LastCheckpoint(every), Cutter(cut), Memory()
    module.on_train_batch_end = lambda *_: cutter.reached("saved", module.trainer)
    averages = [EMA(decay=0.8)] if setting.ema else []
    callbacks: list[Any] = [LambdaMonitor(), Throughput(), DataReport(), *averages, cutter]
    fitting = trainer_of(setting, [*callbacks, *checkpoints(kept, setting.task), last], memory, settings)
    try:
        with prepare_run(fitting, module, last, how="auto", ranks=ranks, ckpt_path=None) as path:
            outcome.resumed += [Path(path).name] if path else []
            fitting.fit(module, data_of(data, module, setting.task, workers), ckpt_path=path)
        fitting.save_checkpoint(kept.with_suffix(".end"))
        outcome.generators = capture_random_state(torch.device("cpu"))
        outcome.metrics = {k: float(v) for k, v in fitting.callback_metrics.items() if not k.startswith(UNEQUAL)}
    except Interrupted:
        pass
    finally:
        outcome.began.append(min(cutter.samples, default=EPOCHS * BATCHES))
        outcome.samples |= cutter.samples
        for step, row in memory.rows.items():
            outcome.rows.setdefault(step, {}).update(row)
    if not kept.with_suffix(".end").exists():
        return False
    outcome.checkpoint = without(kept, torch.load(kept.with_suffix(".end"), weights_only=True))
    outcome.files = sorted(p.name for p in kept.glob("*.ckpt"))
    return True


def trainer_of(setting: Setting, callbacks: list[Any], logger: Logger, settings: dict[str, Any]) -> pl.Trainer:
    accumulated = {} if setting.task == "clip" else {"accumulate_grad_batches": setting.accumulate}
    fixed = {"plugins": [DurableCheckpointIO()], "log_every_n_steps": 1, "val_check_interval": 3}
    return trainer(*callbacks, logger=logger, **fixed | LENGTHS[setting.by] | accumulated | settings)


def run(data: Path, kept: Path, setting: Setting, cuts: list[Cut], *, workers: list[int]) -> Outcome:
    """Train with an interruption at each of `cuts` in turn, and `workers[i]` workers (or the last) in the i-th part."""
    outcome = Outcome()
    with quietly():
        for part, cut in enumerate([*cuts, None]):
            count = workers[min(part, len(workers) - 1)]
            if once(data, kept, setting, outcome, cut, workers=count) != (cut is None):
                raise AssertionError(f"the run was not interrupted at {cut}" if cut else "the run did not end")
    return outcome


@contextmanager
def quietly() -> Iterator[None]:
    """Show neither Lightning's advice nor a run's warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            yield
    finally:
        logging.disable(before)


# --- comparing ---


def unequal(one: Outcome, other: Outcome) -> list[str]:
    """Return the names of what is not bit-equal in two outcomes."""
    pairs = {
        "": (one.checkpoint, other.checkpoint),
        "samples": (one.samples, other.samples),
        "logged": (one.rows, other.rows),
        "generators": (one.generators, other.generators),
        "metrics": (one.metrics, other.metrics),
        "files": (one.files, other.files),
    }
    return [line for name, (a, b) in pairs.items() for line in differences(a, b, name)]


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Return the names of the leaves of two nested containers that are not bit-equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other}, key=str)
        return [d for k in keys for d in differences(one.get(k, "none"), other.get(k, "none"), f"{name}/{k}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{name}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)
    else:
        same = one == other or (one != one and other != other)
    return [] if same else [f"{name}: {short(one)} | {short(other)}"]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


def short(value: Any) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) and value.ndim else str(value)[:100]


def without(root: Path, value: Any) -> Any:
    """Remove the folder of the run from the strings of nested containers."""
    if isinstance(value, dict):
        return {without(root, key): without(root, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without(root, item) for item in value]
    return value.replace(os.fspath(root), "") if isinstance(value, str) else value
