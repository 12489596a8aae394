"""`diffvision adapt`: pretrained weights -> a folder of the same model made differential, which its host loads."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from torch import Tensor, nn

from diffvision.analysis.heads import highest_entropy
from diffvision.data.images.samples import CaptionMember, ImageMember, ImageText
from diffvision.data.shards.loader import ShardLoader
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.module import TextData
from diffvision.evaluation.loading import Loaded, load
from diffvision.export.folders import save_folder
from diffvision.models import language
from diffvision.models.adapt import ENTRYPOINT, Heads, Method
from diffvision.models.adapt import adapt as adapt_model
from diffvision.models.convert import convert
from diffvision.models.files import FOLDER, check_free, written_whole
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.names import unknown_model

EXACT: tuple[Method, ...] = ("v2", "dex")
TOLERANCE = 1e-6  # of the largest output
MEASURED = 64  # samples whose attention chooses heads


def adapt(
    source: str,
    destination: str,
    *,
    method: Method = "v2",
    weights: str | None = None,
    heads: str = "all",
    data: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Makes a pretrained model differential, and writes it as a folder to train on from, once outputs are compared.

    Args:
        source: a timm or OpenCLIP model's name (with --weights), local-dir:FOLDER of either, or a language model's
            folder or .ckpt (ours, or transformers' Llama).
        destination: the folder to write; it must not be there yet.
        method: v2 or dex, which compute the same at first, or v1, which does not.
        weights: of a name: a tag of pretrained weights, or a file.
        heads: of dex: all, entropy:SHARE (the paper's: entropy:0.5), or numbers for every layer, as 0,3,5.
        data: of heads by entropy: shards like those to train on; random inputs without, which tell less.
        tokenizer: of shards of text, where none lies beside the language model.

    Raises:
        FileNotFoundError, ValueError: no such source, or one without weights or without standard attention; settings
            that do not go together; outputs that are not the pretrained ones; a destination that is there.
    """
    target = Path(destination)
    check_free(target)
    if method != "dex" and (heads != "all" or data):
        raise ValueError(f"heads and data choose the heads of method 'dex'; {method!r} changes all")
    if data and not heads.startswith("entropy"):
        raise ValueError(f"data is of heads by entropy, and heads is {heads!r}: set heads to entropy:0.5")
    found = _read(source, weights)
    model: Any = found.model
    inputs = _random_inputs(found)
    chosen = _heads(heads, found, source, data, tokenizer, inputs)
    before = copy.deepcopy(model)
    adapt_model(model, method, heads=chosen)
    _compare(before, model, inputs, method)
    with written_whole(target) as made:
        _write(found, before, method, source, made)
        again = language.load(made) if isinstance(model, LanguageModel) else load(f"{FOLDER}{made}").model
        if (off := largest_difference(model, again, inputs)) > TOLERANCE:
            raise ValueError(f"{type(model).__name__} cannot be saved: its host builds another model, {off:.1e} off")
    print(f"wrote {target}: {_how_to_load(model, target)}")


# ---- what is adapted -----------------------------------------------------------------------------------------------


def _read(source: str, weights: str | None) -> Loaded:
    """The pretrained model."""
    path = Path(source)
    if source.startswith((FOLDER, "hf-hub:")):
        if weights:
            raise ValueError(f"weights is {weights!r}, but {source} brings its own: leave weights out")
        return load(source)
    if path.exists():
        if weights:
            raise ValueError(f"weights is {weights!r}, but {source} is a model with weights: leave weights out")
        return Loaded(_language(path), None, None, {}, {})  # type: ignore[arg-type]  # text has no transform
    name, _, tag = source.partition(".")
    if not (timm.is_model(source) or name in open_clip.list_models()):
        raise unknown_model(source, "neither OpenCLIP nor timm has a", [*open_clip.list_models(), *timm.list_models()])
    if not (weights or tag):
        raise ValueError(f"{source} has new weights: give --weights, a tag of pretrained ones or a file")
    return load(name, weights or tag)


