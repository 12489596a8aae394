"""The private names of jsonargparse that this package uses, wrapped in functions.

`NAMES` lists what the installed version must have, and `missing` compares. The allow-list itself is in `allow`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonargparse

from diffvision.signatures import missing_names, require_names

TESTED = ">=4.53,<5"  # as pyproject.toml has it

NAMES = (
    "jsonargparse._common.parsing_settings",
    "jsonargparse._loaders_dumpers.get_yaml_default_loader()",
    "jsonargparse._loaders_dumpers.yaml_default_loader",
    "jsonargparse._optionals._get_config_read_mode()",
    "jsonargparse._optionals._set_config_read_mode(urls_enabled, fsspec_enabled)",
)


def missing() -> list[str]:
    """Return the names of `NAMES` that the installed jsonargparse lacks; empty if it has all."""
    return missing_names(NAMES, {"jsonargparse": jsonargparse})


def require() -> None:
    """Check that the installed jsonargparse has all of `NAMES`.

    Raises:
        ValueError: it lacks some.
    """
    require_names("jsonargparse", TESTED, missing(), "limits the imports of a configuration")


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
