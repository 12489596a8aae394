"""Cached features of an evaluation: one file each, named by a digest of everything that they depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from diffvision import __version__
from diffvision.evaluation.output_files import write_bytes

Rows = dict[str, Tensor]
FORMAT = 7
_PLAIN = (bool, int, float, str, tuple)  # not None: some modules replace it with a value when they first run


def keep_rows(folder: str | Path, name: str, compute: Callable[[], tuple[Rows, str]]) -> tuple[Rows, str]:
    """Return rows and a note from `folder/name.safetensors`, or compute them and write that file.

    A damaged file is computed again. Where the file cannot be written there is a warning, and the evaluation continues.
    """
    path = Path(folder) / f"{name}.safetensors"
    try:
        if path.is_file():
            with safetensors.safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()["note"]  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        warnings.warn(f"{path} is damaged ({error}): it is computed again", stacklevel=2)
    rows, note = compute()
    try:
        contiguous = {key: value.contiguous() for key, value in rows.items()}
        write_bytes(path, safetensors.torch.save(contiguous, {"note": note}))
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror}): the evaluation continues", stacklevel=2)
    return rows, note


def digest(**parts: Any) -> str:
    """Return a digest of plain values and the versions of torch and diffvision, 32 hexadecimal digits."""
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

    Contents are not read. Hidden files, such as indexes, are ignored.
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
