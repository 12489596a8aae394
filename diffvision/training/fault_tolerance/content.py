"""What is in a checkpoint's file: opened safely, with its layout and its numbers checked.

Whether its states fit a model and its optimizers shows when they are loaded, in `resume`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.training.fault_tolerance.layout import EXACT, LIGHTNING, OPTIONAL, RUN, RUN_KEY, STATES, find_misfit
from diffvision.training.fault_tolerance.records import DamagedCheckpoint


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Open a checkpoint; its tensors are read only when they are used.

    Raises:
        DamagedCheckpoint: it is no checkpoint, or holds objects.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint("holds more than tensors and plain values, or is none") from error
    except Exception as error:  # a file that is no checkpoint can fail torch's reader in any way
        raise DamagedCheckpoint("is damaged or no checkpoint") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"holds a {type(content).__name__}, not a checkpoint's dictionary")
    return content


def find_fault(content: dict[str, Any]) -> str:
    """Say why a checkpoint cannot be read as what Lightning and `RunState` write; return "" where it can."""
    run = content.get(RUN_KEY, {})
    weights = {name: content[name] for name in ("state_dict", "current_model_state") if name in content}
    optional = {name: dict for name in OPTIONAL if name in content}
    faults = [find_misfit(content, LIGHTNING | optional), find_misfit(run, {}, RUN_KEY)]
    if not any(faults):
        expected = {name: kind for name, kind in RUN.items() if name in run} | (EXACT if "place" in run else {})
        faults = [
            find_misfit(run, expected, RUN_KEY),
            *(_bad_entry(state, name) for name, state in weights.items()),
        ]
    if not any(faults):
        faults = [_bad_entry(state, "optimizer_states") for state in _optimizer_tensors(content)]
        faults += [
            f"{states} in its content has {len(content[states])} states for the {len(run[names])} {names} of its run"
            for names, states in STATES.items()
            if names in run and len(run[names]) != len(content[states])
        ]
        if run.get("random") == []:
            faults.append(f"random in {RUN_KEY} is empty")
    return next((f"is malformed: {fault}" for fault in faults if fault), "")


def _bad_entry(state: dict[Any, Any], name: str) -> str:
    """Name a key of a state_dict that is no str, or a tensor that is sparse or has no values; return "" for none."""
    for key, value in state.items():
        if not isinstance(key, str):
            return f"a key of {name} is of type {type(key).__name__}, not str"
        if isinstance(value, Tensor) and value.is_meta:
            return f"{key} in {name} is a tensor without values"
        if isinstance(value, Tensor) and value.layout != torch.strided:
            return f"{key} in {name} is a tensor of layout {value.layout}, not torch.strided"
    return ""


def _optimizer_tensors(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each parameter's state in each optimizer, its tensors by names such as "exp_avg of parameter 0"."""
    for optimizer in content["optimizer_states"]:
        for index, state in optimizer["state"].items():
            if isinstance(state, dict):
                yield {f"{name} of parameter {index}": value for name, value in state.items()}


def find_bad_states(content: dict[str, Any]) -> str:
    """Apply `find_bad_tensors` to a checkpoint's weights and optimizers, whose layout `find_fault` has checked."""
    return find_bad_weights(content) or next(filter(None, map(find_bad_tensors, _optimizer_tensors(content))), "")


def find_bad_weights(checkpoint: dict[str, Any]) -> str:
    """Apply `find_bad_tensors` to a checkpoint's weights; with EMA there are two sets of them."""
    return find_bad_tensors(checkpoint.get("state_dict", {})) or find_bad_tensors(
        checkpoint.get("current_model_state", {})
    )


def find_bad_tensors(weights: dict[str, Any], few: int = 3) -> str:
    """Name the first few tensors of a state_dict that hold NaN or infinity; return "" where all are finite.

    A mask of zeros and -inf, which some models keep among their buffers, counts as finite.
    """
    names = [name for name, value in weights.items() if isinstance(value, Tensor) and not _is_finite(value)]
    return ", ".join(names[:few]) + (f" and {len(names) - few} more" if len(names) > few else "")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; tensors of 0 and -inf are masks, and pass."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.half()  # aminmax takes no float8
    least, most = tensor.aminmax()  # one pass without a temporary; NaN propagates
    return bool((least.isfinite() & most.isfinite()) or ((tensor == 0) | (tensor == -torch.inf)).all())
