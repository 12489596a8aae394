"""Features of images or texts as a step of a scikit-learn pipeline. Evaluations are in `suite.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin

from diffvision.data.images.decode import decode_image, to_rgb
from diffvision.data.shards.sample import BadSample
from diffvision.evaluation.distributed import resolve_device
from diffvision.evaluation.features import Features
from diffvision.evaluation.inference import InferenceSettings
from diffvision.evaluation.options import Precision
from diffvision.models.files import FOLDER
from diffvision.opening import Model, open_model


class FeatureExtractor(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A frozen model's features: `make_pipeline(FeatureExtractor("diff_vit_small"), LogisticRegression())`.

    Nothing is learned, so `transform` needs no `fit`; clones and pickles hold the arguments alone. The model is loaded
    when it is first needed, and shared by all extractors of a process that ask for the same one.

    Args:
        model: as `diffvision.open_model` takes it: a name of timm's or OpenCLIP's, ours or any other, a folder, or a
            .ckpt of a training run.
        checkpoint: of a name: a file of weights or a tag of pretrained ones; without it, the weights of a name are
            random ones.
        tower: "image", or "text" (OpenCLIP) for strings.
        normalize: scale every feature to unit length, as for CLIP's cosine similarities.
        batch_size: images or texts that are computed together.
        device: auto, cpu, cuda, cuda:1, ...
        precision: fp32, bf16 or fp16.
        random_state: seed of weights that no checkpoint gives, so that they are the same in every process.

    Raises:
        ValueError: from `fit` and `transform` for wrong arguments; never from the constructor, as in scikit-learn.
    """

    def __init__(
        self,
        model: str = "diff_vit_small",
        checkpoint: str | Path | None = None,
        *,
        tower: Literal["image", "text"] = "image",
        normalize: bool = False,
        batch_size: int = 64,
        device: str = "auto",
        precision: Precision = "fp32",
        random_state: int = 0,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.tower = tower
        self.normalize = normalize
        self.batch_size = batch_size
        self.device = device
        self.precision = precision
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> FeatureExtractor:
        """Check the arguments and load the model; X and y are not looked at."""
        self._features()
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return features float32 [N, width].

        Args:
            X: N images, as a list of PIL images, paths of files (JPEG, PNG, WebP) and arrays, or as one array
                [N, h, w] or [N, h, w, 3]; arrays are uint8, or floating between 0 and 1. Of the text tower: N strings.

        Raises:
            ValueError: X is empty, or a sample is not an image (or string); the message has its number.
        """
        features = self._features()
        samples = _samples(X)
        for number, sample in enumerate(samples if self.tower == "text" else ()):
            if not isinstance(sample, str):
                raise ValueError(f"X[{number}] is a {type(sample).__name__}: the text tower takes strings")
        batches = []
        for start in range(0, len(samples), self.batch_size):
            batch = samples[start : start + self.batch_size]
            if self.tower == "text":
                batches.append(features.of_texts(batch))
            else:
                batches.append(features.of_images([_image(one, start + i) for i, one in enumerate(batch)]))
        rows = torch.cat(batches)
        return (torch.nn.functional.normalize(rows, dim=-1) if self.normalize else rows).numpy()

    @property
    def _n_features_out(self) -> int:
        """Width of the features, for `get_feature_names_out`."""
        plain = FeatureExtractor(**{**self.get_params(), "normalize": False})
        return plain.transform(["a"] if self.tower == "text" else [Image.new("RGB", (32, 32))]).shape[1]

    def _features(self) -> Features:
        if self.tower not in ("image", "text"):
            raise ValueError(f"tower is {self.tower!r}: choose image or text")
        for name in ("batch_size", "random_state"):
            if not isinstance(getattr(self, name), Integral):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a whole number")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}: give a number of at least 1")
        opened = _open(
            self.model,
            self.checkpoint,
            resolve_device(self.device),
            self.random_state,
            _stamp(self.model, self.checkpoint),
        )
        if self.tower == "text" and opened.tokenizer is None:
            raise ValueError(
                f"{self.model!r} is an image model of timm's, without a text tower: give an OpenCLIP model"
            )
        return Features(opened.module, opened.transform, opened.tokenizer, InferenceSettings(precision=self.precision))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit, tags.no_validation = False, True
        tags.input_tags.two_d_array, tags.input_tags.string = False, self.tower == "text"
        tags.input_tags.three_d_array = self.tower == "image"
        return tags


@lru_cache(maxsize=2)
def _open(model: str, checkpoint: str | Path | None, device: str, seed: int, stamp: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_model(model, checkpoint, device=device).for_images()


def _stamp(model: str, checkpoint: str | Path | None) -> Any:
    """Return names, times and sizes of the files of weights, which change when these do."""
    paths = [Path(str(path)) for path in (str(model).removeprefix(FOLDER), checkpoint) if path is not None]
    files = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(files))


def _samples(X: Any) -> list[Any]:
    """Return X as a list; raise ValueError for an empty one.

    A single image or string is refused, because its rows or letters would be taken as samples.
    """
    if isinstance(X, str | bytes | Path | Image.Image | Mapping) or not isinstance(X, Iterable):
        raise ValueError(f"X is a {type(X).__name__}: give a list of images or strings, of one if there is but one")
    samples = list(X)
    if not samples:
        raise ValueError("X holds 0 samples: give at least 1 image or text")
    return samples


def _image(sample: Any, number: int) -> Image.Image:
    """Return an image in any of the forms that `transform` takes, as RGB."""
    try:
        if isinstance(sample, Image.Image):
            return to_rgb(sample)
        if isinstance(sample, str | Path):
            return decode_image(Path(sample).read_bytes())
        return to_rgb(Image.fromarray(_pixels(np.asarray(sample))))
    except (BadSample, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"X[{number}] is not a usable image: {error}") from error


def _pixels(array: np.ndarray) -> np.ndarray:
    """Return an array as uint8 [h, w] or [h, w, 3]."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3) or not array.size:
        raise ValueError(f"an array of shape {array.shape}; give [h, w] or [h, w, 3], not flattened, channels last")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating) or not (array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            f"an array of {array.dtype} from {array.min()} to {array.max()}; give uint8, or floats between 0 and 1"
        )
    return np.rint(array * 255).astype(np.uint8)
