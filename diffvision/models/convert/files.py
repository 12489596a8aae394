"""Conversions of files and folders of weights between layouts. `command` chooses among them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
import tokenizers
import torch
from safetensors.torch import save_file
from timm.models import is_model
from torch import Tensor, nn

from diffvision.models import language
from diffvision.models.architecture import metadata
from diffvision.models.checkpoint import check_fits, read_state
from diffvision.models.convert import diffclip, timm, unilm
from diffvision.models.convert import transformers as hugging_face
from diffvision.models.convert.layouts import (
    CONFIG,
    WEIGHTS,
    Weights,
    weight_files,
)
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import DIFFCLIP_PREPROCESS
from diffvision.models.weight_files import check_weights_name, read_json
from diffvision.nn.diff_attention import VECTORS


@dataclass(frozen=True)
class Options:
    """Settings of a conversion that are not stored in the source."""

    tower: str | None = None
    lambda_init: float | str = 0.8
    tokenizer: Path | None = None


# ---- writing -------------------------------------------------------------------------------------------------------


def _save(state: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write a .safetensors file with its metadata, or a .pt of the state_dict alone."""
    check_weights_name(path)
    copies = {name: value.detach().clone().contiguous() for name, value in state.items()}  # views would share storage
    if path.suffix == ".safetensors":
        save_file(copies, path, metadata=about)
    else:
        torch.save(copies, path)


def _to_openclip(source: Weights, target: Path, options: Options) -> None:
    if options.tower is not None and not is_model(options.tower):
        raise ValueError(f"tower is {options.tower!r}, which timm does not know: register it before, or name another")
    config, state = diffclip.from_diffclip(source.state, tower=options.tower, lambda_init=options.lambda_init)
    model = _check_diffclip(config, state, f"{source.path} looks like diffclip, and", options.lambda_init)
    target.mkdir()
    values = {"model_cfg": config, "preprocess_cfg": DIFFCLIP_PREPROCESS}
    (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _save(state, target / WEIGHTS, metadata(model))


def _check_diffclip(
    config: Mapping[str, Any], state: Mapping[str, Tensor], what: str, lambda_init: float | str
) -> nn.Module:
    """Return the model of these weights on the meta device; raise a ValueError if they are not of a DiffCLIP."""
    with torch.device("meta"):
        model = open_clip.CLIP(**config)
    check_fits(state, model.state_dict(), what)
    diffclip.check_layers_are_v1(model, lambda_init)
    return model


def _map(source: Weights, target: Path, options: Options, *, by: Callable[..., dict[str, Tensor]]) -> None:
    """Convert weights by a mapping of names."""
    made = by(source.state)
    layers = {name.removesuffix(vector) for name in made for vector in VECTORS if name.endswith(vector)}
    parts = [*VECTORS, "q_proj.weight", "k_proj.weight", "v_proj.weight"]
    if missing := [layer + part for layer in sorted(layers) for part in parts if layer + part not in made]:
        raise ValueError(
            f"{source.path} must hold whole attention layers; in our names it lacks {', '.join(missing[:4])}"
        )
    _save(made, target)


def read_language(folder: Path) -> LanguageModel:
    """Return the language model in a folder of transformers', in the dtype of its weights, for evaluation.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: settings or weights are missing, do not fit each other, or our model does not have them.
    """
    values = read_json(folder / "config.json")
    theirs = {name: value for file in weight_files(folder) for name, value in read_state(file).items()}
    theirs = _in_one_dtype(theirs, values, folder)
    try:
        config, state = hugging_face.from_hugging_face(values, theirs)
    except RuntimeError as error:  # the number of rows is not a multiple of the heads
        raise ValueError(f"{folder} has weights whose sizes are not those of its config.json: {error}") from error
    with torch.device("meta"):
        model = LanguageModel(config)
    check_fits(state, model.state_dict(), f"{folder} looks like {values['model_type']}, and")
    _, known = hugging_face.to_hugging_face(config, model.state_dict())
    if extra := [name for name in theirs if name not in known and not re.search(hugging_face.NO_WEIGHTS, name)]:
        raise ValueError(
            f"{folder} looks like {values['model_type']}, with {len(extra)} unknown weights ({', '.join(extra[:4])}): "
            "give a model of that architecture"
        )
    model.load_state_dict(state, assign=True)
    return model.eval()


def _to_language(source: Weights, target: Path, options: Options) -> None:
    model = read_language(source.path)
    tokenizer = options.tokenizer or source.path / "tokenizer.json"
    if not tokenizer.is_file():
        print(
            f"{source.path} has no tokenizer.json, so {target.name} has none: if it has a tokenizer of another kind, "
            f"transformers' AutoTokenizer.from_pretrained({str(source.path)!r}).save_pretrained(FOLDER) writes one for "
            "--tokenizer"
        )
        language.save(model, target)
    else:
        language.save(model, target, _check_tokenizer(tokenizer, model.config.vocab_size))


def _in_one_dtype(state: dict[str, Tensor], values: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Return weights of several dtypes in the widest; ValueError if they are quantised."""
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if values.get("quantization_config") or any(dtype.itemsize == 1 for dtype in dtypes):
        raise ValueError(f"{folder} has quantised weights: give the model that they were made of")
    widest = max(dtypes, key=lambda one: one.itemsize, default=None)
    return {name: value.to(widest) if value.is_floating_point() else value for name, value in state.items()}


def _check_tokenizer(tokenizer: Path, vocab_size: int) -> Path:
    """Return a tokenizer.json that can be read and fits the model, its tokenizer_config.json too."""
    try:
        size = tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    except Exception as error:  # the library raises this class itself
        raise ValueError(f"{tokenizer} is damaged, or no tokenizer.json ({error}): get the file again") from None
    if size > vocab_size:
        raise ValueError(f"{tokenizer} has {size} tokens and the model {vocab_size}: give the model's own tokenizer")
    if (settings := tokenizer.with_name("tokenizer_config.json")).is_file():
        read_json(settings)
    return tokenizer


def _to_hugging_face(source: Weights, target: Path, options: Options) -> None:
    try:
        from diffvision.models.language.hugging_face import as_transformers, write
    except ImportError as error:
        raise ValueError(f"huggingface needs transformers: pip install 'diffvision[hf]' ({error})") from error
    write(as_transformers(language.load(source.path)), target, language.find_tokenizer(source.path))


CONVERSIONS: dict[tuple[str, str], Callable[[Weights, Path, Options], None]] = {
    ("diffclip", "openclip"): _to_openclip,
    ("timm", "diffvision"): partial(_map, by=timm.from_timm),
    ("huggingface", "language"): _to_language,
    ("language", "huggingface"): _to_hugging_face,
}
for _layout in unilm.NAMES:
    CONVERSIONS[_layout, "diffvision"] = partial(_map, by=partial(unilm.from_unilm, layout=_layout))
