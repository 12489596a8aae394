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


def test_visual_contrast_has_one_for_each_stage():
    model = timm.create_model("vca_vit_debug", depth=2, lambda_init=0.4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.lambda1_q1.zero_()
            block.attn.lambda1_q2.zero_()
    lambdas = layer_lambdas(model)
    assert list(lambdas) == [f"blocks.{block}.attn.stage{stage}" for block in (0, 1) for stage in (1, 2)]
    assert lambdas["blocks.0.attn.stage1"] == pytest.approx(0.4)
    assert lambdas["blocks.0.attn.stage2"] != pytest.approx(0.4, abs=1e-6)


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


def test_models_without_lambda():
    assert layer_lambdas(open_clip.create_model("CLIP-debug")) == {}
