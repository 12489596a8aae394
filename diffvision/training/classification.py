"""Supervised classification with any timm model: one LightningModule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import timm
import torch
from timm.data import Mixup, create_transform, resolve_data_config
from timm.optim import param_groups_layer_decay
from torch import Tensor
from torch.nn import functional as F

from diffvision.data.batches import ImageLabelBatch
from diffvision.models.architecture import KEY, architecture, check, check_start
from diffvision.models.bounds import bounded, check_sizes
from diffvision.models.files import FOLDER, refuse_urls, tensors_only
from diffvision.models.names import unknown_model
from diffvision.training.finite import StepGuard
from diffvision.training.optim import OptimizerSettings, adamw, param_groups, schedule, without_decay


class ClassificationModule(pl.LightningModule):
    """A timm model with cross entropy, on labels or on mixup's soft targets.

    Attributes:
        model: the timm model; its keys in a checkpoint's state_dict have the prefix "model.".
        transform: image -> tensor for training. eval_transform: the same without augmentation.
    """

    def __init__(
        self,
        model: str,
        *,
        num_classes: int,
        model_args: dict[str, Any] | None = None,
        augmentation: dict[str, Any] | None = None,
        mixup: dict[str, Any] | None = None,
        label_smoothing: float = 0.0,
        optimizer: OptimizerSettings = OptimizerSettings(betas=(0.9, 0.999), eps=1e-8),  # noqa: B008  frozen
        layer_decay: float | None = None,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        """Build the model and its transforms.

        Args:
            model: name of a timm model; or "local-dir:FOLDER", whose weights are taken too unless model_args say not.
            num_classes: labels run from 0 to num_classes - 1.
            model_args: further arguments of the model (drop_path_rate, img_size, pretrained, ...).
            augmentation: arguments of timm.data.create_transform (scale, auto_augment, re_prob, ...).
            mixup: arguments of timm.data.Mixup (mixup_alpha, cutmix_alpha, prob, switch_prob, mode); null for none.
            label_smoothing: share of a target spread over all classes, with or without mixup.
            optimizer: AdamW and its schedule.
            layer_decay: each layer's learning rate is this times the next one's; null for one rate.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile the forward pass, in place.
        """
        super().__init__()
        self.name, self.settings, self.layer_decay = model, optimizer, layer_decay
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.model_args = ({"pretrained": True} if model.startswith(FOLDER) else {}) | (model_args or {})
        refuse_urls(self.model_args, "model_args")
        if ":" not in model and not timm.is_model(model.removeprefix("timm/")):
            raise unknown_model(model, "timm has no", timm.list_models())
        check_sizes(self.model_args, "model_args")
        with bounded(model), tensors_only(str(self.model_args.get("checkpoint_path") or model)):
            made: Any = timm.create_model(model, num_classes=num_classes, **self.model_args)
        if self.model_args.get("pretrained") or self.model_args.get("checkpoint_path"):
            check_start(self.model_args.get("checkpoint_path") or model, made)
        self.model = made
        if grad_checkpointing:
            made.set_grad_checkpointing()
        if compile:
            made.compile()  # in place: the state_dict's keys stay
        self.data_config = resolve_data_config(self.model_args, model=self.model)
        self.transform = create_transform(**{**self.data_config, **(augmentation or {})}, is_training=True)
        self.eval_transform = create_transform(**self.data_config)
        self.mixup = Mixup(**mixup, label_smoothing=label_smoothing, num_classes=num_classes) if mixup else None

    def training_step(self, batch: ImageLabelBatch, batch_idx: int) -> Tensor:
        image, target = batch["image"], batch["label"]
        smoothing = self.label_smoothing
        if self.mixup is not None:
            if len(image) % 2:
                raise ValueError(f"mixup pairs the samples of a batch; {len(image)} a rank is odd: change batch_size")
            image, target = self.mixup(image, target)
            smoothing = 0.0  # mixup's soft targets hold it already
        loss = F.cross_entropy(self.model(image).float(), target, label_smoothing=smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True)
        return loss

    def configure_callbacks(self) -> list[pl.Callback]:
        return [StepGuard(self.settings.clip_norm, self.settings.max_skipped)]

    def on_validation_epoch_start(self) -> None:
        self.counts = torch.zeros(4, dtype=torch.float64, device=self.device)  # samples, top-1, top-5, summed loss

    def validation_step(self, batch: ImageLabelBatch, batch_idx: int) -> None:
        logits, label = self.model(batch["image"]).float(), batch["label"]
        ranked = logits.topk(min(5, self.num_classes)).indices == label[:, None]
        loss = F.cross_entropy(logits, label, reduction="sum")
        self.counts += torch.stack([torch.tensor(len(label)).to(loss), ranked[:, 0].sum(), ranked.sum(), loss])

    def on_validation_epoch_end(self) -> None:
        """Counts are summed over ranks, whose batches need not be equal, before anything is divided."""
        samples, top1, top5, loss = self.trainer.strategy.reduce(self.counts, reduce_op="sum").tolist()
        if not samples:
            raise ValueError("the validation data is empty: no accuracy can be given")
        metrics = {"val/acc1": top1 / samples, "val/acc5": top5 / samples, "val/loss": loss / samples}
        self.log_dict(metrics, prog_bar=True, sync_dist=True)
        self.log("val/samples", samples, sync_dist=True)

    def configure_optimizers(self) -> Any:
        decay = self.settings.weight_decay
        # timm models name what they keep from decay (position embedding, class token).
        undecayed = set(self.model.no_weight_decay()) if hasattr(self.model, "no_weight_decay") else set()
        if self.layer_decay is None:
            groups = param_groups(self.model, decay, undecayed)
        else:
            undecayed |= {name for name, p in self.model.named_parameters() if without_decay(name, p)}
            groups = param_groups_layer_decay(
                self.model, weight_decay=decay, no_weight_decay_list=undecayed, layer_decay=self.layer_decay
            )
        optimizer = adamw(groups, self.settings)
        scheduler = schedule(optimizer, self.settings, self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_checkpoint(checkpoint)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """ValueError where a checkpoint is of another architecture; `fit` asks before it reads data."""
        check(checkpoint.get("diffvision", {}), self.model, "the checkpoint")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write down what is needed to rebuild the model, as plain Python values."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.data_config.items()}
        args = {**self.model_args, "num_classes": self.num_classes}
        about = {"model": self.name, "model_args": args, "preprocess": plain, KEY: architecture(self.model)}
        checkpoint["diffvision"] = about
