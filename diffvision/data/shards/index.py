"""The samples of a tar shard and the offsets of their members: one pass over the headers, kept in a sidecar file.

A sample is a run of members with the same key: the name up to the first dot of its last part, as webdataset has it. The
rest of the name, in lower case, is the member's type. Only members of an allow-list of types are read; of the others it
is known which samples have them. A sample with no readable member still counts, so that counts agree with webdataset's.
Links, devices, sparse members and names that begin with a dot are in no sample.
"""

import errno
import hashlib
import os
import re
import tarfile
import zipfile
import zlib
from array import array
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

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

_FORMAT = 10  # changes with what is noted
_MAX_TYPES = 32  # of members that can be read in one shard, with more of which keys have dots; and of others
_MAX_SIZE = 1 << 60  # bytes of a member
_BLOCK = 1 << 20
_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # of names, whatever the locale: keys are compared
_CANNOT_SEEK = (errno.EINVAL, errno.EFBIG, errno.EOVERFLOW)  # to the offset that a header gives
_NAME = re.compile(r"((?:.*/|)[^/.]+)[.]([^/]+)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset's notes inside a tar


@dataclass(frozen=True)
class ShardIndex:
    """Keys and offsets of one shard's samples; offsets and sizes are int64 [types, samples], -1 for no such member.

    Attributes:
        digest: the sha256 of all keys, types, offsets and sizes.
        damage: why the tar could not be read to its end, or has no keys; empty when it is whole.
    """

    types: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    key_bytes: np.ndarray
    key_ends: np.ndarray
    digest: str
    damage: str

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        start = int(self.key_ends[row - 1]) if row else 0
        return self.key_bytes[start : int(self.key_ends[row])].tobytes().decode("utf-8", "replace")


def _is_readable(member_type: str) -> bool:
    return member_type.rpartition(".")[2] in MEMBER_TYPES


class _Rows:
    """Collects members into rows, a new row whenever the key changes or a type comes a second time."""

    def __init__(self) -> None:
        self.types: dict[str, int] = {}  # -> column
        self.cells = array("q")  # column, row, offset, size, flat
        self.key_bytes = bytearray()
        self.key_ends = array("q")
        self._key: bytes | None = None
        self._seen: set[str] = set()

    def add(self, member: tarfile.TarInfo) -> None:
        """Add one member of the tar: the next of this sample, or the first of the next."""
        name = _NAME.fullmatch(member.name)
        if name is None or _META.match(member.name):
            return
        key, member_type = name[1].encode(_ENCODING, _ERRORS), name[2].lower()
        if key != self._key or member_type in self._seen:
            self._key, self._seen = key, set()
            self.key_bytes += key
            self.key_ends.append(len(self.key_bytes))
        self._seen.add(member_type)
        if member_type not in self.types:
            is_readable = _is_readable(member_type)
            if sum(_is_readable(name) == is_readable for name in self.types) == _MAX_TYPES:
                if not is_readable:
                    return
                raise tarfile.ReadError(
                    f"the shard has more than {_MAX_TYPES} types of members: a key ends at the first dot of a name"
                )
        column = self.types.setdefault(member_type, len(self.types))
        self.cells.extend((column, len(self.key_ends) - 1, member.offset_data, member.size))

    def index(self, damage: str) -> ShardIndex:
        """Return the index of all members that were added."""
        columns, rows, *values = np.array(self.cells, dtype=np.int64).reshape(-1, 4).T
        offsets = np.full((len(self.types), len(self.key_ends)), -1, dtype=np.int64)
        sizes = np.full_like(offsets, -1)
        offsets[columns, rows], sizes[columns, rows] = values
        key_bytes = np.frombuffer(bytes(self.key_bytes), dtype=np.uint8)
        key_ends = np.array(self.key_ends, dtype=np.int64)
        digest = hashlib.sha256("/".join(self.types).encode(_ENCODING, _ERRORS))
        for part in (offsets, sizes, key_ends, key_bytes):
            digest.update(part.data)
        return ShardIndex(tuple(self.types), offsets, sizes, key_bytes, key_ends, digest.hexdigest(), damage)


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
    return rows.index(damage)


def _add_members(file: IO[bytes], rows: _Rows) -> str:
    """Add the members of a tar, and return what is wrong with it, or ""."""
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
        while block := file.read(_BLOCK):
            if rest := block.lstrip(b"\0"):
                more = file.tell() - len(rest)
                return f"the zeros at byte {tar.offset} are not its end: more follows from byte {more} on"
        return ""
    except Exception as error:  # tarfile raises nearly anything on damaged headers: RecursionError, OverflowError
        if isinstance(error, OSError) and error.errno not in _CANNOT_SEEK:
            raise  # the disk's, not the tar's
        return f"{error} (at byte {file.tell()})"


def shard_index(path: str | os.PathLike) -> ShardIndex:
    """Return the index of a local tar, from its sidecar where that is of this version of it, else read and kept.

    Raises:
        OSError: the tar cannot be read.
    """
    version, kept = f"{_FORMAT} {stamp(path)}", sidecar(path, ".npz")
    with (
        suppress(OSError, ValueError, TypeError, KeyError, EOFError, zlib.error, zipfile.BadZipFile),
        np.load(kept) as f,
    ):
        if str(f["version"]) == version:
            texts = str(f["digest"]), str(f["damage"])
            return ShardIndex(
                tuple(f["types"].tolist()), f["offsets"], f["sizes"], f["key_bytes"], f["key_ends"], *texts
            )
    index = scan(path)
    if version == f"{_FORMAT} {stamp(path)}":  # else it was written to meanwhile
        values = asdict(index) | {"types": np.array(index.types, dtype=np.str_), "version": version}
        write_sidecar(kept, lambda file: np.savez_compressed(file, **values))
    return index
