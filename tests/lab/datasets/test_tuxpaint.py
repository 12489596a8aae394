"""Tux Paint's stamps from a miniature of the package: English captions, each once."""

import json

import pytest
import webdataset
from PIL import Image

from diffvision.data import EvaluationFolder, make
from diffvision.data.images.decode import decode_image
from diffvision.lab.datasets.tuxpaint import make_tuxpaint

STAMPS = {
    "animals/mammals/tiger": "A tiger.\nde.utf8=Ein Tiger.\n",
    "animals/mammals/tiger_v1.5": "a tiger.\n",
    "animals/fish/carp": "\nde.utf8=Ein Karpfen.\n",
    "food/apple_fuji": "A “Fuji” apple.\nfr.utf8=Une pomme « Fuji ».\n",
    "symbols/alphabets/a": "The letter A.\n",
    "symbols/chess/king": "King. Protect him!\n",
    "symbols/chess/king_mirror": None,
}


@pytest.fixture
def package(tmp_path):
    for number, (name, text) in enumerate(STAMPS.items()):
        path = tmp_path / "usr/share/tuxpaint/stamps" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        mode, colour = [("RGBA", (9, 9, 9, 255)), ("LA", (9, 255)), ("RGB", (9, 9, 9))][number % 3]
        Image.new(mode, (30, 20), colour).save(path)
        if text is not None:
            path.with_name(path.name.replace(".png", ".txt")).write_text(text, encoding="utf-8")
    return tmp_path


def test_each_english_caption_once_and_no_letters(package, tmp_path):
    assert make_tuxpaint(tmp_path / "made", package) == "3 stamps with captions, for tests"
    folder = EvaluationFolder(tmp_path / "made" / "retrieval")
    assert (folder.task, folder.splits) == ("retrieval", ["test"])
    tar = str(tmp_path / "made" / "retrieval" / "test" / "0.tar")
    samples = list(webdataset.WebDataset(tar, shardshuffle=False, empty_check=False))
    assert {s["__key__"]: s["txt"].decode() for s in samples} == {
        "animals-mammals-tiger": "A tiger.",
        "food-apple_fuji": "A “Fuji” apple.",
        "symbols-chess-king": "King. Protect him!",
    }
    assert decode_image(samples[0]["png"]).size == (64, 64)
    assert json.loads((tmp_path / "made" / "about.json").read_text())["licence"] == "GPL-2+"


def test_a_damaged_file_is_named(package, tmp_path):
    stamp = package / "usr/share/tuxpaint/stamps/animals/mammals/tiger.png"
    stamp.write_bytes(stamp.read_bytes()[:-30])
    with pytest.raises(OSError, match=r"tiger\.png is damaged \("):
        make_tuxpaint(tmp_path / "made", package)
    stamp.with_suffix(".txt").write_bytes("Ein Bär".encode("latin-1"))
    with pytest.raises(ValueError, match=r"tiger\.txt is not UTF-8"):
        make_tuxpaint(tmp_path / "again", package)


def test_a_package_without_captions_is_the_source_s_fault(tmp_path):
    (tmp_path / "usr/share/tuxpaint/stamps").mkdir(parents=True)
    message = "no samples to write to .*make tuxpaint --help"
    with pytest.raises(ValueError, match=message):
        make.make("tuxpaint", str(tmp_path / "made"), source=str(tmp_path))


def test_a_missing_package_is_named_with_its_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"apt-get .*--source|--source .*dpkg"):
        make_tuxpaint(tmp_path / "made", tmp_path)
