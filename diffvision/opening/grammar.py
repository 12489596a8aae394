"""`open_model`, which opens a model by name or path, and the grammar of these strings.

All commands and functions that take a model use this grammar. Checks that need no PyTorch are in `specs.py`. Image
models are built in `images.py`, language models in `texts.py`.
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
from diffvision.models.hub import HUB, HUGGING_FACE
from diffvision.models.names import names_by_library
from diffvision.models.weight_files import FOLDER, refuse_urls
from diffvision.opening import image_models as images
from diffvision.opening.model import Library, Model
from diffvision.opening.run_folders import CHECKPOINTS, best_checkpoint, find_run
from diffvision.opening.specs import is_name, no_path, split_label, split_tag, unknown
from diffvision.opening.weights import (
    CONFIG,
    OPEN_CLIP,
    folder_config,
    refuse_checkpoint,
)

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
            PATH            a .ckpt of our training, another file of weights that records its model, or a folder that
                            OpenCLIP, timm, transformers, `diffvision export` or `models.language.save` wrote
                            (local-dir:PATH, as OpenCLIP and timm write it);
            RUN             the directory of a run of `diffvision fit`, or a folder with one run in it: its best
                            checkpoint by the metric that it watched, or the last one where it watched none;
            hf-hub:ID       OpenCLIP's or timm's model on the Hugging Face Hub;
            hf:PATH         transformers' causal language model, in a folder or on the Hub, as transformers opens it.
            A name or tag wins over a path of the same spelling; `./` before it, or a `Path`, makes it a path.
        checkpoint: for a name or a folder of images: a file of weights (.pt, .ckpt or .safetensors: OpenCLIP's, timm's
            or our training's), or a tag of pretrained weights that the library downloads. Without it the weights of a
            name are randomly initialised. Averaged weights (EMA) in the file are preferred.
        preprocess: mean, std, interpolation or resize_mode (OpenCLIP only) where they differ from the model's. Those
            that a training run recorded come before the model's.
        tokenizer: for a language model: a tokenizer.json or its folder. By default the one next
            to the weights, or the one of the training.
        device: where the model is put.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: an unknown name, tag or setting; weights that do not fit, that do not say their model, or that hold
            more than tensors and plain values; a model with code; a folder of several runs, or a run without
            checkpoints.
    """
    images.check_preprocess(preprocess or {})
    if tokenizer is not None and (str(spec) in names_by_library()["language"] or not is_name(spec)):
        from diffvision.opening import texts  # imports the language models, as below

        texts.load_tokenizer(tokenizer)  # raises before a language model is loaded; names of others are refused below
    model = _open(spec, checkpoint, dict(preprocess or {}))
    if model.is_language:
        if preprocess:
            raise ValueError(f"preprocess is for images, and {spec} is a language model: leave preprocess out")
        from diffvision.opening import texts

        model = texts.with_tokenizer(model, tokenizer)
    elif tokenizer is not None:
        raise ValueError(f"tokenizer is {tokenizer!r}, and {spec} has its own: leave it out")
    model.module.to(device).eval()
    return model


def open_native(spec: str | Path, checkpoint: str | Path | None = None) -> Model:
    """Open a model for changing or writing: as `open_model`, but a transformers model is converted to this package's.

    A Llama or DiffLlama, in a folder or on the Hub (`hf:ID`), becomes a language model of ours.

    Args:
        spec: as for `open_model`; after `hf:` also a folder or an id of OpenCLIP's, timm's or ours.
        checkpoint: as for `open_model`.

    Raises:
        FileNotFoundError, ValueError: as `open_model`, or a model of transformers' that ours cannot be.
    """
    text = str(spec)
    if is_name(spec):
        return open_model(spec, checkpoint)
    folder = hub.local(text)
    if text.startswith(HUGGING_FACE):
        refuse_checkpoint(checkpoint, text)
        spec = folder
    if find_run(folder) or not folder.is_dir() or folder_library(folder) != "transformers":
        model = open_model(spec, checkpoint)
    else:
        from diffvision.opening import texts

        refuse_checkpoint(checkpoint, text)
        model = texts.with_tokenizer(texts.open_as_language(folder), None)
    # A folder of huggingface_hub's cache is named by its revision.
    return dataclasses.replace(model, name=split_label(text)[0]) if model.name == folder.name else model


