"""Reading of checkpoints in the usual layouts and of the model that they record, without running pickled code.

Models are built from them in `diffvision.opening`; layouts of other libraries are converted in `models.convert`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision.models.architecture import KEY, METADATA, recorded
from diffvision.models.weight_files import unreadable

_AVERAGES = ("state_dict_ema", "model_ema", "current_model_state")  # the last is next to Lightning's averages
VISION_LANGUAGE = ("timm_llava", "diffvision_vlm")  # model_type of our vision-language models, now and before 0.1
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")


@dataclass(frozen=True)
class Checkpoint:
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
    vision_language: bool = False


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read the weights in a file of any of the usual layouts.

    Only tensors, plain values and an argparse.Namespace of them are unpickled; timm's train.py stores its arguments in
    one. If a file has averaged weights, they are returned (Lightning's EMA stores them as `state_dict`, timm's as
    `state_dict_ema`). Prefixes that wrappers add to the names are removed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, holds more than tensors and plain values, or holds no tensors by name.
    """
    path = Path(path)
    content, about = _read(path)
    lightning = "pytorch-lightning_version" in content
    for key in _NESTED:
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    prefixes = ("module.", "_orig_mod.", *(("model.", "_orig_mod.") if lightning else ()))
    state = {_without(prefixes, name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(f"checkpoint {path} holds no tensors by name: give a file with a state_dict")
    return Checkpoint(state, lightning, about)


def read_origin(path: str | Path) -> Origin:
    """Read the recorded model of a file of weights, without reading the weights.

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        name = recorded(path).get("model")
        return Origin(name if isinstance(name, str) else None, language=False)
    content, about = _read(path, "meta")
    hyper = content.get("hyper_parameters")
    config = hyper.get("config") if isinstance(hyper, dict) else None
    name = about.get("model")
    is_language = isinstance(config, dict) and {"variant", "depth"} <= config.keys()
    joint = about.get("config")
    is_joint = isinstance(joint, dict) and joint.get("model_type") in VISION_LANGUAGE
    return Origin(name if isinstance(name, str) else None, is_language, is_joint)


def holds_average(path: str | Path) -> bool:
    """Return whether the weights that `read_checkpoint` takes from a file are a moving average (EMA).

    Raises:
        FileNotFoundError, ValueError: as `read_checkpoint`.
    """
    content, _ = _read(Path(path), "meta")
    return any(name in content for name in _AVERAGES)


def _read(path: Path, map_location: str = "cpu") -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the dictionary in a file, and the record that was saved with its weights."""
    try:
        if path.suffix == ".safetensors":
            content, about = _read_safetensors(path)
        else:
            with harmless():
                content = torch.load(path, map_location=map_location, weights_only=True)
            is_lightning = isinstance(content, dict) and "pytorch-lightning_version" in content
            about = content.get("diffvision", {}) if is_lightning else {}
    except FileNotFoundError:
        raise
    # torch's reader raises errors of any class for a file that is not a checkpoint.
    except Exception as error:
        raise unreadable(path, error) from error
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path} holds a {type(content).__name__}: give a file with a state_dict")
    _check_about(path, about)
    return content, about


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Return the weights, and the record that `diffvision export` saved with them."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    return weights, about


def _check_about(path: Path, about: Any) -> None:
    """Raise a ValueError if the record that was saved with weights has values of other types than we write."""
    if not isinstance(about, dict):
        raise ValueError(
            f"checkpoint {path} is damaged (its diffvision entry is a {type(about).__name__}): use another"
        )
    built = about.get(KEY)
    parts = {f"{KEY}.{name}": part for name, part in built.items()} if isinstance(built, dict) else {}
    dictionaries = {name: about[name] for name in ("model_args", "preprocess", KEY) if name in about} | parts
    for name, part in dictionaries.items():
        if not isinstance(part, dict):
            raise ValueError(
                f"checkpoint {path} is damaged ({name} is a {type(part).__name__}, not a dictionary): use another"
            )


def harmless() -> torch.serialization.safe_globals:
    """Return a context that allows torch to unpickle an argparse.Namespace too, as timm does."""
    return torch.serialization.safe_globals([argparse.Namespace])


def _without(prefixes: tuple[str, ...], name: str) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
