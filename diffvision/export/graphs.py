"""The graphs of a model that are exported: functions of tensors alone, each with examples of its inputs.

| model | graphs |
|---|---|
| timm's, ours included | `model`: image [B, 3, h, w] -> logits [B, classes] |
| OpenCLIP's | `image`: image [B, 3, h, w] -> features [B, D]; `text`: tokens [B, L] -> features [B, D] |
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
from diffvision.models.merge import merge_dex
from diffvision.nn import AttentionLayer

EXAMPLES = 2  # of the inputs that are traced; the graphs take any number


@dataclass(frozen=True)
class Graph:
    """A function of one tensor, with a batch of any size.

    Attributes:
        module: the module that computes it.
        inputs: {name: an example}.
        output: name of what it returns.
        about: metadata (size, mean and std of images, variant of attention, ...).
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    output: str
    about: dict[str, str] = field(default_factory=dict)


def graphs(model: nn.Module, *, name: str = "", preprocess: Mapping[str, Any] | None = None) -> dict[str, Graph]:
    """Return the graphs of a model, by name (see the module).

    Features of OpenCLIP's towers have length 1, so that their product is the cosine.

    Args:
        model: timm's or OpenCLIP's, on its device.
        name: the model's name, for the metadata.
        preprocess: of images, where it differs from the model's: mean, std, interpolation, ...

    Raises:
        ValueError: a model on the meta device, or of none of these kinds.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is on the meta device, without weights: load some into it first")
    about = {"diffvision": __version__, "model": name, "variant": _variants(model)}
    if any(isinstance(part, AttentionLayer) and part.mergeable for part in model.modules()):
        # The merged layer computes the same function with fewer operations.
        model = merge_dex(copy.deepcopy(model))
    if hasattr(model, "encode_image") and hasattr(model, "encode_text") and hasattr(model, "visual"):
        return _clip_graphs(model, about, dict(preprocess or {}))
    if hasattr(model, "pretrained_cfg") and hasattr(model, "num_classes"):  # those of timm that give one tensor
        return _timm_graphs(model, about, dict(preprocess or {}))
    raise ValueError(
        f"{type(model).__name__} is not a timm model or an OpenCLIP model with two towers: use torch.export on it "
        "yourself"
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


def _clip_graphs(model: Any, about: dict[str, str], preprocess: dict[str, Any]) -> dict[str, Graph]:
    size = model.visual.image_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    about |= {"normalized": "true", "logit_scale": str(model.logit_scale.exp().item())}
    if getattr(model, "logit_bias", None) is not None:
        about["logit_bias"] = str(model.logit_bias.item())
    data = {**getattr(model.visual, "preprocess_cfg", {}), **preprocess}  # a model built by its class has none
    tokens = torch.ones(EXAMPLES, model.context_length, dtype=torch.int64, device=model.logit_scale.device)
    text = Graph(
        TextTower(model), {"tokens": tokens}, "features", about | {"context_length": str(model.context_length)}
    )
    return {
        "image": _image_graph(ImageTower(model), (3, *size), "features", about | _texts(data)),
        "text": text,
    }


def _image_graph(module: nn.Module, size: tuple[int, ...], output: str, about: dict[str, str]) -> Graph:
    weight = _first(module)
    image = torch.zeros(EXAMPLES, *size, dtype=weight.dtype, device=weight.device)
    return Graph(module, {"image": image}, output, about)


class ImageTower(nn.Module):
    """An OpenCLIP model's image tower alone: image [B, 3, h, w] -> features [B, D]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = _with_parts(model, lambda name: name == "visual")

    def forward(self, image: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B D"]:
        """Return the features of `model.encode_image`; CoCa's tower returns more than these."""
        return self.model.encode_image(image, normalize=True)


class TextTower(nn.Module):
    """An OpenCLIP model's text tower alone: tokens [B, L] -> features [B, D]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        others = ("visual", "text_decoder", "logit_scale", "logit_bias")
        self.model = _with_parts(model, lambda name: name not in others)

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B D"]:
        """Return the features of `model.encode_text`."""
        return self.model.encode_text(tokens, normalize=True)


def _with_parts(model: Any, kept: Callable[[str], bool]) -> Any:
    """Return a copy that shares some of a model's parts and drops the rest: a graph holds all weights of its module."""
    alone = copy.copy(model)
    alone._modules = {name: part for name, part in model._modules.items() if kept(name)}
    alone._parameters = {name: parameter for name, parameter in model._parameters.items() if kept(name)}
    return alone


# ---- metadata ------------------------------------------------------------------------------------------------------


def _variants(model: nn.Module) -> str:
    return ", ".join(sorted({layer.variant for layer in model.modules() if isinstance(layer, AttentionLayer)}))


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each value as text: strings unchanged, others as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
