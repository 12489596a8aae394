"""Supervised classification with any timm model: one LightningModule.

Code shared with the other modules is in `module`, the optimizer in `optim`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from diffvision.data.batches import ImageLabelBatch
from diffvision.data.images.image_data import ImageLabelData
from diffvision.models.architecture import KEY, architecture, check, check_start
from diffvision.models.names import unknown_model
from diffvision.models.weight_files import FOLDER, refuse_urls, tensors_only
from diffvision.opening.image_models import refuse_misfit
from diffvision.training.compilation import compile_in_place
from diffvision.training.module import TrainingModule, mark_batch_dynamic, tuples_to_lists
from diffvision.training.optim import OptimizerSettings, check_layer_decay, param_groups


class ClassificationModule(TrainingModule):
    """A timm model with cross entropy, on labels or on mixup's soft targets.

    Attributes:
        model: the timm model; its keys in a checkpoint's state_dict have the prefix "model.".
        transform: image -> tensor for training.
        eval_transform: the same without augmentation.
    """

    batch_keys: ClassVar = ("image", "label")
    required_keys: ClassVar = ("image", "label")
    adamw: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-8}

    def __init__(
        self,
        model: str,
        *,
        num_classes: int | None = None,
        model_args: dict[str, Any] | None = None,
        augmentation: dict[str, Any] | None = None,
        mixup: dict[str, Any] | None = None,
        label_smoothing: float = 0.0,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008  frozen
        layer_decay: float | None = None,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        """Build the model and its transforms.

        Args:
            model: name of a timm model; or "local-dir:FOLDER", whose weights are loaded unless model_args forbid it.
            num_classes: labels run from 0 to num_classes - 1. By default `fit` takes it from data with named
                classes: folders, tables, or an evaluation folder next to shards.
            model_args: more arguments of the model (drop_path_rate, img_size, pretrained, ...).
            augmentation: arguments of timm.data.create_transform (scale, auto_augment, re_prob, ...).
            mixup: arguments of timm.data.Mixup (mixup_alpha, cutmix_alpha, prob, switch_prob, mode); null: no mixup.
            label_smoothing: share of a target spread over all classes, with or without mixup.
            optimizer: settings of the optimizer and schedule, or a dictionary of those that differ from the defaults.
            layer_decay: ratio of each layer's learning rate to that of the next layer; null: one rate for all layers.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile the forward pass, in place.
        """
        check_layer_decay(layer_decay=layer_decay)
        super().__init__(locals(), OptimizerSettings())
        if num_classes is None:
            raise ValueError("model.num_classes is not set, and the data names no classes: set it to their number")
        # timm takes seconds, and the help of `fit` imports this module.
        import timm
        from timm.data import Mixup, create_transform, resolve_data_config

        self.name, self.layer_decay = model, layer_decay
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.model_args = ({"pretrained": True} if model.startswith(FOLDER) else {}) | (model_args or {})
        refuse_urls(self.model_args, "model_args")
        if ":" not in model and not timm.is_model(model.removeprefix("timm/")):
            raise unknown_model(model, "timm has no", timm.list_models())
        file = self.model_args.get("checkpoint_path")
        with tensors_only(str(file or model)), refuse_misfit(file, model):
            made: Any = timm.create_model(model, num_classes=num_classes, **self.model_args)
        if self.model_args.get("pretrained") or self.model_args.get("checkpoint_path"):
            source = self.model_args.get("checkpoint_path") or model
            file = made.pretrained_cfg.get("file") if source == model and ":" not in model else None
            self.sources = [str(file or source).removeprefix(FOLDER)]
            check_start(source, made)
        self.model = made
        if grad_checkpointing:
            made.set_grad_checkpointing()
        if compile:
            compile_in_place(made)
        self.data_config = resolve_data_config(self.model_args, model=self.model)
        self.transform = create_transform(**{**self.data_config, **(augmentation or {})}, is_training=True)
        self.eval_transform = create_transform(**self.data_config)
        if mixup and not (mixup.get("mixup_alpha", 1) or mixup.get("cutmix_alpha") or mixup.get("cutmix_minmax")):
            mixup = None
        self.mixup = Mixup(**mixup, label_smoothing=label_smoothing, num_classes=num_classes) if mixup else None

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [B, num_classes]."""
        return self.model(image)

    def prepare_batch(self, batch: Any) -> Any:
        """Return a loader's batch as a dictionary; raise ValueError for labels that are no class, unless on a GPU."""
        batch = super().prepare_batch(batch)
        label = batch["label"]
        if isinstance(label, Tensor) and label.device.type == "cpu" and not label.is_floating_point():
            outside = label[(label < 0) | (label >= self.num_classes)]
            if len(outside):
                last = self.num_classes - 1
                raise ValueError(f"labels must be 0 to {last}, got {outside[0].item()}: set num_classes to the data's")
        return batch

    def training_step(self, batch: ImageLabelBatch, batch_idx: int) -> Tensor:
        image, target = batch["image"], batch["label"]
        smoothing = self.label_smoothing
        if self.mixup is not None:
            if len(image) % 2:
                raise ValueError(f"mixup needs an even number of samples per rank, got {len(image)}: change batch_size")
            image, target = self.mixup(image, target)
            smoothing = 0.0  # mixup's soft targets include it
        loss = F.cross_entropy(self.model(image).float(), target, label_smoothing=smoothing)
        self.log_step(loss=self.mean_if_logged(loss.detach()))
        return loss

    def validation_metrics(self, data: Any) -> list[str] | None:
        """Return the names of the metrics that validation on `ImageLabelData` logs; none without evaluation data."""
        if not isinstance(data, ImageLabelData):
            return None
        names = ["acc1", *(["acc5"] if self.num_classes >= 5 else []), "loss", "samples"]
        return [] if data.evaluation is None else [f"val/{name}" for name in names]

    def on_validation_epoch_start(self) -> None:
        self.begin_sums(4)  # samples, top-1, top-5, summed loss

    def validation_step(self, batch: ImageLabelBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count correct predictions and sum the loss."""
        logits, label = self.model(mark_batch_dynamic(batch["image"])).float(), batch["label"]
        ranked = logits.topk(min(5, self.num_classes)).indices == label[:, None]
        loss = F.cross_entropy(logits, label, reduction="sum")
        self.add_sums(dataloader_idx, len(label), ranked[:, 0].sum(), ranked.sum(), loss)

    def on_validation_epoch_end(self) -> None:
        """Log accuracies and loss, from sums over all samples and ranks; no acc5 with fewer than five classes."""
        for loader, (samples, top1, top5, loss) in self.reduce_sums():
            if not samples:
                raise ValueError(f"val/acc1{loader} has no samples: check its data, or leave them out")
            means = {"acc1": top1 / samples, "acc5": top5 / samples, "loss": loss / samples}
            if self.num_classes < 5:
                del means["acc5"]
            self.log_means({f"val/{name}{loader}": value for name, value in means.items()})
            self.log_means({f"val/samples{loader}": samples}, prog_bar=False)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters in groups, without decay where the timm model excludes them from it."""
        # Such as the position embedding and the class token.
        undecayed = set(self.model.no_weight_decay()) if hasattr(self.model, "no_weight_decay") else set()
        scales = None
        if self.layer_decay is not None:
            from timm.models import group_parameters

            layers = group_parameters(self.model, self.model.group_matcher(coarse=False), reverse=True)
            top = max(layers.values())
            scales = {name: self.layer_decay ** (top - layer) for name, layer in layers.items()}
        return param_groups(self.model, self.settings, undecayed, scales)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another architecture. `fit` calls this before reading data."""
        check(checkpoint.get("diffvision", {}), self.model, "the checkpoint")

    def describe(self) -> dict[str, Any]:
        """Return the model's name, arguments, preprocessing and architecture."""
        return {
            "model": self.name,
            "model_args": {**self.model_args, "num_classes": self.num_classes},
            "preprocess": tuples_to_lists(self.data_config),
            KEY: architecture(self.model),
        }

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return the model's arguments without those that load weights."""
        args = {key: value for key, value in self.model_args.items() if key != "checkpoint_path"}
        return {"model_args": args | {"pretrained": False}}
