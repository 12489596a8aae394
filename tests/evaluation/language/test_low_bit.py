"""Attention in few bits: rounding against stored integers, each scheme against a loop, errors and factors by hand."""

import math

import pytest
import torch
from language_fixtures import Tiny

from diffvision.analysis.capture import Call
from diffvision.evaluation.intervals import with_intervals
from diffvision.evaluation.language import low_bit as module
from diffvision.evaluation.language.low_bit import SCHEMES, low_bit, round_by_block, round_by_group


def head(length=100, maps=2, key_maps=2):
    """Return one causal head's call with lambda 0.7."""
    draw = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(1, 1, maps, length, 8, generator=draw)
    k = 2 * torch.randn(1, 1, key_maps, length, 8, generator=draw)
    v = torch.randn(1, 1, length, 12, generator=draw)
    lam = torch.full((1, 1, 1, 1), 0.7) if maps == 2 else None
    return Call("head", None, q, k, v, lam, None, True, 8**-0.5)


def output(call, scheme):
    scores = SCHEMES[scheme](call)
    return (scores.compute_weights() @ call.values(torch.float32))[0, 0]


@pytest.mark.parametrize("key_maps", [1, 2])
@pytest.mark.parametrize("bits", [4, 2])
def test_a_cache_read_by_each_query_as_decoding_would(bits, key_maps, monkeypatch):
    """Query by query: the groups that a cache with 20 recent tokens has rounded by then, and the others as they are."""
    monkeypatch.setattr(module, "RECENT", 20)
    call = head(key_maps=key_maps)
    q, k, v = call.q[0, 0], call.k[0, 0].expand(2, -1, -1), call.v[0, 0]
    expected = []
    for query in range(100):
        rounded = max(0, query + 1 - 20) // 32 * 32
        keys, values = k[:, : query + 1].clone(), v[: query + 1].clone()
        for group in (slice(start, start + 32) for start in range(0, rounded, 32)):
            keys[:, group] = round_by_group(keys[:, group], bits, 1)
            values[group] = round_by_group(values[group], bits, 1)
        one, two = ((q[:, query, None] @ keys.transpose(1, 2)) / math.sqrt(8)).softmax(-1)
        expected.append(((one - 0.7 * two) @ values)[0])
    out = output(call, f"cache_{bits}")
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(module, "RECENT", 100)
    kept = output(head(key_maps=key_maps), f"cache_{bits}")
    full = head(key_maps=key_maps)
    torch.testing.assert_close(kept, (full.scores().compute_weights() @ full.values(torch.float32))[0, 0])


def test_probabilities_and_values_as_a_kernel_sums_them():
    """Unnormalised probabilities in 0..127 times values in -127..127, divided by the sum before rounding."""
    call = head(maps=1, key_maps=1)
    logits, v = call.scores().logits[0, 0, 0], call.v[0, 0]
    scale = v.abs().amax(0) / 127
    integers = torch.floor((v / scale).abs() + 0.5) * v.sign()
    expected = []
    for query in range(100):
        row = (logits[query, : query + 1] - logits[query, : query + 1].max()).exp()
        expected.append((torch.floor(row * 127 + 0.5) / 127) @ (integers[: query + 1] * scale) / row.sum())
    torch.testing.assert_close(output(call, "pv_int8"), torch.stack(expected), atol=1e-5, rtol=1e-5)
    eight, floats = (output(head(maps=1, key_maps=1), name) for name in ("pv_int8", "pv_fp8"))
    assert 0 < (floats - eight).norm() / eight.norm() < 0.1


@pytest.mark.parametrize("variant", ["standard", "v1"])
def test_loss_and_errors_of_each_scheme(variant, monkeypatch):
    model = Tiny(variant)
    rows = torch.randint(512, (10, 80), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(module, "RECENT", 16)
    metrics = with_intervals(low_bit(model, rows, batch_size=2))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert metrics["nll/full"] == pytest.approx(expected, rel=1e-5)
    assert {key.rpartition("/")[2] for key in metrics if key.startswith("nll/")} == {"full", *SCHEMES}
    for name in SCHEMES:
        rise, low, high = (metrics[f"nll_rise/{name}{end}"] for end in ("", "_low", "_high"))
        assert low < rise < high
        assert rise == pytest.approx(metrics[f"nll/{name}"] - metrics["nll/full"])
    error = {name: metrics[f"relative_l1/{name}"] for name in SCHEMES}
    for kind in ("logits", "cache"):
        assert error[f"{kind}_8"] < error[f"{kind}_4"]
    assert error["qk_int8"] < error["qk_int4"]
    assert error["pv_int8"] < error["pv_fp8"]
    assert all(0.5 < metrics[f"cosine/{name}"] < 1 for name in SCHEMES)
    assert metrics["cosine/qk_int8"] == pytest.approx((metrics["cosine/qk_int8/0"] + metrics["cosine/qk_int8/1"]) / 2)
    assert (metrics["cancellation"] == pytest.approx(1)) if variant == "standard" else (metrics["cancellation"] > 1)


def test_dint_has_no_cache_to_round():
    rows = torch.randint(512, (2, 20))
    assert low_bit(Tiny("v1_dint"), rows, schemes=["qk_int8"])
    with pytest.raises(ValueError, match="DintAttention"):
        low_bit(Tiny("v1_dint"), rows)


# ---- rounding by hand ----

SEED = torch.Generator().manual_seed(0)


def test_integers_by_hand():
    """Four bits: levels of a whole number from -7 to 7; halves are rounded away from zero."""
    x = torch.tensor([[7.0, 2.5, -2.5, 0.4], [-14.0, 1.0, 0.9, 13.0]])
    assert module.to_integers(x, 4, -1).tolist() == [[7, 3, -3, 0], [-14, 2, 0, 14]]
    assert module.to_integers(torch.zeros(3, 2), 8, -1).abs().max() == 0


def test_float8_has_three_bits_of_mantissa():
    x = torch.tensor([448.0, 17.0, 19.1, -0.3, 0.0])
    assert module.to_float8(x, -1).tolist() == pytest.approx([448, 16, 20, -0.3125, 0])
    torch.testing.assert_close(module.to_float8(x / 7, -1), module.to_float8(x, -1) / 7)


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
    assert module.subtract_key_mean(k).mean(dim=3).abs().max() < 1e-6
    maps = (q @ k.transpose(-1, -2)).softmax(-1)
    torch.testing.assert_close((q @ module.subtract_key_mean(k).transpose(-1, -2)).softmax(-1), maps)


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
