"""Cached features of an evaluation: one file each, named by a digest of everything that they depend on."""

from __future__ import annotations

import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffvision import __version__
from diffvision.evaluation.output_files import write_bytes
from diffvision.models.architecture import architecture

Rows = dict[str, Any]
"""Tensors and lists, with a row for each image, caption or class."""
FORMAT = 8


def load_or_compute(path: Path, compute: Callable[[], tuple[Rows, str]]) -> tuple[Rows, str]:
    """Return rows and a note from a file, or compute them and write the file.

    A damaged file is computed again. Where the file cannot be written there is a warning, and the evaluation continues.
    """
    if path.is_file():
        try:
            rows, note = torch.load(path, weights_only=True)
            return rows, note
        except Exception as error:  # a damaged file can fail torch's reader in any way
            warnings.warn(f"{path} is damaged ({error}): it is computed again", stacklevel=2)
    computed, content = compute(), io.BytesIO()
    torch.save(computed, content)
    try:
        write_bytes(path, content.getvalue())
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror}): the evaluation continues", stacklevel=2)
    return computed


def digest(**parts: Any) -> str:
    """Return a digest of plain values and the versions of torch and diffvision, 32 hexadecimal digits."""
    parts |= {"format": FORMAT, "torch": torch.__version__, "diffvision": __version__}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def model_digest(model: nn.Module) -> str:
    """Return a digest of a model's modules, of the settings that no weight shows, and of its tensors, bit by bit."""
    modules = re.sub("0x[0-9a-f]+", "", repr(model))  # without addresses in memory
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return digest(modules=modules, architecture=architecture(model), tensors=tensor_digest(tensors.values()))


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of tensors, bit by bit."""
    hasher: Any = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def files_digest(*paths: str | Path) -> str:
    """Return a digest of names, sizes and times of files and of those under folders.

    Contents are not read. Hidden files, such as indexes, are ignored.
    """
    files: list[tuple[str, int, int]] = []
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(path) if path.is_dir() else Path(path.name)
            if file.is_file() and not any(part.startswith(".") for part in name.parts):
                files.append((name.as_posix(), (stat := file.stat()).st_size, stat.st_mtime_ns))
    return digest(files=files)
