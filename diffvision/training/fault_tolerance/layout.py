"""The layout of a checkpoint's content, as types and values, and the comparison of content with it.

Reading files and checking their numbers is in `content`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

from torch import Tensor

RUN_KEY = "diffvision_run"  # in a checkpoint: what the trainer knows and Lightning's keys leave out
COUNT = range(1 << 62)
# Layouts that `find_misfit` reads: a type; a range of whole numbers; a pattern of a str; a tuple of the known values; a
# list of one kind of item; a dict with these keys, or, where its key is str, with any names and one kind of value.
# The names are in files that were written by earlier versions: never rename them.
LIGHTNING = {  # what Lightning reads of every checkpoint
    "pytorch-lightning_version": re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+\w+)?"),
    "epoch": COUNT,
    "global_step": COUNT,
    "state_dict": dict,
    "loops": {"fit_loop": dict},
    "callbacks": dict,
    "optimizer_states": [{"state": dict, "param_groups": [dict]}],
    "lr_schedulers": [dict],
}
OPTIONAL = ("current_model_state", "hyper_parameters", "diffvision")  # dicts, if present
RUN = {  # what is read under RUN_KEY, if present
    "world_size": COUNT[1:],
    "optimizers": [str],
    "schedulers": [str],
    "unfinished": str,
    "place": ("step", "validation", "validated", "epoch"),
}
GENERATORS = {  # of one process, as `random_state.capture` gives them
    "python": {"version": COUNT, "words": Tensor, "gauss": float | None},
    "numpy": {"keys": Tensor, "place": COUNT, "has_gauss": COUNT, "cached": float},
    "torch": Tensor,
    "cuda": Tensor | None,
}
EXACT = {  # what comes with "place"
    "random": [GENERATORS],
    "metrics": {str: Tensor},
    "saves": {str: {str: Tensor | int | bool | str | None}},
    "row": {str: int | float},
    "settings": {str: str},
}
STATES = {"optimizers": "optimizer_states", "schedulers": "lr_schedulers"}  # names under RUN_KEY, and their states

KINDS = {range: int, re.Pattern: str, tuple: str}


def find_misfit(value: Any, layout: Any, name: str = "its content") -> str:
    """Say where a value differs from a layout such as LIGHTNING; return "" where it does not."""
    kind: Any = layout if isinstance(layout, type | UnionType) else KINDS.get(type(layout), type(layout))
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in (get_args(kind) or (kind,))):
        return f"{name} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}"
    if (isinstance(layout, range | tuple) and value not in layout) or (
        isinstance(layout, re.Pattern) and not layout.fullmatch(value)
    ):
        return f"{name} is {str(value)[:40]!r}, which no checkpoint has"
    parts: Iterator[tuple[str, Any, Any]] = iter(())
    if isinstance(layout, list):
        parts = ((f"an item of {name}", item, layout[0]) for item in value)
    elif isinstance(layout, dict) and str in layout:
        if names := [key for key in value if not isinstance(key, str)]:
            return f"a key of {name} is of type {type(names[0]).__name__}, not str"
        parts = ((f"{key} in {name}", item, layout[str]) for key, item in value.items())
    elif isinstance(layout, dict):
        if missing := [key for key in layout if key not in value]:
            return f"{name} has no {missing[0]}"
        parts = ((f"{key} in {name}", value[key], layout[key]) for key in layout)
    return next(filter(None, (find_misfit(item, expected, part) for part, item, expected in parts)), "")
