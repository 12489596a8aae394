"""What an evaluation has computed, kept in a directory and looked up by a digest of all that it depends on.

A piece is one file with the results of some batches or classes, or of a task; it is written whole or not at all. One
that is damaged or belongs to another evaluation is reported and computed again. A directory that is full or cannot be
written to is reported once, and the evaluation continues.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from diffvision import __version__
from diffvision.evaluation.output_files import write_bytes

Rows = dict[str, Tensor]
FORMAT = 5
SUFFIX = ".safetensors"
_PLAIN = (bool, int, float, str, tuple)  # not None: some modules replace it with a value when they first run


class Cache:
    """A directory of pieces (safetensors), each set of them under a digest of what it depends on.

    Args:
        directory: the folder of the pieces, created if it does not exist.

    Attributes:
        found, made: pieces that this object has read and written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.found = self.made = 0
        self._writing = True

    def __str__(self) -> str:
        size = sum(file.stat().st_size for file in self.directory.glob(f"*/*{SUFFIX}"))
        return f"cache {self.directory}: {self.found} pieces found, {self.made} made; it holds {size:,} bytes"

    def load(self, identity: str, name: str) -> tuple[Rows, Any] | None:
        """Return a piece's rows and note; None where it does not exist or is damaged."""
        path = self._path(identity, name)
        try:
            if path.exists() and not path.is_file():
                raise ValueError("not a file")  # a pipe would be waited for
            with safetensors.safe_open(path, framework="pt") as file:
                rows = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is not a dictionary
                about = file.metadata() or {}
            if about.get("sha256") != _checksum(rows, identity, name, about.get("note", "")):
                raise ValueError("its checksum is not that of what was saved")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            warnings.warn(f"{path} is damaged or of another evaluation ({error}): it is computed again", stacklevel=2)
            return None
        self.found += 1
        return rows, json.loads(about["note"])

    def save(self, identity: str, name: str, rows: Rows, note: Any) -> None:
        """Keep a piece, if there is room; its note is a plain value."""
        if not self._writing:
            return
        path, note_text = self._path(identity, name), json.dumps(note)
        rows = {key: value.contiguous() for key, value in rows.items()}
        content = safetensors.torch.save(
            rows, {"note": note_text, "sha256": _checksum(rows, identity, name, note_text)}
        )
        try:
            if path.parent.is_symlink():
                raise OSError(f"{path.parent.name} in it is a link to another directory")
            if path.is_dir():
                shutil.rmtree(path)
            write_bytes(path, content)
            self.made += 1
        except OSError as error:
            self._writing = False
            reason = error.strerror or error
            warnings.warn(f"{self.directory} keeps nothing more ({reason}): the evaluation continues", stacklevel=2)

    def _path(self, identity: str, name: str) -> Path:
        return self.directory / identity / f"{name}{SUFFIX}"


def in_pieces(
    cache: Cache | None,
    identity: str,
    count: int,
    size: int,
    compute: Callable[[Sequence[int]], Iterator[tuple[Rows, Any]]],
    name: str = "",
) -> Iterator[tuple[Rows, list[Any]]]:
    """Yield the results of units 0 to count - 1 in pieces of `size` units, from the cache where it has a piece.

    A unit is a batch or a class: whatever `compute` computes at a time. Each piece is yielded as the rows of its units,
    join_rows, and the list of the units' notes.

    Args:
        cache: where pieces are read and saved; None computes all of them.
        identity: the digest of all that the results depend on.
        count: the number of units.
        size: the number of units in a piece.
        compute: called once, with the ascending numbers of the units that are not in the cache; yields (rows, note) of
            each. Rows have the same keys in all units, or are empty.
        name: prefix of the pieces' names, which distinguishes the processes that share a cache.
    """
    pieces = [range(first, min(first + size, count)) for first in range(0, count, size)]
    kept = [cache.load(identity, f"{name}{i:06}") if cache is not None else None for i in range(len(pieces))]
    missing = [unit for piece, units in zip(kept, pieces, strict=True) if piece is None for unit in units]
    computed = compute(missing)
    for i, (piece, units) in enumerate(zip(kept, pieces, strict=True)):
        if piece is None:
            parts = [next(computed) for _ in units]
            piece = join_rows([rows for rows, _ in parts]), [note for _, note in parts]
            if cache is not None:
                cache.save(identity, f"{name}{i:06}", *piece)
        yield piece
    # Run `compute` to its end: it may have resources to release after its last unit.
    if next(computed, None) is not None:
        raise RuntimeError("compute yielded more units than it was called with")


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, concatenated by key; parts without rows are left out."""
    parts = [part for part in parts if part]
    return {key: torch.cat([part[key] for part in parts]) for key in (parts[0] if parts else ())}


def _checksum(rows: Rows, identity: str, name: str, note: str) -> str:
    hasher = hashlib.sha256(f"{identity} {name} {note}".encode())
    for key in sorted(rows):
        _add(hasher, key, rows[key])
    return hasher.hexdigest()


# --- digests of what the results depend on ---


def digest(**parts: Any) -> str:
    """Return 32 hexadecimal digits for plain values, the version of torch and ours."""
    parts |= {"format": FORMAT, "torch": torch.__version__, "diffvision": __version__}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_digest(model: nn.Module) -> str:
    """Return a digest of all weights and buffers, bit by bit, and of the modules' classes and settings."""
    hasher = hashlib.sha256()
    for name, module in model.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if key != "training" and (isinstance(value, _PLAIN) or dataclasses.is_dataclass(value))
        }
        line = f"{name} {type(module)} {module.extra_repr()} {sorted(plain.items())}\n"
        hasher.update(without_addresses(line).encode())
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        _add(hasher, name, tensor)
    return hasher.hexdigest()


def tensor_digest(tensors: Sequence[Tensor]) -> str:
    hasher = hashlib.sha256()
    for number, tensor in enumerate(tensors):
        _add(hasher, str(number), tensor)
    return hasher.hexdigest()


def files_digest(*paths: str | Path) -> str:
    """Return a digest of names, sizes and times of files and of those under folders.

    What they hold is not read. Hidden files (indexes, which come and go) do not count.
    """
    files: list[tuple[str, int, int]] = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            name = file.relative_to(path).as_posix() if file != path else path.name
            if file.is_file() and not any(part.startswith(".") for part in name.split("/")):
                files.append((name, (stat := file.stat()).st_size, stat.st_mtime_ns))
    return digest(files=files)


def without_addresses(text: str) -> str:
    """Return a repr without the objects' addresses in memory."""
    return re.sub(r"0x[0-9a-f]+", "", text)


def _add(hasher: Any, name: str, tensor: Tensor) -> None:
    hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
