"""What the image demo's report shows of a trained model besides its numbers: images it retrieves, and its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffvision.analysis.figures.image_attention import ImageAttention, Retrieved
from diffvision.analysis.maps import layer_maps, patch_maps
from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation.features import Features
from diffvision.models.modes import evaluating

DIGITS = (2, 3, 5, 7)  # the first test image of each is shown with its attention
CAPTIONS = 4  # of the folder `retrieval`, as far apart as they can be
TOP = 6  # retrieved images for a caption


@dataclass(frozen=True)
class ModelExamples:
    """Examples of what one trained model does, for the report: attention on images, and retrieved images.

    Attributes:
        attention: test images with where the class token of the image tower's last layer looks, mean over heads.
        retrieved: for some captions, the images that the model ranks first.
        lam: lambda of that layer, mean over heads; None in a plain model.
    """

    attention: list[ImageAttention]
    retrieved: list[Retrieved]
    lam: float | None = None


@torch.no_grad()
def collect_examples(
    model: Any, transform: Callable[..., Tensor], tokenizer: Callable[..., Tensor], data: Path
) -> ModelExamples:
    """Compute the examples that the report shows of a trained image-text model.

    Args:
        model: an OpenCLIP model.
        transform: its preprocessing of images.
        tokenizer: its tokenizer.
        data: the folder that `diffvision data make digits` wrote.
    """
    with evaluating(model):
        attention, lam = _attention(model, transform, EvaluationFolder(data / "zero_shot"))
        retrieved = _retrieve(Features(model, transform, tokenizer), EvaluationFolder(data / "retrieval"))
    return ModelExamples(attention, retrieved, lam)


def _attention(
    model: Any, transform: Callable[..., Tensor], folder: EvaluationFolder
) -> tuple[list[ImageAttention], float | None]:
    """Return where the last layer looks on an image of every digit, and the last image's lambda."""
    pixels, inputs = (next(iter(folder.batches(t, batch_size=128))) for t in (_pixels, transform))
    rows, lam = [], None
    for digit in DIGITS:
        index = int((inputs["label"] == digit).nonzero()[0])
        image = inputs["image"][index]
        maps = list(patch_maps(model, image).values())[-1].mean(0)
        rows.append(ImageAttention(pixels["image"][index].numpy(), maps.numpy(), folder.classnames[digit]))
        *_, last = (layer for layer in layer_maps(model, image=image))
        lam = None if last.lam is None else last.lam.mean().item()
    return rows, lam


def _retrieve(features: Features, folder: EvaluationFolder) -> list[Retrieved]:
    """Return the images ranked first for some captions."""
    pairs = features.pairs(folder, "test")
    pixels, captions = [], []
    for batch in folder.batches(_pixels, batch_size=128):
        pixels += list(batch["image"].numpy())
        captions += [caption for of_image in batch["captions"] for caption in of_image]
    texts = [len(captions) * (2 * number + 1) // (2 * CAPTIONS) for number in range(CAPTIONS)]
    best = (pairs.texts[texts] @ pairs.images.T).topk(TOP, dim=1).indices.tolist()
    return [
        Retrieved(captions[text], [pixels[i] for i in indices], [i == int(pairs.owner[text]) for i in indices])
        for text, indices in zip(texts, best, strict=True)
    ]


def _pixels(image: Image.Image) -> Tensor:
    """Return an image as it is, [h, w, 3] uint8."""
    return torch.from_numpy(np.array(image.convert("RGB")))
