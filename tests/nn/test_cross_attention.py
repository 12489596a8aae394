"""Every variant over itself and over a context, against the equations written out head by head; what is refused."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from diffvision.analysis.capture import captured
from diffvision.models import adapt, language
from diffvision.nn import ATTENTION, Attention, DiffAttention, DintAttention, VisualContrastAttention, build_attention

VARIANTS = [name for name in ATTENTION if name not in ("dna", "coda")]  # those are in test_rivals
DIM, WIDE, N, L = 16, 24, 5, 7
MASKS = {
    "all": None,
    "padding": torch.tensor([[True] * L, [True] * 4 + [False] * 3])[:, None, None],
    "segments": torch.block_diag(torch.ones(2, 3), torch.ones(3, 4)).bool(),
    "heads": torch.rand(2, 4, N, L, generator=torch.Generator().manual_seed(1)) > 0.3,
}
# mask of the layer, is_causal, which tokens each may attend to
KEYS = torch.tensor([[True, False, True, False, True]])
DOCUMENTS = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
WINDOW = torch.ones(N, N).tril().bool() & ~torch.ones(N, N).tril(-3).bool()
OVER_ITSELF = {
    "all": (None, False, None),
    "causal": (None, True, torch.ones(N, N).tril().bool()),
    "padding": (KEYS, False, KEYS),
    "padding, causal": (KEYS, True, KEYS & torch.ones(N, N).tril().bool()),
    "documents": (DOCUMENTS, True, DOCUMENTS.tril()),
    "window": (WINDOW, False, WINDOW),
}
CASES = [
    *((variant, {}) for variant in VARIANTS),
    *((variant, {"gate": "head"}) for variant in VARIANTS if variant.endswith("gated")),
    ("gda", {"signal_ratio": 4, "num_kv_heads": 1}),
    ("v1", {"num_kv_heads": 4}),
]
each_case = pytest.mark.parametrize(("variant", "settings"), CASES, ids=lambda given: str(given))


def layer_of(variant, num_kv_heads=2, **settings):
    torch.manual_seed(0)
    fixed = {"head_dim": 6, "qkv_bias": True, "depth": 2, "dtype": torch.float64}
    layer = build_attention(variant, DIM, 4, num_kv_heads, **fixed, **settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def lambda_of(layer, x):
    """Lambda of a layer [B, H, N], by each variant's equation."""
    if layer.variant in ("v2", "v2_gated"):
        return (x @ layer.lambda_proj.weight.T).sigmoid().mT
    if layer.variant == "v1_dual":
        lam = layer.lambda_a.exp() - layer.lambda_b.exp() + layer.lambda_init
    else:
        lam = torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2)
        lam = lam + layer.lambda_init
    lam = lam.expand(len(x), layer.num_heads, x.shape[1])
    if layer.variant == "v1_head":
        lam = lam + layer.lambda_head[:, None]
    elif layer.variant in ("v1_token", "v1_token_head"):
        lam = lam + (x @ layer.lambda_token.T).mT
    return lam


def mean_by_definition(first, allowed, is_itself):
    """DINT's G of one sequence and head [N, L]: for each query, over those that see nothing that it may not.

    Over itself, that is over those that it sees.
    """
    rows = []
    for i in range(len(first)):
        counted = [j for j in range(len(first)) if allowed[j].any() and not (allowed[j] & ~allowed[i]).any()]
        counted = allowed[i].nonzero()[:, 0].tolist() if is_itself else counted
        rows.append(sum((first[j] for j in counted), torch.zeros_like(first[0])) / max(len(counted), 1))
    return torch.stack(rows)


