"""Tables of images: what a cell may hold, and what becomes of a row that holds something else."""

import json
import shutil

import pytest

from diffvision.data.images.image_set import ImageSet
from diffvision.data.images.image_sources import find_images, open_source
from diffvision.data.images.samples import CaptionMember
from diffvision.data.shards.sample import BadSample


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table of a format, of rows or as it is given."""

    def write(content, ending="csv"):
        path = tmp_path / f"t.{ending}"
        if ending == "parquet":
            pytest.importorskip("datasets").Dataset.from_list(content).to_parquet(str(path))
        elif ending == "jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in content))
        elif isinstance(content, list):
            path.write_text("\n".join([",".join(content[0]), *(",".join(map(str, row.values())) for row in content)]))
        else:
            path.write_text(content)
        return path

    return write


@pytest.mark.parametrize("cell", [None, float("nan"), True, {"en": "x"}, [None, "a"], [1], []], ids=repr)
def test_a_caption_that_is_no_text_is_counted(table, cell):
    path = table([{"file": "1.png", "caption": "a cat"}, {"file": "2.png", "caption": cell}], "jsonl")
    for name in ("1.png", "2.png"):
        (path.parent / name).touch()
    images = find_images(path)
    assert CaptionMember(images.caption_key).one(ImageSet(images).members((0, 0))) == "a cat"
    with pytest.raises(BadSample, match="missing caption"):
        CaptionMember(images.caption_key).one(ImageSet(images).members((0, 1)))


@pytest.mark.parametrize(
    ("cell", "captions"),
    [
        ('["a dog", "a \\"big\\" cat"]', ("a dog", 'a "big" cat')),
        ('["a dog"]', ("a dog",)),
        ("['a dog', \"a cat's tail\"]", ("a dog", "a cat's tail")),
        ("['a dog' 'a cat']", ("a dog", "a cat")),
        ('["a dog", null]', ()),
        ("[]", ()),
        ("nan", ()),
        ("N/A", ()),
        ("[a dog]", ("[a dog]",)),
        ('["Up" by Pixar]', ('["Up" by Pixar]',)),
        ("[2019]", ("[2019]",)),
        ("\\N", ()),
        ("none of them", ("none of them",)),
        ("a dog\nand a cat", ("a dog and a cat",)),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_caption_that_is_a_list_or_missing_as_text(table, ending, cell, captions):
    quoted = cell.replace('"', '""')
    rows = [{"file": "1.png", "caption": f'"{quoted}"' if ending == "csv" else cell}]
    assert find_images(table(rows, ending)).captions == [captions]


NO_LABELS = [None, float("nan"), "", " ", "\u200b", "null", "None", "NaN", "\\N", "[]", '["cat", "dog"]', "[1 2]"]


@pytest.mark.parametrize("cell", [*NO_LABELS, ["cat"], {"a": 1}], ids=repr)
def test_a_missing_label_is_refused(table, cell):
    path = table([{"file": "1.png", "label": "cat"}, {"file": "2.png", "label": cell}], "jsonl")
    with pytest.raises(ValueError, match="line 2 must have a label"):
        find_images(path)


def test_a_missing_label_in_a_csv_or_parquet_is_refused(table):
    with pytest.raises(ValueError, match="line 3 must have a label"):
        find_images(table("file,label\n1.png,0\n2.png,nan\n"))
    for cell, other in ((1.0, None), ("cat", "NaN")):
        with pytest.raises(ValueError, match="row 1 must have a label"):
            find_images(table([{"file": "1.png", "label": cell}, {"file": "2.png", "label": other}], "parquet"))
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"file": datasets.Value("string"), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_dict({"file": ["1.png", "2.png"], "label": [1, -1]}, features=features)
    rows.to_parquet(str(table("", "csv").with_suffix(".parquet")))
    with pytest.raises(ValueError, match="row 1 must have a label"):
        find_images(table("", "csv").with_suffix(".parquet"))


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
def test_numbers_keep_their_order(table, ending, cells, labels, classnames):
    images = find_images(table([{"file": f"{n}.png", "label": cell} for n, cell in enumerate(cells)], ending))
    assert (images.labels.tolist(), images.classnames) == (labels, classnames)
    for number, name in enumerate(classnames):
        assert f"{number} {name}" in images.described
    assert classnames or "0 to 10" in images.described


def test_numbers_of_another_source_are_matched_by_value(table):
    images = open_source(table("file,label\n1.png,10\n2.png,0\n")).images(classnames=("-1", "0", "10"))
    assert images.labels.tolist() == [2, 1]
    for classnames in (("1", "2", "3"), ("001", "002", "010")):  # a number that is none of these is no index
        with pytest.raises(ValueError, match="training data"):
            open_source(table("file,label\n1.png,1\n2.png,0\n")).images(classnames=classnames)


@pytest.mark.parametrize("separator", [",", "\t", "|"])
def test_separators_of_a_csv(table, separator):
    rows = [("filepath", "title"), ("1.png", '"a ""big"" cat, | asleep"'), ("2.png", "dog")]
    images = find_images(table("\n".join(separator.join(row) for row in rows)))
    assert (images.names, images.captions) == (["1.png", "2.png"], [('a "big" cat, | asleep',), ("dog",)])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("ending", ["csv", "jsonl", "json"])
def test_a_table_in_utf_16_is_named_and_not_printed(table, encoding, ending):
    path = table("", "csv").with_suffix(f".{ending}")
    lines = {"json": '{"images": []}', "jsonl": '{"file": "1.png", "caption": "a dog"}\n'}
    path.write_bytes(lines.get(ending, "file,caption\n1.png,a dog\n").replace("a dog", "a dog" * 99).encode(encoding))
    with pytest.raises(ValueError, match=f"{ending}.* is not UTF-8") as error:
        find_images(path)
    assert "dog" not in str(error.value)


@pytest.mark.parametrize("damage", ["garbage", "cut", "columns"])
def test_a_parquet_that_cannot_be_read_is_named(table, damage, caplog):
    rows = [{"file": "1.png", "caption": "a"}] * 50
    other = table(rows, "parquet").rename(table("").with_name("train.parquet"))
    path = table([{"path": "1.png", "label": 1}] if damage == "columns" else rows, "parquet")
    if damage != "columns":
        path.write_bytes(b"PAR1 garbage" if damage == "garbage" else path.read_bytes()[:-100])
    (path.parent / "t.csv").unlink()
    (path.parent / "all").mkdir()
    for file in (other, path):
        shutil.copy(file, path.parent / "all" / f"part-{file.stat().st_size}.parquet")
    with pytest.raises(ValueError, match=f"{path.parent}/all cannot be read"):
        find_images(path.parent / "all")
    assert "part-" in caplog.text  # datasets names the file
    test = path.rename(path.with_name("test.parquet"))
    if damage != "columns":
        with pytest.raises(ValueError, match=f"{test} cannot be read"):
            find_images(test)
        with pytest.raises(ValueError, match="cannot be read"):  # whose classes are numbered together with train's
            find_images(other.parent, columns={"label": "caption"})
