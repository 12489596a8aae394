"""The one reader of files of weights, which runs no code of a pickle, and checks of what was read.

Models are built from them in `diffvision.opening`; layouts of other libraries are converted in `models.convert`.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from diffvision.models.architecture import KEY, METADATA, read_metadata, recorded
from diffvision.models.weight_files import refuse_urls, unreadable

VISION_LANGUAGE = "timm_llava"  # model_type of our vision-language models
_AVERAGES = ("state_dict_ema", "model_ema", "current_model_state")  # the last is next to Lightning's averages
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
_WRAPPERS = re.compile(r"(module\.|_orig_mod\.)*")  # of DistributedDataParallel and torch.compile
_SCALAR, _ARRAY = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
_PLAIN_CLASSES: list[Any] = [
    argparse.Namespace,
    *((pathlib.PurePosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(np.ndarray, np.dtype),
    *{type(np.dtype(letter)) for letter in "?bhilqBHILQefd"},
]
"""What checkpoints of others hold beside tensors and plain values; an object of any other class is refused."""


class Checkpoint(NamedTuple):
    """The content of a file of weights.

    Attributes:
        state: the weights by the model's names.
        lightning: whether `diffvision fit` wrote the file.
        about: the record that was saved with the weights, {"model": name, "preprocess": {...}, ...}, or {}.
    """

    state: dict[str, Tensor]
    lightning: bool
    about: dict[str, Any]


class Origin(NamedTuple):
    """The model that a file of weights records.

    Attributes:
        model: the model's name in the training run; None if the file records no name.
        language: whether it is a checkpoint of our language training.
        vision_language: whether it is one of our vision-language training.
    """

    model: str | None
    language: bool
    vision_language: bool


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the weights in a file of any of the usual layouts.

    If a file has averaged weights, they are returned (Lightning's EMA stores them as `state_dict`, timm's as
    `state_dict_ema`). Prefixes that wrappers add to the names are removed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, holds objects of other classes than plain data, no tensors by name,
            or tensors twice, with and without a wrapper's prefix.
    """
    content, about = read_content(path)
    lightning = "pytorch-lightning_version" in content
    content = next((content[key] for key in _NESTED if isinstance(content.get(key), dict)), content)
    tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
    state = {_bare(name, lightning): value for name, value in tensors.items()}
    if not state:
        raise ValueError(f"checkpoint {path} holds no tensors by name: give a file with a state_dict")
    if len(state) < len(tensors):
        raise ValueError(f"{path} holds weights twice, with and without a wrapper's prefix: keep one of the two")
    return Checkpoint(state, lightning, about)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Return the weights of `read_checkpoint`; ValueError too if they are not finite."""
    state = read_checkpoint(path).state
    check_finite(state, str(path))
    return state


def read_origin(path: str | Path) -> Origin:
    """Read the recorded model of a file of weights, without reading the weights.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        content: dict[Any, Any] = {}
        about = recorded(path)
    else:
        content, about = read_content(path, "meta")
    hyper, joint, name = content.get("hyper_parameters"), about.get("config"), about.get("model")
    config = hyper.get("config") if isinstance(hyper, dict) else None
    is_language = isinstance(config, dict) and {"variant", "depth"} <= config.keys()
    is_joint = isinstance(joint, dict) and joint.get("model_type") == VISION_LANGUAGE
    return Origin(name if isinstance(name, str) else None, is_language, is_joint)


