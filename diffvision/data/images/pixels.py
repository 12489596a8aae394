"""Training images as uint8: a transform up to its ToTensor and Normalize, which are left to the training device.

A batch of uint8 takes a quarter of the memory of float32, and a worker does not write each image three times as floats.
The order of the operations is ToTensor's and Normalize's, so the normalised pixels are the same bits.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, Resize, ToTensor
from torchvision.transforms.functional import pil_to_tensor
from torchvision.transforms.v2.functional import resize_image

from diffvision.data.images.decode import decode_image, open_image, translate_errors

Decoder = Literal["pillow", "torchvision"]
"""How training images are decoded and resized.

- "pillow": by the transform itself.
- "torchvision": the same crops, with JPEGs decoded and pixels resized by torchvision in uint8. Few values differ,
  by one level; where an edge overshoots black or white, a value rarely differs by more.
"""
EXACT_INTERPOLATIONS = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)
"""Interpolations by which torchvision makes Pillow's pixels; by others it makes other ones, or none."""


class Pixels:
    """A transform without its last two steps, from an image or its bytes to uint8 [3, height, width].

    Args:
        transform: a Compose that ends with ToTensor and Normalize.
        decoder: see `Decoder`.
        on_device: whether the caller normalises batches; False returns normalised floats.

    Raises:
        ValueError: another transform, or one that does not begin with a resizing that the decoder can do.
    """

    def __init__(self, transform: Any, decoder: Decoder = "pillow", *, on_device: bool = True) -> None:
        if not ends_with_normalize(transform):
            raise ValueError(f"decoder {decoder!r} needs a Compose that ends with ToTensor and Normalize: set pillow")
        steps = transform.transforms[:-2]
        # Images are RGB already, and PIL's conversion to the same mode copies.
        self._steps = [step for step in steps if type(step).__name__ != "MaybeConvertMode" or step.mode != "RGB"]
        self._tail, self.decoder, self.on_device = transform.transforms[-2:], decoder, on_device
        first = self._steps[0] if self._steps else None
        # timm's RandomResizedCropAndInterpolation has the same attributes as torchvision's RandomResizedCrop.
        crops = isinstance(first, RandomResizedCrop) or type(first).__name__ == "RandomResizedCropAndInterpolation"
        self._get_box: Callable[..., Any] | None = first.get_params if crops else None  # type: ignore[union-attr]
        if decoder != "pillow" and not crops and not isinstance(first, Resize):
            raise ValueError(
                f"decoder {decoder!r} cannot do a transform that begins with {type(first).__name__}: set pillow"
            )
        modes = getattr(first, "interpolation", None)  # timm's "random" are several
        for mode in modes if isinstance(modes, tuple | list) else [modes]:
            if decoder != "pillow" and mode not in EXACT_INTERPOLATIONS:
                raise ValueError(f"decoder {decoder!r} does not interpolate as Pillow does by {mode}: set pillow")

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the pixels of a decoded RGB image, by the transform's own steps."""
        return self._finish(image, self._steps)

    def read(self, data: bytes) -> Tensor:
        """Return the pixels of an encoded image; raise `BadSample` as `decode_image` does."""
        if self.decoder == "pillow":
            return self(decode_image(data))
        image, whole = open_image(data), None
        with translate_errors():
            if image.format != "JPEG" or image.mode not in ("RGB", "L") or not _is_upright(image):
                image = decode_image(data)
                whole = pil_to_tensor(image)
            # From the size alone: nothing is decoded yet, and the draws are those of the transform.
            height, width, first = image.height, image.width, self._steps[0]
            box: Sequence[int] = (0, 0, height, width)
            if self._get_box is not None:
                box = self._get_box(image, first.scale, first.ratio)
        if whole is None:
            try:
                whole = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
            except RuntimeError:  # Pillow reads it, or says why not
                whole = pil_to_tensor(decode_image(data))
        return self._resize(whole, box)

    def _resize(self, whole: Tensor, box: Sequence[int]) -> Tensor:
        """Crop a box of the decoded image, resize it, and apply the remaining steps of the transform."""
        first = self._steps[0]
        top, left, height, width = box
        height, width = max(height, 1), max(width, 1)  # timm crops nothing from images of a pixel or two
        top, left = min(top, whole.shape[1] - height), min(left, whole.shape[2] - width)
        interpolation = first.interpolation
        if isinstance(interpolation, tuple | list):  # timm's "random"
            interpolation = random.choice(interpolation)
        # The kernel for uint8 is fastest on pixels whose channels lie next to each other, as decoders write them.
        part = whole[None, :, top : top + height, left : left + width].contiguous(memory_format=torch.channels_last)
        size = first.size if isinstance(first.size, int) else list(first.size)
        limit = getattr(first, "max_size", None)
        pixels = resize_image(part, size, InterpolationMode(interpolation), max_size=limit, antialias=True)[0]
        if len(self._steps) == 1:
            return pixels if self.on_device else self.normalize(pixels[None])[0]
        return self._finish(Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())), self._steps[1:])

    def _finish(self, image: Any, steps: Sequence[Callable[[Any], Any]]) -> Tensor:
        """Apply the transform's remaining steps, and normalize unless the device does."""
        for step in steps:
            image = step(image)
        if not isinstance(image, Image.Image) or image.mode != "RGB":  # a step of the user's has made a tensor
            return Compose(self._tail)(image)
        pixels = pil_to_tensor(image)
        return pixels if self.on_device else self.normalize(pixels[None])[0]

    def normalize(self, images: Tensor) -> Tensor:
        """Return uint8 images [B, 3, height, width] as ToTensor and Normalize return them, on the images' device."""
        last = self._tail[1]
        constants = (tuple(torch.as_tensor(values).flatten().tolist()) for values in (last.mean, last.std))
        scale, mean, std = _constants(*constants, images.device)
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(scale).sub_(mean).div_(std)


@lru_cache(maxsize=8)
def _constants(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 255, the mean and the std as float32 on a device, where they stay."""
    rows = [torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std)]
    # 255 as a tensor: CUDA multiplies by the reciprocal of a Python number, which rounds differently.
    return torch.tensor(255.0, dtype=torch.float32, device=device), rows[0].view(-1, 1, 1), rows[1].view(-1, 1, 1)


def ends_with_normalize(transform: Any) -> bool:
    """Return whether a transform is a Compose whose last steps are ToTensor and Normalize."""
    last = transform.transforms[-2:] if type(transform) is Compose else []
    # A subclass of the user's may do more; those of timm and OpenCLIP, MaybeToTensor, do not.
    known = all(type(step).__module__.partition(".")[0] in ("torchvision", "timm", "open_clip") for step in last)
    return known and len(last) == 2 and isinstance(last[0], ToTensor) and isinstance(last[1], Normalize)


def _is_upright(image: Image.Image) -> bool:
    """Return whether EXIF gives no other orientation; unreadable EXIF gives none."""
    with suppress(Exception):
        return image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    return True
