"""Would a cache of keys and values in eight bits make decoding on a CPU faster? One query per head, all layers.

    python scripts/benchmarks/int8_cache.py

Each way attends with one query per head over the cache of a model with 12 layers and 8 key/value heads of 64 (V1: 4
with two maps, and values 128 wide), as a step of decoding does; batch 1. Every layer has its own cache, so that a step
reads all of it from memory. All ways take turns in one process, and a round's times are divided by that of the float32
cache in the same round: the numbers are medians of these ratios and their quartiles, so that other work on the machine
counts for all alike. Above 1 is faster than now.

Eight bits are symmetric, with a scale for each token's key and value of a head, so that a token is stored once and for
all: the scales multiply logits and maps, which are short.

- float32: what decoding does now, the `single` backend.
- whole: a layer's cache is converted to float32, then as above.
- blocks: converted and multiplied by blocks of 512 tokens, which stay in the processor's cache.
- packed: torch's product with weights in eight bits (`torch.ops.aten._weight_int8pack_mm`), head by head, for keys.
- compiled: a loop over channels and tokens that torch.compile fuses with the conversion.
- bfloat16: a cache in half precision, which the `single` backend takes today.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision.ops.attention import single
from machine import describe_machine, environment

LAYERS, SIZE = 12, 64
BLOCK, LAMBDA = 512, 0.5
# Key/value heads, maps of a key, and width of a value.
FAMILIES = {"V1": (4, 2, 128), "V2": (8, 1, 64)}


class Cached(NamedTuple):
    """A layer's keys and values."""

    q: Tensor  # [1, H, 2, 1, D]
    k: Tensor  # [1, H, P, N, D]
    v: Tensor  # [1, H, N, V]
    lam: Tensor


class Bytes(NamedTuple):
    """The same in eight bits: rows of keys are those of all heads and maps, rows of values those of all heads."""

    q: Tensor  # [R, queries, D]
    k: Tensor  # [R, N, D]
    k_scales: Tensor  # [R, 1, N]
    v: Tensor  # [H, N, V]
    v_scales: Tensor  # [H, 1, N]


def draw(family: str, length: int) -> Cached:
    heads, maps, width = FAMILIES[family]
    k, v = torch.randn(1, heads, maps, length, SIZE), torch.randn(1, heads, length, width)
    return Cached(torch.randn(1, heads, 2, 1, SIZE), k, v, torch.tensor([LAMBDA]))


def in_bytes(full: Cached) -> Bytes:
    k, v = full.k.flatten(0, 2), full.v[0]
    q = full.q.mul(SIZE**-0.5).reshape(k.shape[0], -1, SIZE)
    return Bytes(q, *rounded(k), *rounded(v))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers [R, N, D] and their scales [R, 1, N]."""
    scales = x.abs().amax(2, keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales.transpose(1, 2).contiguous()


# ---- ways ----------------------------------------------------------------------------------------------------------


def float32(full: Cached) -> Tensor:
    return single.diff_attention(*full, causal=True, mask=None, scale=None, dropout=0.0)


def difference(logits: Tensor, low: Bytes) -> Tensor:
    """Return what multiplies the integers of the values, [H, 1, N], from q times those of the keys, [R, queries, N]."""
    maps = logits.mul_(low.k_scales).view(len(low.v), 2, 1, -1).softmax(-1)
    return (maps[:, 0] - LAMBDA * maps[:, 1]).mul_(low.v_scales)


def whole(low: Bytes) -> Tensor:
    logits = torch.bmm(low.q, low.k.float().transpose(1, 2))
    return torch.bmm(difference(logits, low), low.v.float())


def blocks(low: Bytes) -> Tensor:
    logits = [torch.bmm(low.q, keys.float().transpose(1, 2)) for keys in low.k.split(BLOCK, dim=1)]
    weights = difference(torch.cat(logits, dim=2), low)
    out = low.q.new_zeros(len(low.v), 1, low.v.shape[2])
    for weight, values in zip(weights.split(BLOCK, dim=2), low.v.split(BLOCK, dim=1), strict=True):
        out.baddbmm_(weight, values.float())
    return out


def packed(low: Bytes) -> Tensor:
    """Values cannot be stored so, token by token: they stay as in `blocks`, and only keys are packed."""
    product: Any = torch.ops.aten._weight_int8pack_mm
    ones = torch.ones(low.k.shape[1])
    weights = difference(torch.stack([product(q, k, ones) for q, k in zip(low.q, low.k, strict=True)]), low)
    out = low.q.new_zeros(len(low.v), 1, low.v.shape[2])
    for weight, values in zip(weights.split(BLOCK, dim=2), low.v.split(BLOCK, dim=1), strict=True):
        out.baddbmm_(weight, values.float())
    return out


@cache
def fused() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def keys(q: Tensor, k: Tensor) -> Tensor:
        return (q[:, :, None] * k[:, None].float()).sum(3)

    def values(weights: Tensor, v: Tensor) -> Tensor:
        return (weights.transpose(1, 2) * v.float()).sum(1, keepdim=True)

    return torch.compile(keys), torch.compile(values)


def compiled(low: Bytes) -> Tensor:
    keys, values = fused()
    return values(difference(keys(low.q, low.k), low), low.v)


WAYS: dict[str, Callable[[Bytes], Tensor]] = {
    "whole": whole,
    "blocks": blocks,
    "packed": packed,
    "compiled": compiled,
}


# ---- measuring -----------------------------------------------------------------------------------------------------


def measure(family: str, length: int, rounds: int) -> dict[str, list[float]]:
    """Return each way's ratios, the float32 cache's time over its own, of each round."""
    full = [draw(family, length) for _ in range(LAYERS)]
    half = [Cached(*(part.bfloat16() for part in layer)) for layer in full]
    low = [in_bytes(layer) for layer in full]
    steps: dict[str, Callable[[], Any]] = {
        "float32": lambda: [float32(layer) for layer in full],
        "bfloat16": lambda: [float32(layer) for layer in half],
    }
    for name, way in WAYS.items():
        check(family, name, float32(full[0]).flatten(), way(low[0]).flatten())
        steps[name] = lambda way=way: [way(layer) for layer in low]
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        times = {name: seconds(step) for name, step in steps.items()}
        for name, taken in times.items():
            ratios[name].append(times["float32"] / taken)
    return ratios


def seconds(step: Callable[[], Any]) -> float:
    """Return the shorter of two runs."""
    return min(_once(step), _once(step))


def _once(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def check(family: str, name: str, expected: Tensor, out: Tensor) -> None:
    error = ((out - expected).norm() / expected.norm()).item()
    if error > 0.03:
        raise SystemExit(f"{name} is wrong for {family}: its relative error is {error:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    if settings.rounds < 2:
        parser.error(f"--rounds is {settings.rounds}: quartiles need 2 or more")
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    print(describe_machine(environment("cpu")), end="\n\n")
    names = ["bfloat16", *WAYS]
    print("| family | tokens | float32 cache, MiB | " + " | ".join(names) + " |")
    print("|---|---:|---:|" + "---:|" * len(names))
    with torch.inference_mode():
        for family, (heads, maps, width) in FAMILIES.items():
            for length in settings.lengths:
                ratios = measure(family, length, settings.rounds)
                size = LAYERS * heads * length * (maps * SIZE + width) * 4 / 2**20
                cells = [quartiles(ratios[name]) for name in names]
                print(f"| {family} | {length:,} | {size:.0f} | " + " | ".join(cells) + " |", flush=True)


def quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    main()
