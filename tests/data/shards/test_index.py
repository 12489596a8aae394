import io
import os
import tarfile

import numpy as np
import pytest
import webdataset

from diffvision.data import ShardSet
from diffvision.data.make import check, write_manifest
from diffvision.data.shards import index as index_module
from diffvision.data.shards.index import scan, shard_index
from diffvision.data.shards.sidecars import sha256_of


def tar_of(path, names, kind=tarfile.REGTYPE):
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    return path


def rows(index):
    return [(index.key(row), sorted(index.members(row))) for row in range(len(index))]


def test_members_lie_where_the_index_says(whole):
    path = whole / "000003.tar"
    index, data = scan(path), path.read_bytes()
    assert len(index) == 10
    assert index.damage == ""
    for row in range(10):
        offset, size = index.extent(row, "txt")
        assert data[offset : offset + size] == f"sample {30 + row}".encode()
        assert index.extent(row, "webp") is None


def test_samples_are_those_that_webdataset_finds(tmp_path):
    names = [
        "a/x.jpg",
        "a/x.txt",
        "a/x.pyd",
        "b/x.JPG",
        "y.v1.png",
        "y.txt",
        "only.pyd",
        "__meta__/z.txt",
        "noext",
        "u.cls",
    ]
    path = tar_of(tmp_path / "a.tar", names)
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
    assert len(scan(tar_of(tmp_path / "a.tar", ["x.jpg"], kind))) == 0


def test_types_and_names_without_bound_are_not_kept(tmp_path):
    names = [f"{n}.t{n}.txt" for n in range(50)] + ["k" * 5000 + ".txt"]
    index = scan(tar_of(tmp_path / "a.tar", names))
    assert len(index) == 50
    assert len(index.types) == 32


def damaged(data, how):
    header = 1024  # of the second member
    return {
        "empty": b"",
        "not a tar": b"<html>" + b"x" * 2000,
        "cut in the first header": data[:100],
        "cut in data": data[:513],
        "cut in a header": data[: header + 100],
        "cut between members": data[:header],
        "flipped in a header": data[: header + 20] + b"\xff" + data[header + 21 :],
    }[how]


@pytest.mark.parametrize(
    ("how", "samples"),
    [
        ("empty", 0),
        ("not a tar", 0),
        ("cut in the first header", 0),
        ("cut in data", 1),
        ("cut in a header", 1),
        ("cut between members", 1),
        ("flipped in a header", 1),
    ],
)
def test_damage_is_told_and_what_lies_before_it_kept(tmp_path, how, samples):
    path = tar_of(tmp_path / "a.tar", ["1.jpg", "1.txt", "2.jpg", "2.txt"])
    data = path.read_bytes()
    assert data[1024:1029] == b"1.txt"
    path.write_bytes(damaged(data, how))
    index = scan(path)
    assert index.damage
    assert len(index) == samples


ZEROS = {
    "a page over headers": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "a page at the start": lambda data: bytes(4096) + data[4096:],
    "one header": lambda data: data[: 6 * 512 * 3] + bytes(512) + data[6 * 512 * 3 + 512 :],
    "another tar joined to it": lambda data: data + data,
    "no header": lambda data: data + b"rubbish",
}


