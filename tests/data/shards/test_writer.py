"""Tars and their manifest: what is written, what is refused."""

import json

import pytest

from diffvision.data import ShardSet, write_manifest
from diffvision.data.shards.writer import write_shards


def test_a_shard_holds_at_least_one_sample(tmp_path, corpus):
    with pytest.raises(ValueError, match="per_shard must be at least 1, got 0"):
        write_shards(tmp_path / "out", [corpus.sample(0)], 0)
    assert not (tmp_path / "out").exists()


def test_a_manifest_lists_at_least_one_shard(tmp_path):
    with pytest.raises(ValueError, match=r"no .tar files in"):
        write_manifest(tmp_path)


def test_a_manifest_is_not_written_through_a_link(tmp_path, corpus):
    source = corpus.write(tmp_path / "s", 10, manifest=False)
    (tmp_path / "elsewhere").mkdir()
    for name in ("manifest.json", "manifest.json.part", "sizes.json", "sizes.json.part"):
        (source / name).symlink_to(tmp_path / "elsewhere" / name)
    write_manifest(source)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_manifest_leaves_out_a_compressed_shard(tmp_path, corpus):
    source = corpus.write(tmp_path / "s", 10, manifest=False)
    for directory in (source, tmp_path):
        (directory / "1.tar.gz").touch()
    with pytest.raises(ValueError, match=r"1\.tar\.gz: unpack it"):
        write_manifest(source)
    with pytest.raises(ValueError, match=r"1\.tar\.gz: unpack it"):
        write_shards(tmp_path, [corpus.sample(0)])
    assert not (source / "manifest.json").exists()


def test_what_was_cut_short_is_not_taken_for_all_of_it(tmp_path, corpus):
    def cut():
        yield from [{"__key__": f"{i}", "txt": "a"} for i in range(5)]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "shards", cut(), per_shard=2)
    assert len(list((tmp_path / "shards").glob("*.tar"))) == 2
    with pytest.raises(ValueError, match="has shards already"):
        write_shards(tmp_path / "shards", [corpus.sample(0)])
    with pytest.raises(ValueError, match=r"manifest.json .*no shards"):
        ShardSet(tmp_path / "shards")
    write_manifest(tmp_path / "shards")
    assert len(ShardSet(tmp_path / "shards")) == 4
    listed = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    listed["shards"] *= 2
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"manifest.json .*more than once"):
        ShardSet(tmp_path / "shards")
