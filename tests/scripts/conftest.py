"""What tests of the one-file models share."""

import pytest
import torch


def _assert_equal(nano, package, run, renamed, as_package=lambda name, tensor: tensor):
    """Give both models random weights, and compare their outputs and their gradients in float64.

    Args:
        run: a pair of functions, of the one-file model and of the package's -> tensors.
        renamed: a name in the one-file model -> the package's.
        as_package: a name and a tensor of the one-file model -> the tensor in the package's layout.
    """
    for name, parameter in nano.named_parameters():  # also norms, biases and the class token, which start as constants
        std = 0.2 if "q_proj" in name or "k_proj" in name else 0.1  # maps that are far from uniform
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or "scale" in name else 0.0, std=std)
    package.load_state_dict({renamed(name): as_package(name, value) for name, value in nano.state_dict().items()})
    for ours, theirs in zip(run[0](nano), run[1](package), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        weights = torch.randn_like(theirs) / theirs.numel() ** 0.5
        (ours * weights).sum().backward(retain_graph=True)
        (theirs * weights).sum().backward(retain_graph=True)
    gradients = {name: parameter.grad for name, parameter in package.named_parameters()}
    for name, parameter in nano.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        theirs = gradients[renamed(name)]
        atol = 1e-5 * max(1, theirs.abs().max().item())  # small entries are sums that cancel
        torch.testing.assert_close(as_package(name, parameter.grad), theirs, rtol=1e-5, atol=atol)


@pytest.fixture
def assert_equal():
    return _assert_equal
