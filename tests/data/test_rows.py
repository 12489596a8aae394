"""Rows of JSON objects from files of each form."""

import gzip
import json

import pytest

from diffvision.data.rows import read_rows

ROWS = [{"question": "a\u2028b", "answers": ["x", "y"]}, {"question": "c", "answers": []}]


def lines():
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n\n" for row in ROWS).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_lines_have_their_numbers(name, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(lines()) if name.endswith(".gz") else lines())
    assert list(read_rows(tmp_path / name)) == [(1, ROWS[0]), (3, ROWS[1])]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ROWS, list(enumerate(ROWS, start=1))),
        (ROWS[0], [(1, ROWS[0])]),
        ({"q1": ROWS[0], "q2": ROWS[1]}, [("q1", ROWS[0]), ("q2", ROWS[1])]),
        ({"question": "a", "meta": {"b": 1}}, [(1, {"question": "a", "meta": {"b": 1}})]),
        ([], []),
    ],
)
def test_json_is_a_row_a_list_or_rows_by_their_ids(name, content, expected, tmp_path):
    data = b"\xef\xbb\xbf" + json.dumps(content).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert list(read_rows(tmp_path / name)) == expected


def test_endings_are_known_in_any_case_and_json_may_have_lines(tmp_path):
    (tmp_path / "A.JSON.GZ").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert list(read_rows(tmp_path / "A.JSON.GZ")) == [(1, ROWS[0]), (2, ROWS[1])]
    (tmp_path / "lines.json").write_bytes(lines())
    assert list(read_rows(tmp_path / "lines.json")) == [(1, ROWS[0]), (3, ROWS[1])]


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == list(enumerate(ROWS, start=1))
    numbers = arrow.table({"answer": arrow.array([0.1, None], arrow.float32()), "text": ["a", "b"]})
    parquet.write_table(numbers, tmp_path / "B.PARQUET")
    assert [row for _, row in read_rows(tmp_path / "B.PARQUET")] == [{"answer": 0.1, "text": "a"}, {"text": "b"}]
    late = arrow.table({"question": ["a"], "when": arrow.array([2**60], arrow.timestamp("ms"))})
    parquet.write_table(late, tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c\.parquet cannot be read .*leave"):
        list(read_rows(tmp_path / "c.parquet"))
    parquet.write_table(arrow.table({"text": [str(number) for number in range(9999)]}), tmp_path / "d.parquet")
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[1000:1040] = bytes(40)
    (tmp_path / "d.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read"):
        list(read_rows(tmp_path / "d.parquet"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a"', r"line 2 of .*a\.jsonl is not JSON"),
        ("a.json", b"[1", r"a\.json is not JSON"),
        ("a.jsonl", b"[" * 100_000, r"line 1 of .*a\.jsonl is not JSON"),
        ("a.jsonl", b"\xff\xfe", r"a\.jsonl is not UTF-8 .*; \.jsonl, "),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz is a damaged \.gz .*: get the file again"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], r"a\.jsonl\.gz is a damaged \.gz"),
        ("a.parquet", b"no parquet", r"a\.parquet cannot be read .*: get the file again"),
    ],
)
def test_damaged_files_are_named(name, data, message, tmp_path):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_rows(tmp_path / name))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder: give files in"):
        list(read_rows(tmp_path))
