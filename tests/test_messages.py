"""Bad input to a training, read by its loader: one error with the file, the fault and what to do."""

import io
import os
import re

import pytest
import torch
from PIL import Image
from test_errors import REMEDY

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.shards.report import BadDataError
from diffvision.data.shards.writer import write_shards

MOST = 160


def png(side=8):
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "PNG")
    return data.getvalue()


def train(source):
    """Read all batches, as a training does."""
    kind = ImageText(
        ImageMember(lambda image: torch.zeros(1)), CaptionMember(), lambda texts: torch.zeros(len(texts), 1)
    )
    return list(ShardLoader(ShardSet(str(source)), kind, 2, num_workers=0))


def cut(folder):
    (shard,) = folder.glob("*.tar")
    shard.write_bytes(shard.read_bytes()[:2000])


def cut_without_a_manifest(folder):
    cut(folder)
    for file in folder.glob("*.json"):
        file.unlink()


def changed(folder):
    (shard,) = folder.glob("*.tar")
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(bytes(data))


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


def replaced_by_a_text(folder):
    emptied(folder)
    (folder / "000000.tar").write_text("hello")


def linked_to_nothing(folder):
    emptied(folder)
    os.symlink("nowhere.tar", folder / "000000.tar")


def removed(folder):
    emptied(folder)
    folder.rmdir()


def unchanged(folder):
    pass


# What is wrong -> (the samples, what happens to the folder, what the error names)
CASES = {
    "a tarball cut anywhere": ({}, cut, "truncated shard: 000000.tar"),
    "a tarball cut without a manifest": ({}, cut_without_a_manifest, "000000.tar"),
    "a wrong hash": ({}, changed, "(sha256): 000000.tar"),
    "no tarball": ({}, replaced_by_a_text, "000000.tar"),
    "a broken link": ({}, linked_to_nothing, "000000.tar"),
    "an empty folder": ({}, emptied, "shards"),
    "no folder": ({}, removed, "shards"),
    "a truncated image": ({"png": png()[:40]}, unchanged, "image: 000000.tar"),
    "an image of zero bytes": ({"png": b""}, unchanged, "empty image: 000000.tar"),
    "an image too large": ({"png": png(9000)}, unchanged, "image too large: 000000.tar"),
    "a caption that is no text": ({"txt": b"\xff\xfe\x00"}, unchanged, "UTF-8: 000000.tar"),
    "an empty caption": ({"txt": ""}, unchanged, "empty caption: 000000.tar"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:shard .* its manifest says")
def test_bad_input_is_one_error_with_file_fault_and_remedy(name, tmp_path):
    change, happens, names = CASES[name]
    folder = tmp_path / "shards"
    write_shards(folder, [{"__key__": str(n), "png": png(), "txt": "a cat", **change} for n in range(4)])
    happens(folder)
    with pytest.raises((ValueError, OSError, BadDataError)) as caught:
        train(folder)
    message = str(caught.value)
    assert names in message
    first = message.splitlines()[0].replace(str(tmp_path), "")
    assert len(first) <= MOST
    assert REMEDY.search(first) or re.search("must be .*, got ", first)
