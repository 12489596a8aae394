"""The samples of a tar shard and the offsets of their members: one pass over the headers, kept in a sidecar file.

A sample is a run of members with the same key: the name up to the first dot of its last part, as webdataset has it. The
rest of the name, in lower case, is the member's type. Offsets are kept only of members of an allow-list of types, so
no others can be read later; of these it is noted which samples have them. A sample with no readable member still counts
as one, so that counts agree with webdataset's.

A sidecar is trusted if it has the tar's size, mtime and last bytes. A member is read together with its header, which is
compared with the index (`ShardIndex.matches`), so a sidecar that is false all the same gives an error, no wrong sample.
"""

import errno
import hashlib
import io
import os
import re
import tarfile
import zipfile
import zlib
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from diffvision.data.shards.sidecars import read_sidecar, sidecars, write_sidecar

MEMBER_TYPES = dict.fromkeys(("jpg", "jpeg", "png", "webp"), 128 << 20) | {
    "txt": 64 << 20,
    "json": 64 << 20,
    "cls": 1 << 10,
    "jsonl": 1 << 30,
}
"""The types that can be decoded, with the most bytes of a member that can be used. `caption.txt` counts as a `txt`."""
RENAME = "rename the members, or pack the images again with `diffvision data make folder`"
"""The remedy for names that are no keys."""

_FORMAT = 5  # changes with what is noted
_MAX_COLUMNS = 32  # distinct member types in one shard; more than this is an attack, or keys with dots
_MAX_KEY = 4096
_MAX_SIZE = 1 << 60  # bytes of a member
_NOTES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_MAX_NOTE = 1 << 20  # bytes of a long name or of an extended header, which tarfile reads whole
_MAX_HEADERS = 4 * _MAX_NOTE  # bytes of all headers of one member
_TAIL = 1 << 15  # bytes at a tar's end that its sidecar must agree with
_MAX_RESUMED = 16  # times that a damaged tar is searched for more headers
_MAX_SIDECAR = 1 << 20  # bytes beyond what the tar's size allows an index
_USTAR = np.frombuffer(b"ustar", dtype=np.uint8)  # at byte 257 of a header
_BLOCK = 1 << 20
_ENCODING, _ERRORS = "utf-8", "surrogateescape"  # of names, whatever the locale: keys are compared
_CANNOT_SEEK = (errno.EINVAL, errno.EFBIG, errno.EOVERFLOW)  # to the offset that a header gives
_ARRAYS = {"offsets": "int64", "sizes": "int64", "heads": "int32", "key_bytes": "uint8", "key_ends": "int64"}
_NAME = re.compile(r"((?:.*/|)[^/.]+)[.]([^/]+)", re.DOTALL)
# The last part of a name that begins with a dot and ends as what is read; `._` begins what macOS puts next to files.
_HIDDEN = re.compile(rf"(?:.*/|)(?=[.])(?![.]_)[^/]*[.](?:{'|'.join(MEMBER_TYPES)})", re.IGNORECASE | re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # webdataset's notes inside a tar


@dataclass(frozen=True)
class ShardIndex:
    """Keys and offsets of one shard's samples.

    `offsets` and `sizes` of members are int64 [types, samples], `heads` (bytes of headers before each) int32; all are
    -1 where a sample has no such member.
    """

    types: tuple[str, ...]
    offsets: np.ndarray
    sizes: np.ndarray
    heads: np.ndarray
    key_bytes: np.ndarray
    key_ends: np.ndarray
    damage: str = ""  # why the tar could not be read to its end; empty when it could
    cut: bool = False  # whether the damage is that the file ends before the tar does
    dotted: str = ""  # of a shard with more member types than a data set has: that its keys have dots, with examples
    hidden: str = ""  # members whose names begin with a dot, which are in no sample
    other_types: tuple[str, ...] = ()  # of members that cannot be read
    end: int = 0  # byte at which reading stopped
    unread: int = 0  # bytes before it that belong to no member with an offset
    other_rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), bool))  # [other types, samples]

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, row: int) -> str:
        """Return the key of a sample."""
        start = int(self.key_ends[row - 1]) if row else 0
        return self.key_bytes[start : int(self.key_ends[row])].tobytes().decode("utf-8", "replace")

    def extent(self, row: int, member_type: str) -> tuple[int, int] | None:
        """Return (offset, size) in bytes of a sample's member, or None where it has no such member."""
        if member_type not in self.types:
            return None
        column = self.types.index(member_type)
        offset = int(self.offsets[column, row])
        return None if offset < 0 else (offset, int(self.sizes[column, row]))

    def members(self, row: int) -> list[str]:
        """Return the types this sample has."""
        return [name for name, offset in zip(self.types, self.offsets[:, row], strict=True) if offset >= 0]

    def other_names(self, row: int) -> list[str]:
        """Return the types this sample has that cannot be read."""
        return [name for name, has in zip(self.other_types, self.other_rows[:, row], strict=True) if has]

    def head(self, row: int, member_type: str) -> int:
        """Return the bytes of headers in front of a member that the sample has."""
        return int(self.heads[self.types.index(member_type), row])

    def matches(self, row: int, member_type: str, headers: bytes) -> bool:
        """Return whether these headers are those of this member: they have its key, its type and its size."""
        start = int(self.key_ends[row - 1]) if row else 0
        key = self.key_bytes[start : self.key_ends[row]].tobytes()
        size = int(self.sizes[self.types.index(member_type), row])
        # The form that most tars have; tarfile decides of any other, in tens of microseconds.
        name, last = b"%s.%s\0" % (key, member_type.encode(_ENCODING, _ERRORS)), headers[-tarfile.BLOCKSIZE :]
        if last[: len(name)] == name and len(name) <= 100 and not last[345] and last[156] in b"0\0":
            has_size = last[124:135] == b"%011o" % size and last[135] in b" \0"
            if has_size and (len(headers) == tarfile.BLOCKSIZE or _is_harmless_pax_header(headers)):
                return True
        try:
            member: tarfile.TarInfo | None
            if len(headers) == tarfile.BLOCKSIZE:
                member = _Header.frombuf(headers, _ENCODING, _ERRORS)
            else:
                member = _open_tar(io.BytesIO(headers)).next()
        except Exception:  # tarfile raises nearly anything on what is no header
            return False
        return (
            member is not None and member.isreg() and member.size == size and _split(member.name) == (key, member_type)
        )

    @property
    def digest(self) -> str:
        """The sha256 of all keys, types, offsets and sizes."""
        digest = hashlib.sha256("/".join(self.types).encode("utf-8", "surrogateescape"))
        for values in (self.offsets, self.sizes, self.heads, self.key_ends, self.key_bytes):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


