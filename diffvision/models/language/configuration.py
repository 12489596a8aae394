"""The configuration of a language model in plain values, the sizes, and the names.

A model is a name, a family and a size:

    transformer-<size>   the matched Transformer, LLaMA's block                             transformer-3m
    diff-<size>          V1: half of its heads, of the same size                            diff-3m
    diffv2-<size>        V2: as many heads, the MLP narrower by what its queries cost       diffv2-3m
    gated-<size>         the Transformer with a gate by channel, its MLP narrower alike     gated-3m
    sink-<size>          the Transformer with a learned sink for each head                  sink-3m
    integral-<size>      V1's heads with one softmax of the mean of two logits              integral-3m
    dna-<size>           DnA: a softmax of negated logits added, the MLP narrower           dna-3m
    coda-<size>          CoDA: V2 whose second queries are the first ones, rotated          coda-3m

Those of a size have the same number of parameters within 0.1%. `variant` gives any of them another attention, with its
matched heads and MLP: `create("diffv2-3m", variant="v2_gated")`.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from diffvision.models.by_layer import extra_rows, matched_heads, variants_by_layer
from diffvision.models.names import unknown_model
from diffvision.nn import ATTENTION, settings_of

LARGEST = {
    "vocab_size": 1 << 24,
    "dim": 1 << 17,
    "depth": 4096,
    "num_heads": 1 << 12,
    "head_dim": 1 << 12,
    "mlp_dim": 1 << 20,
    "max_length": 1 << 31,
    "signal_ratio": 1 << 12,
}
"""The largest values that a `LanguageConfig` takes, since a configuration may be untrusted."""


class Layer(NamedTuple):
    """The settings of one block, which differ between blocks only with `variant_by_layer`."""

    variant: str
    num_heads: int
    num_kv_heads: int | None
    mlp_dim: int
    head_norm: bool


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The settings of a `LanguageModel`; `dataclasses.asdict` and `LanguageConfig(**values)` are inverse.

    Attributes:
        vocab_size: rows of the embedding.
        dim: width.
        depth: number of blocks.
        num_heads: heads of the output; differential heads in variants v1 and v2.
        num_kv_heads: key/value heads, a divisor of num_heads; num_heads if None.
        head_dim: D of one map's head.
        mlp_dim: width within the feed-forward.
        variant: key of `diffvision.nn.ATTENTION`.
        variant_by_layer: other variants by depth, such as "4*standard", as `diffvision.models.by_layer` describes.
        max_length: longest sequence that the model takes; it costs no memory, for rotary positions need no table.
        rotary_theta: base of the rotary frequencies (10,000; the paper's 64k extension has 640,000).
        tied: the output projection is the embedding.
        norm_eps: of the RMSNorms; the head norm's is always 1e-5.
        lambda_init: V1's, a number, or "depth" for 0.8 - 0.6 exp(-0.3 depth).
        head_norm: RMSNorm of each head's output; None for the variant's default, True in V1 and False in the others.
        signal_ratio: signal heads per noise head in variant gda.
        gate: of variants with one: "element" for a number per channel, "head" for one per head.

    Raises:
        ValueError: a value is out of its range, or the variant does not read it.
    """

    vocab_size: int
    dim: int
    depth: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int
    mlp_dim: int
    variant: str = "v1"
    variant_by_layer: str | None = None
    max_length: int = 2048
    rotary_theta: float = 10_000.0
    tied: bool = True
    norm_eps: float = 1e-5
    lambda_init: float | Literal["depth"] = "depth"
    head_norm: bool | None = None
    signal_ratio: int = 2
    gate: Literal["element", "head"] = "element"

    def __post_init__(self) -> None:
        for name in LARGEST:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST[name]:
                raise ValueError(f"{name} must be a whole number from 1 to {LARGEST[name]:,}, got {value!r}")
        if self.variant not in ATTENTION:
            raise ValueError(f"variant is {self.variant!r}: choose one of {', '.join(ATTENTION)}")
        divisors = [number for number in range(1, self.num_heads + 1) if self.num_heads % number == 0]
        if self.num_kv_heads is not None and self.num_kv_heads not in divisors:
            allowed = ", ".join(map(str, divisors))
            raise ValueError(f"num_kv_heads must divide num_heads: one of {allowed}, got {self.num_kv_heads!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since rotary embedding turns pairs, got {self.head_dim}")
        for name, least in (("rotary_theta", 1), ("norm_eps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > least:
                raise ValueError(f"{name} must be a number above {least}, got {value!r}")
        if isinstance(self.lambda_init, str) and self.lambda_init != "depth":
            raise ValueError(f"lambda_init must be a number or 'depth', got {self.lambda_init!r}")
        kinds = [ATTENTION[layer.variant] for layer in self.layers()]
        if {layer.variant for layer in self.layers()} == {self.variant}:
            object.__setattr__(self, "variant_by_layer", None)  # it names the model's own alone
        taken = set().union(*(settings_of(kind) for kind in kinds))
        for name, default in (("lambda_init", "depth"), ("signal_ratio", 2), ("gate", "element")):
            if (value := getattr(self, name)) != default and name not in taken:
                raise ValueError(f"{name} is {value}, and variant {self.variant!r} has none: leave it at {default!r}")

    def layers(self) -> list[Layer]:
        """Return the settings of each block."""
        variants = variants_by_layer(self.variant_by_layer, self.variant, self.depth)
        layers = {variant: self._layer(variant) for variant in set(variants)}
        return [layers[variant] for variant in variants]

    def _layer(self, variant: str) -> Layer:
        """Return the sizes with which a layer of another variant has the same number of parameters."""
        heads, kv_heads = matched_heads(variant, self.variant, self.num_heads, self.num_kv_heads)
        # A unit of the SwiGLU has three rows.
        plain_heads = self.num_heads * ATTENTION[self.variant].value_maps
        less = round(plain_heads * extra_rows(variant, self.variant, self.head_dim, gate=self.gate) / 3)
        if less >= self.mlp_dim:
            raise ValueError(
                f"mlp_dim must be above {less}, which a matched layer of {variant!r} has less, got {self.mlp_dim}"
            )
        default = inspect.signature(ATTENTION[variant]).parameters["head_norm"].default
        return Layer(
            variant, heads, kv_heads, self.mlp_dim - less, default if self.head_norm is None else self.head_norm
        )


@dataclass(frozen=True)
class Size:
    """The shape that the models of a size share."""

    dim: int
    depth: int
    heads: int  # of the Transformer and of V2; V1 has half as many
    head_dim: int
    mlp_dim: int  # of the Transformer and of V1: 8/3 of dim, down to a multiple of 64 in the large ones
    mlp_dim_v2: int  # narrower by the parameters of V2's second queries
    vocab_size: int
    max_length: int = 2048


# Large sizes: arXiv 2410.05258 tables 9 and 10, with the vocabulary of cl100k_base rounded up; the paper says "8/3 of
# the width", and the multiples of 64 (V2: of 8) are this repository's reading. The paper has no small sizes: the names
# of those here count parameters without the embedding, and the vocabulary is small, so as not to outweigh the rest.
SIZES = {
    "nano": Size(64, 2, 2, 32, 171, 149, 768),
    "debug": Size(64, 2, 4, 16, 171, 149, 4096),
    "1m": Size(128, 5, 8, 16, 341, 296, 4096),
    "3m": Size(256, 4, 8, 32, 688, 600, 4096),
    "10m": Size(384, 6, 12, 32, 1024, 892, 4096),
    "30m": Size(512, 10, 16, 32, 1368, 1192, 16_384),
    "100m": Size(768, 14, 12, 64, 2048, 1788, 32_768),
    "830m": Size(1536, 24, 16, 96, 4096, 3576, 100_288),
    "1.4b": Size(2048, 24, 16, 128, 5440, 4752, 100_288),
    "2.8b": Size(2560, 32, 20, 128, 6784, 5920, 100_288),
    "3b": Size(3072, 28, 24, 128, 8192, 7160, 100_288, 4096),
    "6.8b": Size(4096, 32, 32, 128, 10_880, 9504, 100_288),
    "13.1b": Size(5120, 40, 40, 128, 13_632, 11_912, 100_288),
}
FAMILIES = {"transformer": "standard", "diff": "v1", "diffv2": "v2"}
FAMILIES |= {name: name for name in ("gated", "sink", "integral", "dna", "coda")}


def model_names() -> list[str]:
    """Return the names of all models from small to large: "transformer-debug", "diff-debug", "diffv2-debug", ..."""
    return [f"{family}-{size}" for size in SIZES for family in FAMILIES]


def config(name: str, **overrides: Any) -> LanguageConfig:
    """Return the configuration of a model of `model_names()`, with fields of `LanguageConfig` replaced by overrides.

    Raises:
        ValueError: the name is unknown, or a value does not fit.
        TypeError: an override is not a field.
    """
    family, _, size_name = name.lower().partition("-")
    if family not in FAMILIES or size_name not in SIZES:
        raise unknown_model(name, "diffvision.models.language has no", model_names())
    size, variant = SIZES[size_name], overrides.get("variant", FAMILIES[family])
    if variant not in ATTENTION:
        raise ValueError(f"variant is {variant!r}: choose one of {', '.join(ATTENTION)}")
    more_maps = ATTENTION[variant].query_maps > ATTENTION[variant].value_maps
    like_v2 = more_maps and extra_rows(variant, "standard", size.head_dim) > size.head_dim  # not in CoDA
    rows = extra_rows(variant, "v2" if like_v2 else "standard", size.head_dim, gate=overrides.get("gate"))
    values = {
        "vocab_size": size.vocab_size,
        "dim": size.dim,
        "depth": size.depth,
        "num_heads": size.heads // ATTENTION[variant].value_maps,
        "head_dim": size.head_dim,
        "mlp_dim": (size.mlp_dim_v2 if like_v2 else size.mlp_dim) - round(size.heads * rows / 3),
        "variant": variant,
        "max_length": size.max_length,
    }
    known = {field.name for field in dataclasses.fields(LanguageConfig)}
    if unknown := set(overrides) - known:
        raise TypeError(
            f"a language model has no {', '.join(sorted(unknown))}: choose among {', '.join(sorted(known))}"
        )
    return LanguageConfig(**{**values, **overrides})
