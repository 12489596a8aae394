"""Lambda by layer."""

import open_clip
import pytest
import timm
import torch

import diffvision  # noqa: F401  (registers the models)
from diffvision.analysis import layer_lambdas


def test_v1_from_its_parameters():
    model = timm.create_model("diff_vit_debug", depth=2)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.lambda_q1)
    expected = {f"blocks.{depth}.attn": block.attn.compute_lambda().item() for depth, block in enumerate(model.blocks)}
    assert layer_lambdas(model) == pytest.approx(expected)
    assert expected["blocks.0.attn"] != pytest.approx(expected["blocks.1.attn"])


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
    ("language", "expected"), [("diffv2-debug", [0.5, 0.5]), ("diff-debug", [0.2, 0.36]), ("transformer-debug", [])]
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
    words = [value for name, value in lambdas.items() if name.startswith("language_model.")]
    assert words == pytest.approx(expected, abs=0.1 if language == "diff-debug" else 0)  # V1's vectors are random
    assert len(lambdas) == 4 + len(expected)
