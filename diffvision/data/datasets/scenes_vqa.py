"""`scenes-vqa`: scenes of one to three coloured shapes, with conversations to train on and questions to test with.

The training scenes tempt to hallucinate: the two shapes of a pair come mostly together, and some pairs far more often
than others. In the test scenes shapes are independent and equally frequent. Negatives are drawn as POPE draws them (Li
et al., 2023, arXiv 2305.10355), by the counts of the training scenes.
"""

import json
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from diffvision.data.datasets.drawings import Drawings, with_article
from diffvision.data.datasets.scenes import COLOURS, Scene, compose, draw_scene
from diffvision.data.shards.writer import Sample, refuse_existing, write_lines, write_shards
from diffvision.progress import track

SHAPES = ("circle", "star", "square", "heart", "triangle", "moon", "cross", "ring", "diamond", "arrow")
"""Circle and star are a pair, then square and heart, and so on."""
FREQUENCIES = (5, 4, 3, 2, 1)
"""Relative frequency of each pair, as that of a training scene's first shape."""
TOGETHER = 0.75
"""How often, in a training scene of several shapes, the first one comes with the other shape of its pair."""
HELD_OUT = frozenset(zip(SHAPES, 2 * tuple(COLOURS), strict=False))
"""Shapes and colours that no training scene combines: one colour of each shape."""
QUESTIONS: dict[str, tuple[str, Callable[[Scene, int], str]]] = {
    "count": ("How many shapes are there?", lambda scene, which: str(len(scene.kinds))),
    "colour": ("What colour is the {kind}?", lambda scene, which: scene.colours[which]),
    "place": ("Where is the {kind}?", lambda scene, which: scene.layout.positions[which]),
    "shape": ("What shape is {colour}?", lambda scene, which: scene.kinds[which]),
}
"""Kind -> question about a drawing of a scene, and its answer."""
DESCRIBE = "Describe the image."
_SIDE, _FINE = 48, 4  # of a drawing in pixels; it is drawn larger by this factor and scaled down
_VARIANTS = 8  # of each shape, in training and in testing
_TILT = 8  # degrees, at most: a square never becomes a diamond

Rng = np.random.Generator


def make_scenes_vqa(directory: str | Path, *, scenes: int = 4_000, evaluated: int = 300, seed: int = 0) -> str:
    """Write scenes of coloured shapes, with conversations for training and questions of POPE, VQA and CHAIR.

    `train` and `validation` are shards of images and conversations. `test` has images and files of questions, as JSON
    lines: `pope_random.json`, `pope_popular.json`, `pope_adversarial.json`, `vqa.json` and `captions.json`. In these,
    `held_out` says whether the image has a shape in a colour that no training scene shows it in.

    Args:
        directory: the folder to write.
        scenes: how many there are for training.
        evaluated: how many there are for validation, and for testing.
        seed: determines all random choices.

    Returns:
        What was written.

    Raises:
        ValueError: fewer than 100 scenes for training, or none for testing; shards or questions in the directory.
    """
    if scenes < 100 or evaluated < 1:
        raise ValueError(f"scenes and evaluated must be at least 100 and 1, got {scenes} and {evaluated}")
    directory, test = Path(directory), Path(directory, "test")
    if test.exists():
        raise ValueError(f"{test} is there already: remove it, or choose another directory")
    for split in ("train", "validation"):
        refuse_existing(directory / split)
    drawings = draw_shapes(np.random.default_rng(30))
    for number, (split, count) in enumerate({"validation": evaluated, "train": scenes}.items()):
        rng = np.random.default_rng([seed, 40 + number])
        planned = [_compose_training(1 + index % 3, drawings, rng) for index in range(count)]
        samples = (_sample(planned[row], index, drawings, rng) for index, row in enumerate(rng.permutation(count)))
        write_shards(directory / split, track(samples, f"{split} scenes", count))
    # of the training scenes, which come last
    frequencies = Counter(kind for scene in planned for kind in scene.kinds)
    pairs = Counter(pair for scene in planned for pair in permutations(scene.kinds, 2))
    rng, drawings = np.random.default_rng([seed, 42]), draw_shapes(np.random.default_rng(31))
    tested = {f"{index:06d}.png": compose(drawings, [1 + index % 3], rng) for index in range(evaluated)}
    (test / "images").mkdir(parents=True)
    for image, scene in tested.items():
        (test / "images" / image).write_bytes(draw_scene(scene, drawings, rng))
    files = {
        "pope_random": _pope(tested, lambda present, absent: rng.random()),
        "pope_popular": _pope(tested, lambda present, absent: frequencies[absent]),
        "pope_adversarial": _pope(tested, lambda present, absent: pairs[present, absent]),
        "vqa": _vqa(tested, rng),
        "captions": [
            {"image": image, "text": DESCRIBE, "objects": scene.kinds, "caption": scene.caption()}
            for image, scene in tested.items()
        ],
    }
    for name, rows in files.items():
        with_truth = [{**row, "held_out": _is_held_out(tested[row["image"]])} for row in rows]
        lines = [json.dumps({"question_id": number, **row}) for number, row in enumerate(with_truth, start=1)]
        write_lines(test / f"{name}.json", lines)
    write_lines(test / "objects.txt", SHAPES)
    questions = ", ".join(f"{len(rows):,} in {name}" for name, rows in files.items())
    return f"{scenes:,} scenes for training, {evaluated:,} for testing; questions: {questions}"


