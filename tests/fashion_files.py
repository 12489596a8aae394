"""A miniature of Fashion-MNIST in its files' format, of which tests make datasets."""

import gzip

import numpy as np


def write_idx(path, array):
    """Write a file as MNIST's are: magic number (type 8, axes), sizes, bytes; compressed if it is called so."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4").tobytes()
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_miniature(folder, suffix=""):
    """Write 120 images for training and 20 for testing, whose pixels name their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, first, count in (("train", 0, 120), ("t10k", 120, 20)):
        images = np.zeros((count, 28, 28))
        images[:, 4:24, 4:24] = 120 + np.arange(first, first + count).reshape(-1, 1, 1) % 120
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(count) % 10)
    return folder
