"""Contrastive training of any OpenCLIP model: one LightningModule.

Code shared with the other modules is in `module`, the optimizer in `optim`. The model and the loss are OpenCLIP's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeGuard, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffvision.data.batches import ImageTextBatch
from diffvision.data.images.caption_tokenizer import text_only
from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.images.image_data import ImageTextData
from diffvision.evaluation.options import Options, Precision
from diffvision.evaluation.prompts import check_prompts
from diffvision.evaluation.suite import EVALUATIONS, evaluate, plan
from diffvision.models.architecture import KEY, architecture, check, check_start, recorded
from diffvision.models.names import unknown_model
from diffvision.models.text_positions import Positions, check_context_length, resizing_positions
from diffvision.models.weight_files import FOLDER, refuse_urls, tensors_only
from diffvision.opening.image_models import (
    PREPROCESS,
    refuse_code,
    refuse_misfit,
    without_warning_of_random_weights,
)
from diffvision.training.compilation import compile_in_place
from diffvision.training.module import TrainingModule, mark_batch_dynamic, tuples_to_lists
from diffvision.training.optim import OptimizerSettings, check_layer_decay, layer_scales, param_groups
from diffvision.training.progress import track_evaluation

FEATURES = ("image_features", "text_features")
# A trainer's precision -> that of its evaluations; with others they run in the weights' dtype.
PRECISIONS: dict[str, Precision] = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
SHOWN = ("/acc1", "retrieval_recall@1", "/acc", "/group_score", "/auc")  # metrics that the progress bar shows
_MOST_TOKENS = 65536  # of a caption: more is a slip, which would ask for all of the memory


class ContrastiveModule(TrainingModule):
    """An OpenCLIP model with OpenCLIP's loss, over pairs of images and captions.

    A batch has images and captions, as token ids [B, L] or as strings, which are tokenised here. Each batch is one
    optimizer step.
    The loss is computed in float32 whatever the precision, over the features of all ranks (local loss, gathered with
    gradient), so DDP's mean of the gradients is the gradient of the global batch.

    Attributes:
        model: the OpenCLIP model; its keys in a checkpoint's state_dict have the prefix "model.".
        transform: image -> tensor for training.
        eval_transform: the same without augmentation.
        tokenizer: captions -> int64 [B, L].
        prompts: one line of text per zero-shot evaluation of a fit.
    """

    batch_keys: ClassVar = ("image", "text")
    required_keys: ClassVar = ("image", "text")

    def __init__(
        self,
        model: str,
        *,
        pretrained: str | None = None,
        context_length: int | None = None,
        context_positions: Positions | None = None,
        preprocess: dict[str, Any] | None = None,
        augmentation: dict[str, Any] | None = None,
        lock_image: int | None = None,
        lock_text: int | None = None,
        loss: Literal["clip", "siglip"] = "clip",
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008  frozen
        image_layer_decay: float | None = None,
        text_layer_decay: float | None = None,
        accum_freq: int = 1,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        """Build the model, its transforms and tokenizer.

        Args:
            model: name of an OpenCLIP model, ours or OpenCLIP's; or "local-dir:FOLDER", to start from its weights.
            pretrained: tag or file of weights to start from.
            context_length: tokens of a caption, beyond which it is cut; null: the model's, mostly 77.
            context_positions: how to fit the weights' positions to another context_length: "interpolate", "stretch" (as
                Long-CLIP), or "first" for a shorter one; null interpolates, and refuses a shorter one.
            preprocess: values of mean, std, interpolation and resize_mode that replace the model's.
            augmentation: fields of open_clip's AugmentationCfg (scale, ratio, color_jitter, ...).
            lock_image: freeze the image tower except this many of its last layer groups (0: the whole tower).
            lock_text: the same for the text tower.
            loss: "clip" (softmax over the global batch) or "siglip" (a sigmoid for each pair, with a bias).
            optimizer: settings of the optimizer and schedule, or a dictionary of those that differ from the defaults.
            image_layer_decay: ratio of a layer's learning rate to the next one's in the image tower; null: no decay.
            text_layer_decay: the same for the text tower.
            accum_freq: split a rank's batch into this many chunks to save memory; the gradients are the same.
            grad_checkpointing: recompute the blocks' activations in the backward pass.
            compile: torch.compile the forward pass, in place.
        """
        check_layer_decay(image_layer_decay=image_layer_decay, text_layer_decay=text_layer_decay)
        super().__init__(locals(), OptimizerSettings())
        import open_clip  # takes seconds, and the help of `fit` imports this module

        self.automatic_optimization = False  # several backward passes a step; Lightning still scales, syncs and counts
        if accum_freq < 1:
            raise ValueError(f"accum_freq must be 1 or more, got {accum_freq}")
        unknown = set(preprocess or {}) - set(PREPROCESS)
        if unknown:
            raise ValueError(f"preprocess must have only {', '.join(PREPROCESS)}, got {', '.join(sorted(unknown))}")
        if context_length is not None and not 3 <= context_length <= _MOST_TOKENS:
            raise ValueError(f"context_length must be 3 to {_MOST_TOKENS:,}, got {context_length:,}")
        if context_positions is not None and context_length is None:
            raise ValueError(f"context_positions must be null without context_length, got {context_positions!r}")
        refuse_urls(pretrained, "pretrained")
        refuse_code(model)
        # OpenCLIP reads ViT-B/32 as ViT-B-32.
        self.model_cfg = open_clip.get_model_config(model if ":" in model else model.replace("/", "-"))
        if self.model_cfg is None:
            raise unknown_model(model, "OpenCLIP has no", open_clip.list_models())
        self.name, self.loss_name, self.accum_freq = model, loss, accum_freq
        self.layer_decays = {"image": image_layer_decay, "text": text_layer_decay}
        self.prompts: list[str] = []
        # SigLIP's initial values: with scale 10 and bias -10 the many negatives contribute little to the loss at first.
        start = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if loss == "siglip" else {}
        with (
            tensors_only(pretrained or model),
            without_warning_of_random_weights(),
            refuse_misfit(pretrained, model),
            resizing_positions(context_positions),
        ):
            self.model, self.transform, self.eval_transform = open_clip.create_model_and_transforms(
                model,
                pretrained=pretrained,
                device=torch.get_default_device(),
                aug_cfg=augmentation,
                output_dict=True,
                force_context_length=context_length,
                **{f"image_{key}": value for key, value in (preprocess or {}).items()},
                **start,
            )
        self.tokenizer = text_only(open_clip.get_tokenizer(model, context_length=context_length))
        if (length := context_length or self.model_cfg["text_cfg"].get("context_length")) is not None:
            check_context_length(length, self.tokenizer, self.model)
            self.model.context_length = length  # of a text tower of the Hub's: that of its captions
        if model.startswith(FOLDER) and context_length is None:  # the folder's weights, whatever `pretrained` is
            check(recorded(model), self.model, model)
        elif model.startswith(FOLDER) or pretrained is not None:
            check_start(model if model.startswith(FOLDER) else str(pretrained), self.model)
        if ":" in model:
            self.sources = [model.removeprefix(FOLDER)]
        elif pretrained is not None:
            self.sources = [pretrained]
        elif text_tower := self.model_cfg["text_cfg"].get("hf_model_name"):
            self.sources = [text_tower]  # OpenCLIP starts a text tower of the Hub's from its weights
        if lock_image is not None:
            self.model.lock_image_tower(unlocked_groups=lock_image)
        if lock_text is not None:
            self.model.lock_text_tower(unlocked_layers=lock_text)
        if grad_checkpointing:
            self.model.set_grad_checkpointing()
        if compile:
            compile_in_place(self.model)

    def setup(self, stage: str) -> None:
        """Create the loss, which depends on the number of ranks."""
        self.loss = create_loss(self.loss_name, rank=self.global_rank, world_size=self.trainer.world_size)
        self.batch_loss = create_loss(self.loss_name, rank=0, world_size=1)  # of one batch on one rank

    def forward(
        self, image: Tensor | None = None, text: Tensor | list[str] | tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Return normalised features [B, D] of the inputs, `image_features` and `text_features`, and `logit_scale`.

        Args:
            image: [B, 3, height, width], as `eval_transform` makes them.
            text: token ids [B, L], or captions as strings, which are tokenised.
        """
        if is_captions(text):
            text = self.tokenizer(list(text)).to(self.device)
        return {name: value for name, value in self.model(image, text).items() if value is not None}

    def prepare_batch(self, batch: Any) -> Any:
        """Return a loader's batch as a dictionary, its captions as token ids."""
        if isinstance(batch, EvaluationFolder):
            return batch
        batch = super().prepare_batch(batch)
        if is_captions(batch["text"]):
            batch["text"] = self.tokenizer(list(batch["text"]))
        if batch["text"].ndim != 2:
            shape = list(batch["text"].shape)
            raise ValueError(f"a batch's text must be strings, or token ids [B, L], got the shape {shape}")
        return batch

    def training_step(self, batch: ImageTextBatch, batch_idx: int) -> Tensor:
        """Make an optimizer step; return the batch's loss on this rank."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.compute_loss(self.encode_chunks(batch))
        self.manual_backward(loss)
        mean = self.mean_if_logged(loss.detach())
        optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))
        # After the step: in a run's first batch, Lightning drops what was logged before another hook logs.
        self.log_step(loss=mean, logit_scale=self.model.logit_scale.detach().exp().mean())
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:  # a subclass may have none
            scheduler.step()
        return loss.detach()

    def encode_chunks(self, batch: ImageTextBatch) -> dict[str, Tensor]:
        """Return the model's output for a batch, with the activations of one of `accum_freq` chunks in memory.

        The backward pass computes each chunk again, with the same random numbers (dropout). The loss is that of all
        features, with all negatives, and is computed once, whereas OpenCLIP's accum-freq computes it for every chunk.
        """
        if self.accum_freq == 1:
            return self.model(batch["image"], batch["text"])
        chunks = zip(batch["image"].chunk(self.accum_freq), batch["text"].chunk(self.accum_freq), strict=True)
        outputs = [checkpoint(self.model, image, text, use_reentrant=False) for image, text in chunks]
        return {k: torch.cat([out[k] for out in outputs]) if k in FEATURES else v for k, v in outputs[0].items()}

    def compute_loss(self, out: dict[str, Tensor], loss: nn.Module | None = None) -> Tensor:
        """Return the loss of features and scale, in float32: bfloat16 has no fractional digits for logits near 100."""
        with torch.autocast(self.device.type, enabled=False):
            whole = {k: widen(v) for k, v in out.items()}
            return (loss or self.loss)(**{k: detach_zero_rows(v) if k in FEATURES else v for k, v in whole.items()})

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trained parameters in groups, each with its weight decay, by layers of towers with layer decay."""
        names = [name for name, _ in self.model.named_parameters() if not name.startswith("logit_")]
        towers = {"image": [n for n in names if n.startswith("visual.")]}
        towers["text"] = [n for n in names if not n.startswith("visual.")]
        decays = {tower: decay for tower, decay in self.layer_decays.items() if decay is not None}
        scales = {
            n: s for tower, decay in decays.items() for n, s in layer_scales(self.model, decay, towers[tower]).items()
        }
        return param_groups(self.model, self.settings, scales=scales or None)

    def configure_callbacks(self) -> list[pl.Callback]:
        """Return the StepGuard; raise ValueError if the trainer clips or accumulates too, which this module does.

        It is the earliest hook in which the module has its trainer.
        """
        if self.is_fitting and self.trainer.gradient_clip_val:
            value = self.trainer.gradient_clip_val
            raise ValueError(f"trainer.gradient_clip_val must be null, got {value}: set optimizer.clip_norm")
        if self.is_fitting and (batches := self.trainer.accumulate_grad_batches) != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches must be 1, as negatives would be lost, got {batches}: set accum_freq"
            )
        return super().configure_callbacks()

    def validation_metrics(self, data: Any) -> list[str] | None:
        """Return the names of the metrics of the evaluation folders, in the order of the folders.

        Raises:
            ValueError: a folder cannot be evaluated.
        """
        if not isinstance(data, ImageTextData):
            return None
        if not (found := data.folders_by_path):
            return []
        every = plan([folder for folders in found for folder in folders], None, Options())
        self.prompts = check_prompts(every, Options())
        of_first = plan(found[0], None, Options())
        return [
            f"{name}/{folder.name}/{metric}"
            for folder, names in [*of_first, *every]
            for name in names
            for metric in EVALUATIONS[name].metrics
        ]

    def on_validation_epoch_start(self) -> None:
        self.begin_sums(2)  # pairs, and their summed loss

    def validation_step(
        self, batch: EvaluationFolder | ImageTextBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate a folder with the functions of `diffvision evaluate`, over all ranks; or sum the loss of a batch.

        Both are in the run's precision, whereas `diffvision evaluate` takes --precision, fp32 by default. The loss of a
        batch uses negatives from this batch only.
        """
        if not isinstance(batch, EvaluationFolder):
            inputs = mark_batch_dynamic(batch["image"]), mark_batch_dynamic(batch["text"])
            loss = self.compute_loss(self.model(*inputs), self.batch_loss)
            self.add_sums(dataloader_idx, pairs := len(batch["image"]), loss * pairs)
            return
        metrics = evaluate(
            self.model,
            batch,
            transform=self.eval_transform,
            tokenizer=self.tokenizer,
            device=self.device,
            precision=PRECISIONS.get(str(self.trainer.precision), "fp32"),
            progress=track_evaluation(self.trainer),
        )
        for key, value in metrics.items():
            # Every rank has the same value; sync_dist only tells Lightning so.
            self.log(key, value, batch_size=1, sync_dist=True, prog_bar=key.endswith(SHOWN), add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss of the pairs, if there were any."""
        for loader, (pairs, loss) in self.reduce_sums():
            if pairs:
                self.log_means({f"val/loss{loader}": loss / pairs})

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint is of another model. `fit` calls this before reading data."""
        trained = checkpoint.get("diffvision", {}).get("model", self.name)
        if trained != self.name:
            raise ValueError(f"model.model must be {trained!r}, the checkpoint's, got {self.name!r}")
        check(checkpoint.get("diffvision", {}), self.model, "the checkpoint")

    def describe(self) -> dict[str, Any]:
        """Return the model's name, preprocessing and architecture."""
        preprocess = tuples_to_lists(self.model.visual.preprocess_cfg)
        return {"model": self.name, "preprocess": preprocess, KEY: architecture(self.model)}

    def arguments_without_weights(self) -> dict[str, Any]:
        """Return `pretrained: None`."""
        return {"pretrained": None}


def is_captions(text: Any) -> TypeGuard[Sequence[str]]:
    """Return whether a text is a list of strings rather than token ids."""
    return isinstance(text, list | tuple) and all(isinstance(caption, str) for caption in text)


def create_loss(name: str, *, rank: int, world_size: int) -> nn.Module:
    """Return OpenCLIP's loss by name, for one rank of a world."""
    from open_clip.loss import ClipLoss, SigLipLoss

    if name == "siglip":
        return SigLipLoss(rank=rank, world_size=world_size)

    class LocalClipLoss(ClipLoss):
        """OpenCLIP's local loss, its features gathered by functional collectives, as OpenCLIP's main gathers them."""

        def get_logits(
            self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, logit_bias: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            if self.world_size == 1:
                return super().get_logits(image_features, text_features, logit_scale, logit_bias)
            by_image = logit_scale * image_features @ gather_rows(text_features).T
            by_text = logit_scale * text_features @ gather_rows(image_features).T
            return (by_image, by_text) if logit_bias is None else (by_image + logit_bias, by_text + logit_bias)

    return LocalClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)


def gather_rows(x: Tensor) -> Tensor:
    """Return the rows [B, D] of all ranks, [ranks * B, D], with their gradients."""
    from torch.distributed import _functional_collectives as collectives

    # The second is its name in older versions of torch.
    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    rows: Tensor = gather(x.contiguous(), 0, cast(Any, torch.distributed.group.WORLD))
    return rows


def widen(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in its dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def detach_zero_rows(features: Tensor) -> Tensor:
    """Return normalised features [B, D] without a gradient for rows whose embedding was zero.

    A zero row has no direction. F.normalize divides it by 1e-12, so its gradient would be multiplied by 1e12, and
    AdamW's second moments would take thousands of steps to recover. Other rows are bit-identical.
    """
    return torch.where(features.detach().norm(dim=-1, keepdim=True) < 0.9, features.detach(), features)
