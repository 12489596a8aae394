"""The operation's ways to be compared by `bench_attention.py`: other projects' formulations and our backends.

The formulations of others are written here from their formulas, as calls of torch's scaled_dot_product_attention
(SDPA):

- two calls (microsoft/unilm multihead_flashdiff_1.py; timm's DiffAttention and its fused path): each map with the value
  as wide as it is;
- four calls (unilm multihead_flashdiff_2.py): each map with each half of the value;
- two calls of 2H heads (Hugging Face's DiffLlama): all maps with one half of the value, repeated for both maps;
- maps (hammoudhasan/DiffCLIP): matrix products and a softmax that keep every map, in the input's dtype;
- one call (unilm multihead_flashdiffv2.py, V2 only): 2H query heads that read H keys and values.

Every way ends in [B, M, H * V], what an output projection reads, so that a transposition that one needs and another
does not is counted.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark import Way
from diffvision.ops import diff_attention
from diffvision.ops.attention import BACKENDS, supported_backends
from diffvision.ops.attention.problem import describe

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Plain FlexAttention is timed from so many keys on: compiling it takes longer than timing all the rest.
FLEX_KEYS = 4096


class Shape(NamedTuple):
    """A call to be timed; heads are differential ones."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    variant: str = "v1"
    backward: bool = True

    @property
    def value_dim(self) -> int:
        return self.head_dim * (2 if self.variant == "v1" else 1)

    @property
    def pairs(self) -> int:
        """Query-key pairs that may attend, of all heads and samples."""
        per_head = self.queries * self.keys
        if self.causal:
            per_head -= self.queries * (self.queries - 1) // 2
        return self.batch * self.heads * per_head

    @property
    def map_bytes(self) -> int:
        """Both maps of all heads, in float32."""
        return 8 * self.batch * self.heads * self.queries * self.keys

    def words(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.keys}" if self.queries == self.keys else f"{self.queries} of {self.keys}"
        return f"{self.batch} x {heads} x {length} x {self.head_dim}{' causal' if self.causal else ''}"


class Inputs(NamedTuple):
    """q, k, v and lambda as `diff_attention` takes them, with the strides that a layer's projections give them."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor


def inputs_of(shape: Shape, device: str, dtype: torch.dtype, grad: bool) -> Inputs:
    """Return random inputs of a shape, with a lambda for each token and head in V2."""
    generator, is_v2 = torch.Generator().manual_seed(0), shape.variant == "v2"

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    q = normal(shape.batch, shape.queries, shape.heads, 2, shape.head_dim).permute(0, 2, 3, 1, 4)
    k = normal(shape.batch, shape.keys, shape.kv_heads, 1 if is_v2 else 2, shape.head_dim).permute(0, 2, 3, 1, 4)
    v = normal(shape.batch, shape.keys, shape.kv_heads, shape.value_dim).transpose(1, 2)
    lam = 0.2 + 0.6 * torch.rand((shape.batch, shape.queries, shape.heads, 1) if is_v2 else (1,), generator=generator)
    lam = lam.transpose(1, 2) if is_v2 else lam
    return Inputs(*(t.requires_grad_(grad) for t in (q, k, v, lam.to(device))))


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def merge_heads(out: Tensor) -> Tensor:
    """[B, H, M, V] -> [B, M, H * V]."""
    return out.transpose(1, 2).flatten(2)


def plain_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads of plain attention with the same parameters.

    They are two of size D for each differential head; in V2 these share its key and value.
    """
    if k.shape[2] == 2:
        v = v.unflatten(-1, (2, -1)).movedim(3, 2).flatten(1, 2)
    return q.flatten(1, 2), k.flatten(1, 2), v


