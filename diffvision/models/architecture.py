"""What a model was built of, in plain values: recorded with its weights, and compared where they are loaded.

Two models of one name may compute different functions with the same names and shapes of weights: `lambda_init`, the
number of heads, the eps of a norm and the base of a rotary embedding are in no weight.

    {"config": {...},                                  of OpenCLIP and language models, every field with its value
     "arguments": {...},                               of timm models, what `create_model` was given
     "layers": {"blocks.0.attn": {"variant": "v1", "num_heads": 2, "lambda_init": 0.8, ...}, ...}}

What changes while a model is trained is state and not recorded here, such as the schedule of DEX's lambda, a buffer.
Nor are dropout rates, which evaluation does not use, and what the shapes of the weights show.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from diffvision.models.files import FOLDER

KEY = "architecture"  # in what a checkpoint or the metadata of a safetensors file has under `METADATA`
METADATA = "diffvision"

# Attributes of layers, of any host, that say what is computed.
_SETTINGS = (
    "variant",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "scale",
    "lambda_init",
    "dex_lambda_init",
    "rotary",
    "signal_ratio",
    "eps",
)
# Of configurations: what is of training alone, of where weights or words come from, or in the weights' shapes.
_NO_ARCHITECTURE = re.compile(
    r"drop|pretrained|^(init_.*|weight_init|checkpoint_path|cache_dir|architecture|num_classes|max_length"
    r"|hf_tokenizer_name|tokenizer_kwargs|output_tokens)$"
)
_IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors")
_SHOWN = 4  # differences in a message


def architecture(model: nn.Module, model_cfg: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a model was built of, as numbers, strings, lists and dictionaries.

    Args:
        model: of timm, of OpenCLIP or a `LanguageModel`.
        model_cfg: of an OpenCLIP model, which does not keep its configuration itself.
    """
    built: dict[str, Any] = {"layers": dict(_layers(model))}
    config, arguments = getattr(model, "config", None), getattr(model, "_model_args", None)
    if model_cfg is not None:
        built["config"] = _architectural(_whole(model_cfg))
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        built["config"] = _architectural(dataclasses.asdict(config))
    elif arguments is not None:
        built["arguments"] = _architectural(arguments)
    return built


def difference(recorded: Mapping[str, Any], built: Mapping[str, Any]) -> str:
    """What two architectures do not share, as "blocks.0.attn.lambda_init 0.8 there and 0.2 here"; empty if nothing.

    Versions of hosts differ in the fields and layers that they have: those that only one of the two has are not
    compared, unless they are arguments that somebody gave.
    """
    pairs = []
    for part in ("config", "arguments", "layers"):
        if part in recorded and part in built:
            there, here = dict(_flat(recorded[part])), dict(_flat(built[part]))
            names = there.keys() | here.keys() if part == "arguments" else there.keys() & here.keys()
            pairs += [(".".join(name), there.get(name), here.get(name)) for name in sorted(names)]
    lines = [f"{name} {a!r} there and {b!r} here" for name, a, b in pairs if not _same(a, b)]
    return ", ".join(lines[:_SHOWN]) + (f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else "")


def check(about: Mapping[str, Any], model: nn.Module, what: str, model_cfg: Mapping[str, Any] | None = None) -> None:
    """Compares a model with the one that weights were recorded to be of.

    Args:
        about: what was recorded with the weights. Where it has no architecture, as in files of older versions, that is
            a warning; where it is empty, nobody recorded anything.
        model, model_cfg: what the weights are loaded into, as `architecture` takes them.
        what: the weights, as an error calls them.

    Raises:
        ValueError: the architectures differ; it names what.
    """
    recorded = about.get(KEY)
    if not isinstance(recorded, Mapping):
        if about:
            warnings.warn(
                f"{what} does not record its architecture, as files of older versions: settings that are in no weight, "
                "such as lambda_init, are taken from the model as it is built here",
                stacklevel=2,
            )
        return
    if told := difference(recorded, architecture(model, model_cfg)):
        raise ValueError(
            f"{what} is of another architecture than the model here, with {told}: build the model with what it was "
            "trained with (its configuration, its arguments, and the version of the package that has them)"
        )


def metadata(
    model: nn.Module, model_cfg: Mapping[str, Any] | None = None, about: Mapping[str, Any] = {}
) -> dict[str, str]:
    """The metadata of a safetensors file with the weights of a model, as `recorded` reads it.

    Args:
        model, model_cfg: as `architecture` takes them.
        about: what else is to be recorded.
    """
    return {"format": "pt", METADATA: json.dumps({**about, KEY: architecture(model, model_cfg)})}


def check_start(source: str, model: nn.Module) -> None:
    """Compares the layers of a model with those that weights to start from were recorded to be of; whoever starts from
    weights may choose another image size or another head.

    Args:
        source: a file of weights, or `local-dir:FOLDER`.

    Raises:
        ValueError: as `check`.
    """
    if layers := recorded(source).get(KEY, {}).get("layers"):
        check({KEY: {"layers": layers}}, model, f"the file of weights {source}")


def recorded(source: str | Path) -> dict[str, Any]:
    """What a safetensors file, or the one in the folder of `local-dir:FOLDER`, says of its weights; empty where it says
    nothing, or is none.

    Raises:
        ValueError: it is damaged.
    """
    path = Path(str(source).removeprefix(FOLDER))
    if str(source).startswith(FOLDER):
        path = next((path / name for name in _IN_FOLDERS if (path / name).is_file()), path)
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    return about if isinstance(about, dict) and isinstance(about.get(KEY, {}), dict) else {}


def _layers(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, layer in model.named_modules():
        settings = {key: getattr(layer, key, ...) for key in _SETTINGS}
        if known := {key: value for key, value in settings.items() if isinstance(value, int | float | str | None)}:
            yield name, known


def _whole(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenCLIP configuration with every field of its towers."""
    from open_clip import CLIPTextCfg, CLIPVisionCfg

    towers: dict[str, Any] = {"vision_cfg": CLIPVisionCfg, "text_cfg": CLIPTextCfg}
    fields = {
        tower: {field.name: field.default for field in dataclasses.fields(kind)} for tower, kind in towers.items()
    }
    return {
        **{"quick_gelu": False, "multimodal_cfg": {}, **model_cfg},
        **{tower: {**defaults, **(model_cfg.get(tower) or {})} for tower, defaults in fields.items()},
    }


def _architectural(value: Any) -> Any:
    """Plain values without what is no architecture: tuples become lists, as they do in files."""
    if isinstance(value, Mapping):
        return {str(key): _architectural(part) for key, part in value.items() if not _NO_ARCHITECTURE.search(str(key))}
    if isinstance(value, list | tuple):
        return [_architectural(part) for part in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "__qualname__", type(value).__name__)  # a class or function that was given as an argument


def _flat(value: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, (*name, str(key)))
    else:
        yield name, value


def _same(a: Any, b: Any) -> bool:
    """Equal, or as near as the arithmetic of another machine makes a number."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        return numbers and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)
