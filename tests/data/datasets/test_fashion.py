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


def damage_missing(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()


def damage_length(folder):
    file = folder / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])


def damage_kind(folder):
    (folder / "train-images-idx3-ubyte").write_bytes((folder / "train-labels-idx1-ubyte").read_bytes())


def damage_labels(folder):
    write_idx(folder / "t10k-labels-idx1-ubyte", np.arange(20) % 11)


def damage_count(folder):
    write_idx(folder / "t10k-labels-idx1-ubyte", np.arange(30) % 10)


def damage_size(folder):
    write_idx(folder / "train-images-idx3-ubyte", np.zeros((120, 32, 32)))


def damage_set(folder):
    write_idx(folder / "train-images-idx3-ubyte", np.zeros((60_000, 28, 28)))
    write_idx(folder / "train-labels-idx1-ubyte", np.arange(60_000) % 10)


def damage_compression(folder):
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b broken")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"t10k-labels-idx1-ubyte .*apt-get install dataset-fashion-mnist"),
        (damage_length, "is damaged"),
        (damage_kind, r"train .*got \[120\]"),
        (damage_labels, "labels to 10"),
        (damage_count, r"t10k .*\[30, 28, 28\]"),
        (damage_compression, "is damaged"),
        (damage_size, r"got \[120, 32, 32\]"),
        (damage_set, r"not Fashion-MNIST's"),
    ],
)
def test_a_bad_source_is_refused(damage, message, tmp_path):
    damage(write_miniature(tmp_path / "source"))
    with pytest.raises(ValueError, match=message):
        load_splits(tmp_path / "source")