class _Rows:
    """Collects members into rows, a new row whenever the key changes or a type comes a second time."""

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        self.cells = array("q")  # row, column, offset, size, head, flat
        self.others: dict[str, list[int]] = {}  # type -> the rows that have it
        self.hidden, self.first_hidden = 0, ""
        self.key_bytes = bytearray()
        self.key_ends = array("q")
        self._key: bytes | None = None
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self.key_ends)

    def add(self, member: tarfile.TarInfo) -> None:
        """Add one member of the tar: the next of this sample, or the first of the next."""
        if (name := _split(member.name)) is None:
            if _HIDDEN.fullmatch(member.name):
                self.first_hidden = self.first_hidden or member.name
                self.hidden += 1
            return
        key, member_type = name
        if key != self._key or member_type in self._seen:
            self._key, self._seen = key, set()
            self.key_bytes += key
            self.key_ends.append(len(self.key_bytes))
        self._seen.add(member_type)
        if member_type.rpartition(".")[2] not in MEMBER_TYPES:
            if len(self.others) < _MAX_COLUMNS or member_type in self.others:
                self.others.setdefault(member_type, []).append(len(self.key_ends) - 1)
            return
        column = self.columns.setdefault(member_type, len(self.columns))
        if column < _MAX_COLUMNS:
            offset = member.offset_data
            self.cells.extend((len(self.key_ends) - 1, column, offset, member.size, offset - member.offset))

    def index(self, end: int, damage: str, *, cut: bool) -> ShardIndex:
        """Return the index of all members that were added."""
        types = tuple(list(self.columns)[:_MAX_COLUMNS])
        offsets = np.full((len(types), len(self.key_ends)), -1, dtype=np.int64)
        sizes, heads = np.full_like(offsets, -1), np.full_like(offsets, -1, dtype=np.int32)
        rows, columns, *values = np.array(self.cells, dtype=np.int64).reshape(-1, 5).T
        offsets[columns, rows], sizes[columns, rows], heads[columns, rows] = values
        key_bytes = np.frombuffer(bytes(self.key_bytes), dtype=np.uint8)
        ends = np.array(self.key_ends, dtype=np.int64)
        index = ShardIndex(types, offsets, sizes, heads, key_bytes, ends, damage, cut)
        other_rows = np.zeros((len(self.others), len(ends)), dtype=bool)
        for column, having in enumerate(self.others.values()):
            other_rows[column, having] = True
        dotted = hidden = ""
        if len(self.columns) > _MAX_COLUMNS:
            first, *more = list(self.columns)[:3]
            dotted = (
                f"its members are of {len(self.columns)} types ({first}, {', '.join(more)}, ...), because a key "
                f"ends at the first dot of a name: {index.key(0)}.{first} is in the sample {index.key(0)}"
            )
        if self.hidden:
            first = f"{self.first_hidden!r:.80}"
            hidden = f"{self.hidden} members are in no sample, because their names begin with a dot, first {first}"
        unread = end - (_covered_bytes(index) or 0)
        others = tuple(self.others)
        return replace(
            index, dotted=dotted, hidden=hidden, end=end, unread=unread, other_types=others, other_rows=other_rows
        )


