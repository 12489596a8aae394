"""Parameters, FLOPs against a count by hand, and speed in turns."""

from dataclasses import replace

import pytest
import timm
import torch

from diffvision import open_model
from diffvision.comparison.costs import costs, count_flops, one_sample
from diffvision.comparison.result import Cost
from diffvision.evaluation.options import InferenceSettings
from diffvision.models import language


def test_flops_by_hand():
    """A ViT's products: patches, then for each block q, k, v, the output, the MLP and the maps, then the head."""
    model = open_model("diff_vit_debug")
    vit = model.module
    tokens, width, blocks = vit.pos_embed.shape[1], vit.embed_dim, len(vit.blocks)
    patches = vit.patch_embed.num_patches
    by_patch = vit.patch_embed.proj.weight.numel()
    layer = vit.blocks[0]
    linear = sum(part.weight.numel() for part in layer.modules() if isinstance(part, torch.nn.Linear))
    heads, size = layer.attn.num_heads, width // layer.attn.num_heads // 2  # of each of the two maps
    attention = 2 * heads * tokens**2 * size + heads * tokens**2 * 2 * size
    head = vit.head.weight.numel() if isinstance(vit.head, torch.nn.Linear) else 0
    expected = 2 * (patches * by_patch + blocks * (tokens * linear + attention) + head)
    assert count_flops(model, one_sample(model, 0)) == expected


@pytest.mark.parametrize("rival", ["dna", "coda"])
def test_a_plain_model_with_a_wider_mlp_has_the_flops_of_dna_and_coda(rival):
    """The recipe of docs/reference/models.md: N more units than DnA's baseline, or (N + H) / 2 more than CoDA's."""
    its, plain = open_model(f"{rival}_vit_debug"), open_model("plain_vit_debug")
    _, tokens, width = plain.module.pos_embed.shape
    heads = plain.module.blocks[0].attn.num_heads
    added = tokens if rival == "dna" else (tokens + heads) / 2
    wider = timm.create_model("plain_vit_debug", mlp_ratio=4 + added / width + 1e-6)
    control = count_flops(replace(plain, module=wider), one_sample(plain, 0))
    classes = 2 * width * (its.module.num_classes - wider.num_classes)
    assert count_flops(its, one_sample(its, 0)) - classes == pytest.approx(control, rel=2e-3)
    its, plain = open_model(f"{rival}-debug"), open_model("transformer-debug")
    added = 2 * 128 / 3 if rival == "dna" else (128 + plain.module.config.num_heads) / 3
    wider = language.create("transformer-debug", mlp_dim=plain.module.config.mlp_dim + round(added))
    control = count_flops(replace(plain, module=wider), one_sample(plain, 128))
    assert count_flops(its, one_sample(its, 128)) == pytest.approx(control, rel=2e-3)


def test_flops_do_not_depend_on_fused_kernels():
    """OpenCLIP's nn.MultiheadAttention has one operation for evaluation, which torch's counter does not know."""
    model = open_model("CLIP-debug")
    inputs = one_sample(model, 0)
    assert count_flops(model, inputs) > 0.9 * count_flops(open_model("DiffCLIP-debug"), inputs)


def test_speed_is_measured_in_turns(monkeypatch):
    monkeypatch.setattr("diffvision.comparison.costs.TURN_SECONDS", 0.0)
    models = [open_model(name) for name in ("CLIP-debug", "DiffCLIP-debug")]
    first, other = costs(models, InferenceSettings(batch_size=2), 0, rounds=3)
    assert len(first.per_second) == len(other.per_second) == 3
    median, lowest, highest = other.ratio(first)
    assert 0 < lowest <= median <= highest
    assert costs(models, InferenceSettings(), 0, rounds=0)[0].ratio(first) is None


def test_a_ratio_is_taken_within_each_round():
    """The machine was three times as fast in the second round; the ratio is the same."""
    assert Cost(1, 1, [10.0, 30.0]).ratio(Cost(1, 1, [20.0, 60.0])) == (0.5, 0.5, 0.5)
    assert Cost(1, 1, [10.0, 30.0]).speed == pytest.approx(20.0)
