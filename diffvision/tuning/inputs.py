"""Random inputs of a call, and the call itself, for what compares and times backends."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from diffvision.ops import diff_attention, diff_attention_varlen
from diffvision.ops.attention import Problem


class Inputs(NamedTuple):
    """q, k, v and lambda as `diff_attention` takes them, with the strides that a layer's projections give them."""

    q: Tensor  # [B, H, 2, M, D], from [B, M, H, 2, D]
    k: Tensor  # [B, Hk, 2 or 1, N, D]
    v: Tensor  # [B, Hk, N, V]
    lam: Tensor  # [1], or [B, H, M, 1] where the maps share keys (V2); float32 at least

    @classmethod
    def random(cls, problem: Problem, generator: torch.Generator) -> "Inputs":
        """Return normal numbers, and lambdas from 0.2 to 0.8, that need gradients as the problem says.

        Args:
            problem: the call; of its device, "cuda" is the current one.
            generator: on the CPU, so that numbers are the same on every device.
        """
        p, device = problem, problem.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, p.dtype)

        q = normal(p.batch, p.queries, p.heads, 2, p.head_dim).permute(0, 2, 3, 1, 4)
        k = normal(p.batch, p.keys, p.kv_heads, 1 if p.shared_keys else 2, p.head_dim).permute(0, 2, 3, 1, 4)
        v = normal(p.batch, p.keys, p.kv_heads, p.value_dim).transpose(1, 2)
        lam = 0.2 + 0.6 * torch.rand((p.batch, p.queries, p.heads) if p.shared_keys else (1,), generator=generator)
        lam = lam.to(device, torch.promote_types(p.dtype, torch.float32))
        if p.shared_keys:
            lam = lam.transpose(1, 2).unsqueeze(-1)
        return cls(*(t.requires_grad_(p.grad) for t in (q, k, v, lam)))

    def with_lambdas(self, generator: torch.Generator) -> "Inputs":
        """Return the same with a lambda for each sample, head and query."""
        batch, heads, _, queries, _ = self.q.shape
        lam = 0.2 + 0.6 * torch.rand(batch, heads, queries, 1, generator=generator)
        return self._replace(lam=lam.to(self.lam).requires_grad_(self.lam.requires_grad))


def mask_of(problem: Problem, generator: torch.Generator) -> Tensor | None:
    """Return the mask that models have for such a problem; None where it has no mask.

    Causal rows of equal length are of documents in a row: [B, 1, N, N]. Others are padded: [B, 1, 1, N], of which a
    third of the keys is forbidden.
    """
    if not problem.masked:
        return None
    if problem.causal and problem.queries == problem.keys:
        documents = (torch.rand(problem.batch, problem.keys, generator=generator) < 4 / problem.keys).cumsum(1)
        return (documents[:, None, :, None] == documents[:, None, None]).to(problem.device)
    mask = torch.rand(problem.batch, 1, 1, problem.keys, generator=generator) > 1 / 3
    mask[..., 0] = True
    return mask.to(problem.device)


def lengths_of(problem: Problem, generator: torch.Generator) -> list[int]:
    """Return the lengths of a packed problem's sequences, a quarter of its longest or more; one is the longest."""
    longest = problem.queries
    lengths = torch.randint(max(1, longest // 4), longest + 1, (problem.batch,), generator=generator).tolist()
    return [longest, *lengths[1:]]


class Packed(NamedTuple):
    """Sequences one after another, as `diff_attention_varlen` takes them."""

    q: Tensor  # [T, H, 2, D]
    k: Tensor  # [T, Hk, 2 or 1, D]
    v: Tensor  # [T, Hk, V]
    lam: Tensor  # [1], or [T, H, 1]
    ends: Tensor  # int32 [B + 1]

    @classmethod
    def random(cls, problem: Problem, generator: torch.Generator) -> "Packed":
        """Return random sequences of a packed problem, as views of one long sample."""
        lengths = lengths_of(problem, generator)
        total = sum(lengths)
        one = Inputs.random(problem._replace(batch=1, queries=total, keys=total), generator)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=problem.device)
        lam = one.lam[0].transpose(0, 1) if one.lam.dim() == 4 else one.lam
        q, k = (t[0].permute(2, 0, 1, 3) for t in (one.q, one.k))
        q, k, v, lam = (t.detach().requires_grad_(problem.grad) for t in (q, k, one.v[0].transpose(0, 1), lam))
        return cls(q, k, v, lam, ends)


def choose_attend(compiled: bool) -> Callable[..., Tensor]:
    """Return `attend`, compiled if asked."""
    return torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend


def attend(
    given: Inputs | Packed, backend: str, *, causal: bool, mask: Tensor | None = None, longest: int | None = None
) -> Tensor:
    """Return the attention of inputs by a backend."""
    if isinstance(given, Packed):
        q, k, v, lam, ends = given
        return diff_attention_varlen(
            q, k, v, lam, ends, max_seqlen=longest, max_seqlen_k=longest, causal=causal, backend=backend
        )
    return diff_attention(*given, causal=causal, mask=mask, backend=backend)