def holds_average(path: str | Path) -> bool:
    """Return whether the weights that `read_checkpoint` takes from a file are a moving average (EMA).

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    content, _ = read_content(path, "meta")
    return any(name in content for name in _AVERAGES)


def read_content(
    path: str | Path, map_location: torch.device | str = "cpu", *, mmap: bool = False
) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the dictionary in a file, and the record that was saved with its weights.

    Args:
        path: a .safetensors file, or one that `torch.save` wrote.
        map_location: the device of the tensors.
        mmap: do not read tensors that are not used.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    refuse_urls(path, "checkpoint")
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                about = read_metadata(file)
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        else:
            with allow_plain_classes():
                content = torch.load(path, map_location=map_location, weights_only=True, mmap=mmap or None)
            is_lightning = isinstance(content, dict) and "pytorch-lightning_version" in content
            about = content.get(METADATA, {}) if is_lightning else {}
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}: give a checkpoint (.pt, .pth, .ckpt or .safetensors)") from None
    # torch's reader raises errors of any class for a file that is not a checkpoint.
    except Exception as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path} holds a {type(content).__name__}: give a file with a state_dict")
    _check_about(path, about)
    return content, about


def _check_about(path: Path, about: Any) -> None:
    """Raise a ValueError if the record that was saved with weights has values of other types than we write."""
    parts = {METADATA: about}
    if isinstance(about, dict):
        parts |= {name: about[name] for name in ("model_args", "preprocess", KEY) if name in about}
        parts |= about[KEY] if isinstance(about.get(KEY), dict) else {}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(
                f"checkpoint {path} is damaged ({name} must be a dictionary, got {part!r:.50}): use another"
            )


def allow_plain_classes() -> torch.serialization.safe_globals:
    """Return a context in which torch, called by timm or OpenCLIP too, unpickles the classes of `_PLAIN_CLASSES`."""
    return torch.serialization.safe_globals(_PLAIN_CLASSES)


def _bare(name: str, lightning: bool) -> str:
    """Return a tensor's name without prefixes of wrappers; of `diffvision fit` also without its attribute's."""
    name = _WRAPPERS.sub("", name, count=1)
    return _WRAPPERS.sub("", name.removeprefix("model."), count=1) if lightning else name


# ---- checks ----------------------------------------------------------------------------------------------------------


class State(dict[str, Tensor]):
    """A state_dict with errors that name a missing tensor.

    Args:
        weights: name -> tensor.
        what: name of the state_dict in errors.
    """

    def __init__(self, weights: Mapping[str, Tensor], what: str) -> None:
        super().__init__(weights)
        self.what = what

    def __missing__(self, name: str) -> Tensor:
        near = [have for have in self if have.rpartition(".")[2] == name.rpartition(".")[2]][:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ValueError(f"{self.what} lacks {name}{hint}: take the whole state_dict")

    def layers(self, prefix: str) -> int:
        """Return how many layers are numbered after a prefix, 0 first and none missing."""
        numbers = {int(match[1]) for name in self if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))}
        if numbers != set(range(len(numbers))):
            gaps = sorted(set(range(max(numbers))) - numbers)
            raise ValueError(f"{self.what} lacks the layers {gaps} of {prefix}: take the whole state_dict")
        return len(numbers)


def differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the missing, surplus and wrongly shaped tensors of a state_dict, one line each; empty if it fits."""
    faults = [f"{name} is missing" for name in expected if name not in state]
    faults += [f"{name} is unknown" for name in state if name not in expected]
    shared = [name for name in expected if name in state]
    return faults + [
        f"{name} is {list(state[name].shape)}, expected {list(expected[name].shape)}"
        for name in shared
        if state[name].shape != expected[name].shape
    ]


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise a ValueError, which begins with `what`, if a state_dict does not have exactly the expected tensors."""
    if faults := differences(state, expected):
        raise ValueError(f"{what} does not fit the model of its sizes; in our names: {few(faults)}")


def few(faults: list[str]) -> str:
    """Return the first faults, followed by the number of the others."""
    return "; ".join(faults[:4]) + (f" (and {len(faults) - 4} more)" if len(faults) > 4 else "")


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise a ValueError if a state_dict holds numbers that are not finite."""
    floating = {name: value for name, value in state.items() if value.is_floating_point()}
    # torch 2.10 has no isfinite of eight-bit numbers
    if wrong := [n for n, v in floating.items() if not (v.float() if v.itemsize == 1 else v).isfinite().all()]:
        raise ValueError(
            f"{len(wrong)} tensors of {what} are not finite, first {wrong[0]} ({state[wrong[0]].dtype}): save the "
            "weights in float32, or take an earlier checkpoint"
        )
