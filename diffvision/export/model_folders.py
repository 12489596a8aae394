"""Folders of models that OpenCLIP and timm (`local-dir:PATH`) or transformers load offline."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from diffvision.data.images.folders import find_folders, read_lines
from diffvision.export.card import write_card
from diffvision.export.formats import Options
from diffvision.models.architecture import metadata
from diffvision.models.checkpoint import check_finite
from diffvision.models.convert import layouts
from diffvision.models.weight_files import check_free, written_whole
from diffvision.opening import Model
from diffvision.opening.run_folders import run_config, setting

OPEN_CLIP = (layouts.CONFIG, layouts.WEIGHTS)
TIMM = ("config.json", "model.safetensors")
_SOURCES = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "tag")


def save_folder(
    model: nn.Module,
    directory: str | Path,
    *,
    config: Mapping[str, Any],
    preprocess: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a timm or OpenCLIP model so that its library loads it as `local-dir:DIRECTORY`; a failure leaves no folder.

    Args:
        model: the model; its weights are written in the dtype that they have.
        directory: the folder to write; it must not exist yet.
        config: what the library builds the model from. OpenCLIP: its model_cfg. timm: the arguments of
            `create_model` without the name, which is `architecture` here or `model.pretrained_cfg["architecture"]`.
        preprocess: of images: OpenCLIP's mean, std, interpolation and resize_mode; timm's data configuration. By
            default the model's, which an OpenCLIP model has if `open_clip.create_model` built it.
        tokenizer: an OpenCLIP tokenizer, written if the model_cfg names one of Hugging Face; the built-in tokenizer of
            OpenCLIP needs no file.
        more: further keys of the configuration file, such as timm's label_names; the libraries ignore unknown keys.

    Raises:
        ValueError: the directory exists, weights are not finite, mean and std are not known, or the configuration is
            not JSON or does not build this model.
    """
    target = Path(directory)
    check_free(target)
    check_finite(model.state_dict(), type(model).__name__)
    is_clip = hasattr(model, "visual")
    describe, (settings, weights) = (_open_clip_values, OPEN_CLIP) if is_clip else (_timm_values, TIMM)
    values = {**describe(model, dict(config), preprocess or {}), **(more or {})}
    try:
        text = json.dumps(values, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{settings} cannot hold what the model is built of: {error}") from None
    # Tied weights share storage, which safetensors refuses: each is written by itself.
    state = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    with written_whole(target) as made:
        made.mkdir()
        (made / settings).write_text(text + "\n", encoding="utf-8")
        if is_clip and config.get("text_cfg", {}).get("hf_tokenizer_name"):
            tokenizer.save_pretrained(str(made))
        save_file(state, made / weights, metadata=metadata(model))
        shutil.copymode(made / settings, made / weights)  # safetensors makes them private


def write_open_clip(model: Model, destination: Path, options: Options) -> None:
    """Write the format "openclip"."""
    save_folder(model.module, destination, config=model.config, preprocess=model.preprocess, tokenizer=model.tokenizer)
    write_card(destination, model, options.license)


def write_timm(model: Model, destination: Path, options: Options) -> None:
    """Write the format "timm"."""
    save_folder(model.module, destination, config=model.config, preprocess=model.preprocess, more=_labels(model))
    write_card(destination, model, options.license)


def write_hugging_face(model: Model, destination: Path, options: Options) -> None:
    """Write a language model in the format "huggingface"."""
    from diffvision.models.language import find_tokenizer, hugging_face

    module: Any = model.module
    made = hugging_face.as_transformers(module)
    if options.tokenizer is not None:
        tokenizer: Path | None = hugging_face.tokenizer_file(Path(options.tokenizer))
    elif (tokenizer := find_tokenizer(str(model.weights))) is None:
        warnings.warn(
            f"no tokenizer next to {model.weights}: the folder has none; name one with --tokenizer", stacklevel=2
        )
    hugging_face.write(made, destination, tokenizer, eos=options.eos)
    write_card(destination, model, options.license)


def _labels(model: Model) -> dict[str, Any]:
    """Return timm's label_names, from the evaluation data of the run, if it still exists and has as many classes."""
    if model.run is None:
        return {}
    names: list[str] = []
    with suppress(ValueError):  # the configuration cannot be read, or the path has shards or no longer exists
        folder = str(setting(run_config(model.run), "data.init_args.evaluation"))
        names = read_lines(Path(folder) / "classnames.txt")
        names = names or [name for evaluated in find_folders(folder) for name in evaluated.classnames]
    return {"label_names": names} if len(names) == model.config["num_classes"] else {}


def _open_clip_values(model: nn.Module, config: dict[str, Any], preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of open_clip_config.json."""
    clip: Any = model
    preprocess = {**getattr(clip.visual, "preprocess_cfg", {}), **preprocess}
    if missing := [name for name in ("mean", "std") if name not in preprocess]:
        raise ValueError(
            f"the {' and '.join(missing)} of its images are unknown: give preprocess={{'mean': ..., 'std': ...}}"
        )
    return {"model_cfg": config, "preprocess_cfg": preprocess}


def _timm_values(model: nn.Module, config: dict[str, Any], preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of timm's config.json."""
    classifier: Any = model
    if not any(classifier.pretrained_cfg.get(key) for key in ("url", "file", "hf_hub_id")):
        classifier.pretrained_cfg.pop("license", None)  # it is the license of timm's code, not of these weights
    cfg = {key: value for key, value in classifier.pretrained_cfg.items() if key not in _SOURCES and value is not None}
    architecture = config.pop("architecture", cfg.pop("architecture", None))
    # timm takes the classes from the values beside the arguments, and transformers refuses them in both.
    left_out = ("num_classes", "drop_rate", "drop_path_rate")
    classes = classifier.num_classes
    return {
        "architecture": architecture,
        "num_classes": classes,
        "num_features": classifier.num_features,
        "model_args": {key: value for key, value in config.items() if not key.endswith(left_out)},
        "pretrained_cfg": {**cfg, **preprocess, "num_classes": classes, "custom_load": False},
    }
