"""Fashion-MNIST of a miniature in its files' format: splits, captions, damaged files."""

import json

import numpy as np
import pytest
import webdataset
from fashion_files import write_idx, write_miniature

from diffvision.data import EvaluationFolder
from diffvision.data.datasets.fashion import CAPTIONS, TEMPLATES, WORDS, load_splits, make_fashion
from diffvision.data.images.decode import decode_image
from diffvision.data.images.image_data import to_float
from diffvision.data.make import make


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_miniature(tmp_path_factory.mktemp("source"), ".gz"))


def samples_of(directory):
    tars = sorted(map(str, directory.glob("*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


def test_fashion_is_packed_with_labels_and_captions(source, tmp_path, capsys):
    assert make("fashion", str(tmp_path / "f"), source=source) == 0
    assert "110 images for train, 10 images for validation, 20 images for test" in capsys.readouterr().out
    train = samples_of(tmp_path / "f" / "train")
    assert len({sample["__key__"] for sample in train}) == 110
    for sample in train:
        assert f" {WORDS[int(sample['cls'])]}" in sample["txt"].decode()
        number = int(sample["__key__"].removeprefix("garment"))
        pixels = np.asarray(decode_image(sample["png"]))
        assert pixels.shape == (28, 28, 3)
        assert (pixels[14, 14] == 120 + number % 120).all()
    folder = EvaluationFolder(tmp_path / "f" / "zero_shot")
    assert (folder.splits, folder.classnames) == (["test", "train", "validation"], list(WORDS))
    (batch,) = folder.batches(to_float, split="test")
    assert batch["label"].tolist() == [*range(10), *range(10)]
    about = json.loads((tmp_path / "f" / "about.json").read_text())
    assert "MIT" in about["licence"]
    assert about["images"] == {"train": 110, "validation": 10, "test": 20}
    assert not {caption.replace("{0}", "a {c}") for caption in CAPTIONS} & set(TEMPLATES)


def test_the_files_are_taken_from_where_torchvision_puts_them(source, tmp_path):
    write_miniature(tmp_path / "FashionMNIST" / "raw")
    ours, packed = load_splits(tmp_path), load_splits(source)
    for split, garments in ours.items():
        assert (garments.images == packed[split].images).all()
        assert garments.numbers.tolist() == packed[split].numbers.tolist()


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
def test_a_bad_source_is_refused_before_anything_is_written(damage, message, tmp_path):
    damage(write_miniature(tmp_path / "source"))
    with pytest.raises(ValueError, match=message):
        make_fashion(tmp_path / "made", str(tmp_path / "source"))
    assert not (tmp_path / "made").exists()
