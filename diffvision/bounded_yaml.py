"""YAML of others, whose size and depth are bounded before it is built.

A few lines of aliases or merge keys (`<<`) can stand for more values than fit into memory, and deep nesting overflows
the stack of libyaml's composer. Both are counted in the parser's events, whose number is that of the text alone.
"""

import math
from collections.abc import Callable
from typing import Any

import yaml

MAX_LEVELS = 100
_MAX_VALUES = 100_000  # of one text, with its aliases written out


class TooLarge(yaml.YAMLError):
    """A text that stands for too many values, or is nested too deeply."""


def load_yaml(text: str) -> Any:
    """Return the plain values of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML, or `TooLarge`.
        ValueError: an invalid value, such as the date 2026-99-99.
    """
    check_size(text)
    return load_in_range(yaml.safe_load, text)


def load_in_range(load: Callable[[str], Any], text: str) -> Any:
    """Load a text.

    Raises:
        ValueError: a number is too large for a float, such as 1:1:... with two hundred parts, which YAML reads in base
            60.
    """
    try:
        return load(text)
    except OverflowError as error:
        raise ValueError(f"a number is out of range: {error}") from None


def check_size(text: str) -> None:
    """Raise an error for a YAML text that is nested too deeply, or stands for too many values with its aliases.

    Raises:
        yaml.YAMLError: it is not YAML, or `TooLarge`.
    """
    if len(text) <= MAX_LEVELS:
        return
    sizes: dict[str | None, float] = {}  # by anchor
    open_anchors: list[str | None] = []
    open_sizes: list[float] = [0]  # of the whole text, and of each collection that is not closed yet
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_anchors) == MAX_LEVELS:
                raise TooLarge(f"it is nested too deeply, in more than {MAX_LEVELS} levels: write it with fewer")
            sizes[event.anchor] = math.inf  # until it is closed: an alias inside of it would have no end
            open_anchors.append(event.anchor)
            open_sizes.append(1)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = sizes[open_anchors.pop()] = open_sizes.pop()
            open_sizes[-1] += size
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            open_sizes[-1] += 1
        elif isinstance(event, yaml.AliasEvent):
            open_sizes[-1] += sizes.get(event.anchor, 1)
        if open_sizes[-1] > _MAX_VALUES:
            raise TooLarge(f"it stands for more than {_MAX_VALUES:,} values: write it with fewer aliases")
