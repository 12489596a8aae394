"""LLaVA's JSON as shards: several images a row, rows without images, and what is left out or refused."""

import json

import pytest
from PIL import Image

from diffvision.data.conversations import read_row
from diffvision.data.make import make
from tests.data.conftest import read_tars


def record(number, image, question="<image>\nWhat is it?", **more):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"a thing {number} é"}]
    return {"id": str(number), **({} if image is None else {"image": image}), "conversations": turns, **more}


@pytest.fixture
def folder(tmp_path):
    images = tmp_path / "images"
    (images / "coco").mkdir(parents=True)
    for number in range(12):
        Image.new("RGB", (20, 10 + number), (number, 0, 0)).save(images / "coco" / f"{number}.jpg")
    Image.new("RGB", (9, 9)).save(images / "b.png")
    return images


def write(path, rows):
    text = json.dumps(rows, indent=1) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(directory):
    samples = [{name: data for name, data in sample.items() if name[0] != "_"} for sample in read_tars(directory)]
    return {json.loads(members["json"])["id"]: members for members in samples}


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_rows_with_one_image_with_several_and_with_none_are_read_as_they_were(folder, tmp_path, name):
    rows = [record(number, f"coco/{number}.jpg") for number in range(10)]
    rows[9] = {**record(9, None), "image": None, "images": ["coco/9.jpg"]}
    rows += [record(10, ["coco/3.jpg", "b.png"], "<image> or <image>?"), record(11, None, "Why?")]
    source = write(tmp_path / name, rows)
    assert make("llava", tmp_path / "out", source=source, images=str(folder), per_shard=5) == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    members = read(tmp_path / "out")
    assert list(members) != sorted(members)  # in random order
    assert {key: json.loads(one["json"]) for key, one in members.items()} == {row["id"]: row for row in rows}
    for number in range(10):
        assert read_row(members[str(number)])[1] == [(folder / "coco" / f"{number}.jpg").read_bytes()]
    assert members["10"].keys() == {"0.jpg", "1.png", "json"}
    assert read_row(members["10"])[1] == [(folder / "coco" / "3.jpg").read_bytes(), (folder / "b.png").read_bytes()]
    assert members["11"].keys() == {"json"}


def test_missing_and_damaged_images_are_counted_and_too_many_refused(folder, tmp_path, capsys):
    (folder / "coco" / "1.jpg").write_bytes((folder / "coco" / "1.jpg").read_bytes()[:300])
    rows = [record(number, f"coco/{number}.jpg") for number in range(10)]
    rows += [record(10, "gone.jpg"), record(11, "coco/4.jpg", "What is it?")]
    source = write(tmp_path / "rows.json", rows)
    with pytest.raises(ValueError, match="2 of 12 rows") as error:
        make("llava", tmp_path / "out", source=source, images=str(folder))
    assert "1 x missing image" in str(error.value)
    assert not (tmp_path / "out").exists()
    assert make("llava", tmp_path / "out", source=source, images=str(folder), max_bad_fraction=0.2) == 0
    printed = capsys.readouterr().out
    assert "9 samples, left out 3" in printed
    assert "1 x image without placeholder" in printed
    assert read(tmp_path / "out").keys() == {"0", *map(str, range(2, 10))}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" + json.dumps(record(0, "b.png")) + ", {", "must be JSON"),
        (json.dumps([record(0, "../rows.json")]), "one path inside"),
        (json.dumps([3, record(0, "b.png")]), "1 of 2 rows"),
        ("[]", "no images|no rows"),
        ("\ufeff" + json.dumps([3, record(0, "b.png")]), "1 of 2 rows"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_files_of_another_kind_are_refused(folder, tmp_path, text, error):
    with pytest.raises(FileNotFoundError, match=r"rows\.json"):
        make("llava", tmp_path / "out", source=str(tmp_path / "rows.json"))
    (tmp_path / "rows.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=error):
        make("llava", tmp_path / "out", source=str(tmp_path / "rows.json"), images=str(folder))
    assert not (tmp_path / "out").exists()
