"""The attention maps of every layer for an image or a text: each softmax map, and what the layer makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.nn import AttentionLayer


@dataclass(frozen=True)
class LayerMaps:
    """One layer's maps of one image or text.

    H heads, P maps a head (2 in differential layers, 1 in standard ones), N tokens.
    """

    name: str  # of the module in the model
    maps: Tensor  # [H, P, N, N], rows sum to 1
    lam: Tensor | None  # [H, N, 1]; None in standard layers

    @property
    def applied(self) -> Tensor:
        """What multiplies the values, [H, N, N]: map 1 - lambda * map 2 (rows sum to 1 - lambda), or the one map."""
        if self.lam is None:
            return self.maps[:, 0]
        return self.maps[:, 0] - self.lam * self.maps[:, 1]


@dataclass(frozen=True)
class Call:
    """What a layer was called with."""

    layer: Any
    x: Tensor
    attn_mask: Tensor | None
    is_causal: bool


def layer_maps(model: nn.Module, image: Tensor | None = None, text: Tensor | None = None) -> list[LayerMaps]:
    """The maps of every attention layer of `diffvision.nn` that one image, or one text, goes through, in order.

    Args:
        model: a timm model, an OpenCLIP model, or one of its towers; its modes and gradients are left alone.
        image: [3, h, w] or [1, 3, h, w], transformed as the model wants it.
        text: [L] or [1, L] token ids, for an OpenCLIP model's text tower.

    Raises:
        ValueError: both or neither of image and text; no such layer was reached.
    """
    if image is not None and text is None:
        batch = {"image": image if image.ndim == 4 else image[None]}
    elif text is not None and image is None:
        batch = {"text": text if text.ndim == 2 else text[None]}
    else:
        raise ValueError("layer_maps takes either an image or a text")
    if (count := len(next(iter(batch.values())))) != 1:
        raise ValueError(f"layer_maps takes one image or text, got a batch of {count}")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), recorded_layers(model) as calls:
            run_towers(model, batch)
            found = [_maps(name, call) for name, call in calls.items()]
    finally:
        for module, training in modes:
            module.training = training
    if not found:
        raise ValueError(
            f"no attention layer of diffvision.nn saw the {next(iter(batch))} in this {type(model).__name__}: maps are "
            "shown of models with our attention (`diffvision models` lists them), plain twins included"
        )
    return found


def patch_maps(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """For each layer of an image tower, where on the image it looks: the class token's row (in models without one, the
    mean of all patches' rows) over the patches.

    Args:
        model, image: as `layer_maps`.

    Returns:
        By layer, [H, P + 1, rows, columns] in differential layers: map 1, map 2, and map 1 - lambda * map 2; in
        standard ones the one map, [H, 1, rows, columns].
    """
    trunk = image_trunk(model)
    prefix = trunk.num_prefix_tokens
    height, width = image.shape[-2:]
    rows, columns = trunk.patch_embed.dynamic_feat_size((height, width))
    shown = {}
    for layer in layer_maps(model, image=image):
        kinds = [*layer.maps.unbind(1), *([] if layer.lam is None else [layer.applied])]
        stacked = torch.stack(kinds, dim=1)  # [H, kinds, N, N]
        over_patches = stacked[..., prefix:]
        looks = over_patches[:, :, 0] if trunk.cls_token is not None else over_patches[:, :, prefix:].mean(dim=2)
        shown[layer.name] = looks.unflatten(-1, (rows, columns))
    return shown


def image_trunk(model: nn.Module) -> Any:
    """The timm vision transformer inside a model: itself, or an OpenCLIP model's or tower's trunk.

    Raises:
        ValueError: there is none.
    """
    for candidate in (model, getattr(model, "trunk", None), getattr(getattr(model, "visual", None), "trunk", None)):
        if hasattr(candidate, "patch_embed") and hasattr(candidate, "num_prefix_tokens"):
            return candidate
    raise ValueError(f"{type(model).__name__} has no timm vision transformer inside, whose patches could be shown")


def run_towers(model: Any, batch: Mapping[str, Any]) -> None:
    """Runs the towers that the batch has inputs for."""
    if "image" in batch:
        getattr(model, "encode_image", model)(batch["image"])
    if "text" in batch:
        if not hasattr(model, "encode_text"):
            raise ValueError(f"{type(model).__name__} has no encode_text: it takes images only")
        model.encode_text(batch["text"])
    if "tokens" in batch:
        model.hidden(batch["tokens"])


@contextmanager
def recorded_layers(model: nn.Module, only: set[str] | None = None) -> Iterator[dict[str, Call]]:
    """Within it, every attention layer of `diffvision.nn` (or those named) notes its last call, in the order of the
    calls; x without its graph."""
    calls: dict[str, Call] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("x", "attn_mask", "is_causal"), args, strict=False)) | kwargs
            calls[name] = Call(layer, given["x"].detach(), given.get("attn_mask"), bool(given.get("is_causal", False)))

        return hook

    hooks = [
        layer.register_forward_pre_hook(note(name), with_kwargs=True)
        for name, layer in model.named_modules()
        if isinstance(layer, AttentionLayer) and (only is None or name in only)
    ]
    try:
        yield calls
    finally:
        for handle in hooks:
            handle.remove()


def _maps(name: str, call: Call) -> LayerMaps:
    maps = call.layer.attention_maps(call.x, attn_mask=call.attn_mask, is_causal=call.is_causal)[0]
    heads, _, tokens, _ = maps.shape
    lam = None
    if hasattr(call.layer, "compute_lambda"):
        value = call.layer.compute_lambda(call.x)
        value = value if value.ndim == 4 else value.view(1, 1, 1, 1)  # V1: one number for all tokens and heads
        lam = value[0].expand(heads, tokens, 1).to(maps.dtype).cpu()
    return LayerMaps(name, maps.cpu(), lam)
