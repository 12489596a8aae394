"""Attention in few bits: each scheme against a loop, errors and factors by hand, and the first simulation's table."""

import math

import pytest
import torch

from diffvision.analysis.capture import Call
from diffvision.evaluation.intervals import with_intervals
from diffvision.evaluation.language.low_bit import (
    SCHEMES,
    low_bit,
    round_by_group,
)


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
    monkeypatch.setattr("diffvision.evaluation.language.low_bit.RECENT", 20)
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
    monkeypatch.setattr("diffvision.evaluation.language.low_bit.RECENT", 100)
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


@pytest.mark.parametrize("variant", ["standard", "v1", "v2"])
def test_loss_and_errors_of_each_scheme(tiny_of, variant, monkeypatch):
    model = tiny_of(variant)
    rows = torch.randint(512, (10, 80), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("diffvision.evaluation.language.low_bit.RECENT", 16)
    results = low_bit(model, rows, batch_size=2)
    metrics = with_intervals(results)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert metrics["nll/full"] == pytest.approx(expected, rel=1e-5)
    assert {key.rpartition("/")[2] for key in metrics if key.startswith("nll/")} == {"full", *SCHEMES}
    for name in SCHEMES:
        rise, low, high = (metrics[f"nll_rise/{name}{end}"] for end in ("", "_low", "_high"))
        assert rise == pytest.approx(metrics[f"nll/{name}"] - metrics["nll/full"])
        by_row = results[f"nll_rise/{name}"].values
        assert by_row.min() - 1e-12 <= low < high <= by_row.max() + 1e-12
        assert low < rise < high
    error = {name: metrics[f"relative_l1/{name}"] for name in SCHEMES}
    for kind in ("logits", "cache"):
        assert error[f"{kind}_8"] < error[f"{kind}_4"]
    assert error["qk_int8"] < error["qk_int4"]
    assert error["pv_int8"] < error["pv_fp8"]
    assert all(0.5 < metrics[f"cosine/{name}"] < 1 for name in SCHEMES)
    assert metrics["cosine/qk_int8"] == pytest.approx((metrics["cosine/qk_int8/0"] + metrics["cosine/qk_int8/1"]) / 2)
    assert (metrics["cancellation"] == pytest.approx(1)) if variant == "standard" else (metrics["cancellation"] > 1)


def test_dint_has_no_cache_to_round(tiny_of):
    rows = torch.randint(512, (2, 20))
    assert low_bit(tiny_of("v1_dint"), rows, schemes=["qk_int8"])
    with pytest.raises(ValueError, match="DintAttention"):
        low_bit(tiny_of("v1_dint"), rows)
