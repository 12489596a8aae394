"""Shards that img2dataset wrote, and the guide to it."""

import re
from pathlib import Path

import pytest
import torch

from diffvision.data import ImageTextData, ShardSet
from diffvision.data.check import check_shards
from tests.img2dataset_files import NOT_FOUND, write_img2dataset

FAILED = {3: NOT_FOUND, 4: "Image decoding error", **dict.fromkeys(range(20, 30), NOT_FOUND)}


@pytest.fixture
def folder(tmp_path):
    return write_img2dataset(tmp_path / "cc", [f"picture {n}" for n in range(35)], failed=FAILED)


def test_training_and_check_read_them_in_place(folder):
    """A shard of which every URL failed is empty, and in order."""
    assert ShardSet(folder).counts.tolist() == [8, 10, 0, 5]
    data = ImageTextData(str(folder), 1, num_workers=0, tokenizer=lambda texts: torch.zeros(len(texts), 1))
    loader = data.train_dataloader()
    assert len(list(loader)) == loader.report.seen == 23
    assert all(result.ok for result in check_shards(folder, 0))


def test_the_guide_converts_a_list(tmp_path, monkeypatch):
    """As a .tsv, img2dataset lost the rows after the lone quotation mark."""
    parquet = pytest.importorskip("pyarrow.parquet")
    guide = Path(__file__).parents[3] / "docs" / "guides" / "cc12m.md"
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
