"""`digit-scenes`: one to three handwritten digits with colours and positions among clutter, described in words.

Harder than `digits`, for studies: small models need far more than a demo's minutes here. Digits are scikit-learn's, and
those for testing are the same as in `digits`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from diffvision.data.made.digits import UNSEEN_TEMPLATES, WORDS, Digits, load_split, png, with_article
from diffvision.data.shards.writer import Sample, refuse_existing, write_evaluation_split, write_lines, write_shards

SIZE = 64
COLOURS = {  # clutter is grey
    "red": (220, 40, 40),
    "orange": (245, 145, 30),
    "yellow": (240, 225, 50),
    "green": (40, 165, 70),
    "blue": (45, 80, 215),
    "purple": (140, 50, 170),
}
_JITTER = 14  # largest change of a colour channel
_EVALUATED = 500  # images of retrieval and composition
_INK = (20, 27)  # range of a digit's side in pixels, without the end
_PLAIN_FRACTION = 0.25  # share of training captions without colours

# Centres in the frame, and the words that describe them. {0}, {1}, {2} are the digits in this order.
_LAYOUTS: tuple[tuple[tuple[tuple[int, int], ...], tuple[str, ...]], ...] = (
    (((32, 32),), ("{0} in the middle", "{0}", "a picture of {0}")),
    (((17, 17),), ("{0} in the top left corner", "{0}")),
    (((47, 17),), ("{0} in the top right corner", "{0}")),
    (((17, 47),), ("{0} in the bottom left corner", "{0}")),
    (((47, 47),), ("{0} in the bottom right corner", "{0}")),
    (
        ((17, 32), (47, 32)),
        ("{0} to the left of {1}", "{1} to the right of {0}", "{0} on the left and {1} on the right"),
    ),
    (((32, 17), (32, 47)), ("{0} above {1}", "{1} below {0}", "{0} at the top and {1} at the bottom")),
    (((32, 17), (17, 47), (47, 47)), ("{0} above {1} on the left and {2} on the right",)),
    (((17, 17), (47, 17), (32, 47)), ("{2} below {0} on the left and {1} on the right",)),
    (((14, 32), (32, 32), (50, 32)), ("{0}, {1} and {2} from left to right", "{1} between {0} and {2}")),
)
_BY_NUMBER = {n: [layout for layout in _LAYOUTS if len(layout[0]) == n] for n in (1, 2, 3)}


@dataclass(frozen=True)
class Scene:
    """Digits (rows of a `Digits`), their labels, colours and places, and the sentence that describes them."""

    digits: tuple[int, ...]
    labels: tuple[int, ...]
    colours: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    sentence: str

    def caption(self, *, colours: bool = True) -> str:
        """Return the sentence with the digits filled in, with their colours or without."""
        words = [WORDS[label] for label in self.labels]
        if colours:
            words = [f"{colour} {word}" for colour, word in zip(self.colours, words, strict=True)]
        return self.sentence.format(*map(with_article, words))

    def swapped(self) -> "Scene":
        """Return the scene with its first two colours exchanged."""
        first, second, *rest = self.colours
        return replace(self, colours=(second, first, *rest))


def make_scenes(directory: str | Path, *, copies: int = 7, seed: int = 0) -> None:
    """Write the dataset: `train` shards, and evaluation folders `zero_shot`, `retrieval` and `composition`.

    Args:
        directory: the folder to write.
        copies: training scenes for each of the 1,400 training digits.
        seed: determines all random choices.
    """
    directory = Path(directory)
    for part in ("train", "zero_shot/test", "zero_shot/train", "retrieval/test", "composition/test"):
        refuse_existing(directory / part)
    train, test = load_split()
    write_shards(directory / "train", _training(train, copies * len(train), np.random.default_rng([seed, 10])))
    for split, digits in (("train", train), ("test", test)):
        rng = np.random.default_rng([seed, 11, len(split)])  # the length distinguishes the splits
        write_evaluation_split(directory / "zero_shot" / split, _classified(digits, rng))
    write_lines(directory / "zero_shot" / "classnames.txt", WORDS)
    write_lines(directory / "zero_shot" / "zeroshot_classification_templates.txt", UNSEEN_TEMPLATES)
    retrieval = _distinct(test, (1, 2, 3), Scene.caption, np.random.default_rng([seed, 12]))
    write_evaluation_split(directory / "retrieval" / "test", retrieval)
    composition = _distinct(test, (2, 3), _caption_pair, np.random.default_rng([seed, 13]))
    write_evaluation_split(directory / "composition" / "test", composition)
    for folder in ("retrieval", "composition"):
        write_lines(directory / folder / "dataset_type.txt", ["retrieval"])


def _caption_pair(scene: Scene) -> str:
    """Return the right caption and, on a second line, the wrong one: the caption with two colours exchanged."""
    return f"{scene.caption()}\n{scene.swapped().caption()}"


def compose(digits: Digits, numbers: tuple[int, ...], rng: np.random.Generator, first: int | None = None) -> Scene:
    """Draw a scene of digits with different labels and colours.

    Args:
        digits: the digits to choose from.
        numbers: how many digits a scene may have; one of these numbers is drawn.
        rng: makes all random choices.
        first: the row of a digit that must be in the scene; None: any.
    """
    number = int(rng.choice(numbers))
    places, sentences = _BY_NUMBER[number][rng.integers(len(_BY_NUMBER[number]))]
    chosen = [int(rng.integers(len(digits))) if first is None else first]
    while len(chosen) < number:
        other = int(rng.integers(len(digits)))
        if digits.labels[other] not in digits.labels[chosen]:
            chosen.append(other)
    chosen = [chosen[i] for i in rng.permutation(number)]
    colours = tuple(list(COLOURS)[i] for i in rng.choice(len(COLOURS), number, replace=False))
    labels = tuple(int(digits.labels[i]) for i in chosen)
    return Scene(tuple(chosen), labels, colours, places, sentences[rng.integers(len(sentences))])


def draw_scene(scene: Scene, digits: Digits, rng: np.random.Generator) -> bytes:
    """Return a PNG [64, 64]: the digits over a grey background with strokes and dots."""
    canvas = np.asarray(_clutter(rng), dtype=np.float32).copy()
    for which, colour, (x, y) in zip(scene.digits, scene.colours, scene.places, strict=True):
        side = int(rng.integers(*_INK))
        left, top = (int(c - side // 2 + rng.integers(-2, 3)) for c in (x, y))
        left, top = (min(max(c, 0), SIZE - side) for c in (left, top))
        grey = Image.fromarray(digits.images[which]).resize((side, side), Image.Resampling.BICUBIC)
        ink = np.asarray(grey, dtype=np.float32)[:, :, None] / 255
        under = canvas[top : top + side, left : left + side]
        shade = np.asarray(COLOURS[colour]) + rng.integers(-_JITTER, _JITTER + 1, 3)
        under += (shade - under) * ink
    return png(canvas)


def _clutter(rng: np.random.Generator) -> Image.Image:
    ground = int(rng.integers(40, 216))
    image = Image.new("RGB", (SIZE, SIZE), (ground,) * 3)
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(4, 10))):
        grey = (int(np.clip(ground + rng.integers(-60, 61), 0, 255)),) * 3
        x, y = (int(v) for v in rng.integers(0, SIZE, 2))
        dx, dy = (int(v) for v in rng.integers(-12, 13, 2))
        if rng.random() < 0.5:
            pen.line((x, y, x + dx, y + dy), fill=grey, width=int(rng.integers(1, 3)))
        else:
            pen.ellipse((x, y, x + abs(dx) // 3 + 1, y + abs(dy) // 3 + 1), fill=grey)
    return image


def _training(digits: Digits, count: int, rng: np.random.Generator) -> Iterator[Sample]:
    for number, position in enumerate(rng.permutation(count)):
        scene = compose(digits, (1, 2, 3), rng, first=int(position) % len(digits))
        caption = scene.caption(colours=rng.random() >= _PLAIN_FRACTION)
        yield {"__key__": _key(number, scene, digits), "png": draw_scene(scene, digits, rng), "txt": caption}


def _classified(digits: Digits, rng: np.random.Generator) -> Iterator[Sample]:
    for which in range(len(digits)):
        scene = compose(digits, (1,), rng, first=which)
        image = draw_scene(scene, digits, rng)
        yield {"__key__": _key(which, scene, digits), "png": image, "cls": str(scene.labels[0])}


def _distinct(
    digits: Digits, numbers: tuple[int, ...], describe: Callable[[Scene], str], rng: np.random.Generator
) -> Iterator[Sample]:
    """Yield samples of scenes whose descriptions are all different."""
    described: set[str] = set()
    while len(described) < _EVALUATED:
        scene = compose(digits, numbers, rng)
        text = describe(scene)
        if text in described:
            continue
        image = draw_scene(scene, digits, rng)
        yield {"__key__": _key(len(described), scene, digits), "png": image, "txt": text}
        described.add(text)


def _key(number: int, scene: Scene, digits: Digits) -> str:
    """Return a key with the numbers of scikit-learn's digits that are in a scene."""
    return f"scene{number:05d}-" + "-".join(f"{digits.numbers[which]:04d}" for which in scene.digits)
