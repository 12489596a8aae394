"""`open_model`, which opens a model by name, run, path or id; `specs.py` has the grammar of these strings.

Image models are built in `image_models.py`, language models in `texts.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from diffvision.models import hub
from diffvision.models.architecture import check, recorded
from diffvision.models.checkpoint import read_origin
from diffvision.models.hub import HUB
from diffvision.models.weight_files import FOLDER, refuse_urls
from diffvision.opening import image_models as images
from diffvision.opening.model import Library, Model
from diffvision.opening.run_folders import CONFIG, OPEN_CLIP, best_checkpoint, folder_config
from diffvision.opening.specs import find_model, is_name, split_label, tags_of

_IN_FOLDERS = (".safetensors", ".bin", ".pt", ".pth")  # the weights that OpenCLIP and timm look for


def open_model(
    spec: str | Path,
    checkpoint: str | Path | None = None,
    *,
    preprocess: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """Open a model with its weights, transform and tokenizer.

    Args:
        spec: which model:
            NAME[.TAG]      of an OpenCLIP or timm model, ours included, or of one of our language models, with the
                            pretrained weights of the tag;
            RUN             the directory of a run of `diffvision fit`, or a folder with one run in it: its best
                            checkpoint by the metric that it watched, or the last one where it watched none;
            PATH            a .ckpt of our training, another file of weights that records its model, or a folder that
                            OpenCLIP, timm, transformers, `diffvision export` or `models.language.save` wrote;
            hf-hub:ID       OpenCLIP's or timm's model on the Hugging Face Hub;
            hf:PATH         transformers' causal language model, in a folder or on the Hub, as transformers opens it.
            A name or tag wins over a path of the same spelling; `./` before it, or a `Path`, makes it a path.
        checkpoint: for a name without a tag: a file of weights (.pt, .ckpt or .safetensors: the library's or our
            training's), or the folder of a language model. Without it the weights are new ones. Where averaged
            weights (EMA) are in the file, they are taken.
        preprocess: mean, std, interpolation or resize_mode (OpenCLIP only) where they differ from the model's. Those
            that a training run recorded come before the model's.
        tokenizer: for a language model: a tokenizer.json or its folder. By default the one next
            to the weights, or the one of the training.
        device: where the model is put.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: an unknown name, tag or setting; weights that do not fit, that do not say their model, or that hold
            more than tensors and plain values; a model with code; a folder of several runs, or a run without
            checkpoints.
    """
    images.check_preprocess(preprocess or {})
    model = _open(spec, checkpoint, dict(preprocess or {}))
    if model.is_language:
        if preprocess:
            raise ValueError(f"preprocess is for images, and {spec} is a language model: leave preprocess out")
        from diffvision.opening import texts  # imports the language models

        model = texts.with_tokenizer(model, tokenizer)
    elif tokenizer is not None:
        raise ValueError(f"tokenizer is {tokenizer!r}, and {spec} has its own: leave it out")
    model.module.to(device).eval()
    return model


def open_native(spec: str | Path, checkpoint: str | Path | None = None) -> Model:
    """Open a model that is to be changed or written: as `open_model` does, but none stays transformers'.

    A Llama or DiffLlama, in a folder or on the Hub (`hf:ID`), becomes a language model of ours.

    Raises:
        FileNotFoundError, ValueError: as `open_model`, or a model of transformers' that ours cannot be.
    """
    found = find_model(spec)
    folder = hub.local(spec) if found.kind == "hf" else found.path
    if found.kind not in ("hf", "folder") or folder_library(folder) != "transformers":
        return open_model(spec, checkpoint)
    from diffvision.opening import texts

    _refuse_checkpoint(checkpoint, spec)
    model = texts.with_tokenizer(texts.open_as_language(folder), None)
    # A folder of huggingface_hub's cache is named by its revision.
    return dataclasses.replace(model, name=split_label(str(spec))[0]) if model.name == folder.name else model


def folder_library(folder: str | Path) -> Library:
    """Return the library of the model in a folder, by its configuration.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: its configuration is of no known library.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {str(folder)!r}: give the folder of a model")
    if (folder / OPEN_CLIP).is_file():
        return "open_clip"
    config = folder_config(folder)
    if config.get("diffvision") == "language":
        return "language"
    if "architecture" in config:
        return "timm"
    if "model_type" in config:
        return "transformers"
    raise ValueError(
        f"{folder} has no {OPEN_CLIP} and no {CONFIG}: give a folder that OpenCLIP, timm, transformers or "
        "`diffvision export` wrote, or a run"
    )


def _open(spec: str | Path, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open a model by what its string or path stands for."""
    found = find_model(spec)
    if found.kind != "name" or found.tag:
        _refuse_checkpoint(checkpoint, spec)
    refuse_urls(checkpoint, "checkpoint")
    match found.kind:
        case "name":
            if checkpoint in tags_of(found.library, found.text) and not Path(checkpoint).exists():
                tagged = f"{found.text}.{checkpoint}"
                raise ValueError(f"checkpoint must be a file, got the tag {checkpoint!r}: give {tagged} as the model")
            weights = found.tag or (None if checkpoint is None else Path(checkpoint))
            return _open_name(found.text, found.library, weights, preprocess)
        case "hf-hub":
            return _open_hub(str(spec), None, preprocess)
        case "hf":
            from diffvision.opening import texts

            return texts.open_transformers(found.text)
        case "folder":
            return _open_folder(found.text, None, preprocess)
        case "run":
            return _open_file(best_checkpoint(found.path)[0], preprocess)
        case "file":
            return _open_file(found.path, preprocess)


def _refuse_checkpoint(checkpoint: str | Path | None, spec: str | Path) -> None:
    if checkpoint is not None:
        raise ValueError(f"checkpoint is {str(checkpoint)!r}, but {spec} has weights of its own: give only one of them")


def _open_name(name: str, library: str, weights: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open a model by its name in a library, with the weights of a tag or file, or new ones."""
    if library == "language":
        from diffvision.opening import texts

        return texts.open_language_name(name, weights)
    opened = images.open_open_clip if library == "open_clip" else images.open_timm
    return opened(name, weights, preprocess)


def _open_hub(name: str, file: Path | None, preprocess: dict[str, Any]) -> Model:
    """Open OpenCLIP's or timm's model on the Hugging Face Hub, by `hf-hub:ID`."""
    if (hub.snapshot(name.removeprefix(HUB), (OPEN_CLIP, CONFIG)) / OPEN_CLIP).is_file():
        return images.open_open_clip(name, file, preprocess)
    return _open_folder(str(hub.local(name)), file, preprocess)


def _open_folder(text: str, file: Path | None, preprocess: dict[str, Any]) -> Model:
    """Open the model in a folder; a file of a training that began with it replaces its weights."""
    folder, name = Path(text), f"{FOLDER}{text}"
    library = folder_library(folder)
    if library == "language" or library == "transformers":
        from diffvision.opening import texts

        return texts.open_language(folder) if library == "language" else texts.open_transformers_folder(folder)
    opened = images.open_timm if library == "timm" else images.open_open_clip
    with _whole_folder(folder, file):
        model = opened(name, file, preprocess)
    if file is None and (about := recorded(name)):
        check(about, model.module, name)
    return model


def _open_file(path: Path, preprocess: dict[str, Any]) -> Model:
    """Open a file of weights that records its model."""
    name, is_language, is_joint = read_origin(path)
    if is_joint:
        raise ValueError(f"{path} is a vision-language model: use evaluate-vlm, export, or open_vlm in Python")
    if is_language:
        from diffvision.opening import texts

        return texts.open_language(path, name)
    if name is None:
        raise ValueError(
            f"{path} holds weights, and does not say of which model: give the model's name first, and the file as "
            f"--checkpoint {path}"
        )
    if name.startswith(FOLDER):
        if not Path(folder := name.removeprefix(FOLDER)).is_dir():
            raise FileNotFoundError(
                f"{path} is of the model {name!r}, and there is no such folder here: run this where that folder is"
            )
        return _open_folder(folder, path, preprocess)
    if name.startswith(HUB):
        return _open_hub(name, path, preprocess)
    if not is_name(name):
        raise ValueError(f"{path} is of the model {name!r}, which is not known here: train it with a known one")
    # As it was trained, with its tag: timm builds the same model by it, and the file holds the weights.
    return _open_name(name, find_model(name).library, path, preprocess)


@contextmanager
def _whole_folder(folder: Path, file: Path | None) -> Iterator[None]:
    """Refuse a folder without weights, and turn the library's errors about a damaged folder into a ValueError.

    Without this check OpenCLIP would build a model with random weights.
    """
    if file is None and not any(path.suffix in _IN_FOLDERS for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has a configuration and no weights ({', '.join(_IN_FOLDERS)}): save the model with them"
        )
    try:
        yield
    except (RuntimeError, SafetensorError, TypeError, KeyError, AssertionError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ValueError(f"{folder} does not load, damaged or not one model's: {first[:500]}") from error
