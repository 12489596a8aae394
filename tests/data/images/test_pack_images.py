"""Image files packed into shards: what is copied, what is left out, what is refused."""

import json
import re

import pytest
from PIL import Image

from diffvision.cli import main
from diffvision.data import ShardSet
from diffvision.data.images.image_sources import find_images
from diffvision.data.images.pack_images import pack
from diffvision.data.make import make
from tests.data.conftest import read_tars


def pack_folder(source, directory, **settings):
    return pack(find_images(source), directory, **settings)


@pytest.fixture
def images(tmp_path, corpus):
    """Twelve images with captions next to them, some bad; with a table of the same."""
    source = tmp_path / "images"
    (source / "more.v2").mkdir(parents=True)
    for number in range(12):
        path = source / ("more.v2" if number % 2 else ".") / f"image.{number:02d}.png"
        path.write_bytes(corpus.png(number))
        path.with_suffix(".txt").write_text(f"caption {number}\n")
    (source / "image.02.txt").write_text(" ")
    (source / "image.04.txt").write_bytes(b"\xff\xfe\x00")
    (source / "image.06.txt").unlink()
    (source / "image.08.png").write_bytes(b"no image")
    (source / "image.10.png").write_bytes(corpus.png(10)[:50])  # its header does not show what is missing after it
    Image.open(source / "more.v2/image.11.png").save(source / "more.v2/image.11.png", "WEBP", lossless=True)
    Image.new("RGB", (2, 2), (0, 9, 7)).save(source / "more.v2/image.09.png", "JPEG", quality=100)
    (source / "thumbs.db").write_bytes(b"123")
    return source


def test_captions_next_to_the_images(images, tmp_path, corpus):
    packed = pack_folder(images, tmp_path / "out", per_shard=5, num_workers=2)
    assert packed.samples == 7
    assert packed.skipped == {
        "empty caption": 1,
        "caption not UTF-8": 1,
        "missing caption": 2,
        "not a JPEG, PNG or WebP image": 1,
        "truncated image": 1,
    }
    assert packed.examples["empty caption"].endswith("image.02.png")
    (batch,) = corpus.loader(tmp_path / "out", batch_size=7)
    assert sorted(batch["text"].flatten().tolist()) == [0, 1, 3, 5, 7, 9, 11]
    assert {"png", "webp", "jpg"} <= {name for sample in read_tars(tmp_path / "out") for name in sample}
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert list(sizes) == ["000000.tar", "000001.tar", "000002.tar"]
    assert sum(sizes.values()) == 7


TABLES = {
    # what is in the table, the samples that are packed, what is left out
    "other columns": ("t.csv\nid,filepath,title\n0,image.00.png,a\n1,gone.png,b\n", [0], {"missing image": 1}),
    "a quote in a .tsv is text": ('t.tsv\nfile\tcaption\nimage.00.png\t"a\nimage.02.png\t"a" b\n', [0, 2], {}),
    "a long cell is cut": (f"t.csv\nfile,caption\nimage.00.png,a{' x' * 100_000}\n", [0], {}),
    "a missing cell is not filled": ("t.csv\nfile,caption\nimage.00.png\nimage.02.png,b\n", [2], {"empty caption": 1}),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_are_packed_as_they_are_and_shards_without_samples_are_removed(images, tmp_path, corpus, case):
    content, numbers, skipped = TABLES[case]
    name, _, rows = content.partition("\n")
    (images / name).write_text(rows)
    packed = pack_folder(images / name, tmp_path / "out", num_workers=2, per_shard=1)
    assert (packed.samples, packed.skipped) == (len(numbers), skipped)
    assert [sample["png"] for sample in read_tars(tmp_path / "out")] == [corpus.png(n) for n in numbers]
    assert len(ShardSet(tmp_path / "out").shards) == len(numbers)


def test_folders_that_cannot_be_packed(images, tmp_path, corpus):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.png").write_bytes(b"x")
    (empty / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="none of the 1 images"):
        pack_folder(empty, tmp_path / "out")
    assert not [*(tmp_path / "out").iterdir()]
    whole = corpus.write(tmp_path / "whole", 10)
    with pytest.raises(ValueError, match="has shards already"):
        pack_folder(images, whole)


@pytest.mark.parametrize("words", ["digits copies", "recall documents", "arithmetic steps", "folder num_workers"])
def test_numbers_out_of_range_are_named_with_their_limit(words, images, tmp_path, capsys):
    name, setting = words.split()
    source = ["--source", str(images)] if name == "folder" else []
    assert main(["data", "make", name, str(tmp_path / "out"), f"--{setting}", "-1", *source]) == 1
    assert re.search(rf"{setting} (is -1: it )?must be at least [01]", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_command(images, tmp_path, capsys):
    assert make("folder", str(tmp_path / "out"), source=str(images)) == 0
    printed = capsys.readouterr().out
    assert "7 samples, left out 6" in printed
    assert "2 x missing caption, first" in printed
    with pytest.raises(ValueError, match="'cifar'"):
        make("cifar", str(tmp_path / "out2"))


def test_links_in_a_folder_do_not_lead_out_of_it(images, tmp_path):
    (tmp_path / "secret.txt").write_text("a secret")
    (images / "image.06.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match="a link"):
        pack_folder(images, tmp_path / "out", num_workers=1)