def written_out(layer, x, context, mask):
    """The output of a layer [B, N, dim] and the maps that it applies, head by head."""
    size, heads, kinds = layer.head_dim, layer.num_heads, layer.query_maps
    q = x @ layer.q_proj.weight.T + layer.q_proj.bias
    k = (context @ layer.k_proj.weight.T + layer.k_proj.bias).unflatten(-1, (layer.num_kv_heads, -1, size))
    v = (context @ layer.v_proj.weight.T + layer.v_proj.bias).unflatten(-1, (layer.num_kv_heads, -1))
    if layer.variant == "gda":  # some signal heads, then their noise head
        ratio = layer.signal_ratio
        rows = q.unflatten(-1, (heads // ratio, ratio + 1, size))
        pairs = [(rows[:, :, i // ratio, i % ratio], rows[:, :, i // ratio, ratio]) for i in range(heads)]
        q = torch.stack([torch.stack(pair, 2) for pair in pairs], 2)
    else:
        q = q.unflatten(-1, (heads, kinds, size))
    count = context.shape[1]
    allowed = torch.ones((), dtype=torch.bool) if mask is None else mask
    allowed = allowed.expand(len(x), heads, x.shape[1], count)
    out, applied = [], []
    for h in range(heads):
        g = h * layer.num_kv_heads // heads
        maps = []
        for m in range(kinds):
            logits = q[:, :, h, m] @ k[:, :, g, min(m, layer.key_maps - 1)].mT / size**0.5
            logits = logits.masked_fill(~allowed[:, h], -torch.inf)
            if layer.variant == "sink":
                logits = torch.cat((layer.sink[h].expand(len(x), x.shape[1], 1), logits), -1)
            maps.append(logits.softmax(-1)[..., -count:])
        one = maps[0]
        if layer.variant == "integral":
            logits = sum(q[:, :, h, m] @ k[:, :, g, m].mT for m in range(2)) / 2 / size**0.5
            one = logits.masked_fill(~allowed[:, h], -torch.inf).softmax(-1)
        elif kinds == 2:
            lam = lambda_of(layer, x)[:, h, :, None]
            one = maps[0] - lam * maps[1]
            if isinstance(layer, DintAttention):
                pairs = zip(maps[0], allowed[:, h], strict=True)
                one = one + lam * torch.stack([mean_by_definition(*pair, x is context) for pair in pairs])
        applied.append(one)
        head = one @ v[:, :, g]
        if isinstance(layer, DiffAttention):
            rms = (head.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            head = head / rms * layer.head_norm.weight * (1 - layer.lambda_init)
        if layer.variant == "dex":
            lam = layer.dex_lambda_init + layer.dex_lambda
            head = head - lam * head @ layer.dex
        if layer.variant.endswith("gated"):
            gate = (x @ layer.gate.weight.T + layer.gate.bias).sigmoid()
            head = head * gate.unflatten(-1, (heads, -1))[:, :, h]
        out.append(head)
    return torch.cat(out, -1) @ layer.proj.weight.T + layer.proj.bias, torch.stack(applied, 1)


@pytest.mark.parametrize("mask", MASKS)
@each_case
def test_equals_the_equations_with_all_gradients(variant, settings, mask):
    layer = layer_of(variant, context_dim=WIDE, **settings)
    x = torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True)
    context = torch.randn(2, L, WIDE, dtype=torch.float64, requires_grad=True)
    compare(layer, [x, context], written_out(layer, x, context, MASKS[mask]), MASKS[mask], context=context)


@pytest.mark.parametrize("mask", OVER_ITSELF)
@each_case
def test_equals_the_equations_over_itself(variant, settings, mask):
    layer, x = layer_of(variant, **settings), torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True)
    given, causal, allowed = OVER_ITSELF[mask]
    compare(layer, [x], written_out(layer, x, x, allowed), given, causal)


def compare(layer, inputs, true, *arguments, **settings):
    """Compare the output, the maps and all gradients of a layer with what was written out."""
    expected, applied = true
    weight, inputs = torch.randn_like(expected), [*inputs, *layer.parameters()]
    gradients = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    out, maps = layer(inputs[0], *arguments, **settings), []
    explicit = layer(inputs[0], *arguments, **settings, maps=maps)
    for result in (out, explicit):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)  # V1 computes lambda in float32
        ours = torch.autograd.grad((result * weight).sum(), inputs, allow_unused=True)
        for mine, other in zip(ours, gradients, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(maps[0], applied, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_x_as_its_context_is_self_attention_and_the_maps_of_analysis_are_the_layer_s(variant):
    layer, x = layer_of(variant), torch.randn(2, N, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x, context=x), layer(x))
    context, mask, maps = torch.randn(2, L, DIM, dtype=torch.float64), MASKS["segments"], []
    expected = layer(x, mask, context=context, maps=maps)
    shown = layer.attention_maps(x, mask, context=context)
    assert shown.shape == (2, 4, layer.query_maps, N, L)
    torch.testing.assert_close(shown.sum(-1), torch.ones(2, 4, layer.query_maps, N, dtype=torch.float64))
    seen = []
    with captured(nn.ModuleList([layer]), lambda call: seen.append(call.scores()) or seen[-1]):
        torch.testing.assert_close(layer(x, mask, context=context), expected)
    torch.testing.assert_close(seen[0].compute_weights(), maps[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_query_that_may_attend_to_nothing_changes_no_other(variant):
    layer, mask = layer_of(variant, context_dim=WIDE), torch.ones(N, L, dtype=torch.bool)
    mask[-1] = False
    x, context = torch.randn(2, N, DIM, dtype=torch.float64), torch.randn(2, L, WIDE, dtype=torch.float64)
    out = layer(x, mask, context=context)
    torch.testing.assert_close(out[:, :-1], layer(x[:, :-1], context=context))
    torch.testing.assert_close(out[:, -1], layer.proj.bias.expand(2, DIM))


def test_what_has_no_meaning_for_a_context_is_refused():
    x, context = torch.randn(1, 3, 32), torch.randn(1, 4, 32)
    layer = DiffAttention(32, 2)
    with pytest.raises(ValueError, match="is_causal does not apply"):
        layer(x, is_causal=True, context=context)
    with pytest.raises(ValueError, match="is_causal does not apply"):
        layer.attention_maps(x, is_causal=True, context=context)
    with pytest.raises(ValueError, match="a cache does not apply"):
        layer(x, context=context, cache=language.create("diff-debug").new_cache(1, 4).layers[0])
    with pytest.raises(ValueError, match="rotary embedding does not"):
        DiffAttention(32, 2, rotary=1e4)(x, context=context)
    with pytest.raises(ValueError, match=r"width 32, got \[1, 4"):
        layer(x, context=context[..., :8])
    with pytest.raises(ValueError, match=r"width 8, got \[1, 3, 32\]"):
        DiffAttention(32, 2, context_dim=8)(x)
    contrast = VisualContrastAttention(32, 2)
    contrast.set_grid((1, 3))
    with pytest.raises(ValueError, match="pools a whole grid: it takes no"):
        contrast(x, context=context)


def test_adapting_keeps_the_width_of_the_context():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention(32, 4, context_dim=8)

    model = nn.ModuleDict({"blocks": nn.ModuleList([Reader()])})
    x, context = torch.randn(1, 3, 32), torch.randn(1, 4, 8)
    before = model["blocks"][0].attn(x, context=context)
    adapt.adapt(model, "v2")
    torch.testing.assert_close(model["blocks"][0].attn(x, context=context), before)


def test_the_blocks_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "layers.md").read_text()
    made = {"__name__": "page"}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)), made)
    shapes = [tuple(made[name].shape) for name in ("out", "summary", "maps")]
    assert shapes == [(2, 64, 128), (2, 8, 128), (2, 4, 2, 8, 64)]