def _language(path: Path) -> LanguageModel:
    if not (path / "config.json").is_file() or '"model_type"' not in (path / "config.json").read_text("utf-8"):
        return language.load(path)
    with tempfile.TemporaryDirectory() as scratch:  # transformers'
        convert(str(path), f"{scratch}/language", to="language")
        return language.load(f"{scratch}/language")


def _random_inputs(found: Loaded) -> dict[str, Tensor]:
    """A batch that the model takes, drawn always alike."""
    model: Any = found.model
    draws = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    if isinstance(model, LanguageModel):
        shape = (2, min(64, model.config.max_length))
        return {"tokens": torch.randint(model.config.vocab_size, shape, generator=draws)}
    size = getattr(getattr(model, "visual", None), "image_size", None) or found.preprocess["input_size"][1:]
    batch = {"image": torch.randn(2, 3, *((size, size) if isinstance(size, int) else size), generator=draws).to(dtype)}
    if hasattr(model, "encode_text"):
        text = torch.randint(
            1, found.config["text_cfg"].get("vocab_size", 49408), (2, model.context_length), generator=draws
        )
        batch["text"] = text
    return batch


def _heads(
    heads: str, found: Loaded, source: str, data: str | None, tokenizer: str | None, inputs: Mapping[str, Tensor]
) -> Heads | None:
    """Which heads `heads` asks for."""
    if heads == "all":
        return None
    kind, _, rest = heads.partition(":")
    try:
        if kind == "entropy":
            batches = [inputs] if data is None else list(_batches(found, source, data, tokenizer))
            chosen = highest_entropy(found.model, batches, float(rest or 0.5))
            told = f"{MEASURED} samples of {data}" if data else "random inputs: give --data for those of real ones"
            print(f"heads of highest entropy on {told}: {json.dumps(chosen)}")
            return chosen
        numbers = [int(part) for part in heads.split(",")]
    except ValueError as error:
        if kind == "entropy" and "could not convert" not in str(error):
            raise
        raise ValueError(f"heads is {heads!r}: give all, entropy:0.5, or numbers as 0,3,5") from None
    return lambda depth, attention: numbers


