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
from diffvision.data.shards.writer import (
    Sample,
    refuse_existing,
    write_about,
    write_evaluation_split,
    write_shards,
)
from diffvision.progress import track

SWAPS: dict[str, dict[str, bool]] = {  # the arguments of Scene.swapped
    "swapped colours": {"colours": True, "kinds": False},
    "swapped objects": {"colours": False, "kinds": True},
    "swapped places": {"colours": True, "kinds": True},
}
COMPOSITION = (*SWAPS, "wrong count", "absent object")
PAIRS = (*SWAPS, "another count", "another object")
KIND_TEMPLATES = ("the {c} in the picture", "a picture with a {c}", "a {c}, on a background", "one {c} in the middle")
COLOUR_TEMPLATES = tuple(f"a picture with a {{c}} {word}" for word in WORDS)
BACKGROUND_TEMPLATES = tuple(f"a picture with {with_article(word)}, on a {{c}} background" for word in WORDS)
"""For zero-shot classification; none of them is a caption of training."""

_GROUP_FRACTION = 0.2  # share of training scenes whose garments are all of one kind and colour
_NUMBERS = {2: "two", 3: "three"}
_PLURALS = {"dress": "dresses"}
_STREAMS = ("train", "zero_shot", "retrieval", "retrieval-colour", "composition", "pairs", "objects", "masks")

Rng = np.random.Generator


