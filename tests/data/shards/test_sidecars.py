"""Files compared with their manifest: read once, the result kept, never a wrong pair."""

import gzip
import os
import shutil

import pytest

from diffvision.data import BadDataError, Limits, ShardSet
from diffvision.data.shards import sidecars
from diffvision.data.shards.remote import ShardCache
from diffvision.data.shards.sidecars import sha256_of, sidecar

LENIENT = Limits(max_bad_fraction=1.0)


def flip(path, find, at=0, bit=1):
    data = bytearray(path.read_bytes())
    data[data.index(find) + at] ^= bit
    path.write_bytes(data)


@pytest.fixture
def source(corpus, tmp_path):
    return corpus.write(tmp_path / "s", 100)


FLIPS = {
    "caption": lambda path: flip(path, b"sample 4", at=7),  # another digit: only the hash can notice it
    "image data": lambda path: flip(path, b"IDAT", at=8),
    "header name": lambda path: flip(path, b"000043.txt", at=5),  # its checksum does not fit: the tar ends there
    "header size": lambda path: flip(path, b"000043.txt", at=124 + 10),
    "padding": lambda path: flip(path, b"sample 43", at=100),
}


@pytest.mark.quick("0-caption", "0-header name", "1-image data")
@pytest.mark.parametrize("damage", FLIPS.values(), ids=FLIPS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_flipped_bit_costs_its_shard_and_pairs_stay_right(corpus, source, damage, num_workers):
    damage(source / "000004.tar")
    loader = corpus.loader(source, limits=LENIENT, num_workers=num_workers)
    batches = corpus.read(loader)  # asserts that image and caption belong together
    assert {n for b in batches for n in b} == set(range(100)) - set(range(40, 50))
    assert loader.report.skipped == {"shard not as its manifest says (sha256)": 10}
    assert loader.report.seen + loader.report.bad + loader.report.tail == 100
    with pytest.raises(BadDataError, match="shard not as its manifest says"):
        corpus.read(corpus.loader(source, limits=Limits(0.05)))


def test_another_file_of_the_same_name_is_not_read(corpus, source, tmp_path):
    other = corpus.write(tmp_path / "t", 10)
    with open(source / "000004.tar", "wb") as file:
        file.write((other / "000000.tar").read_bytes())
        file.write(bytes(10240))
    with pytest.warns(UserWarning, match="its manifest says"):
        loader = corpus.loader(source, limits=LENIENT)
    corpus.read(loader)
    assert loader.report.skipped == {"shard not as its manifest says (sha256)": 10}


def test_a_flipped_bit_in_a_compressed_shard(corpus, source, tmp_path):
    from diffvision.data.shards.writer import write_manifest

    packed = tmp_path / "packed"
    packed.mkdir()
    shutil.copy(source / "000000.tar", packed)
    write_manifest(packed)
    manifest = (packed / "manifest.json").read_text()
    (packed / "000000.tar.gz").write_bytes(gzip.compress((source / "000000.tar").read_bytes()))
    (packed / "manifest.json").write_text(manifest.replace("000000.tar", "000000.tar.gz"))  # of the tar, not of the gz
    (packed / "000000.tar").unlink()
    with pytest.warns(UserWarning, match="its manifest says"):
        loader = corpus.loader(packed, cache=ShardCache(tmp_path / "cache"), limits=LENIENT)
    with pytest.raises(BadDataError, match="unreadable shard"):
        corpus.read(loader)


def test_each_version_of_a_file_is_read_once(source, tmp_path, monkeypatch):
    reads = []
    read = sidecars.sha256
    monkeypatch.setattr(sidecars, "sha256", lambda path, progress: reads.append(path.name) or read(path, progress))
    path = source / "000000.tar"
    first = sha256_of(path)
    assert first == ShardSet(source).shards[0].sha256 == sha256_of(path)
    assert reads == ["000000.tar"]
    before = path.stat()
    shutil.copy2(path, tmp_path / "copy.tar")
    flip(tmp_path / "copy.tar", b"sample 4")
    os.replace(tmp_path / "copy.tar", path)
    os.utime(path, ns=(0, before.st_mtime_ns))
    assert sha256_of(path) != first
    assert reads == ["000000.tar"] * 2
    sidecar(path, ".sha256").write_text("what is this")
    assert sha256_of(path) != first
    assert len(reads) == 3


def test_where_nothing_can_be_noted_it_is_read_again(source, monkeypatch, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    first = ShardSet(source).shards[0].sha256
    assert sha256_of(source / "000000.tar") == sha256_of(source / "000000.tar") == first


def test_training_compares_a_window_ahead_and_an_unharmed_set_costs_nothing_twice(corpus, source):
    loader = corpus.loader(source, num_workers=1, window=2)
    corpus.read(loader)
    assert loader.report.bad == 0
    assert all(sidecar(path, ".sha256").exists() for path in source.glob("*.tar"))
