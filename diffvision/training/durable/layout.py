"""What a checkpoint holds, as types and values, and where one differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

from torch import Tensor

RUN_KEY = "diffvision_run"  # in a checkpoint: what the trainer knows and the checkpoint's own keys do not tell
COUNT = range(1 << 62)
# Layouts, which `misfit` reads: a type; a range of whole numbers; a pattern of a str; a tuple of the known values; a
# list of one kind of item; a dict with these keys, or, where its key is str, with any names and one kind of value.
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
OPTIONAL = ("current_model_state", "hyper_parameters", "diffvision")  # dicts, where they are there
RUN = {  # what we read under RUN_KEY, where it is there
    "world_size": COUNT[1:],
    "optimizers": [str],
    "schedulers": [str],
    "unfinished": str,
    "place": ("step", "validation", "validated", "epoch"),
}
GENERATORS = {  # of one process, as `random_state.captured` gives them
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


def misfit(value: Any, layout: Any, name: str = "its content") -> str:
    """Where a value differs from a layout such as LIGHTNING, in words; empty where it does not."""
    kind: Any = layout if isinstance(layout, type | UnionType) else KINDS.get(type(layout), type(layout))
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in (get_args(kind) or (kind,))):
        return f"{name} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}"
    if (isinstance(layout, range | tuple) and value not in layout) or (
        isinstance(layout, re.Pattern) and not layout.fullmatch(value)
    ):
        return f"{name} is {str(value)[:40]!r}, which it never is"
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
    return next(filter(None, (misfit(item, expected, where) for where, item, expected in parts)), "")
