"""Open Clip Art from a miniature of the packages' tree: which drawings are taken, their titles, and the splits."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from diffvision.data import EvaluationFolder
from diffvision.data.images.decode import decode_image
from diffvision.lab.datasets import openclipart
from diffvision.lab.datasets.openclipart import clean_title, make_openclipart, read_drawings

SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg"><title>not this one</title>
  <metadata><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
    xmlns="http://web.resource.org/cc/" xmlns:dc="http://purl.org/dc/elements/1.1/">
  <Work rdf:about=""><dc:creator><Agent><dc:title>An Author</dc:title></Agent></dc:creator>
    <dc:title>{title}</dc:title>
    <dc:subject><rdf:Bag>{tags}</rdf:Bag></dc:subject>
    {licence}
  </Work></rdf:RDF></metadata><path d="M0 0"/></svg>"""
PUBLIC = '<license rdf:resource="http://web.resource.org/cc/PublicDomain"/>'
GPL = '<license rdf:resource="http://creativecommons.org/licenses/GPL/2.0/"/>'


def put(root: Path, name, title, tags=(), licence=PUBLIC, colour=None):
    """A drawing in both packages; its colour follows from its name."""
    svg, png = (root / f"usr/share/openclipart/{kind}/{name}.{kind}" for kind in ("svg", "png"))
    for path in (svg, png):
        path.parent.mkdir(parents=True, exist_ok=True)
    items = "".join(f"<rdf:li>{tag}</rdf:li>" for tag in tags)
    svg.write_text(SVG.format(title=title, tags=items, licence=licence), encoding="utf-8")
    image = Image.new("RGBA", (120, 90), (1, 2, 3, 0))
    image.paste((*(colour or list(zlib.crc32(name.encode()).to_bytes(4))[:3]), 255), (20, 20, 60, 60))
    image.save(png)
    return svg


@pytest.fixture
def packages(tmp_path):
    for number in range(8):
        put(
            tmp_path,
            f"food/fruit/apple_{number}_ann",
            f"Apple{number} (half)" if number else "apple",
            ["food", "hash", ""],
        )
        put(tmp_path, f"animals/birds/bird_{number}_bob", f"{'abcdefgh'[number] * 3} bird", ["bird", "small_bird"])
    put(tmp_path, "food/fruit/gpl_eve", "A pear", licence=GPL)
    put(tmp_path, "food/fruit/none_eve", "A plum", licence="")
    put(tmp_path, "shapes/stars/star_7", "gramastar")
    put(tmp_path, "unsorted/what_7", "Something")
    put(tmp_path, "tools/twin_7", "A twin", colour=(9, 9, 9))
    put(tmp_path, "tools/twin_8", "Another twin", colour=(9, 9, 9))
    put(tmp_path, "tools/damaged_9", "Damaged").write_text("<svg><broken>")
    for number in range(12):
        put(tmp_path, f"computer/icons/lemon_{number}xyz", "Lemon SVG theme", colour=(number, 0, 0))
    for number in range(2):
        put(tmp_path, f"people/head_{number}zyx", "Clipart by Nicu Buculei - head1", colour=(0, number, 0))
    link = tmp_path / "usr/share/openclipart/svg/food/linked.svg"
    link.symlink_to("fruit/apple_1_ann.svg")
    return tmp_path


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(openclipart, "HELD_OUT", {"test": 2, "validation": 3})
    monkeypatch.setattr(openclipart, "_CLASS", 8)


def read(folder):
    tars = sorted(map(str, folder.glob("*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


def test_only_the_public_domain_and_titles_of_one_drawing(packages):
    drawings = read_drawings(packages / "usr/share/openclipart/svg")
    names = {d.name for d in drawings}
    assert len(names) == len(drawings) == 18
    assert {name.split("/")[0] for name in names} == {"food", "animals", "tools"}
    apple = next(d for d in drawings if d.name == "food/fruit/apple_3_ann")
    assert (apple.title, apple.tags, apple.folder) == ("Apple3 (half)", ("food",), "fruit")
    bird = next(d for d in drawings if d.name == "animals/birds/bird_0_bob")
    assert bird.captions == ["aaa bird", "aaa bird: bird, small bird"]


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Clipart by Nicu Buculei - w_cloud", "w cloud"),
        ("BypassLopper", "Bypass Lopper"),
        ("BlueMan#202", "Blue Man"),
        ("pantyhose8", "pantyhose"),
        ("MPCAD Box 60x15x60", "MPCAD Box 60x15x60"),
        ("Ice Cream Cone (1 scoop)", "Ice Cream Cone (1 scoop)"),
        ("g8", ""),
    ],
)
def test_titles_are_made_words(title, words):
    assert clean_title(title) == words


def test_no_title_is_in_two_splits(packages, tmp_path):
    made = tmp_path / "made"
    make_openclipart(made, packages)
    shown = {s["__key__"]: json.loads(s["json"])["title"] for s in read(made / "train")}
    splits = {split: {s["txt"].decode() for s in read(made / "retrieval" / split)} for split in ("test", "validation")}
    assert {split: len(titles) for split, titles in splits.items()} == {"test": 2, "validation": 3}
    folders = {
        "train": set(shown.values()),
        **splits,
    }
    assert sum(map(len, folders.values())) == len(set.union(*folders.values()))
    assert "Another twin" not in set.union(*folders.values())
    zero_shot = EvaluationFolder(made / "zero_shot")
    assert (zero_shot.classnames, zero_shot.splits) == (["birds", "fruit"], ["test", "train", "validation"])
    assert sum(len(read(made / "zero_shot" / split)) for split in zero_shot.splits) == 16
    about = json.loads((made / "about.json").read_text())
    assert about["licence"] == "public domain"
    # The margins of the page are cut off, and the drawing, a square, fills the picture.
    for sample in read(made / "train"):
        pixels = np.asarray(decode_image(sample["png"]))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 1


def test_a_missing_package_is_named_with_its_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"no .*openclipart/svg: .*apt-get"):
        make_openclipart(tmp_path / "made", tmp_path)
