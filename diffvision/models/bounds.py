"""Limits on the size of models that are built from untrusted configurations.

A few digits in a configuration can require more memory than any machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from diffvision.models.files import FOLDER, read_json

DEPTH = 4096  # layers
SIZE = 1 << 24  # largest axis of a weight

# The limit of the first pattern that matches a setting's name. Some tensors grow with the square of image and caption
# sizes.
_LIMITS = (
    (re.compile(r"(layers?|depths?|blocks?)$"), DEPTH),
    (re.compile(r"(image_size|img_size|text_cfg\.context_length)$"), 1 << 14),
    (re.compile(r"(size|width|dim|heads|channels|classes|labels|experts|queries)$"), SIZE),
)
_CONFIGURATIONS = ("open_clip_config.json", "config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
_TENSORS = 200_000
_SMALL = 1 << 22  # parameters that any folder may have


def check_sizes(values: Any, what: str, name: str = "") -> None:
    """Raise a ValueError if a number in a configuration is impossibly large, such as a depth of 30,000,000.

    Args:
        values: dictionaries, lists and numbers.
        what: name of the configuration in errors.
        name: path of the values within the configuration.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            check_sizes(value, what, f"{name}.{key}".lstrip("."))
    elif isinstance(values, list | tuple):
        for value in values:
            check_sizes(value, what, name)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        limit = next((limit for ending, limit in _LIMITS if ending.search(name)), None)
        if limit is not None and values > limit:
            raise ValueError(
                f"{what} has {name} {values:,}, above {limit:,}, the largest value that is built: correct it"
            )


@contextmanager
def bounded(source: str | Path) -> Iterator[None]:
    """Refuse, within the context, to build a model that is much larger than its weights.

    Args:
        source: a file of weights; a folder, or `local-dir:FOLDER`, whose configuration is checked first. A name belongs
            to a model that is known here, and is not bounded.

    Raises:
        ValueError: the configuration is not JSON or has numbers that no model has, or the model has more parameters
            than twice the bytes of the weights (for eight bits or four), or more than 200,000 tensors.
    """
    name = str(source)
    if isinstance(source, str) and not name.startswith(FOLDER):
        yield
        return
    path = Path(name.removeprefix(FOLDER))
    files = [path]
    if path.is_dir():
        for file in (path / known for known in _CONFIGURATIONS):
            if file.is_file():
                check_sizes(read_json(file), str(file))
        files = [file for file in path.iterdir() if file.suffix in _WEIGHTS]
    held = sum(file.stat().st_size for file in files if file.is_file())
    if not held:
        yield
        return
    limit, elements, tensors = 2 * held + _SMALL, 0, 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Count a parameter as it is registered, and refuse a model larger than its file."""
        nonlocal elements, tensors
        if parameter is not None:
            elements, tensors = elements + parameter.numel(), tensors + 1
        if elements > limit or tensors > _TENSORS:
            raise ValueError(
                f"{path} describes a model of more than {elements:,} parameters in {tensors:,} tensors, over its "
                f"{held:,} bytes of weights: correct the sizes"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
