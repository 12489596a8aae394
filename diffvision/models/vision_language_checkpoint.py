"""Checkpoints of trained vision-language models: what they record, and the model that is rebuilt from them.

`diffvision fit` saves the record next to the weights, under "diffvision":

    {"model": name, "tokenizer": path, "fingerprint": of the tokenizer, "config": {...},
     "lora": {"r": 8, "alpha": 16, ...} or None, "architecture": {...}}

With LoRA the weights are those of the layers and of their adapters by themselves, so that a run can be resumed.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffvision.models.architecture import KEY, check, difference
from diffvision.models.checkpoint import read_checkpoint
from diffvision.models.vision_language import VisionLanguageConfig, VisionLanguageModel

_UNRECORDED = ("transformers_version", "_name_or_path", "architectures", "dtype")  # versions, and what weights show


def record(model: VisionLanguageModel) -> dict[str, Any]:
    """Return a model's configuration as plain values."""
    values = model.config.to_dict()
    values["text_config"] = {key: value for key, value in values["text_config"].items() if key not in _UNRECORDED}
    return {key: value for key, value in values.items() if key not in _UNRECORDED}


def check_record(about: dict[str, Any], model: VisionLanguageModel, what: str) -> None:
    """Compare a model with the record of a checkpoint.

    Raises:
        ValueError: the record is not of a vision-language model, or of one with other settings, which are named.
    """
    if differences := difference({"config": _config(about, what)}, {"config": record(model)}):
        raise ValueError(f"{what} is of another model, with {differences}: set model.* as in its config.yaml")
    check({KEY: about.get(KEY)}, model, what)


def _config(about: dict[str, Any], what: str) -> dict[str, Any]:
    config = about.get("config")
    if not isinstance(config, dict) or config.get("model_type") != VisionLanguageConfig.model_type:
        raise ValueError(f"{what} is not of our vision-language training: give a checkpoint of VisionLanguageModule")
    return config


def load(path: str | Path, map_location: torch.device | str = "cpu") -> tuple[VisionLanguageModel, dict[str, Any]]:
    """Return the model of a checkpoint in evaluation mode, LoRA's adapters merged, and its record.

    Where averaged weights (EMA) are in the file, they are taken.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, or not a checkpoint of our vision-language training.
    """
    read = read_checkpoint(path)
    config, lora = _config(read.about, str(path)), read.about.get("lora")
    try:
        model: Any = VisionLanguageModel(VisionLanguageConfig.from_dict(config))
        model.load_state_dict(merge_adapters(read.state, lora["alpha"] / lora["r"] if lora else 0.0))
    except (TypeError, KeyError, RuntimeError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ValueError(f"checkpoint {path} does not fit its configuration: {first[:500]}") from error
    check(read.about, model, str(path))
    return model.to(map_location).eval(), read.about


def merge_adapters(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return weights without LoRA's adapters A and B, which are added to the weight of their layer: W + scale B A."""
    merged = {}
    for name, value in state.items():
        layer, is_wrapped, rest = name.rpartition(".base_layer.")
        if is_wrapped and rest == "weight":
            down, up = (state[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
            value = (value.float() + scale * (up @ down)).to(value.dtype)
        if ".lora_" not in name:
            merged[f"{layer}.{rest}" if is_wrapped else name] = value
    return merged
