"""`digits`: real handwritten digits, each in a colour on a background of another, with captions in plain words.

The digits are scikit-learn's 1,797 of 8x8 grey levels (UCI ML hand-written digits). Which of them are for testing is
fixed, whatever the seed, so no dataset made here trains on a digit that another one tests.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from diffvision.data.datasets.drawings import Drawings, png, shade, with_article
from diffvision.data.shards.writer import Sample, refuse_existing, write_evaluation_split, write_shards

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Hues, as ink and as paper. Ink is the brighter whatever the two are, so that a digit's shape is plain to see and which
# of two colours is the ink is a question of looking, not of the name. Pale, because strong colours are learned at once
# and then hide the shapes from a small model for a long time; the share of captions without colours does the same.
INK = {
    "red": (255, 160, 160),
    "yellow": (255, 255, 160),
    "green": (160, 255, 160),
    "cyan": (160, 255, 255),
    "blue": (160, 160, 255),
    "pink": (255, 160, 255),
}
PAPER = {
    "red": (80, 15, 15),
    "yellow": (80, 80, 15),
    "green": (15, 80, 15),
    "cyan": (15, 80, 80),
    "blue": (15, 15, 80),
    "pink": (80, 15, 80),
}
WITH_COLOURS = (
    "{a_colour} {digit} on {a_background} background",
    "the digit {digit} in {colour} on {background}",
    "a handwritten {digit}, {colour} on {background}",
    "the number {digit} written in {colour} on {a_background} background",
)
DIGIT_ONLY = (
    "a handwritten {digit}",
    "the number {digit}",
    "the digit {digit} written by hand",
    "an image of the number {digit}",
)
UNSEEN_TEMPLATES = (
    "an image of a handwritten {c}",
    "the handwritten number {c}",
    "the digit {c}, written in a colour",
    "a photo of the digit {c}",
)
"""For zero-shot classification; none of them is a template of training."""

DIGIT_ONLY_FRACTION = 0.8
SIZE = 32
_TEST_DIGITS = 397
_SPLIT_SEED = 20


def load_split() -> tuple[Drawings, Drawings]:
    """Return (train, test) digits of 8x8 grey levels: 1,400 and 397, no drawing in both."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(grey))
    digits = Drawings(grey, bunch.target, np.arange(len(grey)), WORDS)
    return digits[np.sort(order[_TEST_DIGITS:])], digits[np.sort(order[:_TEST_DIGITS])]


def make_digits(
    directory: str | Path, *, copies: int = 6, digit_only: float = DIGIT_ONLY_FRACTION, seed: int = 0
) -> None:
    """Write handwritten digits in colours, with captions.

    `train` are shards; `zero_shot`, `retrieval` and `composition` are evaluation folders.

    Args:
        directory: the folder to write.
        copies: coloured renderings of each of the 1,400 training digits.
        digit_only: share of the training captions that name the digit and no colour.
        seed: determines all random choices; images are the same whatever `digit_only` is.
    """
    directory = Path(directory)
    for part in ("train", "zero_shot/test", "zero_shot/train", "retrieval/test", "composition/test"):
        refuse_existing(directory / part)
    train, test = load_split()
    write_shards(directory / "train", _training(train, copies, digit_only, np.random.default_rng([seed, 0])))
    for split, digits in (("train", train), ("test", test)):
        rng = np.random.default_rng([seed, 1, len(split)])  # the length distinguishes the splits
        folder = directory / "zero_shot" / split
        write_evaluation_split(folder, _classified(digits, rng), classnames=WORDS, templates=UNSEEN_TEMPLATES)
    retrieval = _distinct(test, np.random.default_rng([seed, 3]))
    composition = _swap_colours(test, np.random.default_rng([seed, 4]))
    # CLIP_benchmark reads both as pairs of image and captions.
    write_evaluation_split(directory / "retrieval" / "test", retrieval, dataset_type=["retrieval"])
    write_evaluation_split(directory / "composition" / "test", composition, dataset_type=["retrieval"])


def combinations() -> list[tuple[int, str, str]]:
    """Return (digit, ink, paper) of the 300 images of `retrieval`, in their order."""
    return [(label, ink, paper) for label in range(10) for ink in INK for paper in PAPER if ink != paper]


def caption(template: str, label: int, colour: str, background: str) -> str:
    """Fill in a template, with "a" or "an" as the colours need it."""
    articles = {"a_colour": with_article(colour), "a_background": with_article(background)}
    return template.format(digit=WORDS[label], colour=colour, background=background, **articles)


def draw(grey: np.ndarray, colour: str, background: str, rng: np.random.Generator) -> bytes:
    """Return a PNG of one digit that fills the frame, in shades of its colours."""
    ink = np.asarray(Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    front, back = shade(INK[colour], rng), shade(PAPER[background], rng)
    return png(back + (front - back) * ink[:, :, None])


def _two_colours(rng: np.random.Generator) -> tuple[str, str]:
    names = list(INK)
    first, second = rng.choice(len(names), 2, replace=False)
    return names[first], names[second]


def _training(digits: Drawings, copies: int, digit_only: float, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield every digit `copies` times, in random order."""
    for position in rng.permutation(len(digits) * copies):
        which, copy = position % len(digits), position // len(digits)
        colour, background = _two_colours(rng)
        templates = DIGIT_ONLY if rng.random() < digit_only else WITH_COLOURS
        label = int(digits.labels[which])
        yield {
            "__key__": f"digit{digits.numbers[which]:04d}-{copy}",
            "png": draw(digits.images[which], colour, background, rng),
            "txt": caption(templates[rng.integers(len(templates))], label, colour, background),
            "cls": str(label),
        }


def _classified(digits: Drawings, rng: np.random.Generator) -> Iterator[Sample]:
    for image, label, number in zip(digits.images, digits.labels, digits.numbers, strict=True):
        colour, background = _two_colours(rng)
        yield {"__key__": f"digit{number:04d}", "png": draw(image, colour, background, rng), "cls": str(label)}


def _distinct(digits: Drawings, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield one image for each of `combinations`: no two captions are the same."""
    for label, colour, background in combinations():
        drawings = np.flatnonzero(digits.labels == label)
        which = drawings[rng.integers(len(drawings))]
        yield {
            "__key__": f"digit{digits.numbers[which]:04d}-{colour}-{background}",
            "png": draw(digits.images[which], colour, background, rng),
            "txt": caption(WITH_COLOURS[0], label, colour, background),
        }


def _swap_colours(digits: Drawings, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield images with the right caption, then the one with its two colours exchanged."""
    for image, label, number in zip(digits.images, digits.labels, digits.numbers, strict=True):
        colour, background = _two_colours(rng)
        right = caption(WITH_COLOURS[0], int(label), colour, background)
        wrong = caption(WITH_COLOURS[0], int(label), background, colour)
        yield {
            "__key__": f"digit{number:04d}",
            "png": draw(image, colour, background, rng),
            "txt": f"{right}\n{wrong}",
        }
