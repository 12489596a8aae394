"""Small grey pictures with labels, and how they are put on paper in colours: what digits and garments have in common.

Scenes of several are in `scenes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import BytesIO
from typing import Self

import numpy as np
from PIL import Image

_JITTER = 14  # largest change of a colour channel
_SIDES = (20, 27)  # range of a drawing's side in a scene in pixels, without the end


@dataclass(frozen=True)
class Drawings:
    """Drawings of several kinds.

    Attributes:
        images: grey levels uint8 [N, h, w], on black.
        labels: kinds [N].
        numbers: of each one in the set that it is from [N].
        words: the kinds' names.
    """

    images: np.ndarray
    labels: np.ndarray
    numbers: np.ndarray
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice | np.ndarray) -> Self:
        return replace(self, images=self.images[rows], labels=self.labels[rows], numbers=self.numbers[rows])

    def kind(self, row: int) -> str:
        """Return the name of a drawing's kind."""
        return self.words[int(self.labels[row])]

    def side(self, room: int, rng: np.random.Generator) -> int:
        """Return a random side in pixels for a drawing in a scene, whose neighbours are `room` pixels away."""
        return int(rng.integers(*_SIDES))

    def ink(self, row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the opacity and the lightness of a drawing's colour, 0 to 1, both [side, side]."""
        grey = Image.fromarray(self.images[row]).resize((side, side), Image.Resampling.BICUBIC)
        opacity = np.asarray(grey, dtype=np.float32) / 255
        return opacity, np.ones_like(opacity)


def shade(colour: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Return a colour with each channel changed a little at random."""
    return np.asarray(colour, dtype=np.float32) + rng.integers(-_JITTER, _JITTER + 1, 3)


def png(pixels: np.ndarray) -> bytes:
    """Return pixels in 0..255 as a PNG."""
    data = BytesIO()
    Image.fromarray(np.rint(pixels.clip(0, 255)).astype(np.uint8)).save(data, "PNG", compress_level=6)
    return data.getvalue()


def with_article(noun: str) -> str:
    """Return "a noun" or "an noun"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