def _is_harmless_pax_header(headers: bytes) -> bool:
    """Return whether the first header is one pax block that sets neither name nor size, such as a time's fraction."""
    notes = headers[tarfile.BLOCKSIZE : -tarfile.BLOCKSIZE]
    return (
        len(notes) == tarfile.BLOCKSIZE
        and headers[156] in b"x"
        and b"0" * 11 < headers[124:135] <= b"00000001000"
        and not any(word in notes for word in (b"path=", b"size=", b"GNU."))
    )


def _split(name: str) -> tuple[bytes, str] | None:
    """Return (key, type) of a member's name, or None where the name is no sample's."""
    match = _NAME.fullmatch(name)
    if match is None or _META.match(name) or len(match[1]) > _MAX_KEY:
        return None
    return match[1].encode("utf-8", "surrogateescape"), match[2].lower()


class _Header(tarfile.TarInfo):
    """A tar header with a checked size, so that tarfile neither seeks backwards nor reads endless names into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        limit = _MAX_NOTE if header.type in _NOTES else _MAX_SIZE
        if not 0 <= header.size <= limit:
            raise tarfile.ReadError(f"a header says that {header.size:,} bytes follow")
        return header


def scan(path: str | os.PathLike) -> ShardIndex:
    """Read the headers of an uncompressed tar.

    A damaged tar gives the samples before the damage; `damage` says what it is and how many samples lie behind it.
    A block of zeros is the end of a tar only where nothing but zeros follows.

    Raises:
        OSError: the file cannot be read.
    """
    rows, behind = _Rows(), _Rows()
    with open(path, "rb") as file:
        end, damage = _add_members(file, 0, rows)
        stopped = end
        cut = bool(damage) and file.tell() >= os.fstat(file.fileno()).st_size
        if not damage and (more := _find_beyond_zeros(file, end)) is not None:
            damage = f"the zeros at byte {end} are not its end: more follows from byte {more} on"
        if damage and not cut:
            start = end
            for _ in range(_MAX_RESUMED):
                if (header := _find_header(file, start)) is None:
                    break
                end, _reason = _add_members(file, header, behind)
                start = max(end, header + tarfile.BLOCKSIZE)
            damage += f", with {len(behind)} more samples" if len(behind) else ""
    return rows.index(stopped, damage, cut=cut)


def _open_tar(file: IO[bytes]) -> tarfile.TarFile:
    """Open a tar at the position of the file; it need not be closed."""
    return tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding=_ENCODING, errors=_ERRORS)


def _add_members(file: IO[bytes], start: int, rows: _Rows) -> tuple[int, str]:
    """Add the members from a byte of a tar on; return the byte at which they end, and what is wrong there."""
    tar = None
    try:
        file.seek(start)
        tar = _open_tar(file)
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps every header in memory
            if not 0 <= member.size <= _MAX_SIZE:  # an extended header may have replaced it
                raise tarfile.ReadError(f"a header says that {member.size:,} bytes follow")
            if member.isreg() and not member.issparse():
                if not member.name:  # its long name is gone
                    raise tarfile.ReadError("a member has no name")
                if (headers := member.offset_data - member.offset) > _MAX_HEADERS:
                    raise tarfile.ReadError(f"{headers:,} bytes of headers before a member")
                rows.add(member)
        file.seek(tar.offset)
        # tarfile silently takes a broken header for the end: the real end is a block of zeros.
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            return tar.offset, f"no end-of-archive mark where it should be, at byte {tar.offset}"
        return tar.offset, ""
    except Exception as error:  # tarfile raises nearly anything on damaged headers: RecursionError, OverflowError
        if isinstance(error, OSError) and error.errno not in _CANNOT_SEEK:
            raise  # the disk's, not the tar's
        return tar.offset if tar else start, f"{error} (at byte {file.tell()})"


def _find_beyond_zeros(file: IO[bytes], start: int) -> int | None:
    """Return the first byte from `start` on that is not zero, or None where there is none."""
    file.seek(start)
    while block := file.read(_BLOCK):
        if rest := block.lstrip(b"\0"):
            return file.tell() - len(rest)
    return None


def _find_header(file: IO[bytes], start: int) -> int | None:
    """Return the first byte from `start` on, in steps of 512, at which there is a header with a right checksum."""
    size = tarfile.BLOCKSIZE
    for begin in range(start, os.fstat(file.fileno()).st_size, _BLOCK):
        file.seek(begin)
        data = file.read(_BLOCK)
        blocks = np.frombuffer(data, np.uint8, len(data) // size * size).reshape(-1, size)
        for number in np.flatnonzero((blocks[:, 257:262] == _USTAR).all(axis=1)).tolist():
            try:
                _Header.frombuf(blocks[number].tobytes(), _ENCODING, _ERRORS)
            except tarfile.TarError:
                continue
            return begin + number * size
    return None


def shard_index(path: str | os.PathLike) -> ShardIndex:
    """Return the index of a local tar, from its sidecar where that is still true, else read and kept.

    The sidecar is `.index/<name>.npz` next to the tar, or in the user's cache where that cannot be written.

    Raises:
        OSError: the tar cannot be read.
    """
    path = Path(path).absolute()
    stamp, candidates = _stamp(path), sidecars(path, ".npz")
    for sidecar in candidates:
        if (index := _load(sidecar, stamp)) is not None:
            return index
    index = scan(path)
    if np.array_equal(stamp, _stamp(path)):  # else it was written to meanwhile, and no sidecar would be true
        _save(candidates, index, stamp)
    return index


def correct_sidecars(path: str | os.PathLike, index: ShardIndex) -> list[str]:
    """Replace the sidecars that would be trusted and differ from `index`, which was just read.

    Returns:
        A clause for each, which names it and says whether it was replaced.
    """
    path = Path(path).absolute()
    stamp, clauses = _stamp(path), []
    for sidecar in sidecars(path, ".npz"):
        kept = _load(sidecar, stamp)
        if kept is not None and (kept.digest, kept.damage, kept.cut) != (index.digest, index.damage, index.cut):
            done = "it has been made again" if _save([sidecar], index, stamp) else "it cannot be replaced: remove it"
            clauses.append(f"its index {sidecar} was not true of it: {done}")
    return clauses


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


def _stamp(path: Path) -> np.ndarray:
    """Return what a sidecar must agree with to be trusted."""
    version = Version.of(path)
    with open(path, "rb") as file:
        file.seek(max(0, version.size - _TAIL))
        tail = zlib.crc32(file.read(_TAIL))
    return np.array([_FORMAT, version.size, version.mtime_ns, tail], dtype=np.int64)


def _load(sidecar: Path, stamp: np.ndarray) -> ShardIndex | None:
    """Read an index from its sidecar; None if it is of another version of the tar, or damaged."""
    tar_bytes = int(stamp[1])
    # A member's header is a block of 512 bytes, and no row or key of the index has twice that for it.
    limit = _MAX_SIDECAR + 2 * tar_bytes
    try:
        file = io.BytesIO(read_sidecar(sidecar, limit))
        with zipfile.ZipFile(file) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > limit:
                return None
        with np.load(file, allow_pickle=False) as kept:
            if not np.array_equal(kept["stamp"], stamp):
                return None
            types = tuple(str(name) for name in kept["types"])
            arrays = {name: kept[name] for name in (*_ARRAYS, "other_rows")}
            others = tuple(str(name) for name in kept["other_types"])
            texts: dict[str, Any] = {name: str(kept[name]) for name in ("damage", "dotted", "hidden")}
            counts: dict[str, Any] = {name: int(kept[name]) for name in ("end", "unread")}
            index = ShardIndex(types, **arrays, **texts, **counts, cut=bool(kept["cut"]), other_types=others)
        return index if _is_possible(index, tar_bytes) else None
    except (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, zlib.error, zipfile.BadZipFile):
        return None  # absent, cut short or of another kind: read the tar again


def _is_possible(index: ShardIndex, tar_bytes: int) -> bool:
    """Return whether a sidecar's arrays could be those of a tar of this size."""
    if any(name.rpartition(".")[2] not in MEMBER_TYPES for name in index.types):
        return False
    arrays = [getattr(index, name) for name in _ARRAYS]
    shape = (len(index.types), len(index))
    if [a.dtype for a in arrays] != list(_ARRAYS.values()) or any(a.shape != shape for a in arrays[:3]):
        return False
    if index.other_rows.dtype != bool or index.other_rows.shape != (len(index.other_types), len(index)):
        return False
    present = index.offsets >= 0
    offsets, sizes, heads = (values[present] for values in arrays[:3])
    ends = np.concatenate(([0], index.key_ends))
    return bool(
        ((sizes >= 0) & (sizes <= _MAX_SIZE) & (offsets <= tar_bytes)).all()
        and ((heads >= tarfile.BLOCKSIZE) & (heads <= _MAX_HEADERS) & (heads <= offsets)).all()
        and (np.diff(ends) > 0).all()
        and ends[-1] == len(index.key_bytes)
        and (covered := _covered_bytes(index)) is not None
        and covered + index.unread == index.end
    )


