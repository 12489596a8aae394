"""Language models by name, and their checkpoints.

The configuration and the sizes are in `configuration.py`, the model itself in `decoder.py`.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffvision.models.architecture import KEY, check, metadata
from diffvision.models.checkpoint import check_fits, read_content
from diffvision.models.language.configuration import LanguageConfig, config
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.weight_files import read_json, refuse_urls
from diffvision.tokenizer_settings import CHAT_TEMPLATE, CONFIG

__all__ = ["create", "find_tokenizer", "load", "origin_of", "save"]

_TOKENIZER, _ORIGIN = "tokenizer.json", "origin.txt"


def create(name: str, **overrides: Any) -> LanguageModel:
    """Return the model `name` with new weights; arguments and errors are those of `config`."""
    return LanguageModel(config(name, **overrides))


def save(model: LanguageModel, directory: str | Path, tokenizer: Any = None, *, origin: str | None = None) -> None:
    """Write config.json and model.safetensors, and tokenizer.json if there is one, for `load`.

    Args:
        model: the model; its weights keep their dtype.
        directory: made if it does not exist; files of these names in it are replaced.
        tokenizer: a file to copy, with the tokenizer_config.json next to it if there is one, or an object with
            `save(path)`; its vocabulary must fit.
        origin: what the weights were made of, in sentences, one a line, for `origin_of` and a model card.

    Raises:
        ValueError: the tokenizer has more tokens than the model.
    """
    size = getattr(tokenizer, "vocab_size", None)
    if size is not None and size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {size} tokens and the model {model.config.vocab_size}: give the model's own tokenizer"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, str | Path):
        _copy_tokenizer(Path(tokenizer), folder)
    elif tokenizer is not None:
        tokenizer.save(folder / _TOKENIZER)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata=metadata(model))
    if origin is not None:
        (folder / _ORIGIN).write_text(origin + "\n", encoding="utf-8")
    values = {"diffvision": "language", **dataclasses.asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> LanguageModel:
    """Return the model of a checkpoint on the CPU, in evaluation mode and in the dtype that was saved.

    Args:
        path: directory that `save` wrote, or a Lightning checkpoint of our language training.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: it is not one of ours, it is damaged, or its weights do not fit its configuration.
    """
    refuse_urls(path, "checkpoint")
    path = Path(path)
    values, state, about = (_read_directory if path.is_dir() else _read_lightning)(path)
    try:
        config = LanguageConfig(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} has a configuration that is not one of a language model: {error}"
        ) from error
    with torch.device("meta"):
        model = LanguageModel(config)
    check_fits(state, model.state_dict(), f"checkpoint {path}")
    model.load_state_dict(state, assign=True)
    if KEY in about:  # older files have the configuration only, from which the model is built
        check(about, model, f"checkpoint {path}")
    return model.eval()


def find_tokenizer(checkpoint: str | Path) -> Path | None:
    """Return the tokenizer.json of a checkpoint: in its folder, next to a .ckpt file, or where its training read it.

    Args:
        checkpoint: as `load` takes.

    Returns:
        The file; None if there is none, or the one of the training no longer exists or was not a file.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: it is damaged.
    """
    refuse_urls(checkpoint, "checkpoint")
    path = Path(checkpoint)
    neighbour = (path if path.is_dir() else path.parent) / _TOKENIZER
    if neighbour.is_file():
        return neighbour
    recorded = None if path.is_dir() else read_content(path, "meta")[0].get("diffvision")
    named = recorded.get("tokenizer") if isinstance(recorded, dict) else None
    if not isinstance(named, str):
        return None
    file = Path(named) / _TOKENIZER if Path(named).is_dir() else Path(named)
    return file if file.is_file() else None


def origin_of(checkpoint: str | Path) -> str | None:
    """Return what the weights in a folder were made of, as `save` was given it; None if nothing is recorded."""
    file = Path(checkpoint) / _ORIGIN
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _copy_tokenizer(file: Path, folder: Path) -> None:
    """Copy a tokenizer with its settings and chat template into a model's folder."""
    # The settings name the tokens that begin and end a document.
    neighbours = [file.with_name(name) for name in (CONFIG, CHAT_TEMPLATE)]
    copied = [(file, folder / _TOKENIZER), *((one, folder / one.name) for one in neighbours if one.is_file())]
    for source, target in copied:
        if source.resolve() != target.resolve():
            shutil.copyfile(source, target)


Read = tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]
"""A configuration, weights, and the other records of a checkpoint."""


def _read_directory(folder: Path) -> Read:
    """Read a folder of `save`."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}: give the directory of a run")
    values = read_json(folder / "config.json")
    state, about = read_content(folder / "model.safetensors")
    if values.pop("diffvision", None) != "language":
        raise ValueError(
            f'{folder / "config.json"} has no "diffvision": "language": give the folder of a language model of ours'
        )
    return values, state, about


def _read_lightning(path: Path) -> Read:
    """Read a checkpoint of our language training."""
    content, _ = read_content(path)
    hyper = content.get("hyper_parameters")
    values = hyper.get("config") if isinstance(hyper, dict) else None
    if not isinstance(values, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"checkpoint {path} has no hyper_parameters.config: give one of our language training")
    state = {
        name.removeprefix("model.").removeprefix("_orig_mod."): value
        for name, value in content["state_dict"].items()
        if name.startswith("model.")
    }
    about = content.get("diffvision")
    return values, state, about if isinstance(about, dict) else {}
