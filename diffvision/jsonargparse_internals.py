"""The private names of jsonargparse that this package uses, wrapped in functions.

`NAMES` lists what the installed version must have, and `missing` compares. The allow-list itself is in `allow`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

TESTED = ">=4.53,<5"  # as pyproject.toml has it

# module:name -> the parameters of a function; None: a variable.
NAMES: dict[str, tuple[str, ...] | None] = {
    "jsonargparse._common:check_import_path": ("path",),
    "jsonargparse._common:parsing_settings": None,
    "jsonargparse._loaders_dumpers:get_yaml_default_loader": (),
    "jsonargparse._loaders_dumpers:yaml_default_loader": None,
    "jsonargparse._optionals:_get_config_read_mode": (),
    "jsonargparse._optionals:_set_config_read_mode": ("urls_enabled", "fsspec_enabled"),
}


def missing() -> list[str]:
    """Return the names of `NAMES` that the installed jsonargparse lacks; empty if it has all."""
    return [fault for name, parameters in NAMES.items() if (fault := _fault(name, parameters))]


def require() -> None:
    """Check that the installed jsonargparse has all of `NAMES`.

    Raises:
        ValueError: it lacks some.
    """
    if lacking := missing():
        raise ValueError(
            f"jsonargparse {version('jsonargparse')} lacks what limits the imports of a configuration "
            f"({', '.join(lacking)}): diffvision was tested with jsonargparse {TESTED}; install one of these versions"
        )


def _fault(name: str, parameters: tuple[str, ...] | None) -> str:
    module, _, member = name.partition(":")
    dotted = name.replace(":", ".")
    try:
        value = getattr(import_module(module), member)
    except (ImportError, AttributeError):
        return dotted
    if parameters is None:
        return ""
    if not callable(value) or tuple(inspect.signature(value).parameters) != parameters:
        return f"{dotted}({', '.join(parameters)})"
    return ""


def check_import(path: str) -> None:
    """Raise jsonargparse's error for a class path that the settings of the moment do not allow."""
    from jsonargparse import _common

    _common.check_import_path(path)


@contextmanager
def restore_settings() -> Iterator[None]:
    """Restore jsonargparse's settings after a block: they are global, and the process may have other parsers."""
    from jsonargparse import _common, _optionals

    settings, modes = dict(_common.parsing_settings), _optionals._get_config_read_mode()
    try:
        yield
    finally:
        _common.parsing_settings.update(settings)
        _optionals._set_config_read_mode(urls_enabled="u" in modes, fsspec_enabled="s" in modes)


@contextmanager
def read_none_as_null() -> Iterator[None]:
    """Read None as YAML's null within a block, since jsonargparse passes parts of a setting on as Python writes them.

    `--model.optimizer.clip_norm null` would otherwise arrive as the text "None", and be refused.
    """
    from jsonargparse import _loaders_dumpers

    loaders: Any = _loaders_dumpers
    loader = loaders.get_yaml_default_loader()
    with_none: type[Any] = type("Loader", (loader,), {})
    with_none.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])
    loaders.yaml_default_loader = with_none
    try:
        yield
    finally:
        loaders.yaml_default_loader = loader
