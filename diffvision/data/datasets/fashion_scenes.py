"""`fashion-scenes`: one to three garments of Fashion-MNIST in colours, on a coloured background, described in words.

What a scene shows is next to each image as a `json` member, so that probes can be fitted to each factor: kinds,
colours, positions, count and background. Scenes for training, validation and testing are of different garments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.datasets.drawings import with_article
from diffvision.data.datasets.fashion import LICENCE, ORIGIN, WORDS, Garments, load_splits
from diffvision.data.datasets.scenes import (
    BACKGROUNDS,
    BY_NUMBER,
    COLOURS,
    Scene,
    compose,
    draw_scene,
    key,
    render_scene,
)
from diffvision.data.shards.writer import Sample, refuse_existing, write_about, write_evaluation_split, write_shards
from diffvision.progress import track

COLOUR_TEMPLATES = tuple(f"a picture with a {{c}} {word}" for word in WORDS)
"""For zero-shot classification; none of them is a caption of training."""

_GROUP_FRACTION = 0.2  # share of training scenes whose garments are all of one kind and colour
_NUMBERS = {2: "two", 3: "three"}
_PLURALS = {"dress": "dresses"}
_STREAMS = {"train": 0, "zero_shot": 1, "retrieval": 3, "masks": 7}  # of random numbers, which change no other's

Rng = np.random.Generator


@dataclass(frozen=True)
class Group(Scene):
    """Garments of one kind and colour, which are counted: "two red sneakers". It has no sentence."""

    def caption(self, *, colours: bool = True, background: bool = False) -> str:
        """Return the description."""
        kind, colour = self.kinds[0], f"{self.colours[0]} " if colours else ""
        words = f"{_NUMBERS[len(self.drawings)]} {colour}{_PLURALS.get(kind, kind + 's')}"
        return f"{words}, on {with_article(self.background)} background" if background else words


def make_fashion_scenes(
    directory: str | Path,
    source: str | Path,
    *,
    scenes: int = 55_000,
    evaluated: int = 2_000,
    plain: float = 0.25,
    background: float = 0.5,
    seed: int = 0,
) -> str:
    """Write scenes of one to three coloured garments of Fashion-MNIST, with captions and what they show.

    `train` are shards. The evaluation folders `zero_shot-colour` (images of one garment, and a split train for probes)
    and `retrieval-colour` (a caption for each kind, colour and background) have the splits validation and test.

    Args:
        directory: the folder to write.
        source: Fashion-MNIST, as `fashion.load_splits` takes it.
        scenes: how many there are for training; up to 55,000 have a different garment each.
        evaluated: images of each split of `zero_shot-colour`, twice as many in train; `retrieval-colour` has 360.
        plain: share of the training captions that do not name the garments' colours; it changes no image.
        background: share of the training captions that name that of the background; it changes no image.
        seed: determines all random choices.

    Returns:
        What was written.

    Raises:
        ValueError: a source that cannot be used; no scenes; shards in the directory.
    """
    if scenes < 1 or evaluated < 2:
        raise ValueError(f"scenes and evaluated must be at least 1 and 2, got {scenes} and {evaluated}")
    directory = Path(directory)
    refuse_existing(directory / "train")
    for part in directory.glob("*/*/"):
        refuse_existing(part)
    splits = load_splits(source)
    train = Scenes(splits["train"], [seed, 30])
    write_shards(directory / "train", track(train.captioned(scenes, plain, background), "training scenes", scenes))
    for number, (split, garments) in enumerate(splits.items()):
        made = Scenes(garments, [seed, 31 + number])
        count = 2 * evaluated if split == "train" else evaluated
        single = track(made.single(count), f"zero_shot-colour/{split}", count)
        folder = directory / "zero_shot-colour" / split
        write_evaluation_split(folder, single, classnames=tuple(COLOURS), templates=COLOUR_TEMPLATES)
        if split != "train":
            combined = track(made.retrieval(), f"retrieval-colour/{split}")
            write_evaluation_split(directory / "retrieval-colour" / split, combined, dataset_type=["retrieval"])
    write_about(
        directory, ORIGIN, LICENCE, seed=seed, scenes=scenes, evaluated=evaluated, plain=plain, background=background
    )
    return f"{scenes:,} scenes for training; {evaluated:,} in each folder's validation and test"


class Scenes:
    """Scenes of some garments. Sample i of each folder depends on the seed and i alone."""

    def __init__(self, garments: Garments, seed: list[int]) -> None:
        self.garments, self.seed = garments, seed

    def captioned(self, count: int, plain: float, background: float) -> Iterator[Sample]:
        """Yield training samples, each of another garment until all have been used."""
        order = self._rng("train").permutation(len(self.garments))
        for index in range(count):
            rng = self._rng("train", index)
            options = {"colours": rng.random() >= plain, "background": rng.random() < background}
            first = int(order[index % len(order)])
            scene = self._group(rng, first) if rng.random() < _GROUP_FRACTION else self._scene(rng, (1, 2, 3), first)
            yield self._sample(index, scene, rng, txt=scene.caption(**options))

    def single(self, count: int) -> Iterator[Sample]:
        """Yield samples of one garment with the number of its colour."""
        order = self._rng("zero_shot").permutation(len(self.garments))
        for index in range(count):
            rng = self._rng("zero_shot", index)
            scene = self._scene(rng, (1,), int(order[index % len(order)]))
            yield {**self._sample(index, scene, rng), "cls": str(list(COLOURS).index(scene.colours[0]))}

    def retrieval(self) -> Iterator[Sample]:
        """Yield a sample of one garment for each kind, colour and background."""
        combinations = [(kind, ink, paper) for kind in range(len(WORDS)) for ink in COLOURS for paper in BACKGROUNDS]
        for index, (kind, ink, paper) in enumerate(combinations):
            rng = self._rng("retrieval", index)
            first = int(rng.choice(np.flatnonzero(self.garments.labels == kind)))
            scene = replace(self._scene(rng, (1,), first), colours=(ink,), background=paper, sentence="{0}")
            yield self._sample(index, scene, rng, txt=scene.caption(background=True))

    def masked(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield uint8 pixels [64, 64, 3] of scenes, and which of them are a garment's [64, 64]; no folder has these."""
        for index in range(count):
            rng = self._rng("masks", index)
            canvas, opacity = render_scene(self._scene(rng, (1, 2, 3)), self.garments, rng)
            yield np.rint(canvas.clip(0, 255)).astype(np.uint8), opacity >= 0.5

    def _rng(self, folder: str, index: int | None = None) -> Rng:
        return np.random.default_rng([*self.seed, _STREAMS[folder], *([] if index is None else [index])])

    def _scene(self, rng: Rng, numbers: tuple[int, ...], first: int | None = None) -> Scene:
        required = () if first is None else (first,)
        return replace(compose(self.garments, numbers, rng, required), background=_background(rng))

    def _group(self, rng: Rng, first: int) -> Group:
        """Return two or three garments of one kind and colour."""
        number = int(rng.integers(2, 4))
        same = np.flatnonzero(self.garments.labels == self.garments.labels[first])
        rows = (first, *map(int, rng.choice(same, number - 1)))
        layout = BY_NUMBER[number][rng.integers(len(BY_NUMBER[number]))]
        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        kinds = (self.garments.kind(first),) * number
        return Group(rows, kinds, (colour,) * number, layout, "", _background(rng))

    def _sample(self, index: int, scene: Scene, rng: Rng, **members: str) -> Sample:
        image = draw_scene(scene, self.garments, rng)
        truth = json.dumps(self._truth(scene))
        return {"__key__": key(index, scene, self.garments), "png": image, **members, "json": truth}

    def _truth(self, scene: Scene) -> dict[str, Any]:
        """Return what is in a scene: a description of each garment, and of the whole."""
        numbers = self.garments.numbers[list(scene.drawings)].tolist()
        columns = (scene.kinds, scene.colours, scene.layout.positions, scene.layout.centres, numbers)
        names = ("kind", "colour", "position", "centre", "number")
        garments = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        whole = {"count": len(garments), "layout": scene.layout.name, "background": scene.background}
        return {"garments": garments, **whole}


def _background(rng: Rng) -> str:
    return list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
