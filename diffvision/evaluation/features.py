"""Features of an evaluation folder by a model, from the one loop over images that all evaluations share."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffvision.data.images.caption_tokenizer import LARGE_CUT, are_cut
from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.cache import Rows, digest, files_digest, load_or_compute, model_digest, tensor_digest
from diffvision.evaluation.distributed import gather, rank_and_world
from diffvision.evaluation.options import InferenceSettings, Precision
from diffvision.models.modes import evaluating

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Pairs(NamedTuple):
    """Images and captions; caption t is of image `owner[t]`, and an image's captions are neighbours."""

    images: Tensor  # [N, D] float32, unit length
    texts: Tensor  # [T, D] float32, unit length; empty if they were not encoded
    owner: Tensor  # [T] int64
    captions: list[str]  # T, as the tokenizer reads them
    kinds: list[str]  # N, "" of an image whose sample has none
    cut: Tensor  # [T] bool, of captions with more tokens than the model takes; empty if they were not encoded


class Features:
    """A frozen model's features of evaluation folders, on the CPU, in float32, gathered over all ranks.

    Features of a split are computed once and kept while this object lives, so that several evaluations of one folder
    read its images once. The model's train/eval modes are as before after every call.

    Args:
        model: an OpenCLIP model, one of its image towers, or any timm model (probes only).
        transform: PIL image -> tensor [3, h, w].
        tokenizer: list of strings -> int64 [B, L]; None where no text is evaluated.
        settings: batches, device, precision, cache, ...
    """

    def __init__(
        self,
        model: nn.Module,
        transform: Callable[..., Tensor],
        tokenizer: Callable[[list[str]], Tensor] | None = None,
        settings: InferenceSettings = InferenceSettings(),  # noqa: B008  frozen
    ) -> None:
        if settings.precision not in AUTOCAST:
            raise ValueError(f"precision must be one of {', '.join(AUTOCAST)}, got {settings.precision!r}")
        self.model: Any = model
        self.transform, self.tokenizer, self.settings = transform, tokenizer, settings
        self.batch_size = settings.batch_size
        self.device = torch.device(settings.device or next((p.device for p in model.parameters()), "cpu"))
        # What the image tower wants its images in: OpenCLIP's half-precision models keep some parameters in float32.
        layers = [m for m in getattr(model, "visual", model).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        self.dtype = layers[0].weight.dtype if layers else torch.float32
        self.progress = settings.progress or (lambda batches, description: batches)
        self._computed: dict[tuple[Any, ...], Rows] = {}

    def images(self, folder: EvaluationFolder, split: str) -> tuple[Tensor, Tensor]:
        """Return features [N, D] of a split's images as the model gives them, and their labels [N] int64."""
        rows = self._encode_split(folder, split, self._encode_labelled, "labels")
        return rows["images"], rows["labels"]

    def pairs(self, folder: EvaluationFolder, split: str, *, encode_texts: bool = True) -> Pairs:
        """Return features of a split's images and of all their captions."""
        encode = partial(self._encode_captioned, encode_texts=encode_texts)
        rows = self._encode_split(folder, split, encode, "texts" if encode_texts else "captions")
        owner = torch.arange(len(rows["counts"])).repeat_interleave(rows["counts"])
        cut = rows["cut"]
        if cut.sum() > LARGE_CUT * len(cut) and rank_and_world()[0] == 0:
            share = cut.float().mean().item()
            warnings.warn(
                f"{folder.name}: {share:.0%} of {len(cut):,} captions are cut to the model's tokens: train it with a "
                "larger context_length",
                stacklevel=3,
            )
        return Pairs(rows["images"], rows["texts"], owner, rows["captions"], rows["kinds"], cut)

    def classes(self, texts: Sequence[list[str]]) -> Tensor:
        """Return one unit vector per class [C, D]: the normalised mean of its texts' unit vectors.

        A class's texts are one batch, as in CLIP_benchmark; with several ranks each takes a share of the classes.
        """
        rank, world = rank_and_world()
        start, stop = (len(texts) * r // world for r in (rank, rank + 1))

        def encode_classes() -> tuple[Rows, str]:
            vectors = []
            for of_class in self.progress(texts[start:stop], "classes"):
                vector = F.normalize(self._encode_tokens(self._tokenize(of_class)), dim=-1).mean(dim=0)
                vectors.append(vector / vector.norm())
            return {"classes": torch.stack(vectors)} if vectors else {}, ""

        rows, _ = self._compute(encode_classes, texts=texts)
        return _concatenate(gather(rows))["classes"]

    def _encode_split(self, folder: EvaluationFolder, split: str, encode: Callable[[Any], Rows], wanted: str) -> Rows:
        """Return the encoded rows of a split, gathered over all ranks; they are computed once and kept.

        Args:
            encode: a batch -> rows.
            wanted: what `encode` computes besides features of images, for the cache.

        Raises:
            ValueError: the folder has no such split, or no readable sample in it.
        """
        if split not in folder.splits:
            raise ValueError(
                f"evaluation folder {folder.name!r} has no split {split!r}: it has {', '.join(folder.splits) or 'none'}"
            )
        key = (folder.path, split, wanted)
        if key not in self._computed:
            rows = _concatenate(gather(self._encode_share(folder, split, encode, wanted)))
            if not rows:
                raise ValueError(f"split {split!r} of evaluation folder {folder.name!r} has no readable sample")
            self._computed[key] = rows
        return self._computed[key]

    def _encode_share(self, folder: EvaluationFolder, split: str, encode: Callable[[Any], Rows], wanted: str) -> Rows:
        """Return this rank's rows of a split."""
        rank, world = rank_and_world()
        batches = folder.batches(
            self.transform,
            split=split,
            batch_size=self.batch_size,
            num_workers=self.settings.num_workers,
            rank=rank,
            world_size=world,
        )

        def encode_all() -> tuple[Rows, str]:
            rows = _concatenate([encode(batch) for batch in self.progress(batches, f"{folder.name}/{split}")])
            return rows, ", ".join(f"{count} {reason}" for reason, count in batches.report.skipped.items())

        files = files_digest(*folder.files(split)) if self.settings.cache else ""
        rows, skipped = self._compute(encode_all, data=files, split=split, task=folder.task, wanted=wanted)
        if skipped:
            warnings.warn(f"{folder.path}/{split}: unreadable samples are left out ({skipped})", stacklevel=3)
        return rows

    def _compute(self, encode: Callable[[], tuple[Rows, str]], **parts: Any) -> tuple[Rows, str]:
        """Return rows and a note, from the cache if there is one; `parts` are what they depend on besides the model."""
        with self._evaluating():
            if self.settings.cache is None:
                return encode()
            rank, world = rank_and_world()
            name = f"{self.identify(world_size=world, **parts)}-rank{rank}.pt"
            return load_or_compute(Path(self.settings.cache) / name, encode)

    def identify(self, **parts: Any) -> str:
        """Return a digest of all that rows depend on: the model, how it is run, and `parts`."""
        return digest(model=self._model_digest, precision=self.settings.precision, batch_size=self.batch_size, **parts)

    @cached_property
    def _model_digest(self) -> str:
        """Return a digest of the model, its device, and what transform and tokenizer make of a test image and texts."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        image = Image.effect_mandelbrot((97, 61), (-2, -1, 1, 1), 100).convert("RGB")
        seen = [self.transform(image)]
        if self.tokenizer is not None:
            seen.append(self.tokenizer(["a photo of a cat.", "Ein großer Hund, zweimal: 你好", "many words " * 100]))
        return digest(model=model_digest(self.model), device=device, inputs=tensor_digest(seen))

    def _encode_labelled(self, batch: Any) -> Rows:
        return {"images": self._encode_images(batch["image"]), "labels": batch["label"]}

    def _encode_captioned(self, batch: Any, encode_texts: bool) -> Rows:
        """Return the embeddings of a batch of images and, where wanted, of all their captions."""
        captions = [text for of_image in batch["captions"] for text in of_image]
        texts, cut = torch.empty(0), torch.empty(0, dtype=torch.bool)
        if encode_texts:
            tokens = self._tokenize(captions)
            texts = F.normalize(self._encode_tokens(tokens), dim=-1)
            cut = torch.tensor(are_cut(self.tokenizer, captions, tokens), dtype=torch.bool)
        return {
            "images": F.normalize(self._encode_images(batch["image"]), dim=-1),
            "texts": texts,
            "cut": cut,
            "counts": torch.tensor([len(of_image) for of_image in batch["captions"]]),
            "captions": captions,
            "kinds": list(batch.get("kind") or [""] * len(batch["captions"])),
        }

    def _encode_images(self, images: Tensor) -> Tensor:
        return _check_finite(image_features(self.model, images.to(self.device, self.dtype)).float().cpu(), "images")

    def _tokenize(self, texts: list[str]) -> Tensor:
        if not hasattr(self.model, "encode_text"):
            raise ValueError(
                f"{type(self.model).__name__} has no encode_text: give an OpenCLIP model, or evaluate images alone "
                "with --tasks classification or linear_probe"
            )
        if self.tokenizer is None:
            raise ValueError("this evaluation reads text: give the model's tokenizer (open_clip.get_tokenizer(name))")
        return self.tokenizer(texts)

    def _encode_tokens(self, tokens: Tensor) -> Tensor:
        return _check_finite(self.model.encode_text(tokens.to(self.device)).float().cpu(), "texts")

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode, without gradients, in its precision."""
        with evaluating(self.model), autocast(self.device, self.settings.precision):
            yield


def _concatenate(parts: Sequence[Rows]) -> Rows:
    """Return the rows of batches or ranks as one; {} where none has any."""
    parts = [part for part in parts if part]
    rows: Rows = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        rows[name] = torch.cat(values) if isinstance(values[0], Tensor) else [*itertools.chain(*values)]
    return rows


def _check_finite(features: Tensor, of: str) -> Tensor:
    """Return the features, and raise a ValueError for NaN, which rankings would treat as a number."""
    if not features.isfinite().all():
        raise ValueError(
            f"the model's features of {of} are NaN or infinite: set precision to fp32, or give other weights"
        )
    return features


def autocast(device: torch.device | str, precision: Precision) -> torch.autocast:
    """Return the autocast context of a precision; fp32 disables an enclosing autocast."""
    dtype = AUTOCAST[precision]
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None)


def image_features(model: Any, images: Tensor) -> Tensor:
    """Return features [B, D] of images [B, 3, h, w], before any normalisation.

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
