import tarfile

import numpy as np
import pytest
import webdataset

from diffvision.data import ShardSet, write_manifest
from diffvision.data.make import check
from diffvision.data.shards import index as index_module
from diffvision.data.shards.index import MEMBER_TYPES, scan, shard_index
from diffvision.data.shards.sidecars import sidecar
from tests.data.conftest import write_members


def tar_of(path, names, **settings):
    return write_members(path, *((name, b"abc") for name in names), **settings)


def rows(index):
    """(key, types that can be read) of each sample."""
    readable = [(column, name) for column, name in enumerate(index.types) if name.rpartition(".")[2] in MEMBER_TYPES]
    found = [sorted(name for column, name in readable if index.offsets[column, row] >= 0) for row in range(len(index))]
    return [(index.key(row), names) for row, names in enumerate(found)]


def test_samples_are_those_that_webdataset_finds(tmp_path):
    names = "a/x.jpg a/x.txt a/x.pyd b/x.JPG y.v1.png y.txt only.pyd __meta__/z.txt noext u.cls"
    path = tar_of(tmp_path / "a.tar", names.split())
    index = scan(path)
    seen = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert [key for key, _ in rows(index)] == seen
    assert rows(index) == [
        ("a/x", ["jpg", "txt"]),  # pyd is not on the allow-list
        ("b/x", ["jpg"]),
        ("y", ["txt", "v1.png"]),
        ("only", []),
        ("u", ["cls"]),
    ]


def test_a_repeated_type_or_a_key_that_comes_back_begins_a_new_sample(tmp_path):
    path = tar_of(tmp_path / "a.tar", ["1.jpg", "1.txt", "1.jpg", "1.txt", "2.jpg", "3.jpg", "2.txt"])
    expected = [("1", ["jpg", "txt"]), ("1", ["jpg", "txt"]), ("2", ["jpg"]), ("3", ["jpg"]), ("2", ["txt"])]
    assert rows(scan(path)) == expected


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_only_regular_files_are_members(tmp_path, kind):
    assert len(scan(write_members(tmp_path / "a.tar", ("x.jpg", b""), kind=kind))) == 0


def test_many_types_that_are_not_read_are_no_damage(tmp_path):
    index = scan(tar_of(tmp_path / "a.tar", [f"{n}.{t}" for n in range(100) for t in ("jpg", f"t{n}")]))
    assert (index.damage, len(index), len(index.types)) == ("", 100, 33)
    assert rows(index)[99] == ("99", ["jpg"])


def test_keys_with_dots_are_damage(tmp_path):
    with pytest.raises(ValueError, match="first dot of a name"):
        ShardSet(tar_of(tmp_path / "a.tar", [f"img 0.{n}.png" for n in range(33)]))
    assert scan(tar_of(tmp_path / "a.tar", [f"img 0.{n}.png" for n in range(32)])).damage == ""


HEADER = 6 * 512 * 3  # of a sample: three members of a header and a block each
DAMAGE = {
    "empty": (0, lambda data: b""),
    "not a tar": (0, lambda data: b"<html>" + b"x" * 2000),
    "cut in data": (1, lambda data: data[:513]),
    "cut in a header": (3, lambda data: data[: HEADER + 100]),
    "cut between members": (3, lambda data: data[:HEADER]),
    "cut in its end": (10, lambda data: data[: 10 * 6 * 512]),
    "flipped in a header": (3, lambda data: data[: HEADER + 20] + b"\xff" + data[HEADER + 21 :]),
    "a page over headers": (2, lambda data: data[:4096] + bytes(4096) + data[8192:]),
    "one header": (3, lambda data: data[:HEADER] + bytes(512) + data[HEADER + 512 :]),
    "another tar joined to it": (10, lambda data: data + data),
    "rubbish after it": (10, lambda data: data + b"rubbish"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_told_what_lies_before_it_kept_and_nothing_counted(whole, tmp_path, how):
    samples, change = DAMAGE[how]
    path = tmp_path / "a.tar"
    path.write_bytes(change((whole / "000000.tar").read_bytes()))
    index = scan(path)
    assert index.damage
    assert len(index) == samples
    for read in (ShardSet, lambda path: write_manifest(tmp_path)):
        with pytest.raises(ValueError, match="damaged"):
            read(path)
    assert not (tmp_path / "manifest.json").exists()
    assert check(str(tmp_path)) == 1


def test_a_disk_that_cannot_be_read_is_no_damage_of_the_tar():
    with pytest.raises(OSError, match="Input/output error"):
        scan("/proc/self/mem")


LONG = "a-long-folder-name/" * 12


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_extended_headers_are_heard(tmp_path, form):
    keys = [f"{LONG}f\u00e4ng{number}" for number in range(3)]
    path = tar_of(tmp_path / "a.tar", [f"{key}.JPG" for key in keys], form=form)
    assert rows(scan(path)) == [(key, ["jpg"]) for key in keys]


def test_the_sidecar_saves_the_second_scan_and_no_more(whole, tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    first = shard_index(path)
    assert [kept.name for kept in tmp_path.iterdir() if kept.name != "user-cache"] == ["a.tar"]
    monkeypatch.setattr(index_module, "scan", lambda path: pytest.fail("scanned again"))
    again = shard_index(path)
    assert rows(again) == rows(first)
    np.testing.assert_array_equal(again.offsets, first.offsets)
    monkeypatch.undo()
    path.write_bytes((whole / "000010.tar").read_bytes())  # another tar under the same name
    assert len(shard_index(path)) == 3


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY"])
def test_a_broken_sidecar_is_made_again(whole, tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    kept = sidecar(path, ".npz")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    assert len(shard_index(path)) == 10
    with np.load(kept) as arrays:
        assert len(arrays["key_ends"]) == 10
