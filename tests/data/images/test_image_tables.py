"""Tables of images: what a cell may hold, and what becomes of a row that holds something else."""

import pytest

from diffvision.data import CaptionMember
from diffvision.data.images.image_set import ImageSet
from diffvision.data.images.image_sources import find_images, open_source
from diffvision.data.shards.sample import BadSample
from tests.data.conftest import write_rows


@pytest.mark.parametrize("cell", [None, float("nan"), True, {"en": "x"}, [None, "a"], [1], []], ids=repr)
def test_a_caption_that_is_no_text_is_counted(tmp_path, cell):
    (tmp_path / "1.png").touch()
    images = find_images(write_rows(tmp_path, [{"file": "1.png", "caption": cell}], "jsonl"))
    with pytest.raises(BadSample, match="missing caption"):
        CaptionMember(images.caption_key).one(ImageSet(images).members((0, 0)))


@pytest.mark.parametrize(
    ("cell", "captions"),
    [
        ('["a dog", "a \\"big\\" cat"]', ("a dog", 'a "big" cat')),
        ("['a dog', \"a cat's tail\"]", ("a dog", "a cat's tail")),
        ("['a dog' 'a cat']", ("a dog", "a cat")),
        ('["a dog", null]', ()),
        ("[]", ()),
        ("nan", ()),
        ("[a dog]", ("[a dog]",)),
        ('["Up" by Pixar]', ('["Up" by Pixar]',)),
        ("[2019]", ("[2019]",)),
        ("\\N", ()),
        ("none of them", ("none of them",)),
        ("a dog\nand a cat", ("a dog and a cat",)),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_caption_that_is_a_list_or_missing_as_text(tmp_path, ending, cell, captions):
    quoted = cell.replace('"', '""')
    rows = [{"file": "1.png", "caption": f'"{quoted}"' if ending == "csv" else cell}]
    assert find_images(write_rows(tmp_path, rows, ending)).captions == [captions]


NO_LABELS = [None, float("nan"), "", " ", "\u200b", "null", "None", "NaN", "\\N", "[]", '["cat", "dog"]', "[1 2]"]


@pytest.mark.parametrize(
    ("ending", "cells", "place"),
    [
        *(("jsonl", ["cat", cell], "line 2") for cell in [*NO_LABELS, ["cat"], {"a": 1}]),
        ("csv", [0, "nan"], "line 3"),
        ("parquet", [1.0, None], "row 1"),
        ("parquet", ["cat", "NaN"], "row 1"),
    ],
    ids=str,
)
def test_a_missing_label_is_refused(tmp_path, ending, cells, place):
    rows = [{"file": f"{n}.png", "label": cell} for n, cell in enumerate(cells)]
    with pytest.raises(ValueError, match=f"{place} must have a label"):
        find_images(write_rows(tmp_path, rows, ending))


@pytest.mark.parametrize(
    ("cells", "labels", "classnames"),
    [
        ([0, 10, 2], [0, 10, 2], ()),
        ([0.0, 10.0, 2.0], [0, 10, 2], ()),
        (["0.000e+00", "1e1", "+2"], [0, 10, 2], ()),
        ([0, 10, -1], [1, 2, 0], ("-1", "0", "10")),
        ([0.5, 2.5], [0, 1], ("0.5", "2.5")),
        (["b", "10", "2"], [2, 0, 1], ("10", "2", "b")),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_numbers_keep_their_order(tmp_path, ending, cells, labels, classnames):
    rows = [{"file": f"{n}.png", "label": cell} for n, cell in enumerate(cells)]
    images = find_images(write_rows(tmp_path, rows, ending))
    assert (images.labels.tolist(), images.classnames) == (labels, classnames)
    for number, name in enumerate(classnames):
        assert f"{number} {name}" in images.described
    assert classnames or "0 to 10" in images.described


def test_numbers_of_another_source_are_matched_by_value(tmp_path):
    source = open_source(write_rows(tmp_path, [{"file": "1.png", "label": 10}, {"file": "2.png", "label": 0}], "csv"))
    assert source.images(classnames=("-1", "0", "10")).labels.tolist() == [2, 1]
    for classnames in (("1", "2", "10"), ("000", "010", "002")):  # a number that is none of these is no index
        with pytest.raises(ValueError, match="training data"):
            source.images(classnames=classnames)


@pytest.mark.parametrize("separator", [",", "\t", "|"])
def test_separators_of_a_csv(tmp_path, separator):
    rows = [("filepath", "title"), ("1.png", '"a ""big"" cat, | asleep"'), ("2.png", "dog")]
    (tmp_path / "t.csv").write_text("\n".join(map(separator.join, rows)))
    images = find_images(tmp_path / "t.csv")
    assert (images.names, images.captions) == (["1.png", "2.png"], [('a "big" cat, | asleep',), ("dog",)])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("ending", ["csv", "jsonl", "json"])
def test_a_table_in_utf_16_is_named_and_not_printed(tmp_path, encoding, ending):
    path = tmp_path / f"t.{ending}"
    path.write_text("a dog" * 99, encoding=encoding)
    with pytest.raises(ValueError, match=f"{ending}.* is not UTF-8") as error:
        find_images(path)
    assert "dog" not in str(error.value)


@pytest.mark.parametrize("damage", ["garbage", "cut", "columns"])
def test_a_parquet_that_cannot_be_read_is_named(tmp_path, damage, caplog):
    rows = [{"file": "1.png", "caption": "a"}] * 50
    whole = write_rows(tmp_path, rows, "parquet", "train")
    path = write_rows(tmp_path, [{"path": "1.png", "label": 1}] if damage == "columns" else rows, "parquet", "test")
    if damage != "columns":
        path.write_bytes(b"PAR1 garbage" if damage == "garbage" else path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=f"{path} cannot be read"):
            find_images(path)
        with pytest.raises(ValueError, match="cannot be read"):  # its classes are numbered together with train's
            find_images(tmp_path, columns={"label": "caption"})
    (tmp_path / "all").mkdir()
    for number, file in enumerate((whole, path)):
        file.rename(tmp_path / "all" / f"part-{number}.parquet")
    with pytest.raises(ValueError, match=f"{tmp_path}/all cannot be read"):
        find_images(tmp_path / "all")
    assert "part-" in caplog.text  # datasets names the file
