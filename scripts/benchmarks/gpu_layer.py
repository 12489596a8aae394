"""Ways to compute a layer between its projections, from [B, N, C] to [B, N, C], forward and with the backward pass.

    python scripts/benchmarks/gpu_layer.py [--device cuda] [--minutes 0.7] [--quick] --output DIR

writes DIR/layer.json after each shape: ours as the backends compute it, and V1 and V2 as calls of torch's kernels that
read the projections in other ways, next to plain attention with the same projections. "cannot" says why a way was not
tried. `--quick` has tiny shapes; on a CPU torch chooses the kernel.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from attention_modules import KERNELS, merge_heads, step
from benchmark import Way, add_ratios, arguments, in_turns, parse, write
from diffvision.ops import diff_attention
from diffvision.ops.attention import BACKENDS
from diffvision.ops.attention.difference import subtract
from diffvision.ops.attention.problem import describe
from machine import environment

OURS = ("sdpa", "flash")


class Shape(NamedTuple):
    """Differential heads of V1; plain attention and V2 have twice as many."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool


SHAPES = {
    "ViT-B/16, 197 tokens": Shape(256, 6, 197, 64, False),
    "CLIP's text, 77 tokens": Shape(1024, 4, 77, 64, True),
    "language, 2048 tokens": Shape(4, 8, 2048, 128, True),
}
QUICK = {"tiny": Shape(2, 2, 7, 8, True)}


def heads(x: Tensor, count: int) -> Tensor:
    """[B, N, C] -> [B, H, N, D]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def maps(x: Tensor, count: int) -> Tensor:
    """[B, N, C] -> [B, H, 2, N, D], as the layers take them."""
    return x.unflatten(-1, (count, 2, -1)).permute(0, 2, 3, 1, 4)


class Projections(NamedTuple):
    """What the projections return; V2 has its own queries, as wide as two, and a lambda for each token."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    wide_q: Tensor
    token_lam: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str, dtype: torch.dtype) -> "Projections":
        generator = torch.Generator(device).manual_seed(0)

        def made(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_()

        size = (shape.batch, shape.tokens, 2 * shape.heads * shape.head_dim)
        lam = torch.full((1,), 0.4, device=device, requires_grad=True)
        per_token = made(shape.batch, 2 * shape.heads, shape.tokens, 1, dtype=torch.float32)
        return cls(shape, made(*size), made(*size), made(*size), lam, made(*size[:2], 2 * size[2]), per_token)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, **more)

    def plain(self) -> Tensor:
        count = 2 * self.shape.heads
        return merge_heads(self.attend(*(heads(x, count) for x in (self.q, self.k, self.v))))

    def v1(self, one: Tensor, two: Tensor) -> Tensor:
        return merge_heads(subtract(one, two, self.lam, self.q.dtype))

    def v2(self, one: Tensor, two: Tensor) -> Tensor:
        return merge_heads(subtract(one, two, self.token_lam, self.q.dtype))

    def v1_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = self.shape.heads
        return maps(self.q, count), maps(self.k, count), heads(self.v, count), self.lam

    def v2_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = 2 * self.shape.heads
        return maps(self.wide_q, count), heads(self.k, count)[:, :, None], heads(self.v, count), self.token_lam

    def v1_ours(self, backend: str) -> Tensor:
        return merge_heads(diff_attention(*self.v1_inputs(), causal=self.shape.causal, backend=backend))

    def v2_ours(self, backend: str) -> Tensor:
        return merge_heads(diff_attention(*self.v2_inputs(), causal=self.shape.causal, backend=backend))

    def v1_unbind(self) -> Tensor:
        q, k, v, _ = self.v1_inputs()
        return self.v1(*(self.attend(a, b, v) for a, b in zip(q.unbind(2), k.unbind(2), strict=True)))

    def v1_widened(self) -> Tensor:
        """Zeros widen queries and keys to the size of the values, which flash needs."""
        q, k, v, _ = self.v1_inputs()
        size = self.shape.head_dim
        q, k = F.pad(q, (0, size)), F.pad(k, (0, size))
        ones = zip(q.unbind(2), k.unbind(2), strict=True)
        return self.v1(*(self.attend(a, b, v, scale=size**-0.5) for a, b in ones))

    def v1_halves(self) -> Tensor:
        """A map's heads are adjacent channels: the maps are halves of q and k, without strides between them."""
        count, v = self.shape.heads, heads(self.v, self.shape.heads)
        ones = zip(self.q.chunk(2, -1), self.k.chunk(2, -1), strict=True)
        return self.v1(*(self.attend(heads(a, count), heads(b, count), v) for a, b in ones))

    def v1_split(self) -> Tensor:
        q, k, v, _ = self.v1_inputs()
        ones = zip(q.unbind(2), k.unbind(2), strict=True)
        halves = v.chunk(2, -1)
        return self.v1(*(torch.cat([self.attend(a, b, half) for half in halves], -1) for a, b in ones))

    def v1_repeated(self) -> Tensor:
        count = self.shape.heads
        v = heads(self.v, count).repeat_interleave(2, 1)
        both = self.attend(heads(self.q, 2 * count), heads(self.k, 2 * count), v)
        return self.v1(*both.unflatten(1, (count, 2)).unbind(2))

    def v2_grouped(self) -> Tensor:
        count = 2 * self.shape.heads
        both = self.attend(heads(self.wide_q, 2 * count), heads(self.k, count), heads(self.v, count), enable_gqa=True)
        return self.v2(*both.unflatten(1, (count, 2)).unbind(2))

    def v2_unbind(self) -> Tensor:
        q, k, v, _ = self.v2_inputs()
        return self.v2(*(self.attend(a, k[:, :, 0], v) for a in q.unbind(2)))


