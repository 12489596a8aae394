import json
import logging
import re
from pathlib import Path

import pytest
import torch

from diffvision.data import ImageTextData, ShardSet
from diffvision.data.check import check_shards
from diffvision.data.make import check
from diffvision.data.shards.downloads import read_downloads
from diffvision.data.shards.sources import Shard
from tests.img2dataset_files import NOT_FOUND, write_img2dataset

FAILED = {3: NOT_FOUND, 4: "Image decoding error", **dict.fromkeys(range(20, 30), NOT_FOUND)}


@pytest.fixture
def folder(tmp_path):
    return write_img2dataset(tmp_path / "cc", [f"picture {n}" for n in range(35)], failed=FAILED)


def test_training_reads_them_in_place_and_says_what_failed(folder, caplog):
    """A shard of which every URL failed is empty, and in order."""
    assert ShardSet(folder).counts.tolist() == [8, 10, 0, 5]
    data = ImageTextData(str(folder), 1, num_workers=0, tokenizer=lambda texts: torch.zeros(len(texts), 1))
    with caplog.at_level(logging.INFO):
        loader = data.train_dataloader()
    assert f"downloaded 23 of 35 URLs (65.7%); failed: {NOT_FOUND} 11, Image decoding error 1" in caplog.text
    assert len(list(loader)) == loader.report.seen == 23


def test_check_counts_them(folder, capsys):
    results = check_shards(folder, 0)
    assert all(result.ok for result in results)
    assert [result.downloads.failed.total() for result in results] == [2, 0, 10, 0]
    assert check(str(folder)) == 0
    assert "12 of 35" in capsys.readouterr().out


def test_a_shard_that_was_not_finished_is_a_problem(folder):
    (folder / "00001_stats.json").write_text('{"count": 10,')
    stats = json.loads((folder / "00003_stats.json").read_text())
    (folder / "00003_stats.json").write_text(json.dumps(stats | {"successes": 4}))
    problems = [result.problems for result in check_shards(folder, 0)]
    assert "did not finish this shard" in problems[1][0]
    assert problems[3] == ["5 samples, img2dataset noted 4"]
    assert not problems[0] + problems[2]
    (folder / "00001.tar").unlink()
    (folder / "00001_stats.json").write_text(json.dumps(stats))
    (folder / "own_stats.json").write_text("{}")
    *_, lost = check_shards(folder, 0)
    assert (lost.path.name, len(lost.problems)) == ("00001.tar", 1)
    assert "remove 00001_stats.json" in lost.problems[0]


@pytest.mark.parametrize("text", ["[]", '{"count": 1e999, "successes": 1}', "[" * 100_000, '{"count": 1}', "\xff"])
def test_notes_that_are_none(text, tmp_path):
    (tmp_path / "0_stats.json").write_text(text, encoding="latin-1")
    assert read_downloads(Shard(str(tmp_path / "0.tar"))) is None


def test_the_guide_converts_a_list(tmp_path, monkeypatch):
    """As a .tsv, img2dataset lost the rows after the lone quotation mark."""
    parquet = pytest.importorskip("pyarrow.parquet")
    guide = Path(__file__).parents[3] / "docs" / "guides" / "img2dataset.md"
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "pyarrow" in block
    )
    monkeypatch.chdir(tmp_path)
    lines = ["http://a.b/1.jpg\ta cat", 'http://a.b/2.jpg\t"a dog', "http://a.b/3.jpg\ta <PERSON>"]
    Path("cc12m.tsv").write_text("\n".join(lines))
    exec(code, {})
    assert parquet.read_table("cc12m.parquet").to_pydict() == {
        "url": [f"http://a.b/{n}.jpg" for n in (1, 2, 3)],
        "caption": ["a cat", '"a dog', "a <PERSON>"],
    }
    Path("cc12m.tsv").write_text("a\tb\tc\n")
    with pytest.raises(Exception, match="Expected 2 columns, got 3"):
        exec(code, {})
