"""Published sets in miniature, in the exact formats of their authors: what becomes of them, and what is refused."""

import json

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from diffvision.data import find_folders, make
from diffvision.data.datasets.mmvp import PATTERNS, make_mmvp
from diffvision.data.datasets.sugarcrepe import KINDS, make_sugarcrepe
from diffvision.data.datasets.winoground import make_winoground
from tests.data.conftest import read_tars


def picture(path, seed=0, size=(9, 7)):
    """Write a small image; return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def text(path, *lines):
    """Write lines: strings as they are, others as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")


def samples(folder):
    """Return the members of each sample of a folder, JSON read."""
    read = [{name: data for name, data in one.items() if name[0] != "_"} for one in read_tars(folder / "test")]
    for sample in read:
        sample |= {name: data.decode() for name, data in sample.items() if name.endswith("txt")}
        sample["json"] = json.loads(sample["json"])
    return read


# ---- MMVP-VLM ------------------------------------------------------------------------------------------------------


def mmvp(root):
    rows = ["Question ID,Type,Statement"]
    for number, kind in enumerate(PATTERNS):
        for image in (2 * number + 1, 2 * number + 2):
            rows.append(f'{image},{kind},"a dog, number {image}"')
            picture(root / "MLLM_VLM Images" / kind / f"{image}.jpg", image)
    text(root / "Questions.csv", *rows)
    return root


def test_mmvp_is_pairs_with_their_patterns(tmp_path):
    source = mmvp(tmp_path / "source")
    make_mmvp(tmp_path / "mmvp", source)
    (source / "MLLM_VLM Images").rename(source / "MMVP_VLM_Images")  # as its page names them
    (source / "MMVP_VLM_Images/Camera Perspective").rename(source / "MMVP_VLM_Images/Camera_Perspective")
    assert make_mmvp(tmp_path / "again", source) == "9 samples in pairs"
    written = samples(tmp_path / "mmvp/pairs")
    assert [sample["json"]["kind"] for sample in written] == list(PATTERNS.values())
    images = [(source / f"MMVP_VLM_Images/Presence/{number}.jpg").read_bytes() for number in (3, 4)]
    assert written[1] == {
        "0.jpg": images[0],
        "1.jpg": images[1],
        "0.txt": "a photo of a dog, number 3",
        "1.txt": "a photo of a dog, number 4",
        "json": {"kind": "Presence of Specific Features"},
    }
    assert (tmp_path / "mmvp/pairs/dataset_type.txt").read_text() == "pairs\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("19,Orientation,a dog", "rows 19 and 20"),
        ("19,Smell,a\n20,Smell,b", "got 'Smell'"),
        ("1,Orientation,a\n2,Orientation,b", "got 'Orientation', 1"),
        ("19,Orientation,a\n20,Orientation, ", "rows 19 and 20"),
    ],
)
def test_mmvp_rows_that_are_no_pair_are_refused(tmp_path, row, message):
    source = mmvp(tmp_path / "source")
    with open(source / "Questions.csv", "a") as file:
        file.write(row + "\n")
    with pytest.raises(ValueError, match=message):
        make_mmvp(tmp_path / "mmvp", source)


# ---- SugarCrepe ----------------------------------------------------------------------------------------------------


def sugarcrepe(root):
    for number, kind in enumerate(KINDS):
        row = {"filename": f"{number:012d}.jpg", "caption": f"a {kind}\nhere", "negative_caption": f"no {kind}"}
        text(root / f"data/{kind}.json", {"7": row})
        picture(root.parent / f"val2017/{number:012d}.jpg", number)
    return root