@dataclass(frozen=True)
class Group(Scene):
    """Garments of one kind and colour, which are counted: "two red sneakers". It has no sentence."""

    def caption(self, *, colours: bool = True, background: bool = False, count: int | None = None) -> str:
        """Return the description, with another count if one is given."""
        count = count or len(self.drawings)
        kind, colour = self.kinds[0], f"{self.colours[0]} " if colours else ""
        if count == 1:
            words = with_article(colour + kind)
        else:
            words = f"{_NUMBERS[count]} {colour}{_PLURALS.get(kind, kind + 's')}"
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

    `train` are shards. The evaluation folders, each with the splits validation and test:
    `zero_shot`, `zero_shot-colour` and `zero_shot-background` (the same images of one garment, and a split
    train for probes), `retrieval`, `retrieval-colour` (a caption for each kind, colour and background), `composition`,
    `pairs` and `objects`.

    Args:
        directory: the folder to write.
        source: Fashion-MNIST, as `make_fashion` takes it.
        scenes: how many there are for training; up to 55,000 have a different garment each.
        evaluated: images of each split for evaluation, pairs of `pairs`; 360 in `retrieval-colour`.
        plain: share of the training captions that do not name the garments' colours; it changes no image.
        background: share of the training captions that name that of the background; it changes no image.
        seed: determines all random choices.

    Returns:
        What was written.

    Raises:
        ValueError: a source that cannot be used; no scenes; shards in the directory.
    """
    if scenes < 1 or evaluated < 2:
        raise ValueError(f"scenes is {scenes} and evaluated {evaluated}: they must be at least 1 and 2")
    directory = Path(directory)
    refuse_existing(directory / "train")
    for part in directory.glob("*/*/"):
        refuse_existing(part)
    splits = load_splits(source)
    train = Scenes(splits["train"], [seed, 30])
    write_shards(directory / "train", track(train.captioned(scenes, plain, background), "training scenes", scenes))
    for number, (split, garments) in enumerate(splits.items()):
        made = Scenes(garments, [seed, 31 + number])
        _write_zero_shot(directory, split, made, 2 * evaluated if split == "train" else evaluated)
        if split == "train":
            continue
        for folder, kind, samples in (
            ("retrieval", "retrieval", made.retrieval(evaluated)),
            ("retrieval-colour", "retrieval", made.retrieval_of_colours()),
            ("composition", "composition", made.composition(evaluated)),
            ("pairs", "pairs", made.pairs(evaluated)),
            ("objects", "objects", made.objects(evaluated)),
        ):
            templates = KIND_TEMPLATES if kind == "objects" else ()
            tracked = track(samples, f"{folder}/{split}")
            write_evaluation_split(directory / folder / split, tracked, dataset_type=[kind], templates=templates)
    write_about(
        directory, ORIGIN, LICENCE, seed=seed, scenes=scenes, evaluated=evaluated, plain=plain, background=background
    )
    return f"{scenes:,} scenes for training; {evaluated:,} in each folder's validation and test"


def _write_zero_shot(directory: Path, split: str, made: Scenes, count: int) -> None:
    """Write the same images with the kind, the colour and the background as labels."""
    samples = list(track(made.single(count), f"zero_shot/{split}", count))
    for folder, factor, names, templates in (
        ("zero_shot", 0, WORDS, KIND_TEMPLATES),
        ("zero_shot-colour", 1, tuple(COLOURS), COLOUR_TEMPLATES),
        ("zero_shot-background", 2, tuple(BACKGROUNDS), BACKGROUND_TEMPLATES),
    ):
        labelled = ({**sample, "cls": str(names.index(values[factor]))} for sample, values in samples)
        write_evaluation_split(directory / folder / split, labelled, classnames=names, templates=templates)


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

    def single(self, count: int) -> Iterator[tuple[Sample, tuple[str, str, str]]]:
        """Yield samples of one garment, with its kind, its colour and the background."""
        order = self._rng("zero_shot").permutation(len(self.garments))
        for index in range(count):
            rng = self._rng("zero_shot", index)
            scene = self._scene(rng, (1,), int(order[index % len(order)]))
            yield self._sample(index, scene, rng), (scene.kinds[0], scene.colours[0], scene.background)

    def retrieval(self, count: int) -> Iterator[Sample]:
        """Yield samples whose captions are all different, and say what is where in which colours."""
        captions: set[str] = set()
        index = 0
        while len(captions) < count:
            rng = self._rng("retrieval", index)
            scene = self._scene(rng, (1, 2, 3))
            scene = replace(scene, sentence=scene.layout.sentences[0])
            caption = scene.caption(background=True)
            if caption not in captions:
                yield self._sample(len(captions), scene, rng, txt=caption)
                captions.add(caption)
            index += 1

    def retrieval_of_colours(self) -> Iterator[Sample]:
        """Yield a sample of one garment for each kind, colour and background."""
        combinations = [(kind, ink, paper) for kind in range(len(WORDS)) for ink in COLOURS for paper in BACKGROUNDS]
        for index, (kind, ink, paper) in enumerate(combinations):
            rng = self._rng("retrieval-colour", index)
            first = int(rng.choice(np.flatnonzero(self.garments.labels == kind)))
            scene = replace(self._scene(rng, (1,), first), colours=(ink,), background=paper, sentence="{0}")
            yield self._sample(index, scene, rng, txt=scene.caption(background=True))

    def composition(self, count: int) -> Iterator[Sample]:
        """Yield samples with the right caption and a wrong one."""
        for index in range(count):
            rng = self._rng("composition", index)
            kind = COMPOSITION[index % len(COMPOSITION)]
            scene, other = self._changed(index % len(COMPOSITION), rng)
            txt = f"{scene.caption()}\n{other.caption()}"
            yield self._sample(index, scene, rng, {"kind": kind}, txt=txt)

    def pairs(self, count: int) -> Iterator[Sample]:
        """Yield samples of two images that differ in one respect, with their captions."""
        for index in range(count):
            rng = self._rng("pairs", index)
            both = self._changed(index % len(PAIRS), rng)
            drawing = int(rng.integers(2**32))  # the same background, clutter and sizes twice
            sample: dict[str, str | bytes] = {"__key__": key(index, both[0], self.garments)}
            for number, scene in enumerate(both):
                sample[f"{number}.png"] = draw_scene(scene, self.garments, np.random.default_rng(drawing))
                sample[f"{number}.txt"] = scene.caption()
            truth = {"kind": PAIRS[index % len(PAIRS)], "scenes": [self._truth(scene) for scene in both]}
            yield {**sample, "json": json.dumps(truth)}

    def objects(self, count: int) -> Iterator[Sample]:
        """Yield samples with the kinds that are in the picture, and as many that are not."""
        for index in range(count):
            rng = self._rng("objects", index)
            scene = self._scene(rng, (1, 2, 3))
            absent = rng.permutation([word for word in WORDS if word not in scene.kinds])[: len(scene.kinds)]
            yield self._sample(index, scene, rng, {"present": list(scene.kinds), "absent": absent.tolist()})

    def masked(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield uint8 pixels [64, 64, 3] of scenes, and which of them are a garment's [64, 64]; no folder has these."""
        for index in range(count):
            rng = self._rng("masks", index)
            canvas, opacity = render_scene(self._scene(rng, (1, 2, 3)), self.garments, rng)
            yield np.rint(canvas.clip(0, 255)).astype(np.uint8), opacity >= 0.5

    def _rng(self, folder: str, index: int | None = None) -> Rng:
        return np.random.default_rng([*self.seed, _STREAMS.index(folder), *([] if index is None else [index])])

    def _scene(self, rng: Rng, numbers: tuple[int, ...], first: int | None = None) -> Scene:
        required = () if first is None else (first,)
        return replace(compose(self.garments, numbers, rng, required), background=_background(rng))

    def _group(self, rng: Rng, first: int | None = None, number: int | None = None) -> Group:
        """Return garments of one kind and colour, two or three by default."""
        number = number or int(rng.integers(2, 4))
        first = int(rng.integers(len(self.garments))) if first is None else first
        same = np.flatnonzero(self.garments.labels == self.garments.labels[first])
        rows = (first, *map(int, rng.choice(same, number - 1)))
        layout = BY_NUMBER[number][rng.integers(len(BY_NUMBER[number]))]
        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        kinds = (self.garments.kind(first),) * number
        return Group(rows, kinds, (colour,) * number, layout, "", _background(rng))

    def _changed(self, change: int, rng: Rng) -> tuple[Scene, Scene]:
        """Return a scene and another one, which differs in what COMPOSITION and PAIRS name at this position."""
        if change < len(SWAPS):
            scene = self._scene(rng, (2, 3))
            return scene, scene.swapped(**SWAPS[COMPOSITION[change]])
        if change == len(SWAPS):
            number, other = (int(n) for n in rng.permutation([1, 2, 3])[:2])
            group = self._group(rng, number=number)
            more = self._group(rng, group.drawings[0], other)
            return group, replace(more, colours=group.colours[:1] * other, background=group.background)
        scene = self._scene(rng, (1, 2, 3))
        which = int(rng.integers(len(scene.drawings)))
        shown = self.garments.labels[list(scene.drawings)]
        new = int(rng.choice(np.flatnonzero(~np.isin(self.garments.labels, shown))))
        return scene, replace(
            scene,
            drawings=(*scene.drawings[:which], new, *scene.drawings[which + 1 :]),
            kinds=(*scene.kinds[:which], self.garments.kind(new), *scene.kinds[which + 1 :]),
        )

    def _sample(
        self, index: int, scene: Scene, rng: Rng, facts: dict[str, Any] | None = None, **members: str
    ) -> Sample:
        image = draw_scene(scene, self.garments, rng)
        truth = json.dumps({**(facts or {}), **self._truth(scene)})
        return {"__key__": key(index, scene, self.garments), "png": image, **members, "json": truth}

    def _truth(self, scene: Scene) -> dict[str, Any]:
        """Return what is in a scene: a description of each garment, and of the whole."""
        garments = [
            {"kind": kind, "colour": colour, "position": position, "centre": centre, "number": int(number)}
            for kind, colour, position, centre, number in zip(
                scene.kinds,
                scene.colours,
                scene.layout.positions,
                scene.layout.centres,
                self.garments.numbers[list(scene.drawings)],
                strict=True,
            )
        ]
        return {
            "garments": garments,
            "count": len(garments),
            "layout": scene.layout.name,
            "background": scene.background,
        }


def _background(rng: Rng) -> str:
    return list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
