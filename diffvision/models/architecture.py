"""The architecture of a model in plain values: recorded with its weights, and compared when they are loaded.

Two models of one name may compute different functions with the same names and shapes of weights: `lambda_init`, the
number of heads, the eps of a norm, the base of a rotary embedding and activations do not show in any weight.

    {"layers": {"blocks.0.attn": {"variant": "v1", "num_heads": 2, "lambda_init": 0.8, ...},
                "blocks.0.mlp.act": {"class": "GELU"}, ...}}

State that changes in training is not recorded here, such as the schedule of DEX's lambda, a buffer. Neither are dropout
rates, which evaluation does not use, nor what the shapes of the weights show.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from diffvision.models.weight_files import FOLDER
from diffvision.nn import AttentionLayer

KEY = "architecture"  # key within the record that a checkpoint or safetensors file has under `METADATA`
METADATA = "diffvision"
# Attributes of layers, of any library, that determine what is computed. Ours have further ones in `recorded`.
_SETTINGS = (
    *("variant", "num_heads", "num_kv_heads", "head_dim", "scale", "lambda_init", "rotary", "eps", "causal"),
    *("approximate", "final_ln_after_pool", "pool_include_prefix", "pad_id", "stride", "padding", "dilation"),
    "context_length",
)
_POOLING = ("pool_type", "text_pool_type", "global_pool")
_CHOSEN = (*_POOLING, "context_length")  # which training from weights may choose
_IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors")
_SHOWN = 4  # differences in a message


def architecture(model: nn.Module) -> dict[str, Any]:
    """Return the architecture of a model as numbers, strings and dictionaries."""
    return {"layers": dict(_layers(model))}


def difference(recorded: Mapping[str, Any], built: Mapping[str, Any]) -> str:
    """Return the differences of two records, as "blocks.0.attn.lambda_init 0.8 there and 0.2 here", or "".

    Only fields and layers in both records are compared, as they differ between versions of libraries.
    """
    there, here = dict(flatten(recorded)), dict(flatten(built))
    lines = [
        f"{'.'.join(filter(None, name[1:]))} {there[name]!r} there and {here[name]!r} here"
        for name in sorted(there.keys() & here.keys())
        if not _same(there[name], here[name])
    ]
    return ", ".join(lines[:_SHOWN]) + (f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else "")


def check(about: Mapping[str, Any], model: nn.Module, what: str) -> None:
    """Compare a model with the architecture that is recorded with weights.

    Args:
        about: the record of the weights; one without architecture is accepted.
        model: the model into which the weights are loaded.
        what: name of the weights in errors.

    Raises:
        ValueError: the architectures differ; the message names the differences.
    """
    if about and KEY not in about:
        warnings.warn(
            f"{what} does not record its architecture: settings that are in no weight, such as lambda_init, are those "
            "of the model that is built here",
            stacklevel=2,
        )
    _compare(about.get(KEY) or {}, architecture(model), what)


def _compare(recorded: Mapping[str, Any], built: Mapping[str, Any], what: str) -> None:
    if differences := difference(recorded, built):
        raise ValueError(
            f"{what} is of another architecture than the model here, with {differences}: build the model with its "
            "training configuration"
        )


def metadata(model: nn.Module) -> dict[str, str]:
    """Return the metadata of a safetensors file with the weights of a model, for `recorded` to read."""
    return {"format": "pt", METADATA: json.dumps({KEY: architecture(model)})}


def check_start(source: str, model: nn.Module) -> None:
    """Compare the layers of a model with those that are recorded with weights to start from.

    Pooling and context length are not compared, because a start from weights may choose another image size, another
    head, or longer captions.

    Args:
        source: a file of weights, or `local-dir:FOLDER`.
        model: the model to train.

    Raises:
        ValueError: as in `check`.
    """
    built = architecture(model)["layers"]
    kept = {name: {key: one[key] for key in one if key not in _CHOSEN} for name, one in built.items()}
    _compare(recorded(source).get(KEY, {}), {"layers": kept}, f"the file of weights {source}")


def recorded(source: str | Path) -> dict[str, Any]:
    """Return the record of a safetensors file, or of the one in the folder of `local-dir:FOLDER`.

    It is empty where the file has no record, or is not a safetensors file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(str(source).removeprefix(FOLDER))
    if str(source).startswith(FOLDER):
        path = next((path / name for name in _IN_FOLDERS if (path / name).is_file()), path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            about = read_metadata(file)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    return about if isinstance(about, dict) and isinstance(about.get(KEY, {}), dict) else {}


def read_metadata(file: Any) -> Any:
    """Return the record in an open safetensors file, {} where it has none; a file of others may hold any JSON."""
    return json.loads((file.metadata() or {}).get(METADATA, "{}"))


def _layers(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, layer in model.named_modules():
        own = layer.recorded if isinstance(layer, AttentionLayer) else ()
        settings = {key: getattr(layer, key, ...) for key in (*_SETTINGS, *_POOLING, *own)}
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
        known = {key: value for key, value in settings.items() if isinstance(value, int | float | str | list | None)}
        kind = type(layer).__name__
        is_plain = next(layer.parameters(), None) is None and next(layer.children(), None) is None
        if is_plain and kind != "Identity" and "Drop" not in kind:  # of activations
            known["class"] = kind
        if hasattr(layer, "attn_mask") and isinstance(tower := getattr(layer, "transformer", None), nn.Module):
            # An OpenCLIP text tower (no_causal_mask); blocks of ours mask by themselves.
            blocks = tower.modules()
            known["causal"] = layer.attn_mask is not None or any(getattr(block, "causal", False) for block in blocks)
        if known:
            yield name, known


def flatten(value: Any, name: tuple[str, ...] = (), *, lists: bool = False) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested dictionaries (with `lists`, of lists too), each with the names that lead to it."""
    parts = dict(enumerate(value)) if lists and isinstance(value, list) else value
    if isinstance(parts, Mapping):
        for key, part in parts.items():
            yield from flatten(part, (*name, str(key)), lists=lists)
    else:
        yield name, value


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, up to the arithmetic of another machine."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        return numbers and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)
