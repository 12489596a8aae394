"""The backends that can compute a problem, and the call of each that is timed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from diffvision.ops.attention import BACKENDS, Problem
from diffvision.ops.attention.choice import rule
from diffvision.tuning.cases import Case
from diffvision.tuning.inputs import Inputs, Packed, choose_attend, mask_of

EAGER_MAP_BYTES = 2**30  # of both maps in float32, up to which `eager` is tried


def backends_for(problem: Problem) -> list[str]:
    """Return the names of the backends that can compute a problem, the heuristic's choice first."""
    default, _ = rule(problem)
    maps = 8 * problem.batch * problem.heads * problem.queries * problem.keys
    able = [
        name
        for name, module in BACKENDS.items()
        if module.limit(problem) is None
        and (name != "eager" or maps <= EAGER_MAP_BYTES)
        # The others take packed sequences one by one, as the default does.
        and (not problem.packed or hasattr(module, "diff_attention_varlen") or name == default)
    ]
    return sorted(able, key=lambda name: name != default)


def calls_of(case: Case, backends: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Return what one timing of each backend runs: the attention of the same random inputs, and gradients if needed.

    Args:
        case: what is timed.
        backends: the names, of backends that can compute it.
    """
    problem, generator = case.problem, torch.Generator().manual_seed(0)
    given: Inputs | Packed
    if problem.packed:
        given, mask, longest = Packed.random(problem, generator), None, problem.queries
    else:
        given, mask, longest = Inputs.random(problem, generator), mask_of(problem, generator), None
    leaves = [t for t in given if t.requires_grad]
    weight: list[torch.Tensor] = []
    if case.compiled:
        torch.compiler.reset()  # it keeps a few graphs of one function, and then refuses
    attend = choose_attend(case.compiled)

    def call(backend: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run one pass with a backend."""
        if not problem.grad:
            with torch.no_grad():
                return attend(given, backend, causal=problem.causal, mask=mask, longest=longest)
        out = attend(given, backend, causal=problem.causal, mask=mask, longest=longest)
        if not weight:  # random, since some kernels have another path for the gradient of a sum
            weight.append(torch.randn(out.shape, generator=generator).to(out))
        return torch.autograd.grad(out, leaves, weight[0])

    # Without a function for packed sequences, one is taken after another, each by the backend for its length.
    single = {name for name in backends if problem.packed and not hasattr(BACKENDS[name], "diff_attention_varlen")}
    return {name: partial(call, "auto" if name in single else name) for name in backends}
