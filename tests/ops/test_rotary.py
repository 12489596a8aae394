import pytest
import torch

from diffvision.ops import apply_rotary, rotary_tables


def test_turns_interleaved_pairs_as_complex_numbers():
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(11), 8, theta=10_000.0)
    frequencies = torch.tensor([10_000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    angles = torch.arange(11, dtype=torch.float64)[:, None] * frequencies
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(apply_rotary(x, cos, sin), torch.view_as_real(turned).flatten(-2), rtol=0, atol=1e-6)


def test_keeps_the_dtype_and_refuses_odd_heads():
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    assert apply_rotary(x, *rotary_tables(torch.arange(5), 6)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="even head_dim, got 5"):
        rotary_tables(torch.arange(3), 5)


def test_without_gradients_the_values_are_the_same():
    """One complex product there, where the memory allows it; the tables may be broadcast, as with left padding."""
    cos, sin = rotary_tables(torch.arange(22).reshape(2, 1, 11), 8)
    whole = torch.randn(2, 3, 11, 8)
    odd = torch.randn(2 * 3 * 11 * 8 + 1)[1:].view(2, 3, 11, 8)  # begins between two pairs
    for x in (whole, odd, whole.transpose(0, 1).contiguous().transpose(0, 1), whole[:, :, :, :].half()):
        expected = apply_rotary(x, cos, sin)
        with torch.no_grad():
            torch.testing.assert_close(apply_rotary(x, cos, sin), expected, rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        assert apply_rotary(whole, cos, sin).shape == whole.shape
