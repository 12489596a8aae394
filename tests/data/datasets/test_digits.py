"""The embedded data sets: what they promise of captions, folders and digits."""

import re

import numpy as np
import pytest

from diffvision.data import find_folders
from diffvision.data.datasets import digits
from diffvision.data.datasets.digits import INK, PAPER, WORDS, caption, draw, load_split, make_digits
from diffvision.data.datasets.scenes import LAYOUTS, Scene, draw_scene
from diffvision.data.images.decode import decode_image
from diffvision.data.images.image_data import to_float
from tests.data.conftest import read_tars


def numbers_in(key):
    """Which of scikit-learn's digits a sample shows, by its key."""
    return {int(n) for n in re.findall(r"(?<!\d)\d{4}(?!\d)", key)}


@pytest.fixture(scope="module")
def few():
    """Have datasets of 40 training digits and 30 for testing, of all classes; return the two."""
    small = tuple(split[:n] for split, n in zip(load_split(), (40, 30), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "load_split", lambda: small)
        yield small


@pytest.fixture(scope="module")
def made(few, tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "digits"
    make_digits(directory, copies=1, seed=0)
    return directory


def test_train_and_test_never_share_a_digit_whatever_the_seed():
    train, test = load_split()
    assert (len(train), len(test)) == (1400, 397)
    assert sorted([*train.numbers, *test.numbers]) == list(range(1797))
    both = np.concatenate([train.images, test.images]).reshape(1797, -1)
    assert len(np.unique(both, axis=0)) == 1797  # no drawing comes twice
    assert set(test.labels) == set(range(10))


def test_made_folders_share_no_digit_with_training(few, made):
    shown = {
        part: set().union(*(numbers_in(sample["__key__"]) for sample in read_tars(made / part)))
        for part in ("train", "zero_shot/train", "zero_shot/test", "retrieval/test", "composition/test")
    }
    train, test = (set(split.numbers.tolist()) for split in few)
    assert shown["train"] == shown["zero_shot/train"] == train
    assert shown["zero_shot/test"] == shown["composition/test"] == test
    assert shown["retrieval/test"] <= test


def test_made_folders_are_found_and_read_whole(few, made):
    folders = {folder.task: folder for folder in find_folders(made)}
    assert sorted(folders) == ["composition", "retrieval", "zero_shot"]
    assert {folder.name for folder in folders.values()} == {made.name}
    zero_shot = folders["zero_shot"]
    assert (zero_shot.splits, zero_shot.classnames) == (["test", "train"], list(WORDS))
    assert all("{c}" in template for template in zero_shot.templates)
    labels = [label for batch in zero_shot.batches(to_float) for label in batch["label"].tolist()]
    assert labels == few[1].labels.tolist()
    for batch in folders["composition"].batches(to_float):
        for right, wrong in batch["captions"]:
            assert right != wrong
            words = [[w for w in caption.split() if w not in ("a", "an")] for caption in (right, wrong)]
            assert sorted(words[0]) == sorted(words[1])  # the same words in another order, but for the articles
            assert sum(a != b for a, b in zip(*words, strict=True)) == 2
    captions = [c for batch in folders["retrieval"].batches(to_float) for (c,) in batch["captions"]]
    assert len(set(captions)) == len(captions) > 200


def test_made_data_is_a_function_of_the_seed(made, tmp_path):
    for name, seed in (("same", 0), ("other", 1)):
        make_digits(tmp_path / name, copies=1, seed=seed)
    for path in made.rglob("manifest.json"):  # which have the hashes of the shards
        same, other = (tmp_path / name / path.relative_to(made) for name in ("same", "other"))
        assert same.read_text() == path.read_text() != other.read_text()


def test_copies_set_the_size(few, tmp_path):
    make_digits(tmp_path / "d", copies=9)
    samples = read_tars(tmp_path / "d" / "train")
    assert len(samples) == len({sample["__key__"] for sample in samples}) == 360
    assert {"png", "txt", "cls"} <= set(samples[0])
    plain = sum(not any(colour in sample["txt"].decode() for colour in INK) for sample in samples)
    assert 0 < plain < 360  # some captions name the colours, some only the digit
    for sample in samples:
        assert WORDS[int(sample["cls"])] in sample["txt"].decode()
    with pytest.raises(ValueError, match="has shards already"):
        make_digits(tmp_path / "d")


def test_a_digit_is_drawn_in_the_colours_its_caption_names():
    train, _ = load_split()
    rng = np.random.default_rng(0)
    which = int(np.flatnonzero(train.labels == 0)[0])
    image = decode_image(draw(train.images[which], "red", "blue", rng))
    assert image.size == (32, 32)
    pixels = np.asarray(image).reshape(-1, 3).astype(int)
    assert np.abs(pixels - PAPER["blue"]).max(axis=1).min() <= 14
    assert np.abs(pixels - INK["red"]).max(axis=1).min() <= 30
    text = caption("{a_colour} {digit} on {a_background} background", 7, "red", "orange")
    assert text == "a red seven on an orange background"


def test_scenes_say_what_they_show():
    train, _ = load_split()
    seven, three = (int(np.flatnonzero(train.labels == label)[0]) for label in (7, 3))
    (row,) = (layout for layout in LAYOUTS if layout.positions == ("left", "right"))
    scene = Scene((seven, three), ("seven", "three"), ("red", "blue"), row, row.sentences[0])
    assert scene.caption() == "a red seven to the left of a blue three"
    assert scene.caption(colours=False) == "a seven to the left of a three"
    image = np.asarray(decode_image(draw_scene(scene, train, np.random.default_rng(0)))).astype(int)
    assert image.shape == (64, 64, 3)
    redness, blueness = image[..., 0] - image[..., 2], image[..., 2] - image[..., 0]
    assert redness[:, :32].max() > 120 > redness[:, 32:].max()
    assert blueness[:, 32:].max() > 120 > blueness[:, :32].max()
