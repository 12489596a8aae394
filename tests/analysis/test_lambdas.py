"""Lambda by layer."""

import open_clip
import pytest
import timm
import torch

import diffvision  # noqa: F401  (registers the models)
from diffvision.analysis import layer_lambdas


def test_v1_from_its_parameters():
    model = timm.create_model("diff_vit_debug", depth=2)
    with torch.no_grad():
        for block, first in zip(model.blocks, (0.1, 0.2), strict=True):
            for vector in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                getattr(block.attn, vector).zero_()
            block.attn.lambda_q1[0] = first
            block.attn.lambda_k1[0] = 1.0
    lambdas = layer_lambdas(model)
    assert list(lambdas) == ["blocks.0.attn", "blocks.1.attn"]
    expected = [
        torch.tensor(f).exp().item() - 1 + b.attn.lambda_init for f, b in zip((0.1, 0.2), model.blocks, strict=True)
    ]
    assert list(lambdas.values()) == pytest.approx(expected)


def test_v2_over_a_batch():
    model = open_clip.create_model("DiffCLIP-V2-debug")
    with torch.no_grad():
        for block in model.visual.trunk.blocks:
            block.attn.lambda_proj.weight.zero_()
    blocks = model.visual.trunk.blocks
    size = model.visual.image_size
    batch = {"image": torch.randn(2, 3, *size), "text": torch.randint(1, 99, (2, model.context_length))}
    lambdas = layer_lambdas(model, batch)
    assert len(lambdas) == len(blocks) + len(model.transformer.resblocks)
    assert all(lambdas[f"visual.trunk.blocks.{i}.attn"] == 0.5 for i in range(len(blocks)))
    assert all(0 < value < 1 for value in lambdas.values())
    assert set(layer_lambdas(model, {"image": batch["image"]})) == {name for name in lambdas if "visual" in name}
    with pytest.raises(ValueError, match=r"visual.trunk.blocks.\d.attn depends"):
        layer_lambdas(model)


@pytest.mark.parametrize(
    ("language", "expected"), [("diffv2-debug", 0.5), ("diff-debug", None), ("transformer-debug", 0)]
)
def test_lambdas_of_a_llava_are_those_of_tower_and_language_model(language, expected):
    pytest.importorskip("transformers")
    from diffvision.models.vision_language import create

    model = create("diff-vlm-debug", language=language)
    for name, parameter in model.named_parameters():
        if "lambda_proj" in name:
            torch.nn.init.zeros_(parameter)  # lambda is sigmoid(0)
    tokens = torch.tensor([[*[model.config.image_token_id] * model.image_tokens, 5, 6]])
    lambdas = layer_lambdas(model, {"image": torch.randn(1, 3, *model.image_size), "tokens": tokens})
    words = {name: value for name, value in lambdas.items() if name.startswith("language_model.")}
    assert len(lambdas) - len(words) == 4
    if expected is None:
        layers = [layer.self_attn for layer in model.language_model.model.layers]
        assert list(words.values()) == pytest.approx([layer.lambda_init for layer in layers], abs=0.1)
    else:
        assert list(words.values()) == [expected] * (2 if expected else 0)