# name -> (the way, the kernels of torch to force)
WAYS: dict[str, tuple[Callable[[Projections], Tensor], tuple[str, ...]]] = {
    "plain": (Projections.plain, ("cudnn", "flash", "efficient")),
    "V1, unbind": (Projections.v1_unbind, ("cudnn", "efficient")),
    "V1, unbind, widened": (Projections.v1_widened, ("flash",)),
    "V1, maps as halves of the channels": (Projections.v1_halves, ("cudnn",)),
    "V2, unbind": (Projections.v2_unbind, ("cudnn", "flash")),
    "V2, one grouped call": (Projections.v2_grouped, ("cudnn", "flash")),
    "V1, one call, values repeated": (Projections.v1_repeated, ("cudnn",)),
    "V1, values in halves": (Projections.v1_split, ("cudnn", "flash")),
}


def ways(given: Projections, device: str, backward: bool) -> Iterator[Way]:
    """Return the ways to compute a layer, plain attention first."""

    def run(name: str, call: Callable[[], Tensor]) -> Callable[[], object]:
        own = {"V1": [given.lam, given.q], "V2": [given.token_lam, given.wide_q]}.get(name[:2], [given.q])
        return step(call, [*own, given.k, given.v], backward)

    for name, (way, kernels) in WAYS.items():
        role = "plain" if name == "plain" else "other"
        for kernel in kernels if device.startswith("cuda") else ("",):
            context = {"context": partial(sdpa_kernel, [KERNELS[kernel]])} if kernel else {}
            yield Way(name, role, run(name, partial(way, given)), kernel, **context)
    for variant, inputs, call in (
        ("V1", given.v1_inputs(), given.v1_ours),
        ("V2", given.v2_inputs(), given.v2_ours),
    ):
        problem = describe(*inputs, causal=given.shape.causal, mask=None, dropout=0.0)
        for backend in OURS:
            reason = BACKENDS[backend].limit(problem)
            own = None if reason else run(variant, partial(call, backend))
            yield Way(f"{variant}, ours", "ours", own, backend, cannot=reason or "")


def main(given: list[str] | None = None) -> int:
    args = parse(arguments(__doc__ or ""), given)
    report = {"benchmark": "layer", **environment(args.device), "shapes": {}}
    until = time.monotonic() + 60 * args.minutes
    shapes = QUICK if args.quick else SHAPES
    for number, (title, shape) in enumerate(shapes.items()):
        given_to_all = Projections.random(shape, args.device, args.dtype)
        for passes in ("forward and backward", "forward"):
            left = (until - time.monotonic()) / (2 * (len(shapes) - number))
            tried = list(ways(given_to_all, args.device, passes != "forward"))
            results = in_turns(tried, args.device, args.rounds, seconds=left)
            add_ratios(results)
            report["shapes"].setdefault(title, {**shape._asdict()})[passes] = results
            write(args.output, "layer", report)
            for name, result in results.items():
                found = f"{result['median_ms']:.3f} ms" if "median_ms" in result else "failed or cannot"
                print(f"{title}, {passes}: {name}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
