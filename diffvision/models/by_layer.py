"""`variant_by_layer`: models whose layers have different attention by depth, such as plain attention in the lower ones.

It works for timm models and language models. From the first layer, parts are joined by "+",
and a part is a variant, or a number of layers times a variant; the remaining layers have the model's own variant:

    "4*standard"                         the first four layers plain, the others as the model's
    "2*standard+8*v1+2*standard"         twelve layers, the middle ones V1
    "+".join(["standard", "v1"] * 6)     every other one

A layer of another variant than the model's is its matched layer, of the same parameters up to V1's 6 D: between V1
and plain attention twice or half as many heads and key/value heads of the same size, and an MLP that is wider or
narrower by the parameters of V2's second queries and of gates. `num_heads` and the MLP's width stay those of the
model's variant. Grouped attention has fewer parameters than its matched layer, as in the models of its name, and DEX
has its projection in addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from diffvision.nn import ATTENTION

_EXAMPLE = "give text such as '4*standard' (the first four layers) or '2*standard+10*v1'"


def variants_by_layer(text: str | None, variant: str, depth: int) -> list[str]:
    """Return the variant of each of `depth` layers.

    Args:
        text: `variant_by_layer`, or None for a model of one variant.
        variant: the model's own, key of `ATTENTION`.
        depth: number of layers.

    Raises:
        ValueError: the text does not parse, names an unknown variant, or more layers than there are.
    """
    if text is None:
        return [variant] * depth
    if not isinstance(text, str):
        raise ValueError(f"variant_by_layer is {text!r}: {_EXAMPLE}; of a list of variants, '+'.join(variants)")
    runs: list[tuple[int, str]] = []
    for part in text.split("+"):
        count, star, name = part.rpartition("*")
        if name not in ATTENTION:
            raise ValueError(
                f"variant_by_layer is {text!r}: {name!r} is no variant; choose from {', '.join(ATTENTION)}"
            )
        if star and not (count.isdecimal() and 0 < len(count) < 6 and int(count) > 0):
            raise ValueError(f"variant_by_layer is {text!r}, with {count!r} layers of {name!r}: {_EXAMPLE}")
        runs.append((int(count) if star else 1, name))
    named = sum(count for count, _ in runs)
    if named > depth:
        raise ValueError(f"variant_by_layer is {text!r}, {named} layers, and there are {depth}: name at most {depth}")
    return [name for count, name in runs for _ in range(count)] + [variant] * (depth - named)


def as_text(variants: Sequence[str], variant: str) -> str | None:
    """Return the text of these variants by layer, or None where all are the model's own."""
    if set(variants) == {variant}:
        return None
    return "+".join(f"{len(list(run))}*{name}" for name, run in itertools.groupby(variants))


def matched_heads(layer: str, variant: str, num_heads: int, num_kv_heads: int | None = None) -> tuple[int, int | None]:
    """Return the heads and key/value heads of a layer in a model that counts them for another variant.

    Args:
        layer: the layer's variant.
        variant: the model's.
        num_heads: the model's.
        num_kv_heads: the model's, or None.

    Raises:
        ValueError: the layer has half as many, and one of the numbers is odd.
    """
    if ATTENTION[layer].value_maps == ATTENTION[variant].value_maps:
        return num_heads, num_kv_heads
    if ATTENTION[layer].value_maps < ATTENTION[variant].value_maps:
        return 2 * num_heads, None if num_kv_heads is None else 2 * num_kv_heads
    if num_heads % 2 or (num_kv_heads or 0) % 2:
        kv = "" if num_kv_heads is None else f" and num_kv_heads {num_kv_heads}"
        raise ValueError(
            f"num_heads is {num_heads}{kv}, and the matched layer of {layer!r} in a model of {variant!r} has half: "
            f"make both even, or build {layer!r}"
        )
    return num_heads // 2, None if num_kv_heads is None else num_kv_heads // 2


def extra_rows(layer: str, variant: str, head_dim: int, **settings: Any) -> float:
    """Return how many more rows a layer's projections have than the model's, per head of the plain layer."""
    return ATTENTION[layer].extra_rows(head_dim, **settings) - ATTENTION[variant].extra_rows(head_dim, **settings)


def extra_queries(layer: str, variant: str, **settings: Any) -> int:
    """Return `extra_rows` in units of a query: 1 for V2's second query, and 1 for a gate by channel."""
    size = 64
    return int(extra_rows(layer, variant, size, **settings) / size)
