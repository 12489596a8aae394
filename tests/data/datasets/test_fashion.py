"""Fashion-MNIST of a miniature in its files' format: splits, damaged files."""

import numpy as np
import pytest
from fashion_files import write_idx, write_miniature

from diffvision.data.datasets.fashion import load_splits


def test_plain_and_compressed_files_have_the_same_splits(tmp_path):
    write_miniature(tmp_path / "FashionMNIST" / "raw")
    plain, compressed = load_splits(tmp_path), load_splits(write_miniature(tmp_path / "gz", ".gz"))
    numbers = {"train": range(110), "validation": range(110, 120), "test": range(120, 140)}
    for split, garments in plain.items():
        assert (garments.images == compressed[split].images).all()
        assert garments.numbers.tolist() == compressed[split].numbers.tolist() == list(numbers[split])
        assert (garments.images[:, 14, 14] == 120 + garments.numbers % 120).all()


IMAGES, TEST_LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
DAMAGE = {
    # what is written in place of a file, and the message
    "missing": ({TEST_LABELS: None}, r"t10k-labels-idx1-ubyte .*apt-get install dataset-fashion-mnist"),
    "cut": ({IMAGES: b"\0\0\x08\x03\0\0\0\x09"}, "is damaged"),
    "compression": ({IMAGES: None, f"{IMAGES}.gz": b"\x1f\x8b broken"}, "is damaged"),
    "labels for images": ({IMAGES: np.arange(120) % 10}, r"train .*got \[120\]"),
    "eleven classes": ({TEST_LABELS: np.arange(20) % 11}, "labels to 10"),
    "more labels": ({TEST_LABELS: np.arange(30) % 10}, r"t10k .*\[30, 28, 28\]"),
    "larger images": ({IMAGES: np.zeros((120, 32, 32))}, r"got \[120, 32, 32\]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_source_is_refused(damage, tmp_path):
    files, message = DAMAGE[damage]
    source = write_miniature(tmp_path / "source")
    for name, content in files.items():
        (source / name).unlink(missing_ok=True)
        if isinstance(content, bytes):
            (source / name).write_bytes(content)
        elif content is not None:
            write_idx(source / name, content)
    with pytest.raises(ValueError, match=message):
        load_splits(source)
