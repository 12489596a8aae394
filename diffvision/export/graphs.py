"""The graphs of a model that are exported: functions of tensors alone, each with examples of its inputs.

| model | graphs |
|---|---|
| timm's, ours included | `model`: image [B, 3, h, w] -> logits [B, classes] |
| OpenCLIP's | `image`: image [B, 3, h, w] -> features [B, D]; `text`: tokens [B, L] -> features [B, D] |
| `LanguageModel` | `prefill` and `decode`: tokens and a cache; see `Prefill` and `Decode` |
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffvision import __version__
from diffvision.models.adapt import merge_dex
from diffvision.models.language.cache import KVCache, LayerCache
from diffvision.models.language.decoder import LanguageModel
from diffvision.nn import AttentionLayer

EXAMPLES, LENGTH, ROOM = 2, 6, 10  # of the inputs that are traced; the graphs hold for any


@dataclass(frozen=True)
class Graph:
    """A function of tensors alone.

    Attributes:
        module: the module that computes it.
        inputs: examples of its arguments, in order.
        outputs: names of what it returns.
        axes: input -> {axis: name} of the axes that may have any size.
        limits: name of an axis -> its largest size, where there is one.
        about: metadata (size, mean and std of images, variant of attention, ...).
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    axes: dict[str, dict[int, str]]
    limits: dict[str, int] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)


def graphs(
    model: nn.Module, *, name: str = "", preprocess: Mapping[str, Any] | None = None, normalize: bool = True
) -> dict[str, Graph]:
    """Return the graphs of a model, by name (see the module).

    Args:
        model: timm's, OpenCLIP's or a `LanguageModel`, on its device.
        name: the model's name, for the metadata.
        preprocess: of images, where it differs from the model's: mean, std, interpolation, ...
        normalize: features of OpenCLIP's towers have length 1, so that their product is the cosine, as
            `model.encode_image(image, normalize=True)` gives them.

    Raises:
        ValueError: a model on the meta device, or of none of these kinds.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device, without weights: load some into it first")
    about = {"diffvision": __version__, "model": name, "variant": _variants(model)}
    if any(isinstance(part, AttentionLayer) and part.mergeable for part in model.modules()):
        # The merged layer computes the same function with fewer operations.
        model = merge_dex(copy.deepcopy(model))
    if isinstance(model, LanguageModel):
        return _language_graphs(model, about)
    if hasattr(model, "encode_image") and hasattr(model, "encode_text") and hasattr(model, "visual"):
        return _clip_graphs(model, about, dict(preprocess or {}), normalize)
    if hasattr(model, "pretrained_cfg") and hasattr(model, "num_classes"):  # those of timm that give one tensor
        return _timm_graphs(model, about, dict(preprocess or {}))
    raise ValueError(
        f"{type(model).__name__} is not a timm model, an OpenCLIP model with two towers or a LanguageModel: "
        "use torch.export on it yourself"
    )


# ---- images --------------------------------------------------------------------------------------------------------


def _timm_graphs(model: Any, about: dict[str, str], preprocess: dict[str, Any]) -> dict[str, Graph]:
    from timm.data import resolve_model_data_config

    data = {**resolve_model_data_config(model), **preprocess}
    data["input_size"] = _input_size(model, data["input_size"])
    output = "logits" if model.num_classes else "features"
    return {"model": _image_graph(model, data["input_size"], output, about | _texts(data))}


def _input_size(model: Any, known: tuple[int, ...]) -> tuple[int, ...]:
    """Return [channels, h, w] that a model takes; it may differ from the model's configuration."""
    embed = getattr(model, "patch_embed", None)
    built = getattr(embed, "img_size", None) if getattr(embed, "strict_img_size", False) else None
    meets = _first(model)
    return (meets.shape[1] if meets.ndim == 4 else known[0], *(built or known[1:]))


