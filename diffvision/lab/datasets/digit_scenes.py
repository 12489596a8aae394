"""`digit-scenes`: one to three handwritten digits with colours and positions among clutter, described in words.

Harder than `digits`, for studies: small models need far more than a demo's minutes here. Digits are scikit-learn's, and
those for testing are the same as in `digits`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from diffvision.data.made.digits import UNSEEN_TEMPLATES, WORDS, load_split
from diffvision.data.made.drawings import Drawings
from diffvision.data.made.scenes import Scene, compose, draw_scene, key
from diffvision.data.shards.writer import Sample, refuse_existing, write_evaluation_split, write_shards

_EVALUATED = 500  # images of retrieval and composition
_PLAIN_FRACTION = 0.25  # share of training captions without colours


def make_digit_scenes(directory: str | Path, *, copies: int = 7, seed: int = 0) -> None:
    """Write scenes of one to three handwritten digits among clutter, with captions.

    `train` are shards; `zero_shot`, `retrieval` and `composition` are evaluation folders.

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
        folder = directory / "zero_shot" / split
        write_evaluation_split(folder, _classified(digits, rng), classnames=WORDS, templates=UNSEEN_TEMPLATES)
    retrieval = _distinct(test, (1, 2, 3), Scene.caption, np.random.default_rng([seed, 12]))
    write_evaluation_split(directory / "retrieval" / "test", retrieval, dataset_type=["retrieval"])
    composition = _distinct(test, (2, 3), _caption_pair, np.random.default_rng([seed, 13]))
    write_evaluation_split(directory / "composition" / "test", composition, dataset_type=["retrieval"])


def _caption_pair(scene: Scene) -> str:
    """Return the right caption and, on a second line, the wrong one: the caption with two colours exchanged."""
    return f"{scene.caption()}\n{scene.swapped().caption()}"


def _training(digits: Drawings, count: int, rng: np.random.Generator) -> Iterator[Sample]:
    for number, position in enumerate(rng.permutation(count)):
        scene = compose(digits, (1, 2, 3), rng, first=[int(position) % len(digits)])
        caption = scene.caption(colours=rng.random() >= _PLAIN_FRACTION)
        yield {"__key__": key(number, scene, digits), "png": draw_scene(scene, digits, rng), "txt": caption}


def _classified(digits: Drawings, rng: np.random.Generator) -> Iterator[Sample]:
    for which in range(len(digits)):
        scene = compose(digits, (1,), rng, first=[which])
        image = draw_scene(scene, digits, rng)
        yield {"__key__": key(which, scene, digits), "png": image, "cls": str(digits.labels[which])}


def _distinct(
    digits: Drawings, numbers: tuple[int, ...], describe: Callable[[Scene], str], rng: np.random.Generator
) -> Iterator[Sample]:
    """Yield samples of scenes whose descriptions are all different."""
    described: set[str] = set()
    while len(described) < _EVALUATED:
        scene = compose(digits, numbers, rng)
        text = describe(scene)
        if text in described:
            continue
        image = draw_scene(scene, digits, rng)
        yield {"__key__": key(len(described), scene, digits), "png": image, "txt": text}
        described.add(text)
