"""Fake quantisation by hand, and against integers that are really stored and multiplied."""

import pytest
import torch

from diffvision.evaluation.language.low_bit import (
    round_by_block,
    round_by_group,
    subtract_key_mean,
    to_float8,
    to_integers,
)

SEED = torch.Generator().manual_seed(0)


def test_integers_by_hand():
    """Four bits: levels of a whole number from -7 to 7; halves are rounded away from zero."""
    x = torch.tensor([[7.0, 2.5, -2.5, 0.4], [-14.0, 1.0, 0.9, 13.0]])
    assert to_integers(x, 4, -1).tolist() == [[7, 3, -3, 0], [-14, 2, 0, 14]]
    assert to_integers(torch.zeros(3, 2), 8, -1).abs().max() == 0


def test_float8_has_three_bits_of_mantissa():
    x = torch.tensor([448.0, 17.0, 19.1, -0.3, 0.0])
    assert to_float8(x, -1).tolist() == pytest.approx([448, 16, 20, -0.3125, 0])
    torch.testing.assert_close(to_float8(x / 7, -1), to_float8(x, -1) / 7)


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_of_rounded_blocks_are_those_of_integer_products(bits):
    """Block by block, as a kernel: integers, a product summed in integers, two scales."""
    q, k = torch.randn(300, 16, generator=SEED), torch.randn(200, 16, generator=SEED)
    highest = 2 ** (bits - 1) - 1
    logits = torch.empty(300, 200)
    for row in range(0, 300, 128):
        for column in range(0, 200, 64):
            a, b = q[row : row + 128], k[column : column + 64]
            sa, sb = a.abs().max() / highest, b.abs().max() / highest
            ia, ib = (torch.floor((x / s).abs() + 0.5) * x.sign() for x, s in ((a, sa), (b, sb)))
            logits[row : row + 128, column : column + 64] = (ia.long() @ ib.long().T) * (sa * sb)
    torch.testing.assert_close(
        round_by_block(q, bits, 128) @ round_by_block(k, bits, 64).T, logits, atol=1e-4, rtol=1e-4
    )


def test_smoothing_subtracts_each_maps_mean_and_changes_no_softmax():
    k = torch.randn(1, 2, 2, 10, 4, generator=SEED) + torch.tensor([5.0, -5.0])[:, None, None]
    q = torch.randn(1, 2, 2, 3, 4, generator=SEED)
    assert subtract_key_mean(k).mean(dim=3).abs().max() < 1e-6
    maps = (q @ k.transpose(-1, -2)).softmax(-1)
    torch.testing.assert_close((q @ subtract_key_mean(k).transpose(-1, -2)).softmax(-1), maps)
    biased = torch.zeros(64, 4) + torch.tensor([100.0, 0, 0, 0]) + 0.1 * torch.randn(64, 4, generator=SEED)
    rough, fine = (
        round_by_block(biased, 8, 64) - biased,
        round_by_block(subtract_key_mean(biased), 8, 64) - subtract_key_mean(biased),
    )
    assert fine.norm() < rough.norm() / 100


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_groups_of_a_cache_are_stored_from_least_to_largest(bits):
    k = torch.randn(70, 3, generator=SEED)
    expected = torch.empty_like(k)
    for channel in range(3):
        for start in range(0, 70, 32):
            numbers = k[start : start + 32, channel].tolist()
            least, step = min(numbers), (max(numbers) - min(numbers)) / (2**bits - 1)
            stored = [round((number - least) / step) for number in numbers]
            assert (min(stored), max(stored)) == (0, 2**bits - 1)
            expected[start : start + 32, channel] = torch.tensor([least + step * level for level in stored])
    torch.testing.assert_close(round_by_group(k, bits, 0), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(round_by_group(k.T, bits, 1), expected.T, atol=1e-6, rtol=1e-5)
    assert (round_by_group(torch.full((40, 2), 3.0), bits, 0) == 3).all()
