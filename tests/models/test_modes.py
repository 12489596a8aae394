"""`evaluating`: evaluation mode and no gradients inside, the former modes afterwards."""

import pytest
import torch
from torch import nn

from diffvision.models.modes import evaluating


def test_each_module_gets_its_mode_back_after_an_error_too():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
