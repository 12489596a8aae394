"""The attention maps of every layer for one image or text, with the values and norms that give the head outputs.

Numbers of maps are in `statistics`; pictures of them in `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured, run_towers
from diffvision.models.modes import evaluating
from diffvision.nn import AttentionLayer


def _identity(heads: Tensor) -> Tensor:
    return heads


@dataclass(frozen=True)
class LayerMaps:
    """One layer's maps of one image or text.

    H heads, P maps per head (2 in differential layers, 1 in standard ones), N tokens, V values per head.
    """

    name: str  # of the module in the model
    maps: Tensor  # [H, P, N, N], rows sum to 1
    # [H, N, N], what multiplies the values: map 1 - lambda * map 2 (rows sum to 1 - lambda), the one map of a standard
    # layer, or what the variant makes of its maps (DINT's rows sum to 1).
    weights: Tensor
    lam: Tensor | None  # [H, N, 1]; None in standard layers
    causal: bool = False  # whether no query attends to a later key
    values: Tensor | None = None  # [H, N, V]; None where they are not captured
    norm: Callable[[Tensor], Tensor] = _identity  # of head outputs [H, N, V]
    factor: float = 1.0  # 1 - lambda_init, where there is one
    hidden: Tensor | None = None  # [N, C], the input of the layer's block: the residual stream

    def by_kind(self) -> dict[str, Tensor]:
        """Return "map 1", "map 2" and "difference", or "attention" in a standard layer, [H, N, N] each."""
        if self.lam is None:
            return {"attention": self.weights}
        return {"map 1": self.maps[:, 0], "map 2": self.maps[:, 1], "difference": self.weights}

    def outputs(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head outputs [H, N, V] that weights [H, N, N] of the values give.

        They are those before the head norm, after it, and after the factor, which is what the output projection takes.
        """
        assert self.values is not None
        before = weights @ self.values
        after = self.norm(before)
        return before, after, after * self.factor

    def first(self, tokens: int) -> LayerMaps:
        """Return the maps of the first tokens only; in a causal layer they do not depend on the later tokens."""
        lam = None if self.lam is None else self.lam[:, :tokens]
        values = None if self.values is None else self.values[:, :tokens]
        maps, weights = self.maps[..., :tokens, :tokens], self.weights[:, :tokens, :tokens]
        hidden = None if self.hidden is None else self.hidden[:tokens]
        return replace(self, maps=maps, weights=weights, lam=lam, values=values, hidden=hidden)


def layer_maps(model: nn.Module, image: Tensor | None = None, text: Tensor | None = None) -> list[LayerMaps]:
    """Return the maps of every attention layer that one image, or one text, goes through, in order, on the CPU.

    Args:
        model: a timm model, an OpenCLIP model, or one of its towers; its modes and gradients are left alone.
        image: [3, h, w] or [1, 3, h, w], transformed as the model wants it.
        text: [L] or [1, L] token ids, for an OpenCLIP model's text tower.

    Raises:
        ValueError: both or neither of image and text; no attention layer was reached.
    """
    if image is not None and text is None:
        batch = {"image": image if image.ndim == 4 else image[None]}
    elif text is not None and image is None:
        batch = {"text": text if text.ndim == 2 else text[None]}
    else:
        raise ValueError("layer_maps takes either an image or a text")
    if (count := len(next(iter(batch.values())))) != 1:
        raise ValueError(f"layer_maps takes one image or text, got a batch of {count}")
    return [
        LayerMaps(
            layer.name,
            layer.maps.cpu(),
            layer.weights.cpu(),
            None if layer.lam is None else layer.lam.cpu(),
            layer.causal,
        )
        for layer in open_layers(model, batch)
    ]


