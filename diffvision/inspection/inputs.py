"""The inputs of an inspection: pictures and texts, read from files and arguments or generated, as a model takes them.

Measurements on them are in `measurements`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffvision.data.datasets.digits import WITH_COLOURS, caption, draw, load_split
from diffvision.data.datasets.scenes import compose, draw_scene
from diffvision.data.images.decode import decode_image
from diffvision.data.shards.sample import BadSample
from diffvision.data.text.tokenizers import check_text
from diffvision.evaluation.language.needle import needle_samples, start_tokens

MAX_TOKENS = 512
"""Of a text of a language model: maps grow with the square of it, and nobody reads a picture of more."""
_INK = 96  # pixels of a drawn digit from this grey level belong to the digit


@dataclass(frozen=True)
class Picture:
    """An image with its name, captions and the region of its object."""

    name: str
    image: Image.Image
    region: Image.Image | None = None  # "L", white where the object is
    captions: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransformedPicture:
    """A picture after a model's transform."""

    tensor: Tensor  # [3, h, w]
    shown: np.ndarray  # [h, w, 3], 0 to 1: the same pixels in colours
    inside: Tensor | None  # [h, w], the part of each pixel that the object covers


@dataclass(frozen=True)
class Passage:
    """A text as tokens."""

    name: str
    tokens: Tensor  # [N]
    words: tuple[str, ...]  # of each token
    answer: tuple[int, int] | None = None  # tokens of the answer, [start, stop)


# ---- pictures ------------------------------------------------------------------------------------------------------


def sample_pictures(tokenizer: Any = None) -> list[Picture]:
    """Draw two test digits and a scene of two as `diffvision data make` does, with their regions and captions.

    Pictures whose captions the tokenizer would cut are left out, if any picture remains.
    """
    _, test = load_split()
    pictures = []
    for label, colour, background, seed in ((3, "yellow", "blue", 3), (7, "pink", "green", 6)):
        drawing = test.images[int(np.flatnonzero(test.labels == label)[seed])]
        image = decode_image(draw(drawing, colour, background, np.random.default_rng(seed)))
        ink = Image.fromarray(drawing).resize(image.size, Image.Resampling.BICUBIC)
        words = caption(WITH_COLOURS[0], label, colour, background)
        pictures.append(Picture(words, image, ink.point(lambda grey: 255 * (grey >= _INK)), (words,)))
    scene = compose(test, (2,), np.random.default_rng(1))
    image = decode_image(draw_scene(scene, test, np.random.default_rng(4)))
    empty = decode_image(draw_scene(scene.emptied(), test, np.random.default_rng(4)))
    changed = np.abs(np.asarray(image, dtype=int) - np.asarray(empty, dtype=int)).max(axis=2) >= _INK // 3
    words = scene.caption()
    pictures.append(Picture(words, image, Image.fromarray(np.uint8(255) * changed), (words,)))
    return [one for one in pictures if tokenizer is None or not _is_cut(one.name, tokenizer)] or pictures


def read_pictures(paths: Sequence[str], masks: Sequence[str]) -> list[Picture]:
    """Read image files, each with its mask where there are any.

    Raises:
        ValueError: a file is not an image; the number of masks or the size of one differs from the
            images'. FileNotFoundError.
    """
    if masks and len(masks) != len(paths):
        raise ValueError(f"{len(masks)} masks for {len(paths)} images: give one for each, or none")
    pictures = [Picture(name, _read(path)) for name, path in zip(_names(paths), paths, strict=True)]
    for index, path in enumerate(masks):
        mask, size = _read(path).convert("L"), pictures[index].image.size
        if mask.size != size:
            raise ValueError(f"mask {path} has {mask.size} pixels and {paths[index]} {size}: draw it over the image")
        pictures[index] = replace(pictures[index], region=mask)
    return pictures


