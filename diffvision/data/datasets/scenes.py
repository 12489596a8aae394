"""Scenes of one to three drawings with colours and positions among clutter, and the sentences that describe them.

`scenes_vqa` and `fashion_scenes` write datasets of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from diffvision.data.datasets.drawings import Drawings, png, shade, with_article

SIZE = 64
COLOURS = {
    "red": (220, 40, 40),
    "orange": (245, 145, 30),
    "yellow": (240, 225, 50),
    "green": (40, 165, 70),
    "blue": (45, 80, 215),
    "purple": (140, 50, 170),
}
BACKGROUNDS = {  # pale, so that which of two colours is a drawing's is a question of looking
    "red": (250, 170, 170),
    "orange": (250, 205, 140),
    "yellow": (246, 242, 150),
    "green": (165, 225, 170),
    "blue": (165, 190, 250),
    "purple": (222, 170, 242),
}


@dataclass(frozen=True)
class Layout:
    """An arrangement of drawings.

    Attributes:
        centres: of the drawings in the frame, (x, y) in pixels.
        positions: a name for each centre.
        sentences: that describe it; {0}, {1}, {2} are the drawings in the order of the centres. The first one says
            where each of them is.
    """

    centres: tuple[tuple[int, int], ...]
    positions: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def name(self) -> str:
        """The names of the positions."""
        return ", ".join(self.positions)

    @property
    def room(self) -> int:
        """The smallest distance of two centres, across or down, in pixels; the frame's side where there is one."""
        pairs = [(a, b) for i, a in enumerate(self.centres) for b in self.centres[:i]]
        return min((max(abs(ax - bx), abs(ay - by)) for (ax, ay), (bx, by) in pairs), default=SIZE)


LAYOUTS = (
    Layout(((32, 32),), ("middle",), ("{0} in the middle", "{0}", "a picture of {0}")),
    Layout(((17, 17),), ("top left",), ("{0} in the top left corner", "{0}")),
    Layout(((47, 17),), ("top right",), ("{0} in the top right corner", "{0}")),
    Layout(((17, 47),), ("bottom left",), ("{0} in the bottom left corner", "{0}")),
    Layout(((47, 47),), ("bottom right",), ("{0} in the bottom right corner", "{0}")),
    Layout(
        ((17, 32), (47, 32)),
        ("left", "right"),
        ("{0} to the left of {1}", "{1} to the right of {0}", "{0} on the left and {1} on the right"),
    ),
    Layout(
        ((32, 17), (32, 47)),
        ("top", "bottom"),
        ("{0} above {1}", "{1} below {0}", "{0} at the top and {1} at the bottom"),
    ),
    Layout(
        ((32, 17), (17, 47), (47, 47)),
        ("top", "bottom left", "bottom right"),
        ("{0} above {1} on the left and {2} on the right",),
    ),
    Layout(
        ((17, 17), (47, 17), (32, 47)),
        ("top left", "top right", "bottom"),
        ("{2} below {0} on the left and {1} on the right",),
    ),
    Layout(
        ((14, 32), (32, 32), (50, 32)),
        ("left", "middle", "right"),
        ("{0}, {1} and {2} from left to right", "{1} between {0} and {2}"),
    ),
)
BY_NUMBER = {n: [layout for layout in LAYOUTS if len(layout.centres) == n] for n in (1, 2, 3)}


@dataclass(frozen=True)
class Scene:
    """Drawings (rows of a `Drawings`) with their kinds and colours in a layout, and the sentence that describes them.

    The background is a key of `BACKGROUNDS`, or empty for a random grey.
    """

    drawings: tuple[int, ...]
    kinds: tuple[str, ...]
    colours: tuple[str, ...]
    layout: Layout
    sentence: str
    background: str = ""

    def caption(self, *, colours: bool = True, background: bool = False) -> str:
        """Return the sentence with the drawings filled in, with their colours and that of the background or without."""
        words = self.kinds
        if colours:
            words = tuple(f"{colour} {word}" for colour, word in zip(self.colours, words, strict=True))
        sentence = self.sentence.format(*map(with_article, words))
        return f"{sentence}, on {with_article(self.background)} background" if background else sentence

    def emptied(self) -> Scene:
        """Return the scene without its drawings."""
        return replace(self, drawings=(), kinds=(), colours=(), layout=Layout((), (), ()))


