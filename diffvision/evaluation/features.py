"""From a model and an evaluation folder to features: the one loop over images that all evaluations share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.data.folders import EvaluationFolder
from diffvision.evaluation.distributed import gather_rows, rank_and_world

Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Pairs(NamedTuple):
    """Images and captions; caption t is of image `owner[t]`, and an image's captions are neighbours."""

    images: Tensor  # [N, D] float32, unit length
    texts: Tensor  # [T, D] float32, unit length
    owner: Tensor  # [T] int64


class Features:
    """A frozen model's features of evaluation folders, on the CPU, in float32, gathered over all ranks.

    Features of a split are computed once and kept while this object lives, so that several evaluations of one folder
    read its images once. The model's train/eval modes are as before after every call.

    Args:
        model: an OpenCLIP model, one of its image towers, or any timm model (probes only).
        transform: PIL image -> tensor [3, h, w].
        tokenizer: list of strings -> int64 [B, L]; None where no text is evaluated.
        batch_size: images a batch and rank.
        device: where the model is; by default that of its parameters.
        precision: "fp32" runs the model as it is, whatever autocast the caller is in; the others are autocasts.
        progress: wraps an iterable in a progress bar, given also its description; None for silence.
    """

    def __init__(
        self,
        model: nn.Module,
        transform: Callable[..., Tensor],
        tokenizer: Callable[[list[str]], Tensor] | None = None,
        *,
        batch_size: int = 64,
        num_workers: int = 0,
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
        progress: Callable[[Any, str], Iterable] | None = None,
    ) -> None:
        if precision not in ("fp32", *_AUTOCAST):
            raise ValueError(f"precision is {precision!r}: choose fp32, {', '.join(_AUTOCAST)}")
        self.model: Any = model
        self.transform, self.tokenizer = transform, tokenizer
        self.batch_size, self.num_workers, self.precision = batch_size, num_workers, precision
        self.device = torch.device(device or next((p.device for p in model.parameters()), "cpu"))
        # What the image tower wants its images in: OpenCLIP's half-precision models keep some parameters in float32.
        layers = [m for m in getattr(model, "visual", model).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        self.dtype = layers[0].weight.dtype if layers else torch.float32
        self.progress = progress or (lambda batches, description: batches)
        self._kept: dict[tuple[Any, ...], Any] = {}

    def images(self, folder: EvaluationFolder, split: str) -> tuple[Tensor, Tensor]:
        """Features [N, D] of a split's images as the model gives them, and their labels [N] int64."""
        key = ("images", folder.path, split)
        if key not in self._kept:
            features, labels = [], []
            with self._frozen():
                for batch in self._batches(folder, split):
                    features.append(self._encode_images(batch["image"]))
                    labels.append(batch["label"])
            self._kept[key] = (
                self._gathered(features, folder, split),
                self._gathered(labels, folder, split, torch.int64),
            )
        return self._kept[key]

    def pairs(self, folder: EvaluationFolder, split: str) -> Pairs:
        """Features of a split's images and of all their captions."""
        key = ("pairs", folder.path, split)
        if key not in self._kept:
            images, texts, counts = [], [], []
            with self._frozen():
                for batch in self._batches(folder, split):
                    captions = batch["captions"]
                    images.append(F.normalize(self._encode_images(batch["image"]), dim=-1))
                    texts.append(F.normalize(self._encode_texts([text for own in captions for text in own]), dim=-1))
                    counts.append(torch.tensor([len(own) for own in captions]))
            count = self._gathered(counts, folder, split, torch.int64)
            owner = torch.arange(len(count)).repeat_interleave(count)
            self._kept[key] = Pairs(self._gathered(images, folder, split), self._gathered(texts, folder, split), owner)
        return self._kept[key]

    def classes(self, texts: Sequence[list[str]]) -> Tensor:
        """One unit vector a class [C, D]: the mean of its texts' unit vectors, made one long again.

        A class's texts are one batch, as CLIP_benchmark has them; with several ranks each takes a share of the classes.
        """
        rank, world = rank_and_world()
        start, stop = (len(texts) * r // world for r in (rank, rank + 1))
        vectors = []
        with self._frozen():
            for own in self.progress(texts[start:stop], "classes"):
                vector = F.normalize(self._encode_texts(own), dim=-1).mean(dim=0)
                vectors.append(vector / vector.norm())
        return gather_rows(torch.stack(vectors) if vectors else None, self.device)

    def _batches(self, folder: EvaluationFolder, split: str) -> Iterator[Any]:
        if split not in folder.splits:
            raise ValueError(
                f"evaluation folder {folder.name!r} has no split {split!r}: it has {', '.join(folder.splits) or 'none'}"
            )
        rank, world = rank_and_world()
        batches = folder.batches(
            self.transform,
            split=split,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            rank=rank,
            world_size=world,
        )
        yield from self.progress(batches, f"{folder.name}/{split}")
        if skipped := batches.report.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
            warnings.warn(f"{folder.path}/{split}: unreadable samples are left out ({reasons})", stacklevel=2)

    def _gathered(
        self, parts: list[Tensor], folder: EvaluationFolder, split: str, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        whole = gather_rows(torch.cat(parts) if parts else None, self.device, dtype)
        if not len(whole):
            raise ValueError(f"split {split!r} of evaluation folder {folder.name!r} has no readable sample")
        return whole

    def _encode_images(self, images: Tensor) -> Tensor:
        return image_features(self.model, images.to(self.device, self.dtype)).float().cpu()

    def _encode_texts(self, texts: list[str]) -> Tensor:
        if not hasattr(self.model, "encode_text"):
            raise ValueError(
                f"{type(self.model).__name__} has no encode_text: this evaluation needs a model with a text tower, "
                "such as an OpenCLIP one; an image model can be evaluated by the probes"
            )
        if self.tokenizer is None:
            raise ValueError("this evaluation reads text: give the model's tokenizer (open_clip.get_tokenizer(name))")
        return self.model.encode_text(self.tokenizer(texts).to(self.device)).float().cpu()

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        """Evaluation mode without gradients; every module gets its own mode back (locked towers differ from others).

        no_grad rather than inference mode: a tensor that a module caches here may be needed in training afterwards.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        autocast = torch.autocast(
            self.device.type, dtype=_AUTOCAST.get(self.precision), enabled=self.precision in _AUTOCAST
        )
        try:
            with torch.no_grad(), autocast:
                yield
        finally:
            for module, training in modes:
                module.training = training


def image_features(model: Any, images: Tensor) -> Tensor:
    """Features [B, D] of images [B, 3, h, w], before any normalisation.

    A model with `encode_image` (OpenCLIP): what that gives, after the projection. A timm model: the features before its
    classifier. An OpenCLIP image tower (`model.visual`): its output; give `model.visual.trunk`, a timm model, for the
    features before the projection.

    Args:
        model: nn.Module.

    Raises:
        ValueError: the model is none of these.
    """
    if hasattr(model, "encode_image"):
        return model.encode_image(images)
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        return model.forward_head(model.forward_features(images), pre_logits=True)
    out = model(images)
    out = out[0] if isinstance(out, tuple) else out
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise ValueError(
            f"{type(model).__name__} gives no features [B, D]: evaluate an OpenCLIP model, its image tower, or a timm "
            "model"
        )
    return out
