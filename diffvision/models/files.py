"""Where weights may come from: files of this machine, so that what is loaded is what was looked at."""

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[/:]|data:|registry(:|$)")  # the last: Lightning's, of models to download


def refuse_urls(given: Any, setting: str) -> None:
    """Checkpoints are files: a URL among what was given, however deep, is a ValueError that names it.

    Lightning, timm and fsspec fetch URLs wherever they take paths, and Lightning then unpickles whatever comes.
    """
    if isinstance(given, Mapping):
        for key, value in given.items():
            refuse_urls(value, f"{setting}.{key}")
    elif given is not None and _URL.match(str(given)):
        raise ValueError(
            f"{setting} is {str(given)!r}, which would be fetched: checkpoints are not loaded from URLs; download it, "
            "compare its sha256 with what its authors say, and give the file"
        )


@contextmanager
def tensors_only(name: str) -> Iterator[None]:
    """A host's error, within it, of weights that it will not unpickle is a ValueError that names them."""
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "weights_only=True blocked" not in str(error):  # timm's
            raise
        raise ValueError(
            f"the weights of {name} are damaged, or hold Python objects, which could run code and are not loaded: "
            "save the state_dict alone, best as .safetensors"
        ) from error