def test_sugarcrepe_is_one_composition_folder_whose_kinds_are_its_files(tmp_path, capsys):
    source = sugarcrepe(tmp_path / "sugar-crepe")
    images = str(tmp_path)  # which has val2017
    assert make.make("sugarcrepe", str(tmp_path / "sc"), source=str(source), images=images) == 0
    assert "7 samples in composition" in capsys.readouterr().out
    (folder,) = find_folders(tmp_path / "sc")
    assert (folder.name, folder.task) == ("sc", "composition")
    written = samples(folder.path)
    assert [sample["json"]["kind"] for sample in written] == list(KINDS)
    # A line break in a caption would make two wrong captions of one.
    assert [sample["txt"] for sample in written] == [f"a {kind} here\nno {kind}" for kind in KINDS]
    assert written[2]["jpg"] == (tmp_path / "val2017/000000000002.jpg").read_bytes()
    about = json.loads((tmp_path / "sc/about.json").read_text())
    assert about["samples"] == {"composition": 7}
    with pytest.raises(ValueError, match="has shards already"):
        make_sugarcrepe(tmp_path / "sc", source, images)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"negative_caption": " "}, "with a blank caption"),
        ({"negative_caption": "a", "caption": "a"}, "whose captions are the same"),
    ],
)
def test_rows_that_say_nothing_are_left_out_and_counted(tmp_path, changed, reason):
    source = sugarcrepe(tmp_path / "source")
    row = {"filename": "000000000000.jpg", "caption": "a", "negative_caption": "b"}
    text(source / f"data/{KINDS[0]}.json", {"0": row | changed})
    written = make_sugarcrepe(tmp_path / "made", source, tmp_path / "val2017")
    assert written.split("\n") == ["6 samples in composition", f"left out of composition: 1 {reason}"]
    for kind in KINDS:
        text(source / f"data/{kind}.json", {"0": row | changed})
    with pytest.raises(ValueError, match=reason):
        make_sugarcrepe(tmp_path / "again", source, tmp_path / "val2017")
    assert not (tmp_path / "again").exists()


def test_two_images_of_one_name_are_refused_unless_they_are_the_same(tmp_path):
    source = sugarcrepe(tmp_path / "source")
    picture(tmp_path / "train2017/000000000001.jpg", 1)
    assert make_sugarcrepe(tmp_path / "made", source, tmp_path) == "7 samples in composition"
    picture(tmp_path / "train2017/000000000001.jpg", 99)
    with pytest.raises(ValueError, match=r"train2017/0+1\.jpg"):
        make_sugarcrepe(tmp_path / "again", source, tmp_path)


# ---- Winoground ----------------------------------------------------------------------------------------------------


def test_winoground_is_pairs_by_their_tag(tmp_path):
    images, texts = [picture(tmp_path / f"{side}.png", side) for side in (0, 1)], ("an adult behind", "a child behind")
    row = {"id": 0, "tag": "Noun", "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": "Object"}
    for side in (0, 1):
        row |= {f"image_{side}": {"bytes": images[side], "path": None}, f"caption_{side}": texts[side]}
    (tmp_path / "source/data").mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "source/data/test-00000-of-00001.parquet")
    make_winoground(tmp_path / "made", tmp_path / "source")
    kind = {"kind": "Object", "tag": "Noun"}
    expected = {"0.png": images[0], "1.png": images[1], "0.txt": texts[0], "1.txt": texts[1], "json": kind}
    assert samples(tmp_path / "made/pairs") == [expected]


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mmvp", "sugarcrepe", "winoground"])
def test_another_layout_is_one_sentence_that_says_what_is_expected(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has (no|none|neither) .*: .* folder") as error:
        make.make(name, str(tmp_path / "made"), source=str(tmp_path / "empty"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"there is no folder .*make {name} --help"):
        make.make(name, str(tmp_path / "made"), source=str(tmp_path / "nowhere"))
    assert not (tmp_path / "made").exists()


def row_of(filename, caption):
    return json.dumps({"0": {"filename": filename, "caption": caption, "negative_caption": "b"}}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"val2017/000000000001.jpg": None, "val2017/000000000004.jpg": None}, r"2 of 7 images .*, first 0+1\.jpg"),
        ({"val2017/000000000006.jpg": "cut"}, r"000000000006\.jpg:"),
        ({"source/data/add_att.json": b"{"}, "JSON"),
        ({"source/data/add_att.json": b"[]"}, "has no rows"),
        ({"source/data/add_att.json": row_of("a.jpg", 3)}, "caption in row 1 .*must be a str"),
        ({"source/data/add_att.json": row_of("../a.jpg", "a")}, r"'\.\./a\.jpg'"),
    ],
)
def test_missing_and_damaged_files_and_paths_outside_are_refused_before_anything_is_written(tmp_path, content, message):
    source = sugarcrepe(tmp_path / "source")
    for name, data in content.items():
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        if data is not None:
            (tmp_path / name).write_bytes(before[:-200] if data == "cut" else data)
    with pytest.raises(ValueError, match=message):
        make_sugarcrepe(tmp_path / "made", source, tmp_path / "val2017")
    assert not (tmp_path / "made").exists()