def plain(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    return merge_heads(sdpa(*plain_inputs(q, k, v), causal))


def two_calls(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    one, two = (sdpa(q[:, :, m], k[:, :, m % k.shape[2]], v, causal) for m in range(2))
    return merge_heads(one - lam.to(q.dtype) * two)


def four_calls(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    halves = v.chunk(2, dim=-1)
    one, two = (torch.cat([sdpa(q[:, :, m], k[:, :, m], half, causal) for half in halves], dim=-1) for m in range(2))
    return merge_heads(one - lam.to(q.dtype) * two)


def half_split(t: Tensor) -> Tensor:
    """Return [B, H, 2, M, D] in the order of Hugging Face's projections, all first maps before all second ones."""
    return t.detach().permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4).requires_grad_(t.requires_grad)


def wide_calls(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    """Compute with q and k as `half_split` lays them out."""
    q, k = (t.transpose(1, 2).flatten(1, 2) for t in (q, k))
    halves = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=-1))
    one, two = torch.cat([sdpa(q, k, half, causal) for half in halves], dim=-1).chunk(2, dim=1)
    return merge_heads(one - lam.to(q.dtype) * two)


def one_call(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    one, two = sdpa(q.flatten(1, 2), k.squeeze(2), v, causal).unflatten(1, (-1, 2)).unbind(2)
    return merge_heads(one - lam.to(q.dtype) * two)


def materialised(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, device=q.device, dtype=q.dtype).triu(1)
    one, two = scores.softmax(dim=-1).unbind(2)
    return merge_heads((one - lam.to(q.dtype) * two) @ v)


def ours(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool, backend: str) -> Tensor:
    return merge_heads(diff_attention(q, k, v, lam, causal=causal, backend=backend))


# group -> (way, variants)
PEERS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "two calls (unilm, timm)": (two_calls, ("v1", "v2")),
    "four calls (unilm)": (four_calls, ("v1",)),
    "two wide calls (HF)": (wide_calls, ("v1",)),
    "one call (unilm V2)": (one_call, ("v2",)),
    "maps (DiffCLIP)": (materialised, ("v1", "v2")),
}


def memory_limit(device: str) -> int:
    """Return the bytes that the maps of a way that keeps them may take: it holds several copies."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(0).total_memory // 8
    return 2 << 30


def too_large(map_bytes: int, device: str) -> str:
    """Return why a way that keeps its maps is not tried, "" if it is."""
    limit = memory_limit(device)
    if map_bytes <= limit:
        return ""
    return f"not tried: its maps alone would take more than {limit / 2**30:.0f} GiB in float32"


def plain_flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """Plain attention by FlexAttention, compiled; its block mask is made here, outside the clock."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, keys = q.shape[3], k.shape[3]
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, queries, keys, device=q.device.type)
    # Beyond the limit it would run uncompiled without a warning.
    torch._dynamo.config.recompile_limit = 64
    # A kernel for these sizes alone is its fastest.
    attend = torch.compile(flex_attention, dynamic=False)
    grouped = q.shape[1] != k.shape[1] or k.shape[2] == 1

    def call() -> Tensor:
        return merge_heads(attend(*plain_inputs(q, k, v), block_mask=mask, enable_gqa=grouped))

    return call


def step(call: Callable[[], Tensor], leaves: list[Tensor], backward: bool) -> Callable[[], Any]:
    """Return what one timing runs: the call without a graph, or the call and the gradients of all leaves."""
    grad: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> tuple[Tensor | None, ...]:
        out = call()
        # Random, since some kernels have another path for the gradient of a sum.
        if not grad:
            grad.append(torch.randn_like(out, memory_format=torch.contiguous_format))
        return torch.autograd.grad(out, leaves, grad[0], allow_unused=True)

    return both if backward else forward


def by_kernel(group: str, role: str, call: Callable[[], Any], device: str) -> list[Way]:
    """Return a way that rests on SDPA: on CUDA once with each of its kernels forced, on a CPU as SDPA chooses."""
    if not device.startswith("cuda"):
        return [Way(group, role, call)]
    return [Way(group, role, call, name, context=partial(sdpa_kernel, [kernel])) for name, kernel in KERNELS.items()]


def operation_ways(shape: Shape, device: str, dtype: torch.dtype, backward: bool) -> list[Way]:
    """Return all ways to compute the operation at a shape, plain attention first, `auto` last."""
    inputs = inputs_of(shape, device, dtype, backward)
    # One query attends to the whole cache.
    causal = shape.causal and shape.queries > 1

    def run(way: Callable[..., Tensor], **more: Any) -> Callable[[], Any]:
        given = inputs
        if way is wide_calls:
            given = inputs._replace(q=half_split(inputs.q), k=half_split(inputs.k))
        return step(partial(way, *given, causal=causal, **more), list(given), backward)

    ways = by_kernel("plain", "plain", run(plain), device)
    if device.startswith("cuda") and causal and shape.keys >= FLEX_KEYS:
        ways.append(_flex_way(inputs, causal, backward))
    for group, (way, variants) in PEERS.items():
        if shape.variant not in variants:
            continue
        if way is not materialised:
            ways += by_kernel(group, "peer", run(way), device)
        elif reason := too_large(shape.map_bytes, device):
            ways.append(Way(group, "peer", None, cannot=reason))
        else:
            ways.append(Way(group, "peer", run(way)))
    with torch.set_grad_enabled(backward):
        problem = describe(*inputs, causal=causal, mask=None, dropout=0.0)
    for name, backend in BACKENDS.items():
        reason = backend.limit(problem) or (too_large(shape.map_bytes, device) if name == "eager" else "")
        ways.append(Way(name, "ours", None if reason else run(ours, backend=name), cannot=reason or ""))
    chosen = next(iter(supported_backends(problem)))
    return [*ways, Way("auto", "ours", run(ours, backend="auto"), kernel=chosen, context=nullcontext)]


def _flex_way(inputs: Inputs, causal: bool, backward: bool) -> Way:
    try:
        call = plain_flex(*inputs[:3], causal=causal)
    except Exception as error:
        return Way("plain flex", "other", None, cannot=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    return Way("plain flex", "other", step(call, list(inputs[:3]), backward))
