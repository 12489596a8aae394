"""The backends that can compute a problem, and the call of each that is timed."""

from collections.abc import Callable
from typing import Any

import torch

from diffvision.ops.attention import BACKENDS, Problem
from diffvision.ops.attention.choice import rule
from diffvision.tuning.cases import Case
from diffvision.tuning.inputs import Inputs, Packed, attending, padding

EAGER_MAP_BYTES = 2**30  # of both maps in float32, up to which `eager` is tried


def backends_for(problem: Problem) -> list[str]:
    """Return the names of the backends that say that they can compute a problem, the one of the rule first."""
    usual, _ = rule(problem)
    maps = 8 * problem.batch * problem.heads * problem.queries * problem.keys
    able = [
        name
        for name, module in BACKENDS.items()
        if module.limit(problem) is None
        and (name != "eager" or maps <= EAGER_MAP_BYTES)
        # The others take packed sequences one by one, as the rule's does.
        and (not problem.packed or hasattr(module, "diff_attention_varlen") or name == usual)
    ]
    return sorted(able, key=lambda name: name != usual)


def call_of(backend: str, case: Case) -> Callable[[], Any]:
    """Return what one timing runs: the attention of random inputs by a backend, and all gradients if needed."""
    problem = case.problem
    generator = torch.Generator().manual_seed(0)
    given: Inputs | Packed
    if problem.packed:
        given, mask, longest = Packed.random(problem, generator), None, problem.queries
        if not hasattr(BACKENDS[backend], "diff_attention_varlen"):
            backend = "auto"  # one sequence after another, each by the backend for its length
    else:
        given, mask, longest = Inputs.random(problem, generator), padding(problem, generator), None
    leaves = [t for t in given if t.requires_grad]

    attend = attending(case.compiled)

    def forward() -> torch.Tensor:
        return attend(given, backend, causal=problem.causal, mask=mask, longest=longest)

    if not problem.grad:
        return torch.no_grad()(forward)
    weight: list[torch.Tensor] = []

    def both() -> tuple[torch.Tensor, ...]:
        out = forward()
        if not weight:  # random, since some kernels have another path for the gradient of a sum
            weight.append(torch.randn(out.shape, generator=generator).to(out))
        return torch.autograd.grad(out, leaves, weight[0])

    return both
