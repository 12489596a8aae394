"""Conversions of files and folders of weights between layouts. `command` chooses among them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import open_clip
import tokenizers
import torch
from safetensors.torch import save_file
from timm.models import is_model
from torch import Tensor

from diffvision.models import language
from diffvision.models.architecture import metadata
from diffvision.models.checkpoint import check_fits, read_state
from diffvision.models.convert import diffclip, timm, unilm
from diffvision.models.convert import transformers as hugging_face
from diffvision.models.convert.layouts import CONFIG, WEIGHTS, Weights, weight_files
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import DIFFCLIP_PREPROCESS
from diffvision.models.weight_files import read_json
from diffvision.nn.diff_attention import VECTORS


def write_openclip(source: Weights, folder: Path, *, tower: str | None = None, lambda_init: float | str = 0.8) -> None:
    """Write a DiffCLIP checkpoint as a folder of OpenCLIP; the settings are those of `diffclip.from_diffclip`.

    Raises:
        ValueError: the weights are not whole, or not a DiffCLIP's, or the tower is unknown.
    """
    if tower is not None and not is_model(tower):
        raise ValueError(f"tower must be a model of timm, got {tower!r}: register it before, or name another")
    config, state = diffclip.from_diffclip(source.state, tower=tower, lambda_init=lambda_init)
    with torch.device("meta"):
        model = open_clip.CLIP(**config)
    check_fits(state, model.state_dict(), f"{source.path} looks like diffclip, and")
    diffclip.check_layers_are_v1(model, lambda_init)
    folder.mkdir()
    values = {"model_cfg": config, "preprocess_cfg": DIFFCLIP_PREPROCESS}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _save(state, folder / WEIGHTS, metadata(model))


def write_layers(source: Weights, file: Path) -> None:
    """Write weights with attention of timm or unilm as a .safetensors or .pt file with attention of ours.

    Raises:
        ValueError: an attention layer is not whole, or not V1 or V2.
    """
    made = timm.from_timm(source.state) if source.layout == "timm" else unilm.from_unilm(source.state, source.layout)
    layers = {name.removesuffix(vector) for name in made for vector in VECTORS if name.endswith(vector)}
    parts = [*VECTORS, "q_proj.weight", "k_proj.weight", "v_proj.weight"]
    if missing := [layer + part for layer in sorted(layers) for part in parts if layer + part not in made]:
        raise ValueError(
            f"{source.path} must hold whole attention layers; in our names it lacks {', '.join(missing[:4])}"
        )
    _save(made, file)


def write_language(source: Path, folder: Path) -> None:
    """Write a folder of transformers as one of our language models, with its tokenizer.json.

    Raises:
        FileNotFoundError, ValueError: as `read_language`, or the tokenizer is damaged or of a larger vocabulary.
    """
    if not (source / "tokenizer.json").is_file():
        print(
            f"{source} has no tokenizer.json, so {folder.name} has none: transformers' "
            f"AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained(FOLDER) writes one"
        )
    model, tokenizer = read_language(source), language.find_tokenizer(source)
    if tokenizer is not None:
        _check_tokenizer(tokenizer, model.config.vocab_size)
    language.save(model, folder, tokenizer)


def _check_tokenizer(file: Path, vocab_size: int) -> None:
    """Raise a ValueError if a tokenizer.json or its settings cannot be read, or it has more tokens than the model."""
    try:
        size = tokenizers.Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:  # the library raises this class itself
        raise ValueError(f"{file} is damaged, or no tokenizer.json ({error}): get the file again") from None
    if size > vocab_size:
        raise ValueError(
            f"{file} must have at most the model's {vocab_size} tokens, got {size}: take its own tokenizer"
        )
    if (settings := file.with_name("tokenizer_config.json")).is_file():
        read_json(settings)


def read_language(folder: Path) -> LanguageModel:
    """Return the language model in a folder of transformers', in the widest dtype of its weights, for evaluation.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: settings or weights are missing, do not fit each other, or our model does not have them.
    """
    values = read_json(folder / "config.json")
    theirs = {name: value for file in weight_files(folder) for name, value in read_state(file).items()}
    dtypes = {tensor.dtype for tensor in theirs.values() if tensor.is_floating_point()}
    if values.get("quantization_config") or any(dtype.itemsize == 1 for dtype in dtypes):
        raise ValueError(f"{folder} has quantised weights: give the model that they were made of")
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
    return model.to(max(dtypes, key=lambda one: one.itemsize)).eval()


def _save(state: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write a .safetensors file with its metadata, or a .pt of the state_dict alone."""
    copies = {name: value.detach().clone().contiguous() for name, value in state.items()}  # views would share storage
    if path.suffix == ".safetensors":
        save_file(copies, path, metadata=about)
    else:
        torch.save(copies, path)
