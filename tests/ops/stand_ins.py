"""Functions in place of the kernels that need a GPU: bound to their signatures, with their refusals, by the formula."""

import inspect
import json
from itertools import pairwise
from pathlib import Path

import torch

from diffvision.ops.attention import flash

SIGNATURES = json.loads((Path(__file__).parents[1] / "assets/flash_signatures.json").read_text())
PACKAGES = {package.name: package for package in flash.PACKAGES}
RELEASES = {
    "flash-attn 2.7.0": ("flash-attn 2", False),
    "flash-attn 2.8.3.post2": ("flash-attn 2", False),
    "FlashAttention-3 3.0.0 at 0251105a": ("FlashAttention-3", False),
    "flash-attn-4 4.0.0b36": ("FlashAttention-4", True),  # returns (out, lse)
}


def plain(q, k, v, scale, causal):
    """[B, N, H, D] as the libraries have it; causal to the last key, rows without a key are zeros."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.mT * scale
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril(k.shape[2] - q.shape[2]) if causal else allowed
    weights = scores.masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1) * allowed
    return (weights @ v).transpose(1, 2)


def signature(release, function):
    """The real signature; a parameter without a default has to be given."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = SIGNATURES[release][function].items()
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=... if optional else empty) for name, optional in parameters]
    )


class StandIn:
    """Both functions of one library, bound to its signature, with its return type; remembers what it was given."""

    def __init__(self, release):
        self.release, self.calls = release, []
        name, self.returns_tuple = RELEASES[release]
        self.package = PACKAGES[name]

    def libraries(self):
        return (flash.Library(self.package, self.attend, self.attend_varlen),)

    def bind(self, function, args, settings):
        bound = signature(self.release, function).bind(*args, **settings).arguments
        q, k, v = (bound.pop(name) for name in "qkv")
        sizes = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"} if "varlen" in function else set()
        assert bound.get("deterministic", False) is torch.are_deterministic_algorithms_enabled()
        assert set(bound) - {"deterministic"} == sizes | {"softmax_scale", "causal"}
        return q, k, v, bound

    def refuse(self, q, k, v):
        for t in (q, k, v):
            assert t.stride(-1) == 1, "a copy would be made"
            assert t.shape[-1] % 8 == 0
            assert t.shape[-1] <= self.package.largest
        unequal = not self.package.equal_sizes and q.shape[-1] <= 64
        assert unequal or q.shape[-1] == v.shape[-1], "one size"
        assert q.shape[-1] == k.shape[-1]
        assert k.shape[:-1] == v.shape[:-1]
        assert q.shape[-2] % k.shape[-2] == 0
        self.calls.append((q, k, v))

    def attend(self, *args, **settings):
        q, k, v, bound = self.bind("flash_attn_func", args, settings)
        assert q.dim() == k.dim() == v.dim() == 4
        assert q.shape[0] == k.shape[0]
        assert not bound["causal"] or q.shape[1] <= k.shape[1], "rows without a key are not handed over"
        self.refuse(q, k, v)
        out = plain(q, k, v, bound["softmax_scale"], bound["causal"])
        return (out, None) if self.returns_tuple else out

    def attend_varlen(self, *args, **settings):
        q, k, v, bound = self.bind("flash_attn_varlen_func", args, settings)
        assert q.dim() == k.dim() == v.dim() == 3
        assert bound["cu_seqlens_q"].dtype == bound["cu_seqlens_k"].dtype == torch.int32
        self.refuse(q, k, v)
        ends_q, ends_k = bound["cu_seqlens_q"].tolist(), bound["cu_seqlens_k"].tolist()
        assert bound["max_seqlen_q"] >= max(b - a for a, b in pairwise(ends_q))
        assert bound["max_seqlen_k"] >= max(b - a for a, b in pairwise(ends_k))
        outs = []
        for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
            own = (q[None, a:b], k[None, c:d], v[None, c:d])
            outs.append(plain(*own, bound["softmax_scale"], bound["causal"])[0])
        out = torch.cat(outs)
        return (out, None) if self.returns_tuple else out


def plain_flex(q, k, v, *, block_mask, scale, enable_gqa):
    """What `flex_attention` computes, written out; as strict as it is about heads."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * (q.shape[3] ** -0.5 if scale is None else scale)
    grid = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    allowed = torch.ones((), dtype=torch.bool) if block_mask is None else block_mask.mask_mod(*grid)
    weights = scores.masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1) * allowed
    return weights @ v.repeat_interleave(groups, 1)
