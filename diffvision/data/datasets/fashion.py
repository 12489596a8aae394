"""`fashion`: Fashion-MNIST's 70,000 garments of 28x28 grey levels, from the files that users have, with captions.

By Zalando Research (arXiv 1708.07747, MIT licence). The test images are the set's; the last twelfth of its training
images is for validation. `fashion_scenes` takes its garments from here.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from diffvision.data.datasets.drawings import Drawings, png, with_article
from diffvision.data.shards.writer import (
    Sample,
    refuse_existing,
    write_about,
    write_evaluation_split,
    write_shards,
)
from diffvision.progress import track

WORDS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
ORIGIN = "Fashion-MNIST, https://github.com/zalandoresearch/fashion-mnist"
LICENCE = "MIT, copyright 2017 Zalando SE"
CAPTIONS = ("{0}", "a picture of {0}", "{0} in grey", "a small grey picture of {0}")
TEMPLATES = ("a photo of a {c}", "a grey picture of a {c}", "a black and white photo of a {c}", "a picture with a {c}")
"""For zero-shot classification; none of them is a caption of training."""
_REMEDY = "give Fashion-MNIST's files, such as those of `apt-get install dataset-fashion-mnist`"
_FOLDERS = ("", "FashionMNIST/raw", "raw")
_IMAGES, _LABELS = 2051, 2049
_SIDE = 28
_TRAIN, _TRAIN_CRC = 60_000, 785835114  # how many training labels Fashion-MNIST has, and their CRC-32


class Garments(Drawings):
    """Garments: their grey levels are the texture of what is opaque."""

    def side(self, room: int, rng: np.random.Generator) -> int:
        """Return a random side in pixels, at most as large as the room: garments fill their frame."""
        return min(int(rng.integers(22, 31)), room)

    def ink(self, row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the opacity and the lightness of a garment's colour, 0 to 1, both [side, side]."""
        grey, _ = super().ink(row, side)
        return (4 * grey).clip(0, 1), 0.6 + 0.4 * grey.clip(0, 1)


def make_fashion(directory: str | Path, source: str | Path, *, seed: int = 0) -> str:
    """Write Fashion-MNIST with labels and captions.

    `train` are shards; the evaluation folder `zero_shot` has the splits train (the same images), validation and test.

    Args:
        directory: the folder to write.
        source: the folder with train-images-idx3-ubyte and the three other files (also .gz), such as
            /usr/share/datasets/fashion-mnist after `apt-get install dataset-fashion-mnist`; torchvision's ROOT after
            datasets.FashionMNIST(ROOT, download=True); or a folder that Hugging Face datasets saved.
        seed: determines the order of the training images and their captions.

    Returns:
        What was written.

    Raises:
        ValueError: files that are missing, damaged or of something else; shards in the directory.
    """
    directory = Path(directory)
    folder = directory / "zero_shot"
    for part in (directory / "train", *(folder / split for split in ("train", "validation", "test"))):
        refuse_existing(part)
    splits = load_splits(source)
    train = splits["train"]
    order = np.random.default_rng([seed, 20]).permutation(len(train))
    write_shards(directory / "train", track(_write_captions(train[order], seed), "training images", len(train)), 10_000)
    for split, garments in splits.items():
        samples = track(_write_labels(garments), f"zero_shot/{split}", len(garments))
        write_evaluation_split(folder / split, samples, classnames=WORDS, templates=TEMPLATES)
    counts = {split: len(garments) for split, garments in splits.items()}
    write_about(directory, ORIGIN, LICENCE, seed=seed, images=counts)
    return ", ".join(f"{count:,} images for {split}" for split, count in counts.items())


def load_splits(source: str | Path) -> dict[str, Garments]:
    """Return {split: garments}, of Fashion-MNIST 55,000 for train, 5,000 for validation and 10,000 for test.

    Their numbers are those of the training file, and of the test file behind them.

    Args:
        source: as of `make_fashion`.

    Raises:
        ValueError: as `make_fashion`.
    """
    root = Path(source)
    train, test = _read_saved(root) if (root / "dataset_dict.json").is_file() else _read_files(root)
    cut = len(train) - len(train) // 12
    return {
        "train": train[:cut],
        "validation": train[cut:],
        "test": replace(test, numbers=test.numbers + len(train)),
    }


