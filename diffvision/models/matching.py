"""`diffvision match`: the differential settings that match a Transformer, by arithmetic, so that torch is not imported.

A layer is a `diffvision.nn.transformer.DecoderBlock`: attention, SwiGLU of three matrices and two RMSNorms, no biases.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

_LIMIT = 1 << 24  # largest value that is counted, as of a configuration
# Signal heads per noise head, the best first: those of the paper's models (arXiv 2510.06949), then others.
_RATIOS = (4, 3, 2, 5)


@dataclass(frozen=True)
class Matched:
    """One of the models: the settings of its layers, and what they cost.

    Attributes:
        variant: key of `diffvision.nn.ATTENTION`.
        num_heads: as its class takes it: differential heads, in "gda" signal heads.
        num_kv_heads: key/value heads.
        head_dim: D of one map's head.
        signal_ratio: signal heads per noise head, in "gda".
        mlp: width of the SwiGLU with which the layer has the Transformer's parameters, up to half a unit.
        attention: parameters of the attention.
        layer: parameters of the layer.
        model: parameters of all layers, the final norm and the embedding, which is the output projection too.
        flops: of a token with `length` tokens to attend to, in all layers and the output projection.
        cache_bytes: of a token's keys and values in bf16, in all layers.
    """

    variant: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    signal_ratio: int | None
    mlp: int
    attention: int
    layer: int
    model: int
    flops: int
    cache_bytes: int


@dataclass(frozen=True)
class _Shape:
    """The sizes of a layer's attention, from which all is counted."""

    variant: str
    heads: int
    kv_heads: int
    head_dim: int
    ratio: int | None = None

    @property
    def maps(self) -> int:
        """Maps a head, which the layer computes with `ops.diff_attention`; "gda" repeats its noise query."""
        return 1 if self.variant == "standard" else 2

    @property
    def value_dim(self) -> int:
        return self.head_dim * (2 if self.variant in ("v1", "gda") else 1)

    @property
    def key_dim(self) -> int:
        """D times the keys per key/value head: V1 and "gda" have two, V2 one."""
        return self.value_dim

    def queries(self) -> int:
        """Return the queries of D that the query projection makes of a token."""
        return self.heads + self.heads // self.ratio if self.ratio else self.heads * self.maps

    def matrices(self, width: int) -> int:
        """Return the numbers of the projections, which multiply every token."""
        rows = self.queries() * self.head_dim + self.kv_heads * (self.key_dim + self.value_dim)
        lambdas = self.heads if self.variant == "v2" else 0
        return width * (rows + self.heads * self.value_dim + lambdas)

    def parameters(self, width: int) -> int:
        """Return the parameters of the attention: V1 and "gda" have four vectors of D and a norm of 2D besides."""
        return self.matrices(width) + (6 * self.head_dim if self.variant in ("v1", "gda") else 0)

    def attention_flops(self, length: int) -> int:
        """Return the FLOPs of logits and values for one token, with a head's maps subtracted before the values."""
        return 2 * length * self.heads * (self.maps * self.head_dim + self.value_dim)


@dataclass(frozen=True)
class _Built(_Shape):
    """The sizes of any variant's attention, counted from its layer."""

    layer: Any = None

    @property
    def maps(self) -> int:
        return self.layer.query_maps

    @property
    def value_dim(self) -> int:
        return self.layer.value_dim

    @property
    def key_dim(self) -> int:
        return self.layer.key_maps * self.head_dim

    def matrices(self, width: int) -> int:
        return sum(weight.numel() for weight in self.layer.parameters() if weight.ndim > 1)

    def parameters(self, width: int) -> int:
        return sum(weight.numel() for weight in self.layer.parameters())


def matched(
    heads: int,
    head_dim: int,
    width: int | None = None,
    kv_heads: int | None = None,
    mlp: int | None = None,
    layers: int = 1,
    vocab: int = 0,
    length: int = 2048,
    signal_ratio: int | None = None,
    variant: str | None = None,
) -> list[Matched]:
    """Return the Transformer of these sizes and the V1, V2 and grouped models that match it, in this order.

    A further variant is the last one, with the settings that its class takes by default.

    V1 halves heads and key/value heads and keeps their size. Where one of the numbers is odd, it keeps both and halves
    the size. V2 keeps all three. Grouped attention has V1's heads, and no more key/value heads than noise heads. The
    parameters of the layers are equal, which the width of the MLP sees to.

    The arguments are those of `match`, None for its defaults.

    Raises:
        ValueError: sizes do not fit together.
    """
    width = heads * head_dim if width is None else width
    kv_heads = heads if kv_heads is None else kv_heads
    mlp = _usual_mlp(width) if mlp is None else mlp
    _check_positive(heads=heads, head_dim=head_dim, width=width, kv_heads=kv_heads, mlp=mlp, layers=layers)
    _check_positive(length=length, **({"vocab": vocab} if vocab else {}))
    if heads % kv_heads:
        raise ValueError(f"heads is {heads}, not a multiple of kv_heads {kv_heads}: give one that is")
    plain = _Shape("standard", heads, kv_heads, head_dim)
    v1 = _v1(plain)
    target = plain.parameters(width)
    shapes = [plain, v1, dataclasses.replace(plain, variant="v2"), _match_grouped(v1, signal_ratio)]
    if variant is not None:
        shapes.append(_built(variant, plain, v1, width))
    counted = []
    for shape in shapes:
        narrowed = mlp - round((shape.parameters(width) - target) / (3 * width))
        if narrowed < 1:
            raise ValueError(
                f"mlp is {mlp}, and attention of {shape.variant} has {shape.parameters(width) - target:,} "
                f"parameters more than the Transformer's: give more than {mlp - narrowed}"
            )
        layer = shape.parameters(width) + 3 * width * narrowed + 2 * width
        products = layers * (shape.matrices(width) + 3 * width * narrowed) + vocab * width
        counted.append(
            Matched(
                shape.variant,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                shape.ratio,
                narrowed,
                shape.parameters(width),
                layer,
                layers * layer + width + vocab * width,
                2 * products + layers * shape.attention_flops(length),
                2 * layers * shape.kv_heads * (shape.key_dim + shape.value_dim),
            )
        )
    return counted