def _batches(found: Loaded, source: str, data: str, tokenizer: str | None) -> Iterator[Any]:
    """`MEASURED` samples of shards, as the model takes them."""
    model: Any = found.model
    size = 8
    batches: Iterator[Any]
    if isinstance(model, LanguageModel):
        own = tokenizer or language.find_tokenizer(source)
        length = min(512, model.config.max_length)
        texts = TextData(data, size, length, tokenizer=None if own is None else str(own), num_workers=0)
        texts.prepare_data()
        batches = ({"tokens": batch["tokens"][:, :-1]} for batch in texts.train_dataloader())
    else:
        image = ImageMember(found.transform)
        kind: Any = _Images(image) if found.tokenizer is None else ImageText(image, CaptionMember(), found.tokenizer)
        batches = iter(ShardLoader(ShardSet(data), kind, size, num_workers=0))
    return islice(batches, MEASURED // size)


class _Images:
    """Images alone, of shards of any kind."""

    def __init__(self, image: ImageMember) -> None:
        self.image = image

    def decode(self, members: Any) -> Tensor:
        return self.image(members)

    def collate(self, items: list[Tensor]) -> dict[str, Tensor]:
        return {"image": torch.stack(items)}


# ---- whether it is the same ----------------------------------------------------------------------------------------


@torch.no_grad()
def largest_difference(before: nn.Module, after: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """The largest difference of two models' outputs over the largest output, each tower for itself, in their dtype.

    Args:
        before, after: timm, OpenCLIP or language models, in evaluation mode.
        inputs: `image` and/or `text`, or `tokens`.
    """
    off = 0.0
    for expected, own in zip(_outputs(before, inputs), _outputs(after, inputs), strict=True):
        difference = (own.double() - expected.double()).abs().max() / expected.double().abs().max()
        off = max(off, difference.nan_to_num(torch.inf).item())
    return off


def _outputs(model: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    if "tokens" in inputs:
        return [model(inputs["tokens"])]
    towers = [(getattr(model, "encode_image", model), "image"), (getattr(model, "encode_text", None), "text")]
    return [tower(inputs[name]) for tower, name in towers if name in inputs]


def _compare(before: nn.Module, after: nn.Module, inputs: Mapping[str, Tensor], method: Method) -> None:
    """Says how far an adapted model is off; ValueError where it must not be. Where rounding in the model's own dtype
    adds up to more than the tolerance, float64 tells it from a fault."""
    off = largest_difference(before, after, inputs)
    told = f"{method}: outputs differ by {off:.1e} of the largest ({str(next(after.parameters()).dtype)[6:]})"
    if method in EXACT and off > TOLERANCE:
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        off = largest_difference(copy.deepcopy(before).double(), copy.deepcopy(after).double(), wide)
        told += f", {off:.1e} (float64)"
    if method in EXACT and not off <= TOLERANCE:
        raise ValueError(f"{told}, above {TOLERANCE}: the weights are not finite, or a layer is not what it looks like")
    print(told if method in EXACT else f"{told}: it is another function, to be trained")


# ---- writing -------------------------------------------------------------------------------------------------------


def _write(found: Loaded, before: nn.Module, method: Method, source: str, folder: Path) -> None:
    """The adapted model as a folder of its host's."""
    model: Any = found.model
    if isinstance(model, LanguageModel):
        beside = None if not Path(source).exists() else language.find_tokenizer(source)
        language.save(model, folder, beside)
        return
    if hasattr(model, "visual"):
        config = open_clip_config(found.config, model, method)
    else:
        config = {**found.config, **{key: model._model_args[key] for key in ("base", "method")}}
    save_folder(model, folder, config=config, preprocess=found.preprocess, tokenizer=found.tokenizer)


def open_clip_config(config: Mapping[str, Any], model: nn.Module, method: Method) -> dict[str, Any]:
    """OpenCLIP's model_cfg of an adapted model, from the one of the pretrained.

    Raises:
        ValueError: a tower that the configuration has no words for: CoCa's decoder.
    """
    if "multimodal_cfg" in config:
        raise ValueError("a CoCa's decoder cannot be named in OpenCLIP's configuration: adapt it in Python instead")
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    own: Any = model
    vision, text = changed["vision_cfg"], changed["text_cfg"]
    args = getattr(getattr(own.visual, "trunk", None), "_model_args", {})
    if "base" in args:
        vision |= {"timm_model_name": f"{ENTRYPOINT}.{method}.{args['base']}", "timm_model_pretrained": False}
    elif hasattr(own.visual, "transformer"):
        vision["block_type"] = _block_type(vision.get("block_type"), method)
        if method == "v1":
            vision["head_width"] = 2 * vision.get("head_width", 64)
    if not text.get("hf_model_name"):
        text["block_type"] = _block_type(text.get("block_type"), method)
        if method == "v1":
            text["heads"] = text.get("heads", 8) // 2
    return changed


def _block_type(given: str | None, method: Method) -> str:
    """Of a plain tower, or of one that has our standard attention with settings, which stay."""
    settings = (given or "").split(":", 2)[2:]
    return ":".join(["diffvision", method, *settings])


def _how_to_load(model: nn.Module, folder: Path) -> str:
    if isinstance(model, LanguageModel):
        return f"diffvision.models.language.load('{folder}'), diffvision fit --model.model local-dir:{folder}"
    call = "open_clip.create_model_and_transforms" if hasattr(model, "visual") else "timm.create_model"
    more = "" if hasattr(model, "visual") else ", pretrained=True"
    return f"{call}('{FOLDER}{folder}'{more}), diffvision fit --model.model {FOLDER}{folder}"
