"""Next-token training of our language models: one LightningModule.

What it shares with others is in `next_token` and `module`, its optimizer in `optim`.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar

from torch import Tensor

from diffvision import ops
from diffvision.data.batches import TokenBatch
from diffvision.data.text.text_data import TextData
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.models import language
from diffvision.models.architecture import KEY, architecture, check
from diffvision.models.bundled import bundled
from diffvision.models.weight_files import FOLDER
from diffvision.training.compilation import compile_in_place
from diffvision.training.cross_entropy import SoftTargets
from diffvision.training.distillation import Distillation, Teacher
from diffvision.training.module import mark_batch_dynamic
from diffvision.training.next_token import NextTokenModule, shift
from diffvision.training.optim import OptimizerSettings
from diffvision.training.sharding import is_sharded, shard

# Fields of the configuration in which a model may differ from the one whose weights it starts from.
EXTENDED = ("max_length", "rotary_theta")
PAPER_3B = OptimizerSettings(lr=3.2e-4, end_lr=1.28e-5, weight_decay=0.1, default_warmup_steps=1000, decay="linear")


class LanguageModule(NextTokenModule):
    """A model of `diffvision.models.language` that learns to predict the next token.

    The loss of an optimizer step is the mean over all predictions of its batches on all ranks; the logged loss is that
    of one batch. If a batch has document numbers, attention is masked to each document, and a document's first token is
    not predicted. If it has a mask of learned tokens, only those are predicted.

    It runs on one device, under DDP, or sharded with FSDP2 (Lightning's ModelParallelStrategy with data_parallel_size
    the number of devices and tensor_parallel_size 1; each process makes the whole weights, and then shards them).

    Attributes:
        model: the `LanguageModel`; its keys in a checkpoint's state_dict have the prefix "model.". A checkpoint can be
            read by `diffvision.models.language.load`.
        tokenizer: the argument; the command line hands it to the data.
    """

    batch_keys: ClassVar = ("tokens", "documents", "learned")
    required_keys: ClassVar = ("tokens",)
    data_class: ClassVar = TextData
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
            tokenizer: of the text to train on, as `TextData` takes it; null if the data are token ids already.
            pretrained: checkpoint to start from, as `language.load` reads it, or a tag of the model's weights; it may
                differ only in max_length and rotary_theta.
            optimizer: settings of the optimizer and schedule, or a dictionary of those that differ from the defaults.
            z_loss: weight of the penalty log(Z)^2 on the logits' normaliser, for training only; 0: no penalty.
            distill: settings of distillation from a teacher, for training only; or a dictionary of them.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile the blocks, in place.

        Raises:
            ValueError: a setting is unknown or out of range, or the weights are of another model.
        """
        distill = Distillation(**distill) if isinstance(distill, dict) else distill
        super().__init__(locals() | {"distill": asdict(distill) if distill else None}, PAPER_3B)
        if z_loss < 0:
            raise ValueError(f"z_loss must be 0 or more, such as 1e-4, got {z_loss}")
        self.name, self.tokenizer = model, tokenizer
        self.z_loss, self.distill = z_loss, distill
        self._teacher: Teacher | None = None
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
            self.sources = [pretrained]
        self.model.set_grad_checkpointing(grad_checkpointing)
        if compile:
            compile_in_place(self.model.blocks)

    def configure_model(self) -> None:
        """Shard the model over the devices, if the strategy asks for it: each block, and the rest together."""
        mesh = self.device_mesh
        if mesh is None or is_sharded(self.model):
            return
        if (size := mesh["tensor_parallel"].size()) > 1:
            raise ValueError(
                f"tensor_parallel_size must be 1, got {size}: set data_parallel_size to {mesh.size()} in its place"
            )
        shard(self.model, mesh["data_parallel"], methods=("hidden",))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.model.config.vocab_size

    def _start_from(self, checkpoint: str) -> None:
        loaded = language.load(bundled(self.name).get(checkpoint, checkpoint))
        self._check_configuration(asdict(loaded.config), checkpoint, ignored=EXTENDED)
        self.model.load_state_dict(loaded.state_dict())

    def _check_configuration(self, saved: dict[str, Any], checkpoint: str, ignored: tuple[str, ...] = ()) -> None:
        """Raise ValueError if a checkpoint's configuration differs from this model's, except in ignored fields."""
        current = asdict(self.model.config)
        if not saved.keys() >= {"variant", "depth"}:
            raise ValueError(f"{checkpoint} must be a checkpoint of LanguageModule")
        # Checkpoints of earlier versions lack newer fields: their defaults apply.
        saved = {
            field.name: field.default for field in fields(language.LanguageConfig) if field.default is not MISSING
        } | saved
        wrong = [name for name, value in current.items() if name not in ignored and saved.get(name) != value]
        if wrong:
            differing = ", ".join(f"{name} {saved.get(name)!r} (here {current[name]!r})" for name in wrong)
            raise ValueError(f"{checkpoint} is of another model than {self.name!r}: set model_args to its {differing}")

    def setup(self, stage: str) -> None:
        """Check that the data's sequences are not longer than the model reads."""
        length = getattr(getattr(self.trainer, "datamodule", None), "length", None)
        if isinstance(length, int) and length > (limit := self.model.config.max_length):
            raise ValueError(f"data.length must be at most model.model_args.max_length, {limit}, got {length}")
        if stage == "fit" and self.distill is not None and self._teacher is None:
            self._teacher = self._open_teacher(self.distill, length)

    def _open_teacher(self, distill: Distillation, length: Any) -> Teacher:
        """Open the teacher with the tokenizer of the data, or of the settings."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "text_tokenizer", None)
        if tokenizer is None and self.tokenizer is not None:
            tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer is None:
            raise ValueError(f"model.tokenizer must be set for the teacher {distill.teacher}, got null")
        return Teacher(distill, tokenizer, length if isinstance(length, int) else 0, self.trainer.strategy.root_device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, N, vocab_size] of the tokens that follow each of `tokens` [B, N]."""
        return self.model(tokens)

    def prepare_batch(self, batch: Any) -> Any:
        """Add the ends of documents to a batch that is on the CPU; on a device this would synchronise."""
        batch = super().prepare_batch(batch)
        numbers = batch.get("documents")
        if numbers is not None and numbers.device.type == "cpu" != self.device.type:
            batch["ends"] = ops.document_ends(numbers[:, :-1])
        return batch

    def compute_states(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return final hidden states [B, N, dim] and targets [B, N]; attention is masked to each document."""
        inputs, targets, documents = shift(batch)
        ends = batch.get("ends")
        packed = documents if documents is None or ends is None else ops.Documents(documents, mark_batch_dynamic(ends))
        return self.model.hidden(inputs, documents=packed), targets

    def soft_targets(self, batch: TokenBatch) -> SoftTargets | None:
        """Return the teacher's distributions, in training."""
        return None if self._teacher is None or not self.training else self._teacher.soft_targets(*shift(batch))

    def log_penalty(self, nats: Tensor, excess: Tensor) -> None:
        """Log the z-loss, or with a teacher the whole objective."""
        if self.distill is not None:
            self.log("train/objective", nats + excess)
        elif self.z_loss:
            self.log("train/z_loss", excess)

    @property
    def _divisor(self) -> int:
        return self.model.config.max_length

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another model. `fit` calls this before reading data."""
        path = getattr(self.attached_trainer, "ckpt_path", None)
        name = str(path or "the checkpoint")
        self._check_configuration(checkpoint.get("hyper_parameters", {}).get("config", {}), name)
        if KEY in (
            about := checkpoint.get("diffvision", {})
        ):  # older files have only the configuration, compared above
            check(about, self.model, name)

    def describe(self) -> dict[str, Any]:
        """Return the model's name, tokenizer (of conversations with their chat template) and architecture."""
        data = getattr(self.attached_trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer_source", None) or self.tokenizer
        return {"model": self.name, "tokenizer": tokenizer, KEY: architecture(self.model)}

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return `pretrained: None`, and all fields of the configuration as `model_args`."""
        config = asdict(self.model.config)
        if not self.name.startswith(FOLDER):
            return {"pretrained": None, "config": config}
        return {"pretrained": None, "config": config, "model": language.model_names()[0], "model_args": config}
