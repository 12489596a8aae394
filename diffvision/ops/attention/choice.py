"""The table of backends, and the choice of `backend="auto"`: one rule, with the measurement behind each line."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch.autograd import forward_ad

from diffvision.ops.attention import blocked, flash, flex, reference, sdpa, single, varlen
from diffvision.ops.attention.problem import Problem

# name -> module that has `limit(problem) -> reason or None` and
# `diff_attention(q, k, v, lam, *, causal, mask, scale, dropout) -> out`, or `diff_attention_varlen`, or both
BACKENDS: dict[str, ModuleType] = {
    "eager": reference,
    "blocked": blocked,
    "sdpa": sdpa,
    "single": single,
    "flex": flex,
    "flash": flash,
    "varlen": varlen,
}

# Operators registered with torch, which have no forward-mode derivative and do not say so.
OPERATORS = ("blocked",)

EAGER_MAX_KEYS_CPU = 80

preferred = "auto"  # what `backend="auto"` stands for, which `attention_backend` sets


@contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Use this backend for every call with `backend="auto"` in the context, in layers and whole models too.

    It never falls back: a call that the backend cannot take raises a ValueError that names the limit. It holds for the
    process, not for a thread: do not use it in two threads at once.

    Args:
        name: a name of `BACKENDS`, or "auto".
    """
    global preferred
    _check_name(name)
    before, preferred = preferred, name
    try:
        yield
    finally:
        preferred = before


def require(name: str, problem: Problem) -> None:
    """Raise a ValueError if the named backend does not exist, or cannot take the call."""
    _check_name(name)
    reason = BACKENDS[name].limit(problem)
    if reason is None and name in OPERATORS and in_forward_mode():
        reason = "it has no forward-mode derivative"
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot take this call: {reason}; use another, or backend='auto'")


def choose(backend: str, problem: Problem) -> tuple[str, str]:
    """Return the backend for a call, and why: the named one, that of the context, or the rule's.

    Raises:
        ValueError: the name is unknown, or the backend cannot take the call.
    """
    name = preferred if backend == "auto" else backend
    if name != "auto":
        require(name, problem)
        return name, "it was named"
    if problem.packed and varlen.limit(problem) is None:
        return "varlen", "it is torch's kernel for packed sequences"  # without a mask of pairs; not measured
    return rule(problem.device, problem.queries, problem.keys, problem.dropout)


def rule(device: str, queries: int, keys: int, dropout: float) -> tuple[str, str]:
    """Return the backend that "auto" takes for a call of so many queries and keys, and why.

    Times on a CPU are of two cores with AVX512 (docs/benchmarks/speed.md), those on a GPU of one H200, compute
    capability 9.0 (docs/benchmarks/gpu.md). Nothing was measured on any other card: these take the same backend.
    """
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return "eager", "it has a forward-mode derivative"
    if device != "cpu":
        # V1, 256 x 197 tokens, forward and backward on the H200: 2.0 ms; fused kernels that we had took 2.5, flex 3.7.
        return "sdpa", "it was the fastest on an H200, and no other card was measured"
    if dropout:  # the two that draw it; the same crossing as below
        return "eager" if keys <= EAGER_MAX_KEYS_CPU else "sdpa", "it draws dropout"
    if torch.compiler.is_exporting():
        return "sdpa", "an exported graph has to hold operations of torch, for any length"
    if torch.jit.is_tracing():
        return "eager", "a traced graph has to hold operations of torch, of which ONNX knows these"
    if queries == 1:  # V1, 4,096 keys, relative to plain attention: 1.0; `blocked` 1.8, `eager` 2.4, `sdpa` 3.4
        return "single", "on a CPU it is the fastest for one query, with the least work besides the products"
    # V1, forward and backward, relative to plain attention. 77 keys: `eager` 0.9, `blocked` 0.95, `sdpa` 2.5. From 197
    # to 1,024 keys: `blocked` 0.9 to 1.2, `eager` 1.0 to 1.9, `sdpa` 1.6 to 2.0.
    if keys <= EAGER_MAX_KEYS_CPU:
        return "eager", f"on a CPU it is the fastest up to {EAGER_MAX_KEYS_CPU} keys"
    return "blocked", f"on a CPU it is the fastest above {EAGER_MAX_KEYS_CPU} keys"


def takes_blocks(backend: str, problem: Problem) -> bool:
    """Return whether `flex` computes rows of documents that no kernel for packed sequences takes."""
    name = preferred if backend == "auto" else backend
    if name != "auto":
        return name == "flex"
    if problem.device != "cuda" or torch.compiler.is_exporting() or torch.jit.is_tracing() or in_forward_mode():
        return False
    return flex.limit(problem) is None and flex.can_compile()


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives (torch.func.jvp) are computed, for which our operators return zeros."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _check_name(name: str) -> None:
    if name not in BACKENDS and name != "auto":
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}, or 'auto'")
