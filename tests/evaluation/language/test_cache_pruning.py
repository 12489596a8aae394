"""Pruned caches measured by masks: what real pruning gives."""

import pytest
import torch
import torch.nn.functional as F
from language_fixtures import small_model

from diffvision.evaluation.language.cache_pruning import cache_pruning
from diffvision.evaluation.language.needle import NeedleSample
from diffvision.evaluation.language.pruning import METHODS, Compress, plain_methods
from diffvision.evaluation.per_sample import means
from diffvision.models import language

ROWS = torch.randint(97, (3, 41), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return small_model("diff-debug", max_length=64, num_kv_heads=None)


@torch.no_grad()
def test_the_loss_is_that_of_a_pruned_cache(model):
    results = cache_pruning(model, ROWS, continuation=10, methods=("diff", "window"), ratios=(0.8, 0.4), window=4)
    metrics = means(results)
    for name, compress in (("full", Compress("window", 0)), ("diff/0.8", Compress("diff", 0.8, 4))):
        _, cache = compress.prefill(model, ROWS[:, :30], None, 10)
        logits = model.logits(model.hidden(ROWS[:, 30:40], cache=cache))
        expected = F.cross_entropy(logits.flatten(0, 1), ROWS[:, 31:].flatten()).item()
        assert metrics[f"nll/{name}"] == pytest.approx(expected, abs=1e-5)
    full, low, high = (metrics[f"nll/{name}"] for name in ("full", "diff/0.4", "diff/0.8"))
    assert metrics["area/nll/diff"] == pytest.approx((full + 2 * low + high) / 4)
    assert metrics["nll_rise/diff/0.8"] == pytest.approx(high - full)
    assert results["nll_rise/diff/0.8"].units.tolist() == [0, 1, 2]
    within = [ratio for ratio, loss in ((0.4, low), (0.8, high)) if loss <= 1.01 * full]
    assert metrics["largest_ratio/diff"] == (0.0 if low > 1.01 * full else within[-1])


@torch.no_grad()
def test_needles_are_asked_for_before_and_after_pruning(model):
    """Answers are what a pruned cache would write, one prompt at a time: in a batch of masks all of them are right."""
    compress = Compress("snap", 0.6, 4)
    for mode in ("agnostic", "aware"):
        samples = []
        for row, (question, end) in zip(ROWS, ((20, 25), (30, 33), (12, 20)), strict=True):
            prompt = question if mode == "agnostic" else end  # aware: the question is in it, and asked again
            _, cache = compress.prefill(model, row[None, :prompt], None, 20)
            hidden = model.hidden(row[None, question:end], cache=cache)
            written = []
            for _ in range(3):
                written.append(int(model.logits(hidden[:, -1]).argmax()))
                hidden = model.hidden(torch.tensor([written[-1:]]), cache=cache)
            samples.append(NeedleSample([*row[:end].tolist(), *written], (1, 2), question, ((end, end + 3),)))
        settings = {"continuation": 10, "methods": ("snap",), "ratios": (0.6,), "window": 4, "batch_size": 2}
        metrics = means(cache_pruning(model, ROWS, samples, **settings))
        assert metrics[f"needle_{mode}/snap/0.6"] == 1
        assert metrics[f"needle_{mode}/full"] < 1
        assert metrics[f"area/needle_{mode}/snap"] == pytest.approx((1 + metrics[f"needle_{mode}/full"]) / 2)


def test_methods_are_those_that_the_model_can_have(model):
    plain = language.create("transformer-debug", vocab_size=97, max_length=64).eval()
    mixed = language.create("diff-debug", vocab_size=97, max_length=64, variant_by_layer="v1+standard").eval()
    for one, expected in ((model, list(METHODS)), (plain, plain_methods()), (mixed, plain_methods())):
        metrics = cache_pruning(one, ROWS, continuation=10, ratios=(0.5,))
        assert [key.split("/")[1] for key in metrics if key.startswith("largest_ratio")] == expected
    with pytest.raises(ValueError, match="diff"):
        cache_pruning(plain, ROWS, continuation=10, methods=("snap", "diff"))
