"""Rows of JSON objects from files of each form."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from diffvision.data.rows import read_rows

ROWS = [{"question": "a\u2028b", "answers": ["x", "y"]}, {"question": "c", "answers": []}]


LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n\n" for row in ROWS).encode()
LISTED = list(enumerate(ROWS, start=1))
NESTED = {"question": "a", "meta": {"b": 1}}


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", LINES, [(1, ROWS[0]), (3, ROWS[1])]),
        ("list.jsonl", json.dumps(ROWS).encode(), LISTED),
        ("marked.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), LISTED),
        ("one.json", json.dumps(ROWS[0]).encode(), [(1, ROWS[0])]),
        ("keys.json", json.dumps({"q1": ROWS[0], "q2": ROWS[1]}).encode(), [("q1", ROWS[0]), ("q2", ROWS[1])]),
        ("nested.json", json.dumps(NESTED).encode(), [(1, NESTED)]),
    ],
)
def test_rows_of_each_form(name, data, expected, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert list(read_rows(tmp_path / name)) == expected


def test_parquet(tmp_path):
    rows = [*ROWS, {"question": "d", "answers": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "A.PARQUET")
    assert list(read_rows(tmp_path / "A.PARQUET")) == [*LISTED, (3, {"question": "d"})]
    parquet.write_table(pyarrow.table({"text": [str(number) for number in range(9999)]}), tmp_path / "d.parquet")
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[1000:1040] = bytes(40)
    (tmp_path / "d.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"d\.parquet"):
        list(read_rows(tmp_path / "d.parquet"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a"', r"line 2 of .*a\.jsonl"),
        ("a.json", b"[1", r"a\.json "),
        ("a.jsonl", b"[" * 100_000, r"line 1 of .*a\.jsonl"),
        ("a.jsonl", b"\xff\xfe", r"a\.jsonl is not UTF-8"),
        ("a.parquet", b"no parquet", r"a\.parquet"),
    ],
)
def test_damaged_files_are_named(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_rows(tmp_path / name))
