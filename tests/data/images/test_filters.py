import pytest

from diffvision.data import ShardSet
from diffvision.data.check import check_shards
from diffvision.data.images.pack_images import FilteredCaptions, make_folder
from tests.data.conftest import Corpus
from tests.img2dataset_files import NOT_FOUND, jpeg, write_img2dataset

CAPTIONS = ["a cat", "A  cat", "a dog on the grass", "ein Hund auf dem Gras", "", "cat", "a dog on the grass", "a Cat"]

NONE = {"words": None, "max_repeats": None}


@pytest.fixture
def shards(tmp_path):
    return write_img2dataset(tmp_path / "cc", CAPTIONS, per_shard=3, failed={6: NOT_FOUND})


def kept(directory):
    shards = ShardSet(directory)
    samples = [(n, row) for n, count in enumerate(shards.counts) for row in range(count)]
    return [shards.members(sample)["txt"].decode() for sample in samples]


def test_shards_are_packed_again_with_their_bytes(shards, tmp_path):
    summary = make_folder(tmp_path / "out", shards, num_workers=1)
    assert kept(tmp_path / "out") == [*CAPTIONS[:4], "cat", "a Cat"]
    assert summary.splitlines()[:2] == [
        "6 samples, left out 1",
        f"  1 x empty caption, first {shards}: 4",
    ]
    assert ShardSet(tmp_path / "out").members((0, 3))["jpg"] == jpeg(3)
    (result,) = check_shards(tmp_path / "out", 0)
    assert result.ok


@pytest.mark.parametrize(
    ("settings", "captions", "reasons"),
    [
        (
            {"words": [2, 4]},
            ["a cat", "A  cat", "a Cat"],
            {"caption too long": 2, "caption too short": 2},
        ),
        ({"max_repeats": 1}, ["a cat", *CAPTIONS[2:4], "cat"], {"caption repeated": 2}),
        ({"max_repeats": 2}, [*CAPTIONS[:4], "cat"], {"caption repeated": 1}),
    ],
)
def test_each_filter_is_counted(settings, captions, reasons, shards, tmp_path):
    summary = make_folder(tmp_path / "out", shards, num_workers=1, **settings)
    assert kept(tmp_path / "out") == captions
    for reason, count in reasons.items():
        assert f"{count} x {reason}, first" in summary


def test_captions_that_differ_in_marks_emoji_or_symbols_are_not_repeated(tmp_path):
    captions = ["लड़का", "लड़की", "🐶", "🐱", "C", "C++", "C#", "caf\u00e9", "cafe\u0301!"]
    filtered = FilteredCaptions([(caption,) for caption in captions], None, 1)
    assert filtered.repeated.tolist() == [False] * 8 + [True]


def test_an_image_keeps_its_captions_if_one_passes(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(Corpus.png(n))
    rows = '{"file": "0.png", "caption": ["cat", "a big cat"]}\n{"file": "1.png", "caption": ["dog", "cat"]}\n'
    (tmp_path / "captions.jsonl").write_text(rows + '{"file": "2.png", "caption": ["Cat", "a  big cat"]}\n')
    summary = make_folder(tmp_path / "out", tmp_path, num_workers=1, words=[2, 9], max_repeats=1)
    assert kept(tmp_path / "out") == ["cat\na big cat"]
    assert "1 x caption too short" in summary
    assert "1 x caption repeated" in summary
    assert "caption_key json:caption" in summary


def test_rows_of_an_image_are_filtered_each(tmp_path):
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(Corpus.png(n))
    rows = ["0.png,cat", "0.png,a big cat", "1.png,A big cat!", "1.png,a red dog", "1.png,a dog"]
    (tmp_path / "captions.csv").write_text("\n".join(["file,caption", *rows]))
    summary = make_folder(tmp_path / "out", tmp_path, num_workers=1, words=[2, 9], max_repeats=1)
    assert kept(tmp_path / "out") == ["a big cat", "a red dog\na dog"]
    assert "1 x caption too short" in summary
    assert "1 x caption repeated" in summary


@pytest.mark.parametrize(
    "settings",
    [{"words": [5, 2]}, {"words": [5]}, {"words": [-1, 2]}, {"max_repeats": 0}],
)
def test_limits_that_cannot_be_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        FilteredCaptions([], **NONE | settings)


def test_images_with_labels_have_no_captions_to_filter(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "0.png").write_bytes(Corpus.png(0))
    with pytest.raises(ValueError, match="no captions"):
        make_folder(tmp_path / "out", tmp_path / "photos", words=[1, 2])