def _names(paths: Sequence[str]) -> list[str]:
    """Return the names of files, or their paths where two would have one name."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else [str(Path(path)) for path in paths]


def transform_picture(picture: Picture, transform: Callable[[Image.Image], Tensor]) -> TransformedPicture:
    """Return the picture after a model's transform.

    The colours are restored from a white and a black image after the same transform, so that pixels and region are
    shown as the model crops and resizes them.
    """
    size = picture.image.size
    black, white = (transform(Image.new("RGB", size, colour)) for colour in ("black", "white"))
    tensor = transform(picture.image)

    def denormalise(pixels: Tensor) -> Tensor:
        return ((pixels - black) / (white - black)).clamp(0, 1)

    inside = None if picture.region is None else denormalise(transform(picture.region.convert("RGB"))).mean(dim=0)
    return TransformedPicture(tensor, denormalise(tensor).permute(1, 2, 0).numpy(), inside)


def share_by_patch(inside: Tensor, rows: int, columns: int) -> Tensor:
    """Return the fraction of each patch that the object covers [rows * columns], from its mask [h, w]."""
    return torch.nn.functional.adaptive_avg_pool2d(inside[None, None], (rows, columns)).flatten()


def _read(path: str) -> Image.Image:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no image file {path!r}: give a JPEG, PNG or WebP")
    try:
        return decode_image(Path(path).read_bytes())
    except BadSample as error:
        raise ValueError(f"image {path} cannot be read ({error}): give a JPEG, PNG or WebP") from error


# ---- texts ---------------------------------------------------------------------------------------------------------


def sample_passage(tokenizer: Any, max_length: int | None) -> Passage:
    """Return a text with a needle in a haystack, which ends where the needle's number should follow.

    Raises:
        ValueError: as `needle_samples`.
    """
    length = min(96, max_length or 96)
    (sample,) = needle_samples(tokenizer, length=length, depth=0.25, needles=3, samples=1, form="synthetic")
    tokens = sample.tokens[: sample.answers[0][0]]
    return Passage("a number among words", torch.tensor(tokens), _words(tokens, tokenizer), sample.needle)


def read_passages(
    texts: Sequence[str], answers: Sequence[str], tokenizer: Any, max_length: int | None
) -> list[Passage]:
    """Return texts as a language model's tokens, after a start token.

    Raises:
        ValueError: an empty text, one beyond the model's context or `MAX_TOKENS`; answers that are not one for each
            text, or not in it.
    """
    if answers and len(answers) != len(texts):
        raise ValueError(f"{len(answers)} answers for {len(texts)} texts: give one for each, or none")
    limit, reason = MAX_TOKENS, "that a picture of maps can show"
    if max_length is not None and max_length < limit:
        limit, reason = max_length, "of the model's context"
    read = []
    for index, text in enumerate(texts):
        check_text(text)
        tokens = [*start_tokens(tokenizer), *tokenizer.encode(text)]
        if len(tokens) < 2:
            raise ValueError("a text is empty: give words to look at")
        if len(tokens) > limit:
            raise ValueError(f"text {text[:40]!r}... has {len(tokens)} tokens, over the {limit} {reason}: shorten it")
        answer = _span(text, answers[index], tokenizer, tokens) if answers else None
        read.append(Passage(text, torch.tensor(tokens), _words(tokens, tokenizer), answer))
    return read


def read_captions(texts: Sequence[str], tokenizer: Any) -> list[Passage]:
    """Return captions as an OpenCLIP tokenizer's tokens, padding included.

    Raises:
        ValueError: an empty caption, or one that the context would cut.
    """
    read = []
    for text in texts:
        check_text(text)
        if not text.strip():
            raise ValueError("a text is empty: give a caption")
        (row,) = tokenizer([text])
        if _is_cut(text, tokenizer):
            raise ValueError(f"text {text[:40]!r}... fills the model's context of {len(row)} tokens: shorten it")
        ids = row[: int(row.nonzero().max()) + 1].tolist()
        read.append(Passage(text, row, _words(ids, tokenizer)))
    return read


def _is_cut(text: str, tokenizer: Any) -> bool:
    return torch.equal(*tokenizer([text, f"{text} a"]))


def _words(tokens: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    decode = getattr(tokenizer, "decode", None)
    return tuple(str(one) if decode is None else str(decode([one])).replace("\n", "\u21b5") for one in tokens)


def _span(text: str, answer: str, tokenizer: Any, tokens: Sequence[int]) -> tuple[int, int]:
    """Return [start, stop) of the tokens with the answer's characters, where it first occurs in the text."""
    first = text.find(answer) if answer else -1
    if first < 0:
        raise ValueError(f"answer {answer!r} is not in the text {text[:60]!r}: give words of the text")
    start = len(start_tokens(tokenizer))
    ends = [len(tokenizer.decode(list(tokens[start : start + count + 1]))) for count in range(len(tokens) - start)]
    begin = next(index for index, end in enumerate(ends) if end > first)
    stop = next((index for index, end in enumerate(ends) if end >= first + len(answer)), len(ends) - 1)
    return start + begin, start + stop + 1
