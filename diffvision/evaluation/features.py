"""Features of an evaluation folder by a model, from the one loop over images that all evaluations share."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffvision.data.images.caption_tokenizer import LARGE_CUT, are_cut
from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.cache import (
    Rows,
    digest,
    files_digest,
    keep_rows,
    model_digest,
    tensor_digest,
    without_addresses,
)
from diffvision.evaluation.distributed import gather_rows, rank_and_world
from diffvision.evaluation.options import InferenceSettings, Precision
from diffvision.models.modes import evaluating

_LABELLED = {"images": torch.float32, "labels": torch.int64}
_CAPTIONED = {
    "images": torch.float32,
    "texts": torch.float32,
    "cut": torch.uint8,
    "counts": torch.int64,
    "captions": torch.uint8,
    "captions_bytes": torch.int64,
    "kinds": torch.uint8,
    "kinds_bytes": torch.int64,
}
_WARNED: WeakSet[EvaluationFolder] = WeakSet()
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Pairs(NamedTuple):
    """Images and captions; caption t is of image `owner[t]`, and an image's captions are neighbours."""

    images: Tensor  # [N, D] float32, unit length
    texts: Tensor  # [T, D] float32, unit length; empty if they were not encoded
    owner: Tensor  # [T] int64
    captions: list[str]  # T, as the tokenizer reads them
    kinds: list[str]  # N, "" of an image whose sample has none
    cut: Tensor  # [T] uint8, 1 of captions with more tokens than the model takes; empty if they were not encoded


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
        if settings.precision not in ("fp32", *AUTOCAST):
            raise ValueError(f"precision must be one of fp32, {', '.join(AUTOCAST)}, got {settings.precision!r}")
        self.model: Any = model
        self.transform, self.tokenizer, self.settings = transform, tokenizer, settings
        self.batch_size, self.cache = settings.batch_size, settings.cache
        self.device = torch.device(settings.device or next((p.device for p in model.parameters()), "cpu"))
        # What the image tower wants its images in: OpenCLIP's half-precision models keep some parameters in float32.
        layers = [m for m in getattr(model, "visual", model).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        self.dtype = layers[0].weight.dtype if layers else torch.float32
        self.progress = settings.progress or (lambda batches, description: batches)
        self._kept: dict[tuple[Any, ...], Rows] = {}

    def images(self, folder: EvaluationFolder, split: str) -> tuple[Tensor, Tensor]:
        """Return features [N, D] of a split's images as the model gives them, and their labels [N] int64."""
        rows = self._encode_split(folder, split, self._encode_labelled, _LABELLED)
        return rows["images"], rows["labels"]

    def pairs(self, folder: EvaluationFolder, split: str, *, encode_texts: bool = True) -> Pairs:
        """Return features of a split's images and of all their captions."""
        dtypes = {name: dtype for name, dtype in _CAPTIONED.items() if encode_texts or name not in ("texts", "cut")}
        rows = self._encode_split(folder, split, partial(self._encode_captioned, encode_texts=encode_texts), dtypes)
        owner = torch.arange(len(rows["counts"])).repeat_interleave(rows["counts"])
        strings = _unpack("captions", rows), _unpack("kinds", rows)
        cut = rows.get("cut", torch.zeros(0, dtype=torch.uint8))
        if cut.sum() > LARGE_CUT * len(cut) and rank_and_world()[0] == 0 and folder not in _WARNED:
            _WARNED.add(folder)
            share = cut.float().mean().item()
            warnings.warn(
                f"{folder.name}: {share:.0%} of {len(cut):,} captions are cut to the model's tokens: train it with a "
                "larger context_length",
                stacklevel=3,
            )
        return Pairs(rows["images"], rows.get("texts", torch.empty(0)), owner, *strings, cut)

    def classes(self, texts: Sequence[list[str]]) -> Tensor:
        """Return one unit vector per class [C, D]: the normalised mean of its texts' unit vectors.

        A class's texts are one batch, as in CLIP_benchmark; with several ranks each takes a share of the classes.
        """
        rank, world = rank_and_world()
        start, stop = (len(texts) * r // world for r in (rank, rank + 1))

        def encode_classes() -> tuple[Rows, str]:
            vectors = []
            for of_class in self.progress(texts[start:stop], "classes"):
                vector = F.normalize(self._encode_texts(of_class), dim=-1).mean(dim=0)
                vectors.append(vector / vector.norm())
            return {"classes": torch.stack(vectors)} if vectors else {}, ""

        rows, _ = self._keep(encode_classes, texts=texts)
        return gather_rows(rows.get("classes"), self.device)

    def _encode_split(
        self, folder: EvaluationFolder, split: str, encode: Callable[[Any], Rows], dtypes: Mapping[str, torch.dtype]
    ) -> Rows:
        """Return the encoded rows of a split, gathered over all ranks; they are computed once and kept.

        Args:
            encode: a batch -> rows.
            dtypes: the dtype of each tensor to return, by name; a rank without samples does not know them.

        Raises:
            ValueError: the folder has no such split, or no readable sample in it.
        """
        if split not in folder.splits:
            raise ValueError(
                f"evaluation folder {folder.name!r} has no split {split!r}: it has {', '.join(folder.splits) or 'none'}"
            )
        key = (folder.path, split, *dtypes)
        if key not in self._kept:
            rows = self._rows(folder, split, encode)
            self._kept[key] = {name: gather_rows(rows.get(name), self.device, dtype) for name, dtype in dtypes.items()}
            if not len(self._kept[key]["images"]):
                raise ValueError(f"split {split!r} of evaluation folder {folder.name!r} has no readable sample")
        return self._kept[key]

    def _rows(self, folder: EvaluationFolder, split: str, encode: Callable[[Any], Rows]) -> Rows:
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
            parts = [encode(batch) for batch in self.progress(batches, f"{folder.name}/{split}")]
            skipped = ", ".join(f"{count} {reason}" for reason, count in batches.report.skipped.items())
            return {key: torch.cat([part[key] for part in parts]) for key in (parts[0] if parts else ())}, skipped

        files = files_digest(*folder.files(split)) if self.cache else ""
        rows, skipped = self._keep(encode_all, data=files, split=split, task=folder.task)
        if skipped:
            warnings.warn(f"{folder.path}/{split}: unreadable samples are left out ({skipped})", stacklevel=3)
        return rows

    def _keep(self, encode: Callable[[], tuple[Rows, str]], **parts: Any) -> tuple[Rows, str]:
        """Return rows and a note, from the cache if there is one; `parts` are what they depend on besides the model."""
        with self._evaluating():
            if self.cache is None:
                return encode()
            return keep_rows(self.cache, f"{self._identity(**parts)}-rank{rank_and_world()[0]}", encode)

    def _identity(self, **parts: Any) -> str:
        """Return a digest of all that rows depend on, besides `parts`."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        shares, precision = rank_and_world()[1], self.settings.precision
        settings = {"precision": precision, "batch_size": self.batch_size, "device": name, "world_size": shares}
        return digest(
            model=self._model, transform=self._transform_digest, tokenizer=self._tokenizer_digest, **settings, **parts
        )

    @cached_property
    def _model(self) -> str:
        return model_digest(self.model)

    @cached_property
    def _transform_digest(self) -> str:
        """Return the transform's repr, and a digest of its output for a test image."""
        image = Image.effect_mandelbrot((97, 61), (-2, -1, 1, 1), 100).convert("RGB")
        return without_addresses(repr(self.transform)) + tensor_digest([self.transform(image)])

    @cached_property
    def _tokenizer_digest(self) -> str:
        """Return a digest of the tokenizer's output for some texts."""
        texts = ["a photo of a cat.", "Ein großer Hund, zweimal: 你好", "many words " * 100]
        return "" if self.tokenizer is None else tensor_digest([self.tokenizer(texts)])

    def _encode_labelled(self, batch: Any) -> Rows:
        return {"images": self._encode_images(batch["image"]), "labels": batch["label"]}

    def _encode_captioned(self, batch: Any, encode_texts: bool) -> Rows:
        """Return the embeddings of a batch of images and, where wanted, of all their captions."""
        captions = [text for of_image in batch["captions"] for text in of_image]
        rows = {
            "images": F.normalize(self._encode_images(batch["image"]), dim=-1),
            "counts": torch.tensor([len(of_image) for of_image in batch["captions"]]),
            **_pack("captions", captions),
            **_pack("kinds", batch.get("kind") or [""] * len(batch["captions"])),
        }
        if not encode_texts:
            return rows
        tokens = self._tokenize(captions)
        texts = F.normalize(self._encode_tokens(tokens), dim=-1)
        return rows | {
            "texts": texts,
            "cut": torch.tensor(are_cut(self.tokenizer, captions, tokens), dtype=torch.uint8),
        }

    def _encode_images(self, images: Tensor) -> Tensor:
        return _check_finite(image_features(self.model, images.to(self.device, self.dtype)).float().cpu(), "images")

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return self._encode_tokens(self._tokenize(texts))

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


def _pack(key: str, strings: Sequence[str]) -> Rows:
    """Return strings as rows, which can be cached and gathered: their bytes, end to end, and the length of each."""
    encoded = [string.encode() for string in strings]
    content = torch.tensor(list(b"".join(encoded)), dtype=torch.uint8)
    return {key: content, f"{key}_bytes": torch.tensor([len(one) for one in encoded], dtype=torch.int64)}


def _unpack(key: str, rows: Rows) -> list[str]:
    """Return the strings that `_pack` made rows of."""
    lengths = rows[f"{key}_bytes"].tolist()
    content = rows[key].numpy().tobytes()
    stops = itertools.accumulate(lengths)
    return [content[stop - length : stop].decode() for stop, length in zip(stops, lengths, strict=True)]


def _check_finite(features: Tensor, of: str) -> Tensor:
    """Return the features, and raise a ValueError for NaN, which rankings would treat as a number."""
    if not features.isfinite().all():
        raise ValueError(
            f"the model's features of {of} are NaN or infinite: set precision to fp32, or give other weights"
        )
    return features


def autocast(device: torch.device | str, precision: Precision) -> torch.autocast:
    """Return the autocast context of a precision; fp32 disables an enclosing autocast."""
    dtype = AUTOCAST.get(precision)
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
