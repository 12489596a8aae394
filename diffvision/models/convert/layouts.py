"""The layouts of weights, and their recognition by the names of tensors in a file or folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from diffvision.models import hub
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import diffclip, timm, unilm
from diffvision.models.convert.transformers import MODEL_TYPES
from diffvision.models.weight_files import read_json

LAYOUTS = {
    "diffclip": "a checkpoint of hammoudhasan/DiffCLIP",
    "timm": "a state_dict with timm's DiffAttention or gated Attention (V1; DINT's weights have the same names)",
    "unilm-v1": "a state_dict with the attention of microsoft/unilm's Diff-Transformer",
    "unilm-v2": "the same of its V2",
    "huggingface": "a folder that transformers loads as DiffLlama or Llama, or as our DIFF V2 in a Llama",
}
CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


class Weights(NamedTuple):
    """Weights of a known layout. Those of transformers' folders are read when they are converted."""

    path: Path
    layout: str
    state: Mapping[str, Tensor]


def recognise(source: str | Path) -> Weights:
    """Recognise the layout of a file or folder by the names of its weights or its configuration.

    Args:
        source: a path, or a model on the Hugging Face Hub (`hf:ID`, `hf-hub:ID`), which is downloaded.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: the layout is not a known one; the message has the names of its tensors.
    """
    path = file = hub.local(source)
    if path.is_dir():
        values = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if values.get("model_type") in MODEL_TYPES.values():
            return Weights(path, "huggingface", {})
        if "architecture" not in values:  # which timm writes
            known = ", ".join(MODEL_TYPES.values())
            raise ValueError(
                f"{path} must have a config.json of timm, or of transformers' {known}, got model_type "
                f"{values.get('model_type')!r}"
            )
        file = weight_files(path)[0]
    weights = read_state(file)
    if diffclip.is_diffclip(weights):
        return Weights(path, "diffclip", weights)
    if timm.recognised(weights):
        return Weights(path, "timm", weights)
    if (layout := unilm.recognised(weights)) is not None:
        return Weights(path, layout, weights)
    raise ValueError(
        f"{path} holds {len(weights)} tensors ({', '.join([*weights][:4])}, ...) of an unknown layout: give weights of "
        "DiffCLIP, timm or unilm, or a folder of transformers"
    )


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