@pytest.mark.parametrize("how", ZEROS)
def test_zeros_are_the_end_only_where_nothing_follows(whole, tmp_path, how):
    path = tmp_path / "a.tar"
    path.write_bytes(ZEROS[how]((whole / "000000.tar").read_bytes()))
    index = scan(path)
    assert "are not its end: more follows from byte" in index.damage
    assert not index.cut
    before = {"a page over headers": 2, "a page at the start": 0, "one header": 3}.get(how, 10)
    assert len(index) == before
    behind = {"a page over headers": 8, "a page at the start": 9, "one header": 7, "another tar joined to it": 10}.get(
        how
    )
    assert behind is None or f"with {behind} more samples" in index.damage
    with pytest.raises(ValueError, match="are not its end"):
        ShardSet(path)
    with pytest.raises(ValueError, match="are not its end"):
        write_manifest(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    assert check(str(tmp_path)) == 1


def test_a_broken_header_says_what_lies_behind_it(whole, tmp_path):
    data = bytearray((whole / "000000.tar").read_bytes())
    data[6 * 512 * 2 + 20] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    assert scan(tmp_path / "a.tar").damage.endswith(f"at byte {6 * 512 * 2}, with 8 more samples")


def test_a_disk_that_cannot_be_read_is_no_damage_of_the_tar():
    with pytest.raises(OSError, match="Input/output error"):
        scan("/proc/self/mem")


LONG = "a-long-folder-name/" * 12


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("key", ["a", "a/b", LONG + "a", "f\u00e4ng", LONG[:150] + "/x"])
def test_a_member_is_known_by_its_headers(tmp_path, form, key):
    names = [f"{key}{number}.{ending}" for number in range(3) for ending in ("JPG", "v1.txt")]
    try:
        with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 3
                tar.addfile(info, io.BytesIO(b"abc"))
    except ValueError:
        pytest.skip("ustar has no room for this name")
    index, data = scan(tmp_path / "a.tar"), (tmp_path / "a.tar").read_bytes()

    def headers(row, member_type):
        offset, _ = index.extent(row, member_type)
        return data[offset - index.head(row, member_type) : offset]

    for row in range(3):
        assert index.matches(row, "jpg", headers(row, "jpg"))
        assert index.matches(row, "v1.txt", headers(row, "v1.txt"))
        assert not index.matches(row, "jpg", headers(row, "v1.txt"))
        assert not index.matches(row, "jpg", headers((row + 1) % 3, "jpg"))
    assert not index.matches(0, "jpg", bytes(512))
    assert not index.matches(0, "jpg", b"x" * 512)
    assert not index.matches(0, "jpg", b"")


@pytest.mark.parametrize("notes", [{"mtime": "1.5"}, {"path": "b.txt"}, {"size": "2"}, {"comment": "x" * 600}])
def test_an_extended_header_is_heard(tmp_path, notes):
    """It may say another name or size than the header behind it, which alone is plain."""
    plain = tarfile.TarInfo("a.txt")
    plain.size = 3
    block = plain.tobuf(tarfile.USTAR_FORMAT)
    extended = bytearray(tarfile.TarInfo.create_pax_global_header(notes))
    extended[156:157], extended[148:156] = b"x", b" " * 8
    extended[148:156] = b"%06o\0 " % sum(extended[:512])
    (tmp_path / "a.tar").write_bytes(bytes(extended) + block + b"abc".ljust(512, b"\0") + bytes(1024))
    index = scan(tmp_path / "a.tar")
    plainly = index.key(0) == "a" and index.extent(0, "txt")[1] == 3
    assert plainly == (not notes.keys() & {"path", "size"})
    headers = bytes(extended) + block
    assert index.head(0, "txt") == len(headers)
    assert index.matches(0, "txt", headers)
    (tmp_path / "b.tar").write_bytes(block + b"abc".ljust(512, b"\0") + bytes(1024))
    assert scan(tmp_path / "b.tar").matches(0, "txt", headers) == plainly


def test_the_sidecar_saves_the_second_scan_and_no_more(whole, tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    first = shard_index(path)
    assert (tmp_path / ".index" / "a.tar.npz").exists()
    monkeypatch.setattr(index_module, "scan", lambda path: pytest.fail("scanned again"))
    again = shard_index(path)
    assert rows(again) == rows(first)
    np.testing.assert_array_equal(again.offsets, first.offsets)
    monkeypatch.undo()
    path.write_bytes((whole / "000010.tar").read_bytes())  # another tar under the same name
    assert len(shard_index(path)) == 3


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY"])
def test_a_broken_sidecar_is_made_anew(whole, tmp_path, content):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    (tmp_path / ".index").mkdir()
    (tmp_path / ".index" / "a.tar.npz").write_bytes(content)
    assert len(shard_index(path)) == 10
    assert index_module._load(tmp_path / ".index" / "a.tar.npz", index_module._stamp(path)) is not None


def test_a_sidecar_with_types_that_are_not_read_is_not_trusted(whole, tmp_path):
    path, sidecar = tmp_path / "a.tar", tmp_path / ".index" / "a.tar.npz"
    path.write_bytes((whole / "000000.tar").read_bytes())
    types = shard_index(path).types
    with np.load(sidecar) as kept:
        content = dict(kept)
    np.savez(sidecar, **{**content, "types": np.array(["exe", *types[1:]])})
    assert shard_index(path).types == types


def test_the_index_in_the_former_cache_folder_is_found(whole, tmp_path, monkeypatch):
    """Of earlier versions, on a system that has another folder for caches."""
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    (tmp_path / ".index").write_text("a file where the sidecars' directory would be")
    first = shard_index(path)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "Caches" / name))
    monkeypatch.setattr(index_module, "scan", lambda path: pytest.fail("scanned again"))
    assert shard_index(path).digest == first.digest


