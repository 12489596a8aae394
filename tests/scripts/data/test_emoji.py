"""Emoji from miniatures of the packages: what is trained on, what is held out, and how pictures are paired."""

import json
import zlib

import numpy as np
import pytest
import webdataset
from PIL import Image

from cutouts import BACKGROUND
from diffvision.data.images.decode import decode_image
from emoji import make_emoji

TONES = {"light": "1F3FB", "medium-light": "1F3FC", "medium": "1F3FD", "medium-dark": "1F3FE", "dark": "1F3FF"}
CODES = {}  # of the emoji of `row`, by name


def row(code, name, subcategory, order, category="Objects", tones=False, **changed):
    """A row of emoji.json, with the fields that are read and some that are not."""
    has = {"has_img_apple": True, "has_img_google": True, "has_img_twitter": True, "has_img_facebook": False}
    image = f"{code.lower()}.png"
    made = {"name": name, "unified": code, "non_qualified": None, "image": image, "short_name": name.lower(), **has}
    made |= {"short_names": [name.lower().replace(" ", "_")], "category": category, "subcategory": subcategory}
    CODES[name.lower()] = code
    first, *rest = code.split("-")
    if tones:
        variations = made["skin_variations"] = {"1F3FB-1F3FC": {"unified": "no", "image": "no.png", **has}}
        for words, tone in TONES.items():
            CODES[f"{name.lower()}: {words} skin tone"] = both = "-".join([first, tone, *rest])
            variations[tone] = {"unified": both, "image": f"{both.lower()}.png", **has}
    return made | {"sort_order": order, **changed}


ROWS = [
    row("1F468-200D-1F692", "MAN FIREFIGHTER", "person-role", 2, "People & Body", tones=True),
    row("1F469-200D-1F692", "WOMAN FIREFIGHTER", "person-role", 1, "People & Body", tones=True),
    row("1F468-200D-1F680", "MAN ASTRONAUT", "person-role", 3, "People & Body"),
    row("1F469-200D-1F680", "WOMAN ASTRONAUT", "person-role", 4, "People & Body"),
    row("2764-FE0F", "RED HEART", "heart", 5, "Smileys & Emotion"),
    row("1F499", "BLUE HEART", "heart", 6, "Smileys & Emotion"),
    row("1F46A", "FAMILY", "family", 7, "People & Body"),
    row("1F46B", "FAMILY AGAIN", "family", 8, "People & Body"),  # Twemoji's picture is the former's
    row("1F511", "KEY", "lock", 9),
    row("1F5FF", "MOYAI", "other-object", 10),
    row("1F3F4", "FLAG", "flag", 11, "Flags"),
    row("1F9CA", "ICE", "drink", 12, has_img_google=False),
]


def pixels(code):
    """A colour for each emoji, whatever the style."""
    return np.random.default_rng(zlib.crc32(code.encode())).integers(0, 256, 3)


@pytest.fixture
def packages(tmp_path):
    """The two vendors' packages, as npm unpacks them."""
    for vendor, shift in (("google", 0), ("twitter", 1)):
        folder = tmp_path / "node_modules" / f"emoji-datasource-{vendor}"
        pictures = folder / "img" / vendor / "64"
        pictures.mkdir(parents=True)
        (folder / "package.json").write_text('{"version": "16.0.0"}')
        (folder / "emoji.json").write_text(json.dumps(ROWS))
        for one in ROWS:
            for variant in [one, *one.get("skin_variations", {}).values()]:
                shown = "1F46A" if (vendor, variant["unified"]) == ("twitter", "1F46B") else variant["unified"]
                image = Image.new("RGBA", (64, 64), (9, 9, 9, 0))
                image.paste((*pixels(shown), 255), (16 + shift, 16, 48 + shift, 48))
                image.save(pictures / variant["image"])
    return tmp_path


@pytest.fixture(autouse=True)
def some_for_validation(monkeypatch):
    """The emoji of the miniature that are for validation: what has a fire engine, and hearts."""
    monkeypatch.setattr("emoji_table.held_out", lambda name, percent: name in ("1F9D1-1F692", "1F511", "1F499"))


def read(folder):
    tars = sorted(map(str, folder.glob("*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


def test_what_is_trained_on_and_what_is_held_out(packages, tmp_path):
    written = make_emoji(tmp_path / "made", packages)
    assert "no OpenMoji" in written
    train = {s["__key__"]: json.loads(s["json"]) for s in read(tmp_path / "made" / "train")}
    # No flag, nothing without Noto's picture, none that looks like another one in Twemoji, and none for validation.
    assert sorted(facts["name"] for facts in train.values()) == [
        "family", "man astronaut", "moyai", "red heart", "woman astronaut",
    ]  # fmt: skip
    facts = train["noto-1f468-200d-1f680"]
    assert facts["captions"][:2] == ["a picture of man astronaut", "man astronaut, person role"]
    seen, unseen = (read(tmp_path / "made" / "retrieval" / split) for split in ("validation", "test"))
    assert {s["txt"].decode() for s in seen} == {
        f"a picture of {name}" for name in ("woman firefighter", "man firefighter", "key", "blue heart")
    }
    assert {s["__key__"] for s in unseen} == {key.removeprefix("noto-") for key in train}
    # The test shows Twemoji's pictures: a pixel to the right of Noto's.
    for sample, left in ((seen[0], 16), (unseen[0], 17)):
        image = np.asarray(decode_image(sample["png"]))
        assert (image[32, left - 1] == BACKGROUND).all()
        assert (image[32, left] == pixels(sample["__key__"].upper())).all()
    about = json.loads((tmp_path / "made" / "about.json").read_text())
    assert "emoji-datasource-twitter 16.0.0" in about["source"]
    assert "CC-BY-4.0" in about["licence"]
    assert about["samples"]["train"] == 5
    with pytest.raises(ValueError, match="has shards already"):
        make_emoji(tmp_path / "made", packages)


def test_pairs_differ_in_one_respect(packages, tmp_path):
    make_emoji(tmp_path / "made", packages)
    pairs = {}
    for split in ("test", "validation"):
        for sample in read(tmp_path / "made" / "pairs" / split):
            texts = [sample[f"{i}.txt"].decode().removeprefix("a picture of ") for i in range(2)]
            pairs.setdefault((split, json.loads(sample["json"])["kind"]), []).append(texts)
            for i in range(2):
                colour = np.asarray(decode_image(sample[f"{i}.png"]))[32, 32]
                assert (colour == pixels(CODES[texts[i]])).all()
    assert {key: len(texts) for key, texts in pairs.items()} == {
        ("test", "gender"): 1,
        ("validation", "gender"): 1,
        ("validation", "skin tone"): 4,
    }
    assert sorted(pairs["test", "gender"][0]) == ["man astronaut", "woman astronaut"]
    for first, second in pairs["validation", "skin tone"]:
        assert first != second
        assert first.split(":")[0] == second.split(":")[0]
    assert json.loads((tmp_path / "made" / "about.json").read_text())["samples"]["pairs/test"] == {"gender": 1}
