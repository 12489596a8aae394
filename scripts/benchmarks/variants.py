"""Times every attention variant of this package next to V1, as whole layers at the sizes of DiffCLIP's towers.

    python scripts/benchmarks/variants.py   # about two minutes of CPU; prints a table

All layers take turns, so that a busy machine slows all alike; a ratio is of the medians. Forward is with gradients off.
docs/reference/models.md quotes the ratios of DINT and Visual-Contrast Attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from diffvision.nn import ATTENTION, DiffAttention, VisualContrastAttention, build_attention

GRID, TEXT, BATCH = 14, 77, 8


def layers(width: int, heads: int, causal: bool) -> dict[str, nn.Module]:
    """Return a layer of each variant, with half of the plain layer's heads where there are two maps of V1's kind."""
    made: dict[str, nn.Module] = {}
    for variant, kind in ATTENTION.items():
        own = heads // 2 if issubclass(kind, DiffAttention) else heads
        made[variant] = build_attention(variant, width, own, qkv_bias=True)
    if not causal:
        made["vca"] = contrast = VisualContrastAttention(width, heads, qkv_bias=True)
        contrast.set_grid((GRID, GRID), 1)
    return made


def forward(layer: nn.Module, x: torch.Tensor, causal: bool) -> None:
    with torch.no_grad():
        layer(x, is_causal=causal)


def both(layer: nn.Module, x: torch.Tensor, causal: bool) -> None:
    layer.zero_grad()
    layer(x, is_causal=causal).sum().backward()


def medians(made: dict[str, nn.Module], x: torch.Tensor, causal: bool, run: Callable, turns: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(turns + 2):
        for name, layer in made.items():
            start = time.perf_counter()
            run(layer, x, causal)
            if turn > 1:  # two turns of warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    torch.manual_seed(0)
    columns = {}
    for tower, width, heads, tokens, causal in (("image", 768, 12, GRID**2 + 1, False), ("text", 512, 8, TEXT, True)):
        made, x = layers(width, heads, causal), torch.randn(BATCH, tokens, width, requires_grad=True)
        for kind, run in (("forward", forward), ("forward and backward", both)):
            columns[f"{tower}, {kind}"] = medians(made, x, causal, run, turns)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), float32; times of V1's layer\n")
    print("| variant |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for variant in [*ATTENTION, "vca"]:
        ratios = [f"{own[variant] / own['v1']:.2f}" if variant in own else "-" for own in columns.values()]
        print(f"| `{variant}` |", " | ".join(ratios), "|")
    print("\nV1 itself:", ", ".join(f"{name} {1000 * own['v1']:.1f} ms" for name, own in columns.items()))


if __name__ == "__main__":
    main()
