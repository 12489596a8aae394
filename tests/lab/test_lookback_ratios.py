"""The lookback ratio by hand, and of models against the maps that transformers' interface returns."""

import pytest
import torch

from diffvision.lab.lookback_ratios import lookback_ratio, lookback_ratios
from diffvision.models import language


def test_ratio_by_hand():
    """Two tokens of context; the sign of an entry does not count."""
    applied = torch.zeros(5, 5)
    applied[2, :3] = torch.tensor([0.3, -0.1, 0.2])  # mean 0.2 and 0.2
    applied[3, :4] = torch.tensor([0.1, 0.1, 0.4, -0.2])  # mean 0.1 and 0.3
    ratio = lookback_ratio(applied, 2)
    assert ratio[:2].tolist() == pytest.approx([0.5, 0.25])
    assert ratio[2].isnan()
    for context in (0, 5):
        with pytest.raises(ValueError, match=f"context is {context} of 5 tokens"):
            lookback_ratio(applied, context)


@pytest.mark.parametrize("name", ["transformer-debug", "diff-debug", "diffv2-debug"])
def test_ratios_of_a_model_are_those_of_its_maps(name):
    pytest.importorskip("transformers")
    from diffvision.models.language.transformers import DiffTransformerForCausalLM

    torch.manual_seed(0)
    model = language.create(name, vocab_size=60, max_length=32)
    torch.nn.init.normal_(model.embed.weight, std=2.0)
    tokens, context = torch.randint(60, (12,)), 5
    ratios = lookback_ratios(model, tokens, context)
    theirs = DiffTransformerForCausalLM.from_diffvision(model).eval()
    with torch.no_grad():
        maps = theirs(tokens[None], output_attentions=True).attentions
    assert len(ratios) == len(maps)
    for ratio, layer in zip(ratios.values(), maps, strict=True):
        for head, attention in enumerate(layer[0].tolist()):
            for step, query in enumerate(range(context, 12)):
                row = [abs(weight) for weight in attention[query]]
                back = sum(row[:context]) / context
                new = sum(row[context : query + 1]) / (query + 1 - context)
                assert ratio[head, step].item() == pytest.approx(back / (back + new), abs=1e-5)


def test_ratios_of_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **sizes)).eval()
    ratios = lookback_ratios(model, torch.randint(60, (7,)), 3)
    assert {name: ratio.shape for name, ratio in ratios.items()} == {"layers.0": (2, 4), "layers.1": (2, 4)}
    assert all(((ratio > 0) & (ratio < 1)).all() for ratio in ratios.values())
