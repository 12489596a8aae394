"""Rules for files of weights: they are local, never unpickle Python objects, and are written whole or not at all.

Reading checkpoints is in `checkpoint.py`.
"""

import json
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

FOLDER = "local-dir:"
"""Before the path of a folder that holds a model, as timm and OpenCLIP call one."""

_UNREADABLE = ("weights_only=True blocked", "legacy .tar format")  # timm's error, and torch's of its oldest files
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[/:]|data:|registry(:|$)")  # the last: Lightning's, of models to download


def refuse_urls(given: Any, setting: str) -> None:
    """Raise a ValueError if a value is a URL, at any depth, because checkpoints must be local files.

    Lightning, timm and fsspec fetch URLs wherever they take paths, and Lightning then unpickles the download.
    """
    if isinstance(given, Mapping):
        for key, value in given.items():
            refuse_urls(value, f"{setting}.{key}")
    elif given is not None and _URL.match(str(given)):
        raise ValueError(
            f"{setting} is {str(given)!r}, and checkpoints are not loaded from URLs: download it, check its sha256, "
            "and give the file"
        )


@contextmanager
def tensors_only(name: str) -> Iterator[None]:
    """Turn a library's error about weights into a ValueError that names them.

    It is raised for damaged files, and for weights that the library refuses to unpickle.
    """
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {name} are damaged, or no .safetensors: {error}; copy or download the file again"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, LookupError, EOFError) as error:
        if not is_unreadable(error):
            raise
        raise ValueError(
            f"the weights of {name} are damaged, or hold Python objects: save the state_dict alone, best as "
            ".safetensors"
        ) from error


def is_unreadable(error: Exception) -> bool:
    """Return whether a library's error says that it cannot read a file of weights, or refuses to."""
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _UNREADABLE)
    return isinstance(error, pickle.UnpicklingError) or (isinstance(error, LookupError | EOFError) and _of_torch(error))


def _of_torch(error: Exception) -> bool:
    """Return whether torch raised the error, as its reader does for a file that is not a checkpoint."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals["__name__"].startswith("torch.")


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error for an unreadable checkpoint; readers raise errors of any class (torch a KeyError for text)."""
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL (\S+)", str(error))):
        return ValueError(
            f"checkpoint {path} holds more than tensors and plain values ({named[1]}), which is not loaded, since it "
            "could run code: save its state_dict alone"
        )
    return ValueError(
        f"checkpoint {path} is damaged or no checkpoint ({path.stat().st_size:,} bytes), or holds more than tensors "
        "and plain values: give a .pt, .ckpt or .safetensors file of weights, as large as its original"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration; ValueError unless it is a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or nested too deeply: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object: correct the file")
    return values


def check_free(target: Path) -> None:
    """Raise a ValueError if a destination exists already, or one of its parents is a file."""
    if target.is_symlink() or target.exists():
        raise ValueError(f"destination {target} is there already: remove it, or name another")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"destination {target} is within {above}, which is a file: name another")


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or folder to, which is moved to `target` at the end.

    After a failure no file remains.

    Raises:
        ValueError: as in `check_free`.
    """
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        yield made
        shutil.move(made, target)
