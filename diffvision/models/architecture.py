"""The architecture of a model in plain values: recorded with its weights, and compared when they are loaded.

Two models of one name may compute different functions with the same names and shapes of weights: `lambda_init`, the
number of heads, the eps of a norm and the base of a rotary embedding do not show in any weight.

    {"config": {...},                                  of OpenCLIP and language models, every field with its value
     "arguments": {...},                               of timm models, what `create_model` was given
     "layers": {"blocks.0.attn": {"variant": "v1", "num_heads": 2, "lambda_init": 0.8, ...}, ...}}

State that changes in training is not recorded here, such as the schedule of DEX's lambda, a buffer. Neither are dropout
rates, which evaluation does not use, nor what the shapes of the weights show.
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

from diffvision.models.weight_files import FOLDER
from diffvision.nn import AttentionLayer

KEY = "architecture"  # key within the record that a checkpoint or safetensors file has under `METADATA`
METADATA = "diffvision"

# Attributes of layers, of any library, that determine what is computed. Ours have further ones in `recorded`.
_SETTINGS = ("variant", "num_heads", "num_kv_heads", "head_dim", "scale", "lambda_init", "rotary", "eps")
# Settings in configurations that are not recorded: of training, of sources of weights and tokenizers, and sizes that
# the shapes of weights show.
_NO_ARCHITECTURE = re.compile(
    r"drop|pretrained|^(init_.*|weight_init|checkpoint_path|cache_dir|architecture|num_classes|max_length"
    r"|hf_tokenizer_name|tokenizer_kwargs|output_tokens)$"
)
_IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors")
_SHOWN = 4  # differences in a message


def architecture(model: nn.Module, model_cfg: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the architecture of a model as numbers, strings, lists and dictionaries.

    Args:
        model: a model of timm, one of OpenCLIP or a `LanguageModel`.
        model_cfg: the configuration of an OpenCLIP model, which does not keep it.
    """
    built: dict[str, Any] = {"layers": dict(_layers(model))}
    config, arguments = getattr(model, "config", None), getattr(model, "_model_args", None)
    if model_cfg is not None:
        built["config"] = _architectural(_fill_defaults(model_cfg))
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        built["config"] = _architectural(dataclasses.asdict(config))
    elif arguments is not None:
        built["arguments"] = _architectural(arguments)
    return built


def difference(recorded: Mapping[str, Any], built: Mapping[str, Any]) -> str:
    """Return the differences of two architectures, as "blocks.0.attn.lambda_init 0.8 there and 0.2 here", or "".

    Versions of libraries differ in their fields and layers: those that only one of the two has are not compared, unless
    they are arguments that a caller gave.
    """
    pairs = []
    for part in ("config", "arguments", "layers"):
        if part in recorded and part in built:
            there, here = dict(flatten(recorded[part])), dict(flatten(built[part]))
            names = there.keys() | here.keys() if part == "arguments" else there.keys() & here.keys()
            pairs += [(".".join(name), there.get(name), here.get(name)) for name in sorted(names)]
    lines = [f"{name} {a!r} there and {b!r} here" for name, a, b in pairs if not _same(a, b)]
    return ", ".join(lines[:_SHOWN]) + (f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else "")


def check(about: Mapping[str, Any], model: nn.Module, what: str, model_cfg: Mapping[str, Any] | None = None) -> None:
    """Compare a model with the architecture that is recorded with weights.

    Args:
        about: the record of the weights. A record without architecture, as in files of older versions, is a warning; an
            empty one is accepted.
        model: the model into which the weights are loaded.
        what: name of the weights in errors.
        model_cfg: as in `architecture`.

    Raises:
        ValueError: the architectures differ; the message names the differences.
    """
    recorded = about.get(KEY)
    if not isinstance(recorded, Mapping):
        if about:
            warnings.warn(
                f"{what} does not record its architecture, as files of older versions: settings that are in no weight, "
                "such as lambda_init, are those of the model that is built here",
                stacklevel=2,
            )
        return
    if differences := difference(recorded, architecture(model, model_cfg)):
        raise ValueError(
            f"{what} is of another architecture than the model here, with {differences}: build the model with its "
            "training configuration"
        )


def metadata(
    model: nn.Module, model_cfg: Mapping[str, Any] | None = None, about: Mapping[str, Any] = {}
) -> dict[str, str]:
    """Return the metadata of a safetensors file with the weights of a model, for `recorded` to read.

    Args:
        model: as in `architecture`.
        model_cfg: as in `architecture`.
        about: further values to record.
    """
    return {"format": "pt", METADATA: json.dumps({**about, KEY: architecture(model, model_cfg)})}


def check_start(source: str, model: nn.Module) -> None:
    """Compare the layers of a model with those that are recorded with weights to start from.

    Only layers are compared, because a start from weights may choose another image size or another head.

    Args:
        source: a file of weights, or `local-dir:FOLDER`.
        model: the model to train.

    Raises:
        ValueError: as in `check`.
    """
    if layers := recorded(source).get(KEY, {}).get("layers"):
        check({KEY: {"layers": layers}}, model, f"the file of weights {source}")


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
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    return about if isinstance(about, dict) and isinstance(about.get(KEY, {}), dict) else {}


def _layers(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, layer in model.named_modules():
        own = layer.recorded if isinstance(layer, AttentionLayer) else ()
        settings = {key: getattr(layer, key, ...) for key in (*_SETTINGS, *own)}
        if known := {key: value for key, value in settings.items() if isinstance(value, int | float | str | None)}:
            yield name, known


def _fill_defaults(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenCLIP configuration with every field of its towers, at its default where it is not set."""
    from open_clip import CLIPTextCfg, CLIPVisionCfg

    towers: dict[str, Any] = {"vision_cfg": CLIPVisionCfg, "text_cfg": CLIPTextCfg}
    fields = {
        tower: {field.name: field.default for field in dataclasses.fields(kind)} for tower, kind in towers.items()
    }
    fields["text_cfg"].pop("eos_id", None)  # its default is 2, and none in OpenCLIP 4
    return {
        **{"quick_gelu": False, "multimodal_cfg": {}, **model_cfg},
        **{tower: {**defaults, **(model_cfg.get(tower) or {})} for tower, defaults in fields.items()},
    }


def _architectural(value: Any) -> Any:
    """Return plain values without settings that are not architecture; tuples become lists, as in files."""
    if isinstance(value, Mapping):
        return {str(key): _architectural(part) for key, part in value.items() if not _NO_ARCHITECTURE.search(str(key))}
    if isinstance(value, list | tuple):
        return [_architectural(part) for part in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "__qualname__", type(value).__name__)  # a class or function that was given as an argument


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