def test_where_nothing_can_be_written_the_users_cache_keeps_the_index(whole, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    (tmp_path / ".index").write_text("a file where the sidecars' directory would be")
    shard_index(path)
    assert len(list((tmp_path / "user-cache" / "diffvision" / "index").glob("*.npz"))) == 1


def test_no_sidecar_is_written_through_a_link(whole, tmp_path):
    """A folder of shards may come from anyone, with its links."""
    source, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    source.mkdir(), elsewhere.mkdir()
    path = source / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    (source / ".index").symlink_to(elsewhere)
    assert len(shard_index(path)) == 10
    sha256_of(path)
    assert list(elsewhere.iterdir()) == []
    kept = tmp_path / "user-cache" / "diffvision" / "index"
    assert {note.suffix for note in kept.iterdir()} == {".npz", ".sha256", ".lock"}


@pytest.mark.parametrize("ending", ["npz", "sha256"])
@pytest.mark.parametrize("kind", ["link", "pipe", "endless"])
def test_what_is_no_file_is_no_sidecar(whole, tmp_path, ending, kind):
    path, sidecar = tmp_path / "a.tar", tmp_path / ".index" / f"a.tar.{ending}"
    path.write_bytes((whole / "000000.tar").read_bytes())
    sidecar.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(sidecar)  # to open it would wait for ever
    elif kind == "endless":
        sidecar.write_bytes(b"")
        os.truncate(sidecar, 1 << 40)
    else:
        sidecar.symlink_to(tmp_path / "target")
        (tmp_path / "target").write_text("kept")
    assert len(shard_index(path)) == 10
    assert len(sha256_of(path)) == 64
    assert sidecar.stat().st_size < 1 << 20
    assert kind != "link" or (tmp_path / "target").read_text() == "kept"


def forge(sidecar, **changes):
    """A sidecar with other values, and all that it is believed by."""
    with np.load(sidecar) as kept:
        content = dict(kept)
    np.savez(sidecar, **{name: changes.get(name, lambda value: value)(value) for name, value in content.items()})


IMPOSSIBLE = {
    "far": {"offsets": lambda value: value + (1 << 50)},
    "negative": {"sizes": lambda value: -value - 5},
    "of another type": {"offsets": lambda value: value.astype(float)},
    "of another shape": {"sizes": lambda value: value[:1]},
    "without keys": {"key_bytes": lambda value: value[:3]},
    "that drops rows": {name: lambda value: value[..., :5] for name in ("offsets", "sizes", "heads", "key_ends")}
    | {"other_rows": lambda value: value[:, :5], "key_bytes": lambda value: value[: len(value) // 2]},
    "that repeats a row": {name: lambda value: value[:, [0] * 10] for name in ("offsets", "sizes", "heads")},
    "with great headers": {"heads": lambda value: value + (1 << 29)},
}


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_index_that_cannot_be_is_made_anew(whole, tmp_path, changes):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())
    first = shard_index(path)
    forge(tmp_path / ".index" / "a.tar.npz", **changes)
    assert shard_index(path).digest == first.digest


def test_a_sidecar_is_never_unpickled(whole, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes((whole / "000000.tar").read_bytes())

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / ".index").mkdir()
    np.savez(tmp_path / ".index" / "a.tar.npz", stamp=np.array([Payload()], dtype=object))
    assert len(shard_index(path)) == 10
    assert not (tmp_path / "ran").exists()


def header(name, size, kind=tarfile.REGTYPE):
    """A member's header of whatever size it says, with the right checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = (size % 2**96).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
    block[156:157], block[148:156] = kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extended(line):
    return header("x", len(line), tarfile.XHDTYPE) + line.ljust(512, b"\0") + header("b.txt", 1)


@pytest.mark.parametrize(
    "blocks",
    [
        header("b.txt", -512),  # tarfile would read this header for ever
        extended(b"14 size=-1536\n"),  # and these two
        header("b.txt", 2**80),  # beyond any file: OverflowError
        extended(b"14 size=9" + b"9" * 4 + b"\n") * 3000,  # RecursionError
        header("././@LongLink", 2**40, tarfile.GNUTYPE_LONGNAME),  # would be read whole, into memory
        header("b.cls", 2**40),  # more than there is
    ],
    ids=["back", "extended back", "far", "chain", "long name", "long member"],
)
def test_hostile_headers_end_the_tar(tmp_path, blocks):
    tar_of(tmp_path / "s.tar", ["a.txt"])
    whole = (tmp_path / "s.tar").read_bytes()
    (tmp_path / "s.tar").write_bytes(whole[:1024] + blocks + bytes(1024))
    index = scan(tmp_path / "s.tar")
    assert index.damage
    assert index.key(0) == "a"
    assert len(index) <= 2
