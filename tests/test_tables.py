"""What `--json` prints: the results, on standard output alone."""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from diffvision import cli
from diffvision.data.shards.writer import write_shards
from diffvision.tables import as_json, plain, show


@dataclass
class Result:
    path: Path
    counts: Counter


def test_values_become_plain_for_json():
    result = Result(Path("a/b"), Counter({(3, 4): 2}))
    values = {"x": [float("nan"), np.float32(0.5), None, True, (1, "y")], Path("k"): result}
    assert plain(values) == {
        "x": [None, 0.5, None, True, [1, "y"]],
        "k": {"path": "a/b", "counts": {"(3, 4)": 2}},
    }
    with pytest.raises(TypeError, match="object"):
        plain(object())


def test_a_table_or_its_data(capsys):
    show("a table", data=[1])
    assert capsys.readouterr().out == "a table\n"
    with as_json():
        print("a note")
        show("a table", data={"a": float("inf")})
        print("progress", file=sys.stderr)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": None}
    assert printed.err == "a note\nprogress\n"
    with pytest.raises(ZeroDivisionError), as_json():
        show(1 / 0, data=1)
    assert capsys.readouterr().out == ""
    show("a table", data=[1])
    assert capsys.readouterr().out == "a table\n"


def printed(words: list[str], capsys, status: int = 0):
    assert cli.main(words) == status
    return json.loads(capsys.readouterr().out)


def test_commands_with_tables_print_json(tmp_path, capsys):
    assert printed(["models", "--json", "--filter", "diff_vit_base"], capsys) == [
        {"model": "diff_vit_base", "library": "timm", "parameters": 86572264}
    ]
    write_shards(tmp_path / "text", [{"__key__": "a", "txt": "some text"}, {"__key__": "b", "txt": "more"}])
    (shard,) = printed(["data", "check", str(tmp_path / "text"), "--json", "--num_workers", "0"], capsys)
    assert (shard["ok"], shard["samples"], shard["good"], shard["bad"]) == (True, 2, 2, {})
    (tmp_path / "text" / "nshards.txt").write_text("2\n")
    _, count = printed(["data", "check", str(tmp_path / "text"), "--json", "--num_workers", "0"], capsys, status=1)
    assert not count["ok"]
    assert count["problems"] == ["says '2', but there are 1 shards"]
