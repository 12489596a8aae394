"""Conversions of files and folders of weights between layouts. `command` chooses among them."""

from __future__ import annotations

import json
import math
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
from diffvision.models.architecture import KEY, check, metadata, recorded
from diffvision.models.checkpoint import check_fits, differences, few, read_content, read_state
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
from diffvision.nn import ATTENTION, AttentionLayer, depth_lambda_init

_IDENTIFYING = tuple(ATTENTION[variant].identifying_weight for variant in ("v1", "v2", "gated"))


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
    _save(state, target / WEIGHTS, metadata(model, config))


def _to_diffclip(source: Weights, target: Path, options: Options) -> None:
    weights = diffclip.to_diffclip(source.state)
    if not diffclip.is_diffclip(weights):
        raise ValueError(f"{source.path} has no V1 attention in both towers: give a DiffCLIP model")
    config = read_json(source.path / CONFIG).get("model_cfg", {})
    if other := diffclip.lost_settings(config, weights):
        raise ValueError(
            f"{source.path} cannot be written as diffclip: DiffCLIP's code would compute something else: {few(other)}"
        )
    depth = "lambda_init=depth" in config["text_cfg"]["block_type"]
    model = _check_diffclip(config, source.state, f"{source.path}, by its {CONFIG},", "depth" if depth else 0.8)
    if about := recorded(source.path / WEIGHTS):
        check(about, model, str(source.path / WEIGHTS), config)
    if target.suffix == ".safetensors":
        _save(weights, target)
    else:  # as DiffCLIP's code reads them
        torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, target)


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
    """Convert weights by a mapping of names, and check every attention layer of the result."""
    if source.layout == "diffvision":
        _refuse_other_layers(source.path)
        _refuse_mixed_layers(source)
    made = by(source.state)
    _check_layers(source.state if source.layout == "diffvision" else made, str(source.path))
    _save(made, target)


def _refuse_other_layers(path: Path) -> None:
    """Raise a ValueError if a file records what the other layouts' code does not compute from the same weights.

    It is another lambda_init than the depth's, or a variant such as DINT, whose weights are V1's.
    """
    layers: Any = read_content(path, "meta")[1].get(KEY, {}).get("layers", {})
    for name, layer in layers.items():
        if (variant := layer.get("variant")) not in (None, "standard", "v1", "v2", "gated"):
            raise ValueError(
                f"{path} has attention of variant {variant!r} in {name}, which other layouts do not have: export it "
                "as a diffvision folder"
            )
    given = [(name, layer["lambda_init"]) for name, layer in layers.items() if "lambda_init" in layer]
    for depth, (name, value) in enumerate(given):
        theirs = depth_lambda_init(depth)
        if not math.isclose(value, theirs, rel_tol=1e-6):
            raise ValueError(
                f"{path} has lambda_init {value} in {name}, and other layouts fix {theirs:.4g} at that depth: "
                "export it as a diffvision folder"
            )


def _refuse_mixed_layers(source: Weights) -> None:
    """Raise a ValueError for attention of different variants in one file, which the other layouts' code has not."""
    layers = {name.removesuffix("q_proj.weight") for name in source.state if name.endswith("q_proj.weight")}
    kinds = {layer: [mark for mark in _IDENTIFYING if f"{layer}{mark}" in source.state] for layer in sorted(layers)}
    one, *others = kinds
    if differing := [layer for layer in others if kinds[layer] != kinds[one]]:
        raise ValueError(
            f"{source.path} has different variants, as in {one.rstrip('.')} and {differing[0].rstrip('.')} "
            "(variant_by_layer), and other layouts have one: export a folder"
        )


def _check_layers(state: Mapping[str, Tensor], what: str) -> None:
    """Compare every V1, V2 and gated attention of a state_dict with the layer that its tensors describe.

    Args:
        state: with our layers' names, at the top or anywhere within a model.
        what: name of the state_dict in errors.

    Raises:
        ValueError: a layer has missing, surplus or wrongly shaped tensors; the message names them.
    """
    prefixes = {
        name[: -len(mark)] for name in state for mark in ("head_norm.weight", *_IDENTIFYING) if name.endswith(mark)
    }
    prefixes = {prefix for prefix in prefixes if not prefix.endswith("mlp.")}  # its gate is SwiGLU's
    faults = [f"{prefix}{fault}" for prefix in sorted(prefixes) for fault in _faults(_under(state, prefix))]
    if faults:
        raise ValueError(f"{what} does not hold whole attention layers; in our names: {few(faults)}")


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _faults(weights: Mapping[str, Tensor]) -> list[str]:
    """Return what keeps a layer's weights from being loaded."""
    try:
        layer = _build_meta(weights)
    except KeyError as error:
        return [f"{error.args[0]} is missing"]
    except (ValueError, IndexError, ZeroDivisionError) as error:
        shapes = {
            name: list(value.shape) for name, value in weights.items() if "proj.weight" in name or "lambda" in name
        }
        return [f"* has sizes that do not fit ({error}): {shapes}"]
    return differences(weights, layer.state_dict())


def _build_meta(weights: Mapping[str, Tensor]) -> AttentionLayer:
    """Return the layer of these sizes on the meta device."""
    is_v2, gate = ATTENTION["v2"].identifying_weight in weights, weights.get(ATTENTION["gated"].identifying_weight)
    is_gated = gate is not None and not is_v2 and "lambda_q1" not in weights
    variant = ATTENTION["v2" if is_v2 else "gated" if is_gated else "v1"]
    queries, width = weights["q_proj.weight"].shape
    if is_gated:  # the size of a head changes no other shape than that of its norms
        head_dim = len(weights.get("q_norm.weight", torch.empty(math.gcd(queries, len(weights["k_proj.weight"])))))
        heads = queries // head_dim
    elif is_v2:
        heads = len(weights["lambda_proj.weight"])
        head_dim = queries // (2 * heads)
    else:
        head_dim = len(weights["lambda_q1"])
        heads = queries // (2 * head_dim)
    return variant(
        width,
        heads,
        len(weights["k_proj.weight"]) // (variant.key_maps * head_dim),
        head_dim=head_dim,
        head_norm="head_norm.weight" in weights,
        qkv_bias="q_proj.bias" in weights,
        proj_bias="proj.bias" in weights,
        qk_norm="q_norm.weight" in weights,
        device="meta",
    )


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
    """Return weights of several dtypes in the one of config.json, as transformers loads them, or in the widest.

    Raises:
        ValueError: they are quantised.
    """
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if (quantised := values.get("quantization_config")) or any(dtype.itemsize == 1 for dtype in dtypes):
        smallest = min(dtypes, key=lambda one: one.itemsize)
        how = quantised.get("quant_method") if isinstance(quantised, dict) else smallest
        raise ValueError(
            f"{folder} has quantised weights ({how}), which our layers do not compute with: give the model that they "
            "were made of"
        )
    if len(dtypes) < 2:
        return state
    named = getattr(torch, str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch."), None)
    dtype = named if named in dtypes else max(dtypes, key=lambda one: one.itemsize)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


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
    ("openclip", "diffclip"): _to_diffclip,
    ("timm", "diffvision"): partial(_map, by=timm.from_timm),
    ("diffvision", "timm"): partial(_map, by=timm.to_timm),
    ("huggingface", "language"): _to_language,
    ("language", "huggingface"): _to_hugging_face,
}
for _layout in unilm.NAMES:
    CONVERSIONS[_layout, "diffvision"] = partial(_map, by=partial(unilm.from_unilm, layout=_layout))
    CONVERSIONS["diffvision", _layout] = partial(_map, by=partial(unilm.to_unilm, layout=_layout))