def _read_files(root: Path) -> tuple[Garments, ...]:
    """Return (train, test) of MNIST's four files."""
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    for folder in (root / name for name in _FOLDERS):
        files = [path for path in map(_existing, (folder / name for name in names)) if path is not None]
        if len(files) == len(names):
            train, test = files[:2], files[2:]
            return tuple(
                _garments(read_idx(images, _IMAGES, 3), read_idx(labels, _LABELS, 1), labels)
                for images, labels in (train, test)
            )
    raise ValueError(f"{root} has not the four files {', '.join(names)} (nor .gz): {_REMEDY}")


def _read_saved(root: Path) -> tuple[Garments, ...]:
    """Return (train, test) of a folder that Hugging Face datasets saved."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f'{root} is read by the package `datasets` ({error}): pip install "diffvision[data]"'
        ) from None
    saved = datasets.load_from_disk(str(root))
    parts = []
    for split in ("train", "test"):
        if split not in saved or not {"image", "label"} <= set(saved[split].column_names):
            raise ValueError(f"{root} has no split {split} with the columns image and label: give Fashion-MNIST")
        pixels = np.stack([np.asarray(image.convert("L")) for image in saved[split]["image"]])
        parts.append(_garments(pixels, np.asarray(saved[split]["label"]), root))
    return tuple(parts)


def _existing(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() else packed if packed.is_file() else None


def _garments(pixels: np.ndarray, labels: np.ndarray, path: Path) -> Garments:
    """Check that pixels and labels are Fashion-MNIST's, and return them."""
    kinds = labels.astype(np.int64)
    if len(pixels) != len(kinds):
        raise ValueError(f"{path} has {len(kinds):,} labels of {len(pixels):,} images: fetch both again")
    if pixels.shape[1:] != (_SIDE, _SIDE):
        sizes = " x ".join(map(str, pixels.shape[1:]))
        raise ValueError(f"{path} has images of {sizes} pixels, not {_SIDE} x {_SIDE}: give Fashion-MNIST's files")
    if len(labels) == _TRAIN and zlib.crc32(labels.astype(np.uint8).tobytes()) != _TRAIN_CRC:
        raise ValueError(
            f"{path} has {_TRAIN:,} labels that are not Fashion-MNIST's (MNIST and others come in files of the same "
            f"names): {_REMEDY}"
        )
    if missing := set(range(len(WORDS))) ^ set(kinds.tolist()):
        raise ValueError(
            f"{path} has labels other than 0 to 9, or lacks some ({', '.join(map(str, sorted(missing)))}): give "
            "Fashion-MNIST's files"
        )
    return Garments(pixels, kinds, np.arange(len(kinds)), WORDS)


def read_idx(path: Path, magic: int, axes: int) -> np.ndarray:
    """Return the array of a file in MNIST's idx format, uint8, also of a .gz.

    Args:
        path: the file: the magic number and the sizes as big-endian int32, then the bytes.
        magic: the number that it must begin with: 2051 of images, 2049 of labels.
        axes: of the array.

    Raises:
        ValueError: another magic number, or another length than the sizes say.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): fetch it again") from error
    header = np.frombuffer(data[: 4 * (axes + 1)], dtype=">i4") if len(data) >= 4 * (axes + 1) else np.zeros(1)
    if header[0] != magic:
        raise ValueError(f"{path} does not begin with {magic} as MNIST's idx format does: fetch it again")
    shape = tuple(int(size) for size in header[1:])
    if min(shape) < 1 or len(data) != 4 * len(header) + np.prod(shape, dtype=object):
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"{path} has {len(data):,} bytes, which is not what its header says ({sizes}): fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=4 * len(header)).reshape(shape)


def _write_captions(garments: Garments, seed: int) -> Iterator[Sample]:
    rng = np.random.default_rng([seed, 21])
    for sample, label in zip(_write_labels(garments), garments.labels, strict=True):
        caption = CAPTIONS[rng.integers(len(CAPTIONS))]
        yield {**sample, "txt": caption.format(with_article(WORDS[label]))}


def _write_labels(garments: Garments) -> Iterator[Sample]:
    for image, label, number in zip(garments.images, garments.labels, garments.numbers, strict=True):
        yield {"__key__": f"garment{number:05d}", "png": png(image), "cls": str(label)}
