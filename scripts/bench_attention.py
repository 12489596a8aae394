"""Times the ways to compute differential attention against plain attention with the same parameters, on one device.

    python scripts/bench_attention.py [--device cpu] [--dtype float32] [--threads 2] [--output FILE.md]

Plain attention has two heads of size D for each differential head. All ways take turns within each round, and the table
gives the median over rounds of each way's time divided by plain attention's in the same round, so that a noisy machine
disturbs all alike.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops import diff_attention

# (batch, differential heads, tokens, D); V = 2D
SHAPES = [
    (128, 2, 65, 16),
    (32, 6, 50, 64),
    (32, 4, 77, 64),
    (8, 6, 197, 64),
    (8, 6, 257, 64),
    (4, 6, 384, 64),
    (2, 6, 577, 64),
    (1, 8, 1024, 64),
    (1, 4, 2048, 64),
]


def plain(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    values = v.unflatten(-1, (2, q.shape[-1])).movedim(3, 2).flatten(1, 2)
    return F.scaled_dot_product_attention(q.flatten(1, 2), k.flatten(1, 2), values)


def unequal(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Two calls with V = 2D as it is: torch's MATH path on a CPU."""
    one, two = (F.scaled_dot_product_attention(q[:, :, m], k[:, :, m], v) for m in range(2))
    return one - lam * two


def split(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Four calls of equal sizes: each map with each half of the value head."""
    halves = v.chunk(2, dim=-1)
    one, two = (
        torch.cat([F.scaled_dot_product_attention(q[:, :, m], k[:, :, m], half) for half in halves], dim=-1)
        for m in range(2)
    )
    return one - lam * two


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "eager": lambda *t: diff_attention(*t, backend="eager"),
    "sdpa (widened)": lambda *t: diff_attention(*t, backend="sdpa"),
    "sdpa, value split": split,
    "sdpa, unequal": unequal,
    "auto": lambda *t: diff_attention(*t),
}


def seconds(way: Callable, inputs: list[Tensor], backward: bool) -> float:
    synchronize = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    if backward:
        torch.autograd.grad(way(*inputs).sum(), [t for t in inputs if way is not plain or t.dim() > 1])
    else:
        with torch.no_grad():
            way(*inputs)
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    lines = []
    for backward in (False, True):
        lines += [f"\n### {'Forward and backward' if backward else 'Forward'}, {args.dtype}\n"]
        lines += [f"| B, H, N, D | plain, ms | {' | '.join(list(WAYS)[1:])} |", "|---" * (len(WAYS) + 1) + "|"]
        for b, h, n, d in SHAPES:
            made = [(b, h, 2, n, d), (b, h, 2, n, d), (b, h, n, 2 * d), (1,)]
            inputs = [torch.randn(s, device=args.device, dtype=dtype).requires_grad_(backward) for s in made]
            rounds = [
                {name: seconds(way, inputs, backward) for name, way in WAYS.items()} for _ in range(args.rounds + 2)
            ][2:]
            ratios = [statistics.median(r[name] / r["plain"] for r in rounds) for name in list(WAYS)[1:]]
            base = statistics.median(r["plain"] for r in rounds) * 1e3
            lines.append(f"| {b}, {h}, {n}, {d} | {base:.2f} | {' | '.join(f'{ratio:.2f}x' for ratio in ratios)} |")
            print(lines[-1], flush=True)
    name = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU, {args.threads} threads"
    )
    command = f"python scripts/bench_attention.py --device {args.device} --dtype {args.dtype} --threads {args.threads}"
    head = f"\n## {name}, torch {torch.__version__}\n\n`{command}`\n"
    print(head, *lines, sep="\n")
    if args.output:
        with args.output.open("a") as file:
            print(head, *lines, sep="\n", file=file)


if __name__ == "__main__":
    main()
