"""Next-token training of our language models: one LightningModule.

What it shares with others is in `module`, its loss in `cross_entropy`, its optimizer in `optim`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from diffvision import ops
from diffvision.data.batches import TokenBatch
from diffvision.data.text.module import TextData
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models import int8, language
from diffvision.models.architecture import KEY, architecture, check
from diffvision.models.files import FOLDER
from diffvision.training.cross_entropy import IGNORED, linear_cross_entropy
from diffvision.training.distillation import Distillation, Teacher
from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.module import TrainingModule, of_any_size
from diffvision.training.optim import OptimizerSettings
from diffvision.training.sharding import is_sharded

# Fields of the configuration in which a model may differ from the one whose weights it starts from.
EXTENDED = ("max_length", "rotary_theta")
PAPER_3B = OptimizerSettings(lr=3.2e-4, end_lr=1.28e-5, weight_decay=0.1, default_warmup_steps=1000, decay="linear")


class LanguageModule(TrainingModule):
    """A model of `diffvision.models.language` that learns to predict the next token.

    A step's loss is the mean over its predictions, of all its batches and on all ranks together; that of a batch is
    logged. Where the batch numbers its documents, attention stays inside them, and the first token of a document is not
    predicted from the one before. Where it says which tokens are learned, the others are not predicted.

    It runs on one device, under DDP, or sharded with FSDP2 (Lightning's ModelParallelStrategy with data_parallel_size
    the number of devices and tensor_parallel_size 1; each process makes the whole weights, and then shards them).

    Attributes:
        model: the `LanguageModel`; its keys in a checkpoint's state_dict have the prefix "model.". A checkpoint can be
            read by `diffvision.models.language.load`.
        tokenizer: the argument; the command line hands it to the data.
    """

    keys: ClassVar = ("tokens", "documents", "learned")
    needed: ClassVar = ("tokens",)
    computing: ClassVar = ("hidden",)
    adamw: ClassVar = {"betas": (0.9, 0.95), "eps": 1e-8}

    def __init__(
        self,
        model: str,
        *,
        model_args: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        pretrained: str | None = None,
        optimizer: OptimizerSettings = PAPER_3B,
        z_loss: float = 0.0,
        loss_chunk: int = 1024,
        distill: Distillation | None = None,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        """Build the model.

        Args:
            model: name of a language model: "diff-3m", "transformer-1.4b", ...; or "local-dir:FOLDER", a saved one to
                start from, such as `diffvision adapt` writes.
            model_args: fields of `LanguageConfig` that replace the named model's (vocab_size, max_length, ...); for a
                saved one only max_length and rotary_theta.
            tokenizer: of the text to train on, as `TextData` takes it; null where its shards hold tokens already.
            pretrained: checkpoint to start from, as `language.load` reads it; it may differ only in max_length and
                rotary_theta.
            optimizer: it and its schedule; or a dictionary of what differs from the defaults.
            z_loss: weight of the penalty log(Z)^2 on the logits' normaliser, for training only; 0: no penalty.
            loss_chunk: tokens whose logits are in memory together.
            distill: a teacher whose logits are learned besides the data's tokens, for training only; or a dictionary.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile each block, in place.

        Raises:
            ValueError: settings that no model has; weights of another model.
        """
        distill = Distillation(**distill) if isinstance(distill, dict) else distill
        super().__init__(locals() | {"distill": asdict(distill) if distill else None}, PAPER_3B)
        if loss_chunk < 1:
            raise ValueError(f"loss_chunk is {loss_chunk}: give the number of tokens, 1 or more, such as 1024")
        if z_loss < 0:
            raise ValueError(f"z_loss is {z_loss}: give the weight of the penalty, 0 or more, such as 1e-4")
        self.name, self.tokenizer = model, tokenizer
        self.z_loss, self.loss_chunk, self.distill = z_loss, loss_chunk, distill
        self._teacher: Teacher | None = None
        self._predictions: Tensor | None = None  # of this rank, in the batches of a step
        try:
            if model.startswith(FOLDER):
                pretrained = pretrained or model.removeprefix(FOLDER)
                saved = language.load(model.removeprefix(FOLDER)).config
                self.model = language.LanguageModel(replace(saved, **(model_args or {})))
            else:
                self.model = language.create(model, **(model_args or {}))
        except TypeError as error:  # an unknown field
            raise ValueError(f"model_args: {error}") from error
        if pretrained is not None:
            self._start_from(pretrained)
        self.model.set_grad_checkpointing(grad_checkpointing)
        if compile:
            for block in self.model.blocks:
                block.compile()  # in place: the state_dict's keys stay; one graph serves all blocks

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.model.config.vocab_size

    def _start_from(self, checkpoint: str) -> None:
        loaded = language.load(checkpoint)
        int8.refuse(loaded.state_dict(), checkpoint)
        self._check_configuration(asdict(loaded.config), checkpoint, ignored=EXTENDED)
        self.model.load_state_dict(loaded.state_dict())

    def _check_configuration(self, saved: dict[str, Any], checkpoint: str, ignored: tuple[str, ...] = ()) -> None:
        """Raise ValueError where a checkpoint's configuration is not this model's, except for some fields."""
        current = asdict(self.model.config)
        if not saved.keys() >= {"variant", "depth"}:
            raise ValueError(f"{checkpoint} is no checkpoint of our language training: give one of LanguageModule")
        # Checkpoints of earlier versions lack the fields that are newer, and have what are now their defaults.
        saved = {
            field.name: field.default for field in fields(language.LanguageConfig) if field.default is not MISSING
        } | saved
        if wrong := _differing_fields(saved, current, ignored):
            differing = ", ".join(f"{k} {saved.get(k)!r} (here {current[k]!r})" for k in wrong)
            remedy = _suggest_settings(saved, ignored)
            raise ValueError(f"{checkpoint} is of another model than {self.name!r}, with {differing}: {remedy}")

    def setup(self, stage: str) -> None:
        """Check that the data's sequences are not longer than the model reads."""
        super().setup(stage)
        length = getattr(getattr(self.trainer, "datamodule", None), "length", None)
        if isinstance(length, int) and length > (limit := self.model.config.max_length):
            raise ValueError(
                f"data.length is {length} tokens, over max_length of {limit}: set model.model_args.max_length to "
                "it, or lower data.length"
            )
        if stage == "fit" and self.distill is not None and self._teacher is None:
            self._teacher = self._open_teacher(self.distill, length)

    def _open_teacher(self, distill: Distillation, length: Any) -> Teacher:
        """Open the teacher with the tokenizer of the data, or of the settings."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "text_tokenizer", None)
        if tokenizer is None and self.tokenizer is not None:
            tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer is None:
            raise ValueError(
                f"distill.teacher is {distill.teacher}, and the data's tokenizer is not known: set model.tokenizer"
            )
        return Teacher(distill, tokenizer, length if isinstance(length, int) else 0, self.trainer.strategy.root_device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, N, vocab_size] of the tokens that follow each of `tokens` [B, N]."""
        return self.model(tokens)

    def as_read(self, batch: Any) -> Any:
        """Return a batch with where its documents end, if it is on its way to a device: there it would wait."""
        batch = super().as_read(batch)
        numbers = batch.get("documents")
        if numbers is not None and numbers.device.type == "cpu" != self.device.type:
            batch["ends"] = ops.document_ends(numbers[:, :-1])
        return batch

    def sums(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss with its penalty, the cross entropy in nats, and the number of predictions, each summed."""
        inputs, targets, documents = shift(batch)
        ends = batch.get("ends")
        packed = documents if documents is None or ends is None else ops.Documents(documents, of_any_size(ends))
        hidden = self.model.hidden(inputs, documents=packed)
        penalty = self.z_loss if self.training else 0.0
        teacher = self._teacher if self.training else None
        soft = None if teacher is None else teacher.soft_targets(inputs, targets, documents)
        loss, nll = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.model.head_weight,
            targets.flatten(),
            z_loss=penalty,
            chunk=self.loss_chunk,
            soft=soft,
        )
        return loss, nll, (targets != IGNORED).sum()

    def on_train_start(self) -> None:
        """Begin the schedule, and the count of a step's predictions."""
        super().on_train_start()
        self._predictions = None

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch's predictions; where batches differ in their number, a share of the sum."""
        if self.in_fabric:
            return self._mean_loss(self.as_read(batch))
        loss, nll, count = self.sums(batch)
        nats, excess, predictions = self._on_all_ranks(torch.stack([nll, loss.detach() - nll, count.to(nll.dtype)]))
        self.log_step(self.rate, loss=nats / predictions.clamp(min=1))
        if self.distill is not None:
            self.log("train/objective", (nats + excess) / predictions.clamp(min=1))
        elif self.z_loss:
            self.log("train/z_loss", excess / predictions.clamp(min=1))
        if "documents" not in batch and "learned" not in batch:
            return loss / count
        self._predictions = count if self._predictions is None else self._predictions + count
        return loss / self._share

    def _mean_loss(self, batch: TokenBatch) -> Tensor:
        """Return the mean loss of a batch's predictions on this rank, for a loop without a Trainer."""
        if self.distill is not None and self._teacher is None:
            self._teacher = self._open_teacher(self.distill, batch["tokens"].shape[1] - 1)
        loss, nll, count = self.sums(batch)
        self.log("train/loss", nll.detach() / count.clamp(min=1))
        return loss / count.clamp(min=1)

    @property
    def _share(self) -> int:
        """What a batch's sum is divided by before its backward pass: the same for all, near their predictions."""
        return self.model.config.max_length

    def on_after_backward(self) -> None:
        """Divide the gradients by the predictions of the step's batches on all ranks, once it has them all.

        The mean of the batches' means would weigh a token by how few are learned in its batch.
        """
        if self._predictions is None or lightning_internals.is_accumulating(self.trainer):
            return
        total = self._sum_over_ranks(self._predictions).clamp(min=1)
        divided = self._share * self.trainer.accumulate_grad_batches * self.trainer.world_size
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(divided / total)
        self._predictions = None

    def _on_all_ranks(self, sums: Tensor) -> Tensor:
        """Sum over ranks on the steps that are logged; on others ranks need not wait, and the sums are this rank's."""
        is_logged = lightning_internals.is_logging_step(self.trainer, self.trainer.global_step + 1)
        return self._sum_over_ranks(sums) if is_logged else sums

    def _sum_over_ranks(self, sums: Tensor) -> Tensor:
        """Sum in place; a strategy's `reduce` has a barrier before it, which waits for the device."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def validation_metrics(self, data: Any) -> list[str] | None:
        """Return the metrics of TextData's evaluation, if it has one."""
        if not isinstance(data, TextData):
            return None
        return [] if data.evaluation is None else ["val/loss", "val/perplexity", "val/tokens"]

    def on_validation_epoch_start(self) -> None:
        self.begin_sums(2)  # nats, predictions

    def validation_step(self, batch: TokenBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._in_step(working=True)
        with self._plain_tensors():
            _, nll, count = self.sums(batch)
        self.add_sums(dataloader_idx, nll, count)

    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity, from sums over all ranks."""
        while self._in_step(working=False):
            with self._plain_tensors():
                self.model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        for stage, loader, (nats, predictions) in self.all_sums():
            if not predictions:
                raise ValueError(f"the data for {stage}loss{loader} is empty: give some, or no such split")
            loss = nats / predictions
            perplexity = torch.tensor(loss, dtype=torch.float64).exp().item()  # infinite where Python's would raise
            self.log_means({f"{stage}loss{loader}": loss, f"{stage}perplexity{loader}": perplexity})
            self.log_means({f"{stage}tokens{loader}": predictions}, prog_bar=False)

    def predict_step(self, batch: TokenBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return log-probabilities of a batch's tokens [B, L + 1] after the first, in float32: [B, L].

        They are 0 for tokens that are not predicted: the first of a document, and those that are not learned.
        """
        inputs, targets, documents = shift(batch)
        hidden = self.model.hidden(inputs, documents=documents)
        pieces = zip(hidden.flatten(0, 1).split(self.loss_chunk), targets.flatten().split(self.loss_chunk), strict=True)
        weight = self.model.head_weight
        scores = [
            -F.cross_entropy((h @ weight.t()).float(), t, reduction="none", ignore_index=IGNORED) for h, t in pieces
        ]
        return torch.cat(scores).view_as(targets)

    def _in_step(self, working: bool) -> bool:
        """Return whether any rank has a batch to validate.

        Sharded layers are gathered by all ranks together, so a rank with fewer batches than others takes part until all
        are done. Without sharding, ranks need not know of each other.
        """
        if not is_sharded(self.model):
            return working
        flag = torch.tensor(float(working), device=self.device)
        return bool(self.trainer.strategy.reduce(flag, reduce_op="sum"))

    @contextmanager
    def _plain_tensors(self) -> Iterator[None]:
        """Disable gradients without inference mode, because the next training step uses what FSDP2 gathers."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError, with what to set, where a checkpoint is of another model; `fit` calls it before data."""
        path = getattr(self.attached_trainer, "ckpt_path", None)
        name = str(path or "the checkpoint")
        self._check_configuration(checkpoint.get("hyper_parameters", {}).get("config", {}), name)
        if KEY in (
            about := checkpoint.get("diffvision", {})
        ):  # older files have only the configuration, compared above
            check(about, self.model, name)

    def describe(self) -> dict[str, Any]:
        """Return the model's name, tokenizer and architecture."""
        return {"model": self.name, "tokenizer": self.tokenizer, KEY: architecture(self.model)}

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return `pretrained`, left out, and the configuration, which `language.load` reads.

        A saved model is rebuilt from all fields of its configuration, with which a model of any name is the same.
        """
        config = asdict(self.model.config)
        if not self.name.startswith(FOLDER):
            return {"pretrained": None, "config": config}
        return {"pretrained": None, "config": config, "model": language.model_names()[0], "model_args": config}


def shift(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a batch's inputs, their targets (or IGNORED), and the documents of the inputs."""
    tokens, documents, learned = batch["tokens"], batch.get("documents"), batch.get("learned")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if learned is not None:
        targets = targets.masked_fill(~learned[:, 1:], IGNORED)
    if documents is None:
        return inputs, targets, None
    return inputs, targets.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED), documents[:, :-1]


def _differing_fields(saved: dict[str, Any], current: dict[str, Any], ignored: tuple[str, ...]) -> list[str]:
    """Return the fields in which two configurations differ."""
    return [name for name, value in current.items() if name not in ignored and saved.get(name) != value]


def _suggest_settings(saved: dict[str, Any], ignored: tuple[str, ...]) -> str:
    """Say what to set for a model of this configuration: the nearest named model, and the fields that differ."""
    known = {name: asdict(language.config(name)) for name in language.model_names()}
    differing = {
        name: _differing_fields(saved, config, ignored)
        for name, config in known.items()
        if config["variant"] == saved["variant"]
    }
    if not differing:
        return f"no model has its variant {saved['variant']!r}"
    name = min(differing, key=lambda name: len(differing[name]))
    args = "".join(f" --model.model_args.{field}={json.dumps(saved.get(field))}" for field in differing[name])
    return f"set --model.model={name}{args}"