def draw_shapes(rng: Rng) -> Drawings:
    """Return drawings of each of `SHAPES`, which differ a little in their proportions and angles."""
    images = [_draw(shape, rng) for shape in SHAPES for _ in range(_VARIANTS)]
    labels = np.repeat(np.arange(len(SHAPES)), _VARIANTS)
    return Drawings(np.stack(images), labels, np.arange(len(labels)), SHAPES)


def _draw(shape: str, rng: Rng) -> np.ndarray:
    """Return one shape in white on black, uint8 [_SIDE, _SIDE]."""
    size = _SIDE * _FINE
    image = Image.new("L", (size, size))
    pen = ImageDraw.Draw(image)
    centre, radius = size / 2, size / 2 * 0.94

    def fill(points: np.ndarray, colour: int = 255) -> None:
        pen.polygon([tuple(point) for point in centre + radius * points], fill=colour)

    def disc(x: float, y: float, r: float, colour: int = 255) -> None:
        left, top, reach = centre + radius * x, centre + radius * y, radius * r
        pen.ellipse((left - reach, top - reach, left + reach, top + reach), fill=colour)

    thin = 0.3 + rng.uniform(-0.04, 0.04)  # half of a stroke's width, or what a shape has like it
    match shape:
        case "circle":
            disc(0, 0, 0.95)
        case "ring":
            disc(0, 0, 1)
            disc(0, 0, 0.8 - thin, 0)
        case "moon":
            disc(-0.1, 0, 1)
            disc(0.25 + thin, 0, 0.8, 0)
        case "heart":
            t = np.linspace(0, 2 * np.pi, 100)
            y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
            fill(np.stack([16 * np.sin(t) ** 3, -y - 2], 1) / 16)
        case "star":
            fill(_regular(10, np.where(np.arange(10) % 2, thin + 0.12, 1)))
        case "triangle":
            fill(np.add(_regular(3, 1.1), (0, 0.25)))
        case "square":
            fill(_regular(4, 1.2, turn=45))
        case "diamond":
            fill(_regular(4, 1) * (0.55 + thin / 3, 1))
        case "cross":
            fill(np.array([(-thin, -1), (thin, -1), (thin, 1), (-thin, 1)]))
            fill(np.array([(-1, -thin), (1, -thin), (1, thin), (-1, thin)]))
        case "arrow":
            fill(np.array([(-1, -thin), (0, -thin), (0, thin), (-1, thin)]))
            fill(np.array([(0, -0.85), (1, 0), (0, 0.85)]))
    turned = image.rotate(rng.uniform(-_TILT, _TILT), Image.Resampling.BICUBIC)
    return np.asarray(turned.resize((_SIDE, _SIDE), Image.Resampling.BOX))


