"""Splits by names, as `datasets` tells them."""

import pytest

from diffvision.data.shards.sources import find_shards, split_shards
from diffvision.data.shards.writer import write_tar
from diffvision.data.splits import by_split

LAYOUTS = [
    ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
    ["train.csv", "test.csv", "dev.csv"],
    ["my_training.data.csv", "my-eval 2.csv", "cats.val.csv"],
    ["train2017/a.parquet", "val2017/b.parquet", "val2017/train.parquet"],
    ["some/training-set/a.csv", "other/evaluation/deep/b.csv"],
    ["trainable.csv", "contest.csv"],
    ["a.train"],
    ["a.train.csv"],
    ["en/validation.csv", "de/validation.csv", "de/testing_1.csv"],
]


@pytest.mark.parametrize("files", LAYOUTS, ids=lambda files: files[0])
def test_splits_are_those_of_datasets(files, tmp_path):
    data_files = pytest.importorskip("datasets.data_files")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    theirs = data_files.DataFilesDict.from_patterns(data_files.get_data_patterns(str(tmp_path)), str(tmp_path))
    expected = {str(split): sorted(path.removeprefix(f"{tmp_path}/") for path in theirs[split]) for split in theirs}
    assert (by_split(files, "x") or {"train": sorted(files)}) == expected


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["train.csv", "test.csv", "more.csv"], "more.csv"),
        (["train-eval.csv"], "train-eval.csv"),
        (["data/train-00000-of-00001.parquet", "extra/more.parquet"], "extra/more.parquet"),
        (["data/train_a-00000-of-00001.parquet", "data/train_b-00000-of-00001.parquet"], "train_b"),
    ],
)
def test_what_is_ambiguous_is_refused(files, named):
    with pytest.raises(ValueError, match=named):
        by_split(files, "x")


def test_shards_of_several_splits_in_one_folder(tmp_path):
    (tmp_path / "pets").mkdir()
    for name in ("pets-train-000", "pets-train-001", "pets-validation-000"):
        write_tar(tmp_path / "pets" / f"{name}.tar", [{"__key__": "a", "txt": "a"}])
    for split, names in (("train", ["pets-train-000", "pets-train-001"]), ("test", ["pets-validation-000"])):
        assert [shard.name for shard in split_shards(tmp_path / "pets", split)] == [f"{name}.tar" for name in names]
    pattern = str(tmp_path / "pets/*-train-*.tar")
    assert split_shards(pattern, "train") == pattern
    assert len(find_shards(tmp_path / "pets")) == 3
    write_tar(tmp_path / "pets/others.tar", [{"__key__": "a", "txt": "a"}])
    with pytest.raises(ValueError, match=r"others\.tar"):
        split_shards(tmp_path / "pets", "train")
