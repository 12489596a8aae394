"""The layouts of weights, and their recognition by the names of tensors in a file or folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diffvision.models import hub, language
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import diffclip, timm, unilm
from diffvision.models.convert import transformers as hugging_face
from diffvision.models.weight_files import read_json, refuse_gguf

LAYOUTS = {
    "diffclip": "a checkpoint of hammoudhasan/DiffCLIP",
    "language": "a language model of ours: a folder that language.load reads, or a training's .ckpt",
    "timm": "a state_dict with timm's DiffAttention or gated Attention (V1; DINT's weights have the same names)",
    "unilm-v1": "a state_dict with the attention of microsoft/unilm's Diff-Transformer",
    "unilm-v2": "the same of its V2",
    "huggingface": "a folder that transformers loads as DiffLlama or Llama, or as our DIFF V2 in a Llama",
}
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


@dataclass(frozen=True)
class Weights:
    """Weights of a known layout. A folder's are read when they are converted."""

    path: Path
    layout: str
    state: Mapping[str, Tensor]


def recognise(source: str | Path) -> Weights:
    """Recognise the layout of a file or folder by the names of its weights or its configuration.

    Args:
        source: a path, or a model on the Hugging Face Hub (`hf:ID`, `hf-hub:ID`), which is downloaded.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: the layout is not a known one; the message has the names, and the layout that they resemble.
    """
    path = hub.local(source)
    if path.is_dir():
        return _folder(path)
    refuse_gguf(path)
    if path.suffix == ".ckpt" and path.is_file():
        try:
            language.load(path, "meta")
            return Weights(path, "language", {})
        except ValueError:
            pass  # not of language training: recognised by the names of its weights below
    return _by_names(path, read_state(path))


def _by_names(path: Path, weights: Mapping[str, Tensor]) -> Weights:
    """Recognise the layout of a file by the names of its tensors."""
    layout = recognised(weights)
    if layout is None:
        names = list(weights)
        raise ValueError(
            f"{path} holds {len(names)} tensors ({', '.join(names[:4])}, ...) of an unknown layout: give weights of "
            "DiffCLIP, timm or unilm, or a folder of transformers"
        )
    return Weights(path, layout, weights)


def recognised(weights: Mapping[str, Tensor]) -> str | None:
    """Return the layout that these names are of, if it is known."""
    if diffclip.is_diffclip(weights):
        return "diffclip"
    if timm.recognised(weights):
        return "timm"
    return unilm.recognised(weights)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder that transformers would read: model.safetensors, else those that its index names.

    Published folders hold other files too: an adapter, the same weights in their authors' layout, older shards.

    Raises:
        ValueError: there is neither file, or the index is damaged.
        FileNotFoundError: a shard that the index names is missing.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(f"{folder} has no model.safetensors: save the model with safe_serialization=True")
    try:
        files = sorted(
            {folder / Path(name).name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is damaged, or no index of shards: {error!s:.100}") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing[:3])} ({len(missing)} of {len(files)} shards): download them again"
        )
    return files


def _folder(path: Path) -> Weights:
    """Recognise the layout of a folder by its configuration."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: give a folder of timm, transformers or a language model of ours")
    values = read_json(path / "config.json")
    if values.get("diffvision") == "language":
        return Weights(path, "language", {})
    if values.get("model_type") in hugging_face.MODEL_TYPES.values():
        return Weights(path, "huggingface", {})

    if "architecture" in values:  # as timm writes a folder
        return _by_names(path, read_state(weight_files(path)[0]))
    hugging_face.refuse_older(path, values)
    known = ", ".join(hugging_face.MODEL_TYPES.values())
    raise ValueError(f"{path}: model_type must be one of transformers' {known}, got {values.get('model_type')!r}")
