"""Fashion-MNIST's 70,000 garments of 28x28 grey levels, read from the files that users have.

By Zalando Research (arXiv 1708.07747, MIT licence). The test images are the set's; the last twelfth of its training
images is for validation. `fashion_scenes` takes its garments from here.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from diffvision.data.datasets.drawings import Drawings

WORDS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
ORIGIN = "Fashion-MNIST, https://github.com/zalandoresearch/fashion-mnist"
LICENCE = "MIT, copyright 2017 Zalando SE"
_REMEDY = "give Fashion-MNIST's files, such as those of `apt-get install dataset-fashion-mnist`"
_FOLDERS = ("", "FashionMNIST/raw", "raw")
_SIDE = 28


class Garments(Drawings):
    """Garments: their grey levels are the texture of what is opaque."""

    def side(self, room: int, rng: np.random.Generator) -> int:
        """Return a random side in pixels, at most as large as the room: garments fill their frame."""
        return min(int(rng.integers(22, 31)), room)

    def ink(self, row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the opacity and the lightness of a garment's colour, 0 to 1, both [side, side]."""
        grey, _ = super().ink(row, side)
        return (4 * grey).clip(0, 1), 0.6 + 0.4 * grey.clip(0, 1)


def load_splits(source: str | Path) -> dict[str, Garments]:
    """Return {split: garments}, of Fashion-MNIST 55,000 for train, 5,000 for validation and 10,000 for test.

    Their numbers are those of the training file, and of the test file behind them.

    Args:
        source: the folder with train-images-idx3-ubyte and the three other files (also .gz), such as
            /usr/share/datasets/fashion-mnist after `apt-get install dataset-fashion-mnist`; or torchvision's ROOT after
            datasets.FashionMNIST(ROOT, download=True).

    Raises:
        ValueError: files that are missing, damaged or of something else.
    """
    train, test = (_read_garments(Path(source), part) for part in ("train", "t10k"))
    cut = len(train) - len(train) // 12
    return {
        "train": train[:cut],
        "validation": train[cut:],
        "test": replace(test, numbers=test.numbers + len(train)),
    }


def _read_garments(root: Path, part: str) -> Garments:
    """Return the garments of a pair of files, whose labels must be Fashion-MNIST's."""
    pixels, labels = read_idx(root, f"{part}-images-idx3-ubyte"), read_idx(root, f"{part}-labels-idx1-ubyte")
    if pixels.shape != (len(labels), _SIDE, _SIDE) or {*labels.tolist()} != {*range(len(WORDS))}:
        raise ValueError(
            f"{part} in {root} must be images [{len(labels)}, {_SIDE}, {_SIDE}] with labels 0 to 9, got "
            f"{list(pixels.shape)} and labels to {max(labels)}: {_REMEDY}"
        )
    return Garments(pixels, labels.astype(np.int64), np.arange(len(labels)), WORDS)


def read_idx(root: Path, name: str) -> np.ndarray:
    """Return the array of a file in MNIST's idx format, uint8, also of a .gz.

    Raises:
        ValueError: the file does not exist, or its length is not what its header says.
    """
    files = [root / folder / f"{name}{suffix}" for folder in _FOLDERS for suffix in ("", ".gz")]
    if (path := next(filter(Path.is_file, files), None)) is None:
        raise ValueError(f"{root} has no {name} (nor .gz): {_REMEDY}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        axes = data[3]  # after two zeros and the type, which is uint8
        shape = np.frombuffer(data, ">i4", axes, offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
