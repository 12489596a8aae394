"""Bad input to a training: one error that names the file."""

import os
import shutil

import numpy as np
import pytest
import torch

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.datasets.digits import png
from diffvision.data.shards.report import BadDataError
from diffvision.data.shards.writer import write_shards

MOST = 160
PNG = png(np.zeros((8, 8, 3)))


def train(source):
    """Read all batches, as a training does."""
    image = ImageMember(lambda image: torch.zeros(1))
    kind = ImageText(image, CaptionMember(), lambda texts: torch.zeros(len(texts), 1))
    return list(ShardLoader(ShardSet(str(source)), kind, 2, num_workers=0))


def cut(folder):
    shard = folder / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def replaced_by_a_text(folder):
    emptied(folder)
    (folder / "000000.tar").write_text("hello")


def unchanged(folder):
    pass


def linked_to_nothing(folder):
    emptied(folder)
    os.symlink("nowhere.tar", folder / "000000.tar")


# What is wrong -> (changes of the samples, what happens to the folder, what the error names)
CASES = {
    "a tarball cut anywhere": ({}, cut, "as its manifest says: 000000.tar"),
    "no tarball": ({}, replaced_by_a_text, "000000.tar"),
    "a broken link": ({}, linked_to_nothing, "000000.tar"),
    "an empty folder": ({}, emptied, "shards"),
    "no folder": ({}, shutil.rmtree, "shards"),
    "a truncated image": ({"png": PNG[:40]}, unchanged, "image: 000000.tar"),
    "an empty caption": ({"txt": ""}, unchanged, "empty caption: 000000.tar"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_error_with_file_fault_and_remedy(name, tmp_path):
    change, happens, names = CASES[name]
    folder = tmp_path / "shards"
    write_shards(folder, [{"__key__": str(n), "png": PNG, "txt": "a cat", **change} for n in range(4)])
    happens(folder)
    with pytest.raises((ValueError, OSError, BadDataError)) as caught:
        train(folder)
    assert names in str(caught.value)
    assert len(str(caught.value).splitlines()[0].replace(str(tmp_path), "").partition(". ")[0]) <= MOST
