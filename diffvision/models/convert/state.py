"""State_dicts of any origin: read without unpickling code, and checked for missing names and shapes."""

from __future__ import annotations

import collections
import pickle
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffvision.models.weight_files import refuse_urls, unreadable

PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")


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
    missing = [f"{name} is missing" for name in expected if name not in state]
    extra = [f"{name} is unknown" for name in state if name not in expected]
    return [
        *missing,
        *extra,
        *(
            f"{name} is {list(state[name].shape)}, expected {list(value.shape)}"
            for name, value in expected.items()
            if name in state and state[name].shape != value.shape
        ),
    ]


def check_fits(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise a ValueError, which begins with `what`, if a state_dict does not have exactly the expected tensors."""
    if faults := differences(state, expected):
        raise ValueError(f"{what} does not fit the model of its sizes; in our names: {few(faults)}")


def few(faults: list[str]) -> str:
    """Return the first faults, followed by the number of the others."""
    return "; ".join(faults[:4]) + (f" (and {len(faults) - 4} more)" if len(faults) > 4 else "")


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read the weights in a file; unpickling imports and calls nothing but what rebuilds torch's tensors.

    Objects of other classes, which released checkpoints hold (an argparse.Namespace, paths, numpy scalars), are left
    out. Prefixes that wrappers add are removed.

    Raises:
        ValueError: the file has no weights, or they are of another class than torch's, not finite, or in eight bits.
    """
    refuse_urls(path, "source")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give a checkpoint (.pt, .pth, .ckpt, .bin or .safetensors)")
    content = _content(path)
    # Checkpoints of `diffvision fit` have the LightningModule's attribute as a prefix of the names.
    prefixes = (
        (*PREFIXES, "model.") if isinstance(content, dict) and "pytorch-lightning_version" in content else PREFIXES
    )
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    named = content.items() if isinstance(content, dict) else ()
    tensors = {str(name): value.detach() for name, value in named if isinstance(value, Tensor)}
    state = {_bare(name, prefixes): value for name, value in tensors.items()}
    if len(state) < len(tensors):
        raise ValueError(f"{path} holds weights twice, with and without {' or '.join(prefixes)}: keep one of the two")
    if not state:
        raise ValueError(f"{path} holds no tensors by name: give a state_dict, or a checkpoint that has one")
    check_finite(state, str(path))
    return state


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise a ValueError if a state_dict holds numbers that are not finite."""
    floating = {name: value for name, value in state.items() if value.is_floating_point()}
    # torch 2.10 has no isfinite of eight-bit numbers
    if wrong := [n for n, v in floating.items() if not (v.float() if v.itemsize == 1 else v).isfinite().all()]:
        raise ValueError(
            f"{len(wrong)} tensors of {what} are not finite, first {wrong[0]} ({state[wrong[0]].dtype}): save the "
            "weights in float32, or take an earlier checkpoint"
        )


def read_about(path: str | Path) -> dict[str, Any]:
    """Return the record that `diffvision fit` saved with the weights of a checkpoint; empty for any other file."""
    content = _content(Path(path)) if Path(path).suffix == ".ckpt" else None
    about = content.get("diffvision") if isinstance(content, dict) else None
    return about if isinstance(about, dict) else {}


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    """Return a name without prefixes, in any order."""
    while known := next((prefix for prefix in prefixes if name.startswith(prefix)), None):
        name = name.removeprefix(known)
    return name


def _content(path: Path) -> Any:
    """Load a file of weights without running code of its pickle."""
    if path.suffix == ".onnx":
        raise ValueError(f"{path} is an ONNX graph, which names few of its weights: give the weights it was made from")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    # Files from before torch 1.6 are read by `load`, piece by piece.
    reader = types.SimpleNamespace(
        Unpickler=_Tensors, load=lambda file, **settings: _Tensors(file, **settings).load(), __name__="tensors"
    )
    try:
        return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception as error:  # damaged pickles raise errors of any class
        raise unreadable(path, error) from error


class _Inert:
    """A stand-in for an object of a class that is not imported; it accepts and ignores any arguments and state."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def __call__(self, *args: Any, **settings: Any) -> _Inert:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Tensors(pickle.Unpickler):
    """An unpickler that imports only what rebuilds tensors; all other classes are replaced by `_Inert`."""

    _allowed: ClassVar = {("collections", "OrderedDict"): collections.OrderedDict}
    _builders = ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor")

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that tensors need; any other becomes an inert placeholder."""
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        if module == "torch._utils" and name in self._builders:
            return getattr(torch._utils, name)
        if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch.storage" and name == "UntypedStorage":
            return torch.UntypedStorage
        return _Inert
