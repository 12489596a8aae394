"""The sizes that a GGUF file declares, compared with its length before anything is read by them.

The package `gguf` takes them as they are: a file of 49 bytes can declare a list of 2^60 elements.

Source: ggml-org/ggml docs/gguf.md.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

_MAX_ELEMENTS = 1 << 21  # of all lists, keys and tensors: the largest vocabularies have about 2^20 with their merges
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type
_STRING, _LIST = 8, 9
_MAX_DIMENSIONS = 4


def check_sizes(path: Path) -> None:
    """Raise an error for a GGUF file that declares more than it holds; of another file, nothing is checked.

    Raises:
        ValueError: a text, a list, a key or a tensor goes beyond the end of the file, or there are too many.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).check()


class _Header:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 4
        self._elements = 0
        self._order = "<"
        if self._number("I") & 0xFFFF == 0:  # the version, in the other order of bytes
            self._order = ">"

    def check(self) -> None:
        """Walk through the header, and refuse sizes that the file cannot hold."""
        tensors, keys = self._number("Q"), self._number("Q")
        self._count(keys, 13, "the metadata")
        for _ in range(keys):
            name = self._text()
            self._value(self._number("I"), name)
        self._count(tensors, 32, "the list of tensors")
        values = 0
        for _ in range(tensors):
            name, dimensions = self._text(), self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions:,} dimensions, and tensors have at most {_MAX_DIMENSIONS}")
            values += math.prod(self._number("Q") for _ in range(dimensions))
            self._skip(4 + 8, name)
            if values > 8 * len(self._content):  # no type has less than a bit for a value
                raise ValueError(f"its tensors have {values:,} values up to {name}, more than a file of its length can")

    def _value(self, kind: int, name: str) -> None:
        """Skip one metadata value of a type."""
        if kind == _STRING:
            self._text()
        elif kind == _LIST:
            kind, count = self._number("I"), self._number("Q")
            if kind not in _SCALARS and kind != _STRING:
                raise ValueError(f"{name} is a list of type {kind}, which no Llama has")
            size = _SCALARS.get(kind, 8)
            self._count(count, size, name)
            if kind == _STRING:
                for _ in range(count):
                    self._text()
            else:
                self._skip(count * size, name)
        elif kind in _SCALARS:
            self._skip(_SCALARS[kind], name)
        else:
            raise ValueError(f"{name} is of type {kind}, which GGUF lacks: download the file again")

    def _text(self) -> str:
        size = self._number("Q")
        start = self._at
        self._skip(size, "a text")
        return repr(self._content[start : start + min(size, 60)].decode("utf-8", errors="replace"))

    def _number(self, kind: str) -> int:
        start = self._at
        self._skip(struct.calcsize(kind), "a number")
        number: tuple[Any, ...] = struct.unpack_from(self._order + kind, self._content, start)
        return number[0]

    def _skip(self, size: int, what: str) -> None:
        if size > len(self._content) - self._at:
            raise ValueError(f"{what} of {size:,} bytes begins at byte {self._at:,}, and goes beyond the end")
        self._at += size

    def _count(self, count: int, size: int, what: str) -> None:
        """Check a number of elements, each of at least some bytes."""
        left = len(self._content) - self._at
        if count * size > left:
            raise ValueError(f"{what} has {count:,} elements, and {left:,} bytes follow")
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise ValueError(f"{what} has {count:,} elements, and a file may have {_MAX_ELEMENTS:,} in all")
