"""The samples of a tar shard and the offsets of their members: one pass over the headers, kept in a sidecar file.

A sample is a run of members with the same key: the name up to the first dot of its last part, as webdataset has it. The
rest of the name, in lower case, is the member's type. Only members of an allow-list of types are read; of the others it
is known which samples have them. A sample with no readable member still counts, so that counts agree with webdataset's.
Links, devices and sparse members are in no sample.
"""

import errno
import hashlib
import os
import re
import tarfile
import zipfile
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from diffvision.data.shards.sidecars import sidecar, stamp, write_sidecar

MEMBER_TYPES = dict.fromkeys(("jpg", "jpeg", "png", "webp"), 128 << 20) | {
    "txt": 64 << 20,
    "json": 64 << 20,
    "cls": 1 << 10,
    "jsonl": 1 << 30,
    "npy": 0,
}
"""The types that can be decoded, with the most bytes of a member that can be used. `caption.txt` counts as a `txt`."""
RENAME = "rename the members, or pack the images again with `diffvision data make folder`"
"""The remedy for names that are no keys."""

_FORMAT = 7  # changes with what is noted
_MAX_COLUMNS = 32  # distinct member types in one shard; with more of them, keys have dots
_MAX_SIZE = 1 << 60  # bytes of a member
_BLOCK = 1 << 20
_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # of names, whatever the locale: keys are compared
_CANNOT_SEEK = (errno.EINVAL, errno.EFBIG, errno.EOVERFLOW)  # to the offset that a header gives
_ARRAYS = ("offsets", "sizes", "key_bytes", "key_ends")
_TEXTS = ("digest", "damage", "dotted", "hidden")
_NAME = re.compile(r"((?:.*/|)[^/.]+)[.]([^/]+)", re.DOTALL)
# The last part of a name that begins with a dot and ends as what is read; `._` begins what macOS puts next to files.
_HIDDEN = re.compile(rf"(?:.*/|)(?=[.])(?![.]_)[^/]*[.](?:{'|'.join(MEMBER_TYPES)})", re.IGNORECASE | re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset's notes inside a tar


@dataclass(frozen=True)
class ShardIndex:
    """Keys and offsets of one shard's samples; offsets and sizes are int64 [types, samples], -1 for no such member.

    Attributes:
        digest: the sha256 of all keys, and of types, offsets and sizes of members that can be read.
        damage: why the tar could not be read to its end; empty when it could.
        dotted: of a shard with more member types than a data set has: that its keys have dots, with examples.
        hidden: members whose names begin with a dot, which are in no sample.
        cut: whether the damage is that the file ends before the tar does.
    """

    types: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    key_bytes: np.ndarray
    key_ends: np.ndarray
    digest: str
    damage: str
    dotted: str
    hidden: str
    cut: bool

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        start = int(self.key_ends[row - 1]) if row else 0
        return self.key_bytes[start : int(self.key_ends[row])].tobytes().decode("utf-8", "replace")

    def members(self, row: int) -> list[str]:
        """Return the types this sample has that can be read."""
        offsets = zip(self.types, self.offsets[:, row], strict=True)
        return [name for name, offset in offsets if offset >= 0 and is_readable(name)]


def is_readable(member_type: str) -> bool:
    """Return whether members of a type can be read."""
    return member_type.rpartition(".")[2] in MEMBER_TYPES


class _Rows:
    """Collects members into rows, a new row whenever the key changes or a type comes a second time."""

    def __init__(self) -> None:
        self.types: tuple[dict[str, int], dict[str, int]] = ({}, {})  # those that can be read, the others -> column
        self.cells = array("q")  # row, whether it is of another type, column, offset, size, bytes of headers, flat
        self.hidden: list[str] = []
        self.key_bytes = bytearray()
        self.key_ends = array("q")
        self._key: bytes | None = None
        self._seen: set[str] = set()

    def add(self, member: tarfile.TarInfo) -> None:
        """Add one member of the tar: the next of this sample, or the first of the next."""
        name = _NAME.fullmatch(member.name)
        if name is None or _META.match(member.name):
            if _HIDDEN.fullmatch(member.name):
                self.hidden.append(member.name)
            return
        key, member_type = name[1].encode(_ENCODING, _ERRORS), name[2].lower()
        if key != self._key or member_type in self._seen:
            self._key, self._seen = key, set()
            self.key_bytes += key
            self.key_ends.append(len(self.key_bytes))
        self._seen.add(member_type)
        is_other = not is_readable(member_type)
        column = self.types[is_other].setdefault(member_type, len(self.types[is_other]))
        if column < _MAX_COLUMNS:
            offset = member.offset_data
            row = len(self.key_ends) - 1
            self.cells.extend((row, is_other, column, offset, member.size, offset - member.offset))

    def index(self, damage: str, *, cut: bool) -> ShardIndex:
        """Return the index of all members that were added."""
        read, others = (list(types)[:_MAX_COLUMNS] for types in self.types)
        offsets = np.full((len(read) + len(others), len(self.key_ends)), -1, dtype=np.int64)
        sizes, heads = np.full_like(offsets, -1), np.full_like(offsets, -1, dtype=np.int32)
        rows, is_other, columns, *values = np.array(self.cells, dtype=np.int64).reshape(-1, 6).T
        columns = columns + is_other * len(read)
        offsets[columns, rows], sizes[columns, rows], heads[columns, rows] = values
        key_bytes = np.frombuffer(bytes(self.key_bytes), dtype=np.uint8)
        key_ends = np.array(self.key_ends, dtype=np.int64)
        digest = hashlib.sha256("/".join(read).encode(_ENCODING, _ERRORS))
        for array_of_all in (offsets[: len(read)], sizes[: len(read)], heads[: len(read)], key_ends, key_bytes):
            digest.update(np.ascontiguousarray(array_of_all).data)
        dotted = hidden = ""
        if (number := len(self.types[0])) > _MAX_COLUMNS:
            key = self.key_bytes[: self.key_ends[0]].decode(_ENCODING, "replace")
            dotted = (
                f"its members are of {number} types ({', '.join(read[:3])}, ...), because a key ends at the first dot "
                f"of a name: {key}.{read[0]} is in the sample {key}"
            )
        if self.hidden:
            first = f"{self.hidden[0]!r:.80}"
            hidden = f"{len(self.hidden)} members are in no sample, because their names begin with a dot, first {first}"
        types = (*read, *others)
        return ShardIndex(
            types, offsets, sizes, key_bytes, key_ends, digest.hexdigest(), damage, dotted, hidden, cut=cut
        )


def scan(path: str | os.PathLike) -> ShardIndex:
    """Read the headers of an uncompressed tar.

    A damaged tar gives the samples before the damage. A block of zeros is the end of a tar only where nothing but zeros
    follows.

    Raises:
        OSError: the file cannot be read.
    """
    rows = _Rows()
    with open(path, "rb") as file:
        damage = _add_members(file, rows)
        cut = bool(damage) and file.tell() >= os.fstat(file.fileno()).st_size
        end = file.tell()
        if not damage and (more := _find_beyond_zeros(file)) is not None:
            damage = f"the zeros at byte {end - tarfile.BLOCKSIZE} are not its end: more follows from byte {more} on"
    return rows.index(damage, cut=cut)


def _add_members(file: IO[bytes], rows: _Rows) -> str:
    """Add the members of a tar and stop behind its first block of zeros; return what is wrong there, or ""."""
    try:
        tar = tarfile.open(fileobj=file, mode="r:", encoding=_ENCODING, errors=_ERRORS)  # noqa: SIM115  the file is closed
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps every header in memory
            if not 0 <= member.size <= _MAX_SIZE:  # tarfile would go back, or no file is so long
                raise tarfile.ReadError(f"a header says that {member.size:,} bytes follow")
            if member.isreg() and not member.issparse():
                rows.add(member)
        file.seek(tar.offset)
        # tarfile silently takes a broken header for the end: the real end is a block of zeros.
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            return f"no end-of-archive mark where it should be, at byte {tar.offset}"
        return ""
    except Exception as error:  # tarfile raises nearly anything on damaged headers: RecursionError, OverflowError
        if isinstance(error, OSError) and error.errno not in _CANNOT_SEEK:
            raise  # the disk's, not the tar's
        return f"{error} (at byte {file.tell()})"


def _find_beyond_zeros(file: IO[bytes]) -> int | None:
    """Return the first byte from here on that is not zero, or None where there is none."""
    while block := file.read(_BLOCK):
        if rest := block.lstrip(b"\0"):
            return file.tell() - len(rest)
    return None


def shard_index(path: str | os.PathLike) -> ShardIndex:
    """Return the index of a local tar, from its sidecar where that is of this version of it, else read and kept.

    Raises:
        OSError: the tar cannot be read.
    """
    version, kept = f"{_FORMAT} {stamp(path)}", sidecar(path, ".npz")
    if (index := _load(kept, version)) is not None:
        return index
    index = scan(path)
    if version == f"{_FORMAT} {stamp(path)}":  # else it was written to meanwhile
        values = {name: getattr(index, name) for name in (*_ARRAYS, *_TEXTS, "cut")}
        types = np.array(index.types, dtype=np.str_)
        write_sidecar(kept, lambda file: np.savez_compressed(file, version=version, types=types, **values))
    return index


def _load(sidecar: Path, version: str) -> ShardIndex | None:
    """Read an index from its sidecar; None if there is none, or it is of another version of the tar, or damaged."""
    try:
        with np.load(sidecar, allow_pickle=False) as kept:
            if str(kept["version"]) != version:
                return None
            arrays = {name: kept[name] for name in _ARRAYS}
            texts: dict[str, Any] = {name: str(kept[name]) for name in _TEXTS}
            return ShardIndex(tuple(kept["types"].tolist()), **arrays, **texts, cut=bool(kept["cut"]))
    except (OSError, ValueError, TypeError, KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None


class Version(NamedTuple):
    """What changes whenever a file is written to or replaced.

    `ctime_ns` also changes with the file's mode and links, and cannot be set back.
    """

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, file: int | str | os.PathLike) -> "Version":
        """Return the version of an open file or of a path."""
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