def _first(module: nn.Module) -> Tensor:
    """Return the first layer's weight, [D, channels, p, p]: in mixed precision other weights have another dtype."""
    return next((weight for weight in module.parameters() if weight.ndim == 4), next(module.parameters()))


def _clip_graphs(model: Any, about: dict[str, str], preprocess: dict[str, Any], normalize: bool) -> dict[str, Graph]:
    size = model.visual.image_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    about |= {"normalized": json.dumps(normalize), "logit_scale": str(model.logit_scale.exp().item())}
    if getattr(model, "logit_bias", None) is not None:
        about["logit_bias"] = str(model.logit_bias.item())
    data = {**getattr(model.visual, "preprocess_cfg", {}), **preprocess}  # a model built by its class has none
    tokens = torch.ones(EXAMPLES, model.context_length, dtype=torch.int64, device=model.logit_scale.device)
    text = Graph(
        TextTower(model, normalize),
        {"tokens": tokens},
        ("features",),
        {"tokens": {0: "batch"}},  # OpenCLIP's towers take no other length
        about=about | {"context_length": str(model.context_length)},
    )
    return {
        "image": _image_graph(ImageTower(model, normalize), (3, *size), "features", about | _texts(data)),
        "text": text,
    }


def _image_graph(module: nn.Module, size: tuple[int, ...], output: str, about: dict[str, str]) -> Graph:
    weight = _first(module)
    image = torch.zeros(EXAMPLES, *size, dtype=weight.dtype, device=weight.device)
    return Graph(module, {"image": image}, (output,), {"image": {0: "batch"}}, about=about)


class ImageTower(nn.Module):
    """An OpenCLIP model's image tower alone: image [B, 3, h, w] -> features [B, D]."""

    def __init__(self, model: Any, normalize: bool) -> None:
        super().__init__()
        self.model, self.normalize = _with_parts(model, lambda name: name == "visual"), normalize

    def forward(self, image: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B D"]:
        """Return the features of `model.encode_image`; CoCa's tower returns more than these."""
        return self.model.encode_image(image, normalize=self.normalize)


class TextTower(nn.Module):
    """An OpenCLIP model's text tower alone: tokens [B, L] -> features [B, D]."""

    def __init__(self, model: Any, normalize: bool) -> None:
        super().__init__()
        others = ("visual", "text_decoder", "logit_scale", "logit_bias")
        self.model, self.normalize = _with_parts(model, lambda name: name not in others), normalize

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B D"]:
        """Return the features of `model.encode_text`."""
        return self.model.encode_text(tokens, normalize=self.normalize)


def _with_parts(model: Any, kept: Callable[[str], bool]) -> Any:
    """Return a copy that shares some of a model's parts and drops the rest: a graph holds all weights of its module."""
    alone = copy.copy(model)
    alone._modules = {name: part for name, part in model._modules.items() if kept(name)}
    alone._parameters = {name: parameter for name, parameter in model._parameters.items() if kept(name)}
    return alone


# ---- text ----------------------------------------------------------------------------------------------------------


def _language_graphs(model: LanguageModel, about: dict[str, str]) -> dict[str, Graph]:
    """Return a graph for the prompt and one for a decoded token, with the cache as tensors."""
    config, device = model.config, model.head_weight.device
    about |= {"vocab_size": str(config.vocab_size), "max_length": str(config.max_length)}
    example = model.new_cache(EXAMPLES, ROOM)
    shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in example.layers}
    if len(shapes) > 1:
        raise ValueError(
            f"variant_by_layer={config.variant_by_layer!r} has caches of different shapes, which a graph cannot "
            "hold: export a folder, without --to"
        )
    keys = torch.stack([layer.keys for layer in example.layers])
    values = torch.stack([layer.values for layer in example.layers])
    tokens = torch.zeros(EXAMPLES, LENGTH, dtype=torch.int64, device=device)
    positions = torch.full((EXAMPLES,), LENGTH, device=device)
    outputs = ("logits", "new_keys", "new_values")
    prefill = Graph(
        Prefill(model),
        {"tokens": tokens},
        outputs,
        {"tokens": {0: "batch", 1: "length"}},
        {"length": config.max_length},
        about,
    )
    decode = Graph(
        Decode(model),
        {"tokens": tokens[:, :1], "positions": positions, "keys": keys, "values": values},
        outputs,
        {
            "tokens": {0: "batch"},
            "positions": {0: "batch"},
            "keys": {1: "batch", 4: "room"},
            "values": {1: "batch", 3: "room"},
        },
        about=about,
    )
    return {"prefill": prefill, "decode": decode}


