"""What a layer costs on a CPU besides its products: its time for two tokens beside timm's, and its calls of ours.

    python scripts/benchmarks/bench_launch.py [--rounds 40]

Width 64, four heads, one sample, one thread, bfloat16 autocast, forward and backward. Layers take turns, a hundred
calls each; a ratio is the median over rounds of the process's time over that of timm's layer (`Attention` for plain
attention and V2, `DiffAttention` for V1). Functions and calls are those of this package that a warm layer enters.
"""

import argparse
import statistics
import time
import warnings

import timm.layers
import torch
from torch import Tensor, nn

from code_paths import Counter
from diffvision.nn import Attention, DiffAttention, DiffAttentionV2

WIDTH, HEADS, CALLS = 64, 4, 100
# ours -> (its layer, timm's to which it is compared)
PAIRS = {
    "plain": (Attention, "Attention"),
    "V1": (DiffAttention, "DiffAttention"),
    "V2": (DiffAttentionV2, "Attention"),
}


def step(layer: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.backward(torch.ones_like(out))


def entered(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the functions of ours that a warm layer enters, and the calls."""
    counter = Counter()
    with counter.counting():
        step(layer, x)
    return len(counter.functions), counter.calls


def measure(rounds: int) -> dict[str, list[float]]:
    """Return each layer's milliseconds in each round."""
    torch.manual_seed(0)
    layers = {name: make(WIDTH, HEADS) for name, (make, _) in PAIRS.items()}
    layers |= {name: getattr(timm.layers, name)(WIDTH, HEADS) for name in ("Attention", "DiffAttention")}
    x = torch.randn(1, 2, WIDTH, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(-1, rounds):  # the first warms
        for name, layer in layers.items():
            start = time.process_time()
            for _ in range(CALLS):
                step(layer, x)
            if turn >= 0:
                times[name].append((time.process_time() - start) / CALLS * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Mismatch dtype")  # of timm's norm
    times = measure(rounds)
    print("| layer | ms | timm's, ms | ratio | functions | calls |\n|---|---:|---:|---:|---:|---:|")
    for name, (make, other) in PAIRS.items():
        layer, x = make(WIDTH, HEADS), torch.randn(1, 2, WIDTH, requires_grad=True)
        step(layer, x)
        functions, calls = entered(layer, x)
        ratio = statistics.median(ours / theirs for ours, theirs in zip(times[name], times[other], strict=True))
        ours, theirs = statistics.median(times[name]), statistics.median(times[other])
        print(f"| {name} | {ours:.2f} | {theirs:.2f} ({other}) | {ratio:.2f} | {functions} | {calls} |")


if __name__ == "__main__":
    main()