def _covered_bytes(index: ShardIndex) -> int | None:
    """Return the bytes of the members with an offset and their headers, in whole blocks; None if two overlap."""
    present = index.offsets >= 0
    offsets, sizes, heads = index.offsets[present], index.sizes[present], index.heads[present]
    begins, ends = offsets - heads, offsets + -(-sizes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    order = np.argsort(begins)
    if (begins[order][1:] < ends[order][:-1]).any():
        return None
    return int((ends - begins).sum())


def _save(places: list[Path], index: ShardIndex, stamp: np.ndarray) -> bool:
    names = (*_ARRAYS, "damage", "cut", "dotted", "hidden", "end", "unread", "other_rows")
    values: dict[str, Any] = {name: getattr(index, name) for name in names}
    values["types"], values["other_types"] = (np.array(t, dtype=np.str_) for t in (index.types, index.other_types))
    return write_sidecar(places, lambda file: np.savez(file, stamp=stamp, **values))


def count_with_webdataset(path: Path) -> tuple[int, Counter[str]]:
    """Return the samples and the members by type that webdataset finds where the index finds none.

    That is the case in a compressed tar without the ending of its compression. No content is read into memory.
    """
    from webdataset import WebDataset
    from webdataset.tariterators import base_plus_ext

    names: list[tuple[str, str]] = []

    def skip(name: str) -> bool:
        names.append(base_plus_ext(name))
        return False

    with suppress(Exception):  # tarfile raises nearly anything on damaged headers; what comes before counts
        next(iter(WebDataset([str(path.absolute())], shardshuffle=False, select_files=skip, empty_check=False)), None)
    keyed = [(key, kind) for key, kind in names if key is not None]
    return len(list(groupby(keyed, key=lambda name: name[0]))), Counter(kind.lower() for _, kind in keyed)