def folder_library(folder: str | Path) -> Library:
    """Return the library of the model in a folder, by its configuration.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder is the directory of a run, or its configuration is of no known library.
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
    if (folder / CHECKPOINTS).is_dir():
        files = ", ".join(sorted(file.name for file in (folder / CHECKPOINTS).glob("*.ckpt"))) or "none"
        raise ValueError(
            f"{folder} is the directory of a run: give it without {FOLDER}, or one of the files in its {CHECKPOINTS}/ "
            f"({files})"
        )
    raise ValueError(
        f"{folder} has no {OPEN_CLIP} and no {CONFIG}: give a folder that OpenCLIP, timm, transformers or "
        "`diffvision export` wrote"
    )


def _open(spec: str | Path, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open a model by what the text is: a prefix, a name, a run, a folder or a file."""
    text = str(spec)
    if not text:
        raise ValueError("the model is '': give a model's name, a file of weights or a folder")
    if "://" in text:
        refuse_urls(text, "model")
    refuse_urls(checkpoint, "checkpoint")
    if not isinstance(spec, Path):
        if text.startswith(HUGGING_FACE):
            from diffvision.opening import texts

            refuse_checkpoint(checkpoint, text)
            return texts.open_transformers(text.removeprefix(HUGGING_FACE))
        if text.startswith(FOLDER):
            return _open_folder(text, checkpoint, preprocess)
        if is_name(text):
            return _open_name(text, checkpoint, preprocess)
        refuse_urls(text, "model")
    path = Path(spec)
    if run := find_run(path):
        refuse_checkpoint(checkpoint, text)
        return _open_file(best_checkpoint(run)[0], preprocess)
    if path.is_dir():
        return _open_folder(f"{FOLDER}{spec}", checkpoint, preprocess)
    if path.is_file():
        refuse_checkpoint(checkpoint, text)
        return _open_file(path, preprocess)
    raise no_path(text) if isinstance(spec, Path) else unknown(text)


def _open_name(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open a model by name: a language model of ours, a Hub repository, OpenCLIP's or timm's, with a tag or weights."""
    import open_clip

    if checkpoint is None and not name.startswith(HUB):
        name, tag = split_tag(name)
        checkpoint = tag or None
    if name in names_by_library()["language"]:
        from diffvision.opening import texts

        return texts.open_language_name(name, checkpoint)
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        if not (hub.snapshot(repository, (OPEN_CLIP, CONFIG)) / OPEN_CLIP).is_file():
            return _open_folder(f"{FOLDER}{hub.local(name)}", checkpoint, preprocess)
        return images.open_open_clip(name, checkpoint, preprocess)
    if name in open_clip.list_models():
        return images.open_open_clip(name, checkpoint, preprocess)
    base, dot, tag = name.partition(".")
    if checkpoint is None and dot and base != "adapted_vit":
        return images.open_timm(base, tag, preprocess)
    return images.open_timm(name, checkpoint, preprocess)


def _open_folder(name: str, checkpoint: str | Path | None, preprocess: dict[str, Any]) -> Model:
    """Open the folder of a `local-dir:` name."""
    folder = Path(name.removeprefix(FOLDER))
    library = folder_library(folder)
    if library == "language" or library == "transformers":
        from diffvision.opening import texts

        refuse_checkpoint(checkpoint, str(folder))
        return texts.open_language(folder) if library == "language" else texts.open_transformers_folder(folder)
    opened = images.open_timm if library == "timm" else images.open_open_clip
    with _whole_folder(folder, checkpoint):
        model = opened(name, checkpoint, preprocess)
    if checkpoint is None and (about := recorded(name)):
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
        if not Path(name.removeprefix(FOLDER)).is_dir():
            raise FileNotFoundError(
                f"{path} is of the model {name!r}, and there is no such folder here: run this where that folder is"
            )
        return _open_folder(name, path, preprocess)
    if not is_name(name):
        raise ValueError(f"{path} is of the model {name!r}, which is not known here: {unknown(name)}")
    return _open_name(name, path, preprocess)


@contextmanager
def _whole_folder(folder: Path, checkpoint: str | Path | None) -> Iterator[None]:
    """Refuse a folder without weights, and turn the library's errors about a damaged folder into a ValueError.

    Without this check OpenCLIP would build a model with random weights.
    """
    if checkpoint is None and not any(path.suffix in _IN_FOLDERS for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has a configuration and no weights ({', '.join(_IN_FOLDERS)}): save the model with them"
        )
    try:
        yield
    except (RuntimeError, SafetensorError, TypeError, KeyError, AssertionError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:3])
        raise ValueError(f"{folder} does not load, damaged or not one model's: {first[:500]}") from error