def compose(drawings: Drawings, numbers: Sequence[int], rng: np.random.Generator, first: Sequence[int] = ()) -> Scene:
    """Return a scene of drawings with different kinds and colours.

    Args:
        drawings: those to choose from, of at least as many kinds as a scene has drawings.
        numbers: how many drawings a scene may have; one of these numbers is drawn.
        rng: makes all random choices.
        first: rows of drawings of different kinds that must be in the scene.
    """
    number = int(rng.choice(numbers))
    layout = BY_NUMBER[number][rng.integers(len(BY_NUMBER[number]))]
    chosen = list(first) or [int(rng.integers(len(drawings)))]
    while len(chosen) < number:
        other = int(rng.integers(len(drawings)))
        if drawings.labels[other] not in drawings.labels[chosen]:
            chosen.append(other)
    chosen = [chosen[i] for i in rng.permutation(number)]
    colours = tuple(list(COLOURS)[i] for i in rng.choice(len(COLOURS), number, replace=False))
    sentence = layout.sentences[rng.integers(len(layout.sentences))]
    return Scene(tuple(chosen), tuple(map(drawings.kind, chosen)), colours, layout, sentence)


def draw_scene(scene: Scene, drawings: Drawings, rng: np.random.Generator) -> bytes:
    """Return a PNG [64, 64]: the drawings over a background with strokes and dots."""
    return png(render_scene(scene, drawings, rng)[0])


def render_scene(scene: Scene, drawings: Drawings, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels of a scene [64, 64, 3], 0 to 255, and the opacity of its drawings over the background [64, 64].

    The arguments are those of `draw_scene`, which draws the same picture.
    """
    if scene.background:
        ground = shade(BACKGROUNDS[scene.background], rng)
    else:
        ground = np.full(3, rng.integers(40, 216))
    canvas = np.asarray(_draw_clutter(ground, rng), dtype=np.float32).copy()
    seen_through = np.ones(canvas.shape[:2], dtype=np.float32)
    for which, colour, (x, y) in zip(scene.drawings, scene.colours, scene.layout.centres, strict=True):
        side = drawings.side(scene.layout.room, rng)
        left, top = (int(c - side // 2 + rng.integers(-2, 3)) for c in (x, y))
        left, top = (min(max(c, 0), SIZE - side) for c in (left, top))
        opacity, lightness = drawings.ink(which, side)
        under = canvas[top : top + side, left : left + side]
        under += (shade(COLOURS[colour], rng) * lightness[:, :, None] - under) * opacity[:, :, None]
        seen_through[top : top + side, left : left + side] *= 1 - opacity
    return canvas, 1 - seen_through


def _draw_clutter(ground: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """Return an image in one colour with strokes and dots in lighter and darker ones."""
    image = Image.new("RGB", (SIZE, SIZE), _channels(ground))
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(4, 10))):
        fill = _channels(ground + rng.integers(-60, 61))
        x, y = (int(v) for v in rng.integers(0, SIZE, 2))
        dx, dy = (int(v) for v in rng.integers(-12, 13, 2))
        if rng.random() < 0.5:
            pen.line((x, y, x + dx, y + dy), fill=fill, width=int(rng.integers(1, 3)))
        else:
            pen.ellipse((x, y, x + abs(dx) // 3 + 1, y + abs(dy) // 3 + 1), fill=fill)
    return image


def _channels(colour: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = (int(channel) for channel in colour.clip(0, 255))
    return red, green, blue


def key(number: int, scene: Scene, drawings: Drawings) -> str:
    """Return a key with the numbers of the drawings that are in a scene."""
    return f"scene{number:05d}-" + "-".join(f"{drawings.numbers[which]:04d}" for which in scene.drawings)