def open_layers(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[LayerMaps]:
    """Yield the maps and values of every attention layer that one image or text goes through, in order.

    Queries, keys and values of all layers are stored in one forward pass, and a layer's maps are computed when it is
    yielded, so only one layer's maps are in memory at a time.

    Args:
        model: as `capture.captured`; its modes are left alone.
        batch: `image` [1, 3, h, w], `text` [1, L] or `tokens` [1, N].

    Raises:
        ValueError: no attention layer was reached.
    """
    calls: list[tuple[Call, Tensor | None]] = []
    with (
        evaluating(model),
        _record_block_inputs(model) as block_input,
        captured(model, lambda call: calls.append((call, block_input(call.layer)))),
    ):
        run_towers(model, batch)
    while calls:
        call, hidden = calls.pop(0)
        layer = compute_layer_maps(call)
        tokens = None if hidden is None else hidden.flatten(0, -2)
        yield layer if tokens is None or len(tokens) != call.q.shape[3] else replace(layer, hidden=tokens)


@contextmanager
def _record_block_inputs(model: nn.Module) -> Iterator[Callable[[nn.Module], Tensor | None]]:
    """Yield a function that returns, while an attention layer runs, the input of the block which it is in."""
    running: list[tuple[nn.Module, Tensor | None]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim >= 3)
        running.append((module, next(tensors, None)))

    def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        running.pop()

    def block_input(layer: nn.Module) -> Tensor | None:
        depth = next((i for i, (module, _) in enumerate(running) if module is layer), len(running))
        is_block = isinstance(layer, DiffParallelScalingBlock)
        return running[depth if is_block else depth - 1][1] if running else None

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        yield block_input
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compute_layer_maps(call: Call) -> LayerMaps:
    """Compute the maps and values of the first sample of a captured call, without gradients."""
    scores = call.scores()
    batch_maps = scores.maps()
    maps = batch_maps[0]
    weights = scores.combine_maps(batch_maps)[0]
    heads, _, tokens, _ = maps.shape
    lam = None if scores.lam is None else scores.lam[0].expand(heads, tokens, 1)
    values = None if call.v is None else call.values(maps.dtype)[0]
    causal = tokens > 1 and not bool(maps.triu(1).any())
    norm, factor = _norm(call)
    return LayerMaps(call.name, maps, weights, lam, causal, values, norm, factor)


def _norm(call: Call) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the norm and the factor that are applied to a head's output."""
    layer = call.layer
    # DiffLlama: values are split across heads, so the head norm cannot be applied to one head.
    if call.v is None:
        return _identity, 1.0
    if isinstance(layer, AttentionLayer):
        return partial(layer.finish, factor=1.0), layer.output_factor
    # timm's; a plain layer of transformers has none.
    return getattr(layer, "sub_norm", _identity), 1 - getattr(layer, "lambda_init", 0.0)


def patch_maps(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return the attention over the image's patches for each layer of an image tower.

    It is the class token's row of a map; in models without a class token, the mean of all patches' rows.

    Args:
        model: as `layer_maps`, with a timm vision transformer.
        image: as `layer_maps`.

    Returns:
        By layer, [H, P + 1, rows, columns] in differential layers: map 1, map 2, and map 1 - lambda * map 2; in
        standard ones the one map, [H, 1, rows, columns].
    """
    patches = find_patches(model, image)
    grids = {}
    for layer in layer_maps(model, image=image):
        kinds = [*layer.maps.unbind(1), *([] if layer.lam is None else [layer.weights])]
        over_patches = torch.stack(kinds, dim=1)[..., patches.first :]  # [H, kinds, N, patches]
        read = over_patches[:, :, 0] if patches.has_class else over_patches[:, :, patches.first :].mean(dim=2)
        grids[layer.name] = read.unflatten(-1, (patches.rows, patches.columns))
    return grids


class Patches(NamedTuple):
    """Where the patches of an image are among the tokens of an image tower."""

    rows: int
    columns: int
    first: int  # its token: the class and register tokens come before
    has_class: bool
    pools_class: bool  # whether the tower's output is the class token's


def image_trunk(model: nn.Module) -> Any:
    """Return the vision transformer inside a model: timm's, or OpenCLIP's.

    Raises:
        ValueError: the model has none.
    """
    for candidate in (model, getattr(model, "trunk", None), getattr(getattr(model, "visual", None), "trunk", None)):
        if hasattr(candidate, "patch_embed") and hasattr(candidate, "num_prefix_tokens"):
            return candidate
    for candidate in (model, getattr(model, "visual", None)):
        if hasattr(candidate, "class_embedding") and hasattr(candidate, "grid_size"):
            return candidate
    raise ValueError(
        f"{type(model).__name__} has no timm vision transformer, so no patches to show: give a model that has one, or "
        "one of OpenCLIP's"
    )


def find_patches(model: nn.Module, image: Tensor) -> Patches:
    """Return where the patches of an image [3, h, w] are among the tokens.

    Raises:
        ValueError: as `image_trunk`.
    """
    trunk = image_trunk(model)
    if hasattr(trunk, "class_embedding"):  # OpenCLIP's
        rows, columns = trunk.grid_size
        return Patches(rows, columns, 1, True, trunk.pool_type == "tok")
    height, width = image.shape[-2:]
    rows, columns = trunk.patch_embed.dynamic_feat_size((height, width))
    has_class = getattr(trunk, "cls_token", None) is not None
    return Patches(rows, columns, trunk.num_prefix_tokens, has_class, trunk.global_pool == "token")
