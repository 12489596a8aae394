"""The table of backends, and the choice of `backend="auto"`: what was measured on this machine, else a rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from diffvision.ops.attention import blocked, flash, flex, native, reference, sdpa, single, triton, tuned, varlen
from diffvision.ops.attention.problem import Problem

# name -> module that has `limit(problem) -> reason or None` and
# `diff_attention(q, k, v, lam, *, causal, mask, scale, dropout) -> out`, or `diff_attention_varlen`, or both
BACKENDS: dict[str, ModuleType] = {
    "eager": reference,
    "blocked": blocked,
    "native": native,
    "sdpa": sdpa,
    "single": single,
    "flex": flex,
    "flash": flash,
    "triton": triton,
    "varlen": varlen,
}

# Operators registered with torch, which have no forward-mode derivative and do not say so.
OPERATORS = ("blocked", "native", "triton")

# `native` runs a compiler, and is taken only where `tune` had it do so. Of the others the plain formula wins on a CPU
# for very short rows, where the blocks' many small calls cost more than they save: the crossing lies between 77 and
# 197 keys (docs/benchmarks/speed.md).
EAGER_MAX_KEYS_CPU = 80

preferred = "auto"  # what `backend="auto"` stands for, which `attention_backend` sets
seen: list[Problem] | None = None  # the calls in the context of `problems_seen`


@contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Let every call of `backend="auto"` in the context take this backend, in layers and whole models too.

    It never falls back: a call that the backend cannot take is a ValueError that names the limit. It holds for the
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


@contextmanager
def problems_seen() -> Iterator[list[Problem]]:
    """Yield the list of all calls in the context, in their order; it holds for the process."""
    global seen
    before, seen = seen, []
    try:
        yield seen
    finally:
        seen = before


def choose(backend: str, problem: Problem) -> ModuleType:
    """Return the backend for a call: the named one, that of the context, or the fastest.

    Raises:
        ValueError: the name is unknown, or the backend cannot take the call.
    """
    if seen is not None:
        seen.append(problem)
    name = preferred if backend == "auto" else backend
    if name == "auto":
        return BACKENDS[fastest(problem)]
    _check_name(name)
    reason = BACKENDS[name].limit(problem)
    if reason is None and name in OPERATORS and in_forward_mode():
        reason = "it has no forward-mode derivative"
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot take this call: {reason}; use another, or backend='auto'")
    return BACKENDS[name]


def supported_backends(problem: Problem) -> dict[str, str]:
    """Return the backend that "auto" would choose for a problem, and why the others were passed over.

    Returns:
        backend name -> a sentence that starts with "chosen", "passed over" or "cannot"; the chosen one comes first.
    """
    chosen = fastest(problem)
    why = _why(problem, chosen)
    tuning = tuned.tuning_of(problem.device)
    excluded = {} if tuning is None else tuning.excluded
    reasons = {chosen: f"chosen: {why}"}
    for name, module in BACKENDS.items():
        if name == chosen:
            continue
        if (reason := module.limit(problem)) is not None:
            reasons[name] = f"cannot: {reason}"
        elif name in excluded:
            reasons[name] = f"passed over: excluded here, {excluded[name]}"
        else:
            reasons[name] = f"passed over: {chosen} was chosen, {why}"
    return reasons


def fastest(problem: Problem) -> str:
    """Return the backend that was measured to be the fastest on this machine, else that of the rule."""
    if in_forward_mode():
        return "eager"
    usual, _ = rule(problem)
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or not tuned.is_measured(problem.device):
        return usual
    compiled = torch.compiler.is_compiling()
    # Without choices no size is looked at, so that a graph of any length stays one.
    if not problem.dropout and tuned.has_choices(problem.device, compiled):
        name = tuned.measured_backend(problem.device, *tuned.kind_of(problem, compiled=compiled))
        if name in BACKENDS and BACKENDS[name].limit(problem) is None:
            return name
    return _not_excluded(problem, usual)


def _not_excluded(problem: Problem, usual: str) -> str:
    """Return the rule's backend, or another in its place where it was excluded here; the formula is the last."""
    if not tuned.is_excluded(problem.device, usual):
        return usual
    for name in ("sdpa", "blocked"):
        if not tuned.is_excluded(problem.device, name) and BACKENDS[name].limit(problem) is None:
            return name
    return "eager"


def _why(problem: Problem, chosen: str) -> str:
    """Return why a backend was chosen."""
    usual, why = rule(problem)
    tuning = tuned.tuning_of(problem.device)
    if tuning is None:
        return why
    choice = None if problem.dropout else tuning.choices.get(tuned.kind_of(problem, compiled=False))
    if choice is not None and choice.backend == chosen:
        if choice.than not in choice.milliseconds:
            return f"measured here on {choice.date}, where {choice.than} has no memory or failed"
        if chosen != choice.than:
            return f"measured here on {choice.date}, {choice.faster:.2f}x faster than {choice.than}"
        if chosen == usual:
            return f"measured here on {choice.date}, none was faster"
    return why if chosen == usual else f"{usual} was excluded here, {tuning.excluded[usual]}"


def rule(problem: Problem) -> tuple[str, str]:
    """Return (backend, reason) where nothing was measured on this machine."""
    if problem.packed and varlen.limit(problem) is None:
        return "varlen", "it is torch's kernel for packed sequences"
    if problem.device != "cpu":
        remedy = ": run `diffvision tune --device cuda`" if problem.device == "cuda" else ""
        return "sdpa", f"no other is known to be right and faster here{remedy}"
    if problem.dropout:
        return ("eager", "it draws dropout") if problem.keys <= EAGER_MAX_KEYS_CPU else ("sdpa", "it draws dropout")
    if torch.compiler.is_exporting():
        return "sdpa", "an exported graph has to hold operations of torch, for any length"
    if torch.jit.is_tracing():
        return "eager", "a traced graph has to hold operations of torch, of which ONNX knows these"
    if problem.queries == 1:
        return "single", "on a CPU it is the fastest for one query, with the least work besides the products"
    if problem.keys <= EAGER_MAX_KEYS_CPU:
        return "eager", f"by rule on a CPU up to {EAGER_MAX_KEYS_CPU} keys, without a compiler"
    return "blocked", f"by rule on a CPU above {EAGER_MAX_KEYS_CPU} keys, without a compiler"


def takes_blocks(backend: str, problem: Problem) -> bool:
    """Return whether `flex` computes rows of documents that no kernel for packed sequences takes."""
    name = preferred if backend == "auto" else backend
    if name != "auto":
        return name == "flex"
    if problem.device != "cuda" or torch.compiler.is_exporting() or torch.jit.is_tracing() or in_forward_mode():
        return False
    fits = problem.head_dim <= 128 and problem.value_dim <= 256  # in a card's shared memory, as far as counted
    return fits and not tuned.is_excluded("cuda", "flex") and flex.limit(problem) is None and flex.can_compile()


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives are taken (torch.func.jvp), of which operators of ours give zeros."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def _check_name(name: str) -> None:
    if name not in BACKENDS and name != "auto":
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}, or 'auto'")