class Prefill(nn.Module):
    """A language model's prompts: tokens [B, N] -> logits [B, N, vocab], keys and values for `Decode`.

    Prompts of unequal length are padded at the right with any token: no token attends to what comes after
    it. A row's first new token is chosen from the logits at the row's last token.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Int[Tensor, "B N"]
    ) -> tuple[Float[Tensor, "B N vocab"], Float[Tensor, "layers B Hk P N D"], Float[Tensor, "layers B Hk N V"]]:
        """Return (logits, keys, values)."""
        cache = _Cache([_PromptLayer() for _ in self.model.blocks], tokens.shape[0], tokens.shape[1])
        hidden = self.model.hidden(tokens, cache=cache)
        return self.model.logits(hidden), *cache.stacked()


class Decode(nn.Module):
    """A language model's step: one token per row, with the buffer of past keys and values as input and output.

    Each row writes at its position and attends to the buffer up to that position. The rest of the buffer (zeros, or a
    prompt's padding) is masked, but must be finite. Positions must be below the buffer's length and the model's
    max_length, which a graph cannot check.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Int[Tensor, "B 1"],
        positions: Int[Tensor, "B"],
        keys: Float[Tensor, "layers B Hk P L D"],
        values: Float[Tensor, "layers B Hk L V"],
    ) -> tuple[Float[Tensor, "B 1 vocab"], Float[Tensor, "layers B Hk P L D"], Float[Tensor, "layers B Hk L V"]]:
        """Return (logits, keys, values): the latter two for the next step, with positions one higher."""
        layers: list[LayerCache] = [_CopiedLayer(k, v) for k, v in zip(keys.unbind(), values.unbind(), strict=True)]
        past = _Cache(layers, tokens.shape[0], keys.shape[4])
        hidden = self.model.step(tokens, positions[:, None], past)
        return self.model.logits(hidden), *past.stacked()


class _Cache(KVCache):
    """A cache made of existing layer caches."""

    def __init__(self, layers: list[Any], batch: int, capacity: int) -> None:
        self.layers, self.batch, self.capacity = layers, batch, capacity

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return all layers' keys [layers, B, Hk, P, L, D] and values [layers, B, Hk, L, V]."""
        return torch.stack([layer.keys for layer in self.layers]), torch.stack([layer.values for layer in self.layers])


class _PromptLayer(LayerCache):
    """A layer's cache that stores the keys and values of a prompt, without a buffer allocated beforehand."""

    def __init__(self) -> None:
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = k, v
        return k, v


class _CopiedLayer(LayerCache):
    """A layer's cache that is copied at each write, since a graph has no state."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def at(self, index: Int[Tensor, "B 1"]) -> Any:
        positions = torch.arange(self.capacity, device=index.device)
        self.is_written = (positions == index)[:, None, :, None]  # [B, 1, L, 1]
        return self

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.where(self.is_written[:, :, None], k, self.keys)
        self.values = torch.where(self.is_written, v, self.values)
        return self.keys, self.values


# ---- metadata ------------------------------------------------------------------------------------------------------


def _variants(model: nn.Module) -> str:
    return ", ".join(sorted({layer.variant for layer in model.modules() if isinstance(layer, AttentionLayer)}))


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each value as text: strings unchanged, others as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
