"""Gradients of a compiled module, of which torch returns some as views of others."""

import copy

import pytest
import torch
from torch import nn

from diffvision.training.compilation import compile_in_place


class Tokens(nn.Module):
    """What a ViT does first: a class token and positions, each the same for all samples."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = (nn.Parameter(torch.randn(1, n, 4)) for n in (1, 3))
        self.shift = nn.Parameter(torch.randn(1, 3, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.linear(x + self.positions + self.shift)


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_a_compiled_module_add_up(batch, monkeypatch):
    compiled, eager = nn.Module.compile, Tokens()
    chosen = {"backend": "aot_eager", "options": None}
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compiled(self, **given | chosen))
    module = copy.deepcopy(eager)
    compile_in_place(module)
    for steps in range(4):
        x = torch.randn(batch, 2, 4)
        for one in (eager, module):
            if steps == 2:
                one.zero_grad()
            one(x).square().sum().backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (eager, module)]
        torch.testing.assert_close(*norms)
        for (name, expected), got in zip(eager.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, msg=name)
    addresses = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(addresses) == len(list(module.parameters()))
    assert all(parameter.grad.stride() == parameter.stride() for parameter in module.parameters())