def _regular(corners: int, radius: float | np.ndarray, turn: float = 0) -> np.ndarray:
    """Return the corners of a polygon around the origin [corners, 2], the first one at the top, then turned."""
    angles = np.arange(corners) * 2 * np.pi / corners + np.radians(turn)
    return np.stack([np.sin(angles), -np.cos(angles)], 1) * np.reshape(radius, (-1, 1))


def _compose_training(number: int, drawings: Drawings, rng: Rng) -> Scene:
    """Return a scene that prefers some shapes, has pairs together, and none of `HELD_OUT`."""
    pair = rng.choice(len(FREQUENCIES), p=np.divide(FREQUENCIES, sum(FREQUENCIES)))
    kinds = [2 * pair + rng.integers(2)]
    if number > 1 and rng.random() < TOGETHER:
        kinds.append(kinds[0] ^ 1)
    rows = [int(rng.choice(np.flatnonzero(drawings.labels == kind))) for kind in kinds]
    while True:
        scene = compose(drawings, [number], rng, rows)
        if not _is_held_out(scene):
            return scene


def _is_held_out(scene: Scene) -> bool:
    return not HELD_OUT.isdisjoint(zip(scene.kinds, scene.colours, strict=True))


def _sample(scene: Scene, index: int, drawings: Drawings, rng: Rng) -> Sample:
    """Return a scene with a conversation in any order: is it there, twice; two other questions; and the caption.

    Answers to the first two do not follow from each other: each is yes or no by the toss of a coin.
    """
    turns = []
    present, absent = (list(rng.permutation(kinds)) for kinds in (scene.kinds, sorted({*SHAPES} - {*scene.kinds})))
    for _ in range(2):
        is_yes = bool(present) and rng.random() < 0.5
        turns.append((_ask_presence((present if is_yes else absent).pop()), "yes" if is_yes else "no"))
    kinds = list(QUESTIONS)
    for number in rng.choice(len(kinds), 2, replace=False):
        turns.append(_ask(kinds[number], scene, int(rng.integers(len(scene.kinds)))))
    turns.append((DESCRIBE, scene.caption()))
    conversations = []
    for number in rng.permutation(len(turns)):
        question, answer = turns[number]
        conversations += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    conversations[0]["value"] = "<image>\n" + conversations[0]["value"]
    record = json.dumps({"conversations": conversations})
    return {"__key__": f"scene{index:06d}", "png": draw_scene(scene, drawings, rng), "json": record}


def _ask(kind: str, scene: Scene, which: int) -> tuple[str, str]:
    """Return a question of `QUESTIONS` about a drawing of a scene, and its answer."""
    question, answer = QUESTIONS[kind]
    return question.format(kind=scene.kinds[which], colour=scene.colours[which]), answer(scene, which)


def _ask_presence(kind: str) -> str:
    return f"Is there {with_article(kind)} in the image?"


def _pope(scenes: dict[str, Scene], tempting: Callable[[str, str], float]) -> list[dict[str, Any]]:
    """Return POPE's questions: for each shape in a scene one yes, and one no, the most tempting of the absent shapes.

    Args:
        scenes: by the names of their images.
        tempting: (present, absent) -> score of the absent shape as a negative; the first of equal ones is taken.
    """
    rows = []
    for image, scene in scenes.items():
        absent = [kind for kind in SHAPES if kind not in scene.kinds]
        for present in scene.kinds:
            absent.remove(other := max(absent, key=lambda kind: tempting(present, kind)))
            for kind, label in ((present, "yes"), (other, "no")):
                rows.append({"image": image, "text": _ask_presence(kind), "label": label})
    return rows


def _vqa(scenes: dict[str, Scene], rng: Rng) -> list[dict[str, Any]]:
    """Return one question of each kind about each scene, about the drawing whose answer is the rarest so far."""
    rows = []
    given: Counter[tuple[str, str]] = Counter()
    for image, scene in scenes.items():
        for kind in QUESTIONS:
            choices = [_ask(kind, scene, int(which)) for which in rng.permutation(len(scene.kinds))]
            text, label = min(choices, key=lambda choice: given[kind, choice[1]])
            given[kind, label] += 1
            rows.append({"image": image, "text": text, "label": label, "kind": kind})
    return rows
