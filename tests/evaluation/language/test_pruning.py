"""Pruned caches: which tokens are kept, by hand; real pruning against masks; padding; what is refused."""

import math

import pytest
import torch
from language_fixtures import small_model

from diffvision.analysis.capture import captured
from diffvision.evaluation.language.pruning import METHODS, Compress, plain_methods, pruned_attention
from diffvision.models.language.generation import generate

NAMES = ["transformer-debug", "diff-debug", "diffv2-debug"]
CLOSE = {"rtol": 0, "atol": 1e-5}
PAIRS = [(NAMES[0], method) for method in plain_methods()] + [(NAMES[1], method) for method in METHODS]
PAIRS += [(NAMES[2], "snap"), (NAMES[2], "diff")]


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


def kept_of(model, compress, tokens):
    calls, stop = [], torch.full((len(tokens),), tokens.shape[1])
    with torch.no_grad(), captured(model, calls.append):
        model(tokens)
    return [compress.select_tokens(call, torch.zeros_like(stop), stop) for call in calls]


@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.no_grad()
def test_masks_and_real_pruning_agree(name, method):
    """Prompts of 40 and 40 tokens, then nine more in three calls; each head of a group reads one kept set."""
    model, compress = small_model(name, num_kv_heads=2), Compress(method, ratio=0.7, window=8)
    tokens = torch.tensor(prompts_of(49, 49))
    with pruned_attention(model, compress, torch.tensor([40, 40])):
        masked = model.hidden(tokens)
    hidden, cache = compress.prefill(model, tokens[:, :40], None, 9)
    assert (cache.length, cache.position, cache.capacity) == (12, 40, 21)
    parts = [model.hidden(part, cache=cache) for part in tokens[:, 40:].split([1, 5, 3], dim=1)]
    torch.testing.assert_close(torch.cat([hidden, *parts], dim=1), masked, **CLOSE)
    assert (cache.length, cache.position) == (21, 49)
    assert not torch.allclose(masked[:, 40:], model.hidden(tokens)[:, 40:], atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(40, 40), (40, 1, 23)])
@torch.no_grad()
def test_ratio_0_is_bit_equal_to_no_compression(name, lengths):
    model, rows = small_model(name), prompts_of(*lengths)
    compress = Compress("snap", ratio=0)
    longest = max(lengths)
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    padding = torch.tensor([longest - len(row) for row in rows]) if len(set(lengths)) > 1 else None
    plain = model.new_cache(len(rows), longest + 3)
    before = model.hidden(tokens, cache=plain, padding=padding)
    hidden, cache = compress.prefill(model, tokens, padding, 3)
    assert torch.equal(hidden, before)
    further = torch.randint(97, (len(rows), 1))
    expected = model.hidden(further, cache=plain, padding=padding)
    assert torch.equal(model.hidden(further, cache=cache, padding=padding), expected)
    new = generate(model, rows, max_new_tokens=12)
    assert generate(model, rows, max_new_tokens=12, compress=compress) == new


@pytest.mark.parametrize("method", ["window", "knorm", "h2o", "snap", "tova", "diff"])
@torch.no_grad()
def test_padding_is_neither_scored_nor_kept(method):
    """Each row of a left-padded batch as alone: the tokens that are kept, and what is computed from them."""
    model, rows = small_model("diff-debug"), prompts_of(40, 7, 23)
    compress = Compress(method, ratio=0.6, window=6)
    tokens = torch.tensor([[5] * (40 - len(row)) + row for row in rows])
    padding, further = torch.tensor([0, 33, 17]), torch.randint(97, (3, 4))
    _, cache = compress.prefill(model, tokens, padding, 4)
    assert (cache.length, cache.empty.tolist()) == (16, [0, 13, 6])
    together = model.hidden(further, cache=cache, padding=padding)
    for index, row in enumerate(rows):
        _, single = compress.prefill(model, torch.tensor([row]), None, 4)
        count = single.length
        assert count == math.ceil(round(0.4 * len(row), 9))
        for one, many in zip(single.layers, cache.layers, strict=True):
            torch.testing.assert_close(many.keys[index, :, :, 16 - count : 16], one.keys[0, :, :, :count], **CLOSE)
        alone = model.hidden(further[index : index + 1], cache=single)
        torch.testing.assert_close(together[index], alone[0], **CLOSE)
    expected = [generate(model, [row], max_new_tokens=9, compress=compress)[0] for row in rows]
    assert generate(model, rows, max_new_tokens=9, compress=compress) == expected


@pytest.mark.parametrize("method", ["snap", "h2o", "tova", "diff", "knorm"])
@torch.no_grad()
def test_kept_tokens_by_hand(method):
    """One layer of V1 with two key/value heads, token by token from its two maps."""
    model, tokens = small_model("diff-debug", num_kv_heads=2, num_heads=4), torch.tensor(prompts_of(30))
    compress = Compress(method, ratio=0.5, window=4)
    layer, calls = model.blocks[0].attn, []
    with captured(model, lambda call: calls.append(call)):
        model(tokens)
    call, lam = calls[0], layer.compute_lambda().item()
    one, two = layer.attention_maps(model.blocks[0].norm1(model.embed(tokens)), is_causal=True)[0].unbind(1)
    weights = (one - lam * two).abs() if method == "diff" else (one + two) / 2
    for head in range(2):
        heads = weights[2 * head : 2 * head + 2]  # two query heads read a key/value head
        if method == "h2o":
            scores = [heads[:, j:, j].mean() for j in range(30)]
        elif method == "tova":
            scores = list(weights[:, -1].mean(0))
        elif method == "knorm":
            scores = list(-call.k[0, head].transpose(0, 1).flatten(1).norm(dim=1))
        else:
            mean = [heads[:, 26:, j].mean() if j < 26 else 0.0 for j in range(30)]  # the last four lend nothing
            scores = [sum(mean[max(0, j - 2) : j + 3]) / 5 for j in range(30)]
        best = sorted(range(26), key=lambda j: -float(scores[j]))[:11]
        kept = compress.select_tokens(call, torch.tensor([0]), torch.tensor([30]))[0, head]
        assert kept.nonzero().flatten().tolist() == sorted([*best, 26, 27, 28, 29])


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.5, [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]), (0.85, [0, 1, 19]), (0.95, [0]), (0.0, list(range(20)))],
)
def test_window_keeps_sinks_and_the_last(ratio, expected):
    """Of three the last is one; a single one is the first, the sink."""
    [kept, *_] = kept_of(small_model("diff-debug"), Compress("window", ratio), torch.tensor(prompts_of(20)))
    assert kept[0, 0].nonzero().flatten().tolist() == expected


def test_as_many_as_the_ratio_says_and_random_ones_by_their_seed():
    """1 - 0.29 of 100 are 71, although 0.29 * 100 is below 29 in floating point."""
    model, tokens = small_model("diff-debug"), torch.tensor(prompts_of(100))
    for ratio, count in ((0.29, 71), (0.95, 5), (0.999, 1)):
        assert {count} == {int(n) for kept in kept_of(model, Compress("diff", ratio), tokens) for n in kept.sum(-1)}
    first, again, other = (kept_of(model, Compress("random", seed=seed), tokens)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