def match(
    *,
    heads: int,
    head_dim: int,
    width: int | None = None,
    kv_heads: int | None = None,
    mlp: int | None = None,
    layers: int = 1,
    vocab: int = 0,
    length: int = 2048,
    signal_ratio: int | None = None,
    variant: str | None = None,
) -> None:
    """Print the V1, V2 and grouped settings that match a Transformer, with parameters, FLOPs and cache.

    Args:
        heads: query heads of the Transformer.
        head_dim: size of each.
        width: of the tokens; heads * head_dim by default.
        kv_heads: key/value heads; as many as heads by default.
        mlp: width of its SwiGLU; 8/3 of the width by default.
        layers: number of layers.
        vocab: rows of the embedding, which is the output projection too; 0 for none.
        length: tokens that a token attends to, for the FLOPs.
        signal_ratio: signal heads a noise head of the grouped model; 4, 3, 2 or 5 by default, whichever fits.
        variant: a further variant to match, key of `diffvision.nn.ATTENTION`, which imports torch.

    Raises:
        ValueError: sizes do not fit together.
    """
    from rich.table import Table

    from diffvision.tables import show

    models = matched(heads, head_dim, width, kv_heads, mlp, layers, vocab, length, signal_ratio, variant)
    table = Table("", *(_NAMES.get(model.variant, model.variant) for model in models), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in _ROWS.items():
        if name != "model" or layers > 1 or vocab:
            table.add_row(label, *(_cell(name, getattr(model, name)) for model in models))
    one = models[1]
    where = "one layer" if layers == 1 else f"{layers} layers"
    notes = [
        f"FLOPs (forward, 2 a multiply-add, {length:,} tokens to attend to) and cache (bf16) of one token in {where}"
        f"{', with the output projection' if vocab else ''}.",
    ]
    if one.head_dim != head_dim:
        notes.append(
            f"{heads} heads and {models[0].num_kv_heads} key/value heads cannot both be halved: V1 keeps their numbers "
            f"and halves their size to {one.head_dim}"
            f"{', odd, which rotary embedding cannot turn in pairs' if one.head_dim % 2 else ''}."
        )
    show(table, "\n".join(["", *notes]), data=models)


_NAMES = {"standard": "Transformer", "v1": "V1", "v2": "V2", "gda": "grouped"}
_ROWS = {
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "signal_ratio": "signal_ratio",
    "mlp": "MLP width",
    "attention": "attention",
    "layer": "layer",
    "model": "model, millions",
    "flops": "FLOPs, millions",
    "cache_bytes": "cache, bytes",
}


def _cell(name: str, value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:,.1f}" if name in ("model", "flops") else f"{value:,}"


def _v1(plain: _Shape) -> _Shape:
    """Return the V1 layer of the plain one's parameters."""
    if plain.heads % 2 == 0 and plain.kv_heads % 2 == 0:
        return _Shape("v1", plain.heads // 2, plain.kv_heads // 2, plain.head_dim)
    if plain.head_dim % 2:
        raise ValueError(
            f"heads is {plain.heads}, kv_heads {plain.kv_heads} and head_dim {plain.head_dim}, and V1 halves the "
            "heads or their size: give an even head_dim"
        )
    return _Shape("v1", plain.heads, plain.kv_heads, plain.head_dim // 2)


def _match_grouped(v1: _Shape, ratio: int | None) -> _Shape:
    """Return GDA's heads with V1's number of signal heads and `ratio` signal heads a noise head."""
    if ratio is None:
        ratio = next((ratio for ratio in _RATIOS if v1.heads % ratio == 0), v1.heads)
    elif ratio < 1 or v1.heads % ratio:
        divisors = [number for number in range(1, v1.heads + 1) if v1.heads % number == 0]
        raise ValueError(
            f"signal_ratio is {ratio}, and there are {v1.heads} signal heads (V1's): choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    return _Shape("gda", v1.heads, math.gcd(v1.kv_heads, v1.heads // ratio), v1.head_dim, ratio)


def _built(variant: str, plain: _Shape, v1: _Shape, width: int) -> _Built:
    """Build a variant with the heads of V1 or plain attention, whichever it counts like."""
    from diffvision.nn import ATTENTION, build_attention

    if variant not in ATTENTION:
        raise ValueError(f"variant is {variant!r}: choose one of {', '.join(ATTENTION)}")
    like = v1 if ATTENTION[variant].value_maps == 2 else plain
    layer = build_attention(
        variant, width, like.heads, like.kv_heads, head_dim=like.head_dim, proj_bias=False, device="meta"
    )
    return _Built(variant, like.heads, like.kv_heads, like.head_dim, layer=layer)


def _usual_mlp(width: int) -> int:
    exact = 8 * width // 3
    return exact // 64 * 64 if width >= 1024 else max(exact, 1)


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if not 1 <= value <= _LIMIT:
            raise ValueError(f"{name} is {value}: it must be a whole number from 1 to {_LIMIT:,}")
