"""Attention in few bits: each scheme against a loop, errors and factors by hand, and the first simulation's table."""

import math

import pytest
import torch

from diffvision.analysis.capture import Call, captured
from diffvision.evaluation.intervals import with_intervals
from diffvision.evaluation.language.evaluate_language_command import run
from diffvision.evaluation.language.language_options import LanguageOptions
from diffvision.evaluation.language.low_bit import (
    SCHEMES,
    attention_errors,
    by_group,
    low_bit,
    low_bit_attention,
    rounded_keys,
)

ROWS = torch.randint(512, (2, 80), generator=torch.Generator().manual_seed(0))
WITHOUT_CACHES = [name for name in SCHEMES if not name.startswith("cache")]


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
    return (scores.applied() @ call.values(torch.float32))[0, 0]


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
            keys[:, group] = by_group(keys[:, group], bits, 1)
            values[group] = by_group(values[group], bits, 1)
        one, two = ((q[:, query, None] @ keys.transpose(1, 2)) / math.sqrt(8)).softmax(-1)
        expected.append(((one - 0.7 * two) @ values)[0])
    out = output(call, f"cache_{bits}")
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr("diffvision.evaluation.language.low_bit.RECENT", 100)
    kept = output(head(key_maps=key_maps), f"cache_{bits}")
    full = head(key_maps=key_maps)
    torch.testing.assert_close(kept, (full.scores().applied() @ full.values(torch.float32))[0, 0])


def test_which_keys_are_read_rounded():
    assert rounded_keys(0, 100, 100).sum() == 0
    whole = rounded_keys(0, 100, 0)
    assert whole.sum(1).tolist() == [(query + 1) // 32 * 32 for query in range(100)]
    torch.testing.assert_close(rounded_keys(97, 100, 4), rounded_keys(0, 100, 4)[97:])


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


@torch.no_grad()
def test_errors_and_factors_of_a_layer(tiny):
    """The first layer's, which reads the same in full precision and under a scheme."""
    names = ["qk_int4", "pv_fp8"]
    metrics = attention_errors(tiny, ROWS, schemes=names)
    calls, heads = [], {}
    for name in (None, *names):
        with low_bit_attention(tiny, name) if name else captured(tiny, lambda call: calls.append(call)):
            note = tiny.blocks[0].attn.proj.register_forward_pre_hook(
                lambda module, args, name=name: heads.update({name: args[0]})
            )
            tiny(ROWS)
            note.remove()
    if tiny.blocks[0].attn.variant == "standard":  # no head norm: the projection reads the heads
        full, low = heads[None].double(), heads["pv_fp8"].double()
        cosine = torch.nn.functional.cosine_similarity(full.flatten(), low.flatten(), dim=0).item()
        assert metrics["cosine/pv_fp8/0"] == pytest.approx(cosine, rel=1e-6)
        error = ((full - low).abs().sum() / full.abs().sum()).item()
        assert metrics["relative_l1/pv_fp8/0"] == pytest.approx(error, rel=1e-4)
        assert metrics["cancellation"] == pytest.approx(1)
    scores = calls[0].scores()
    allowed = scores.logits[scores.allowed.expand_as(scores.logits)]
    assert metrics["largest_logit/0"] == pytest.approx(allowed.abs().max().item())
    assert metrics["largest_logit"] == max(metrics["largest_logit/0"], metrics["largest_logit/1"])
    if scores.lam is not None and scores.is_rowwise:
        values = calls[0].values(torch.float32)
        one, two = (attention @ values for attention in scores.maps().unbind(2))
        parts = one.square().sum() + (scores.lam * two).square().sum()
        factor = parts.sqrt() / (one - scores.lam * two).norm()
        assert metrics["cancellation/0"] == pytest.approx(factor.item(), rel=1e-5)


def test_dint_has_no_cache_to_round(tiny_of):
    model = tiny_of("v1_dint")
    assert low_bit(model, ROWS, schemes=WITHOUT_CACHES[:4])
    with pytest.raises(ValueError, match="DintAttention takes no cache"):
        low_bit(model, ROWS)


def test_settings_are_refused_before_a_model_is_opened():
    with pytest.raises(ValueError, match="schemes"):
        run("nowhere.ckpt", tasks="low_bit", data="nowhere.txt", options=LanguageOptions(schemes=("qk_int8", "int8")))
