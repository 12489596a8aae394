"""Heads of highest entropy are those whose attention is the most spread."""

import timm
import torch

import diffvision
from diffvision.analysis.heads import highest_entropy


def test_sharp_heads_are_left_out():
    model = timm.create_model("plain_vit_debug").eval()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):  # queries twenty times as long: logits so, too
            block.attn.q_proj.weight.unflatten(0, (4, 16))[[number % 4, 3 - number % 2]] *= 20
    names = list(model.state_dict())
    batches = [{"image": torch.randn(4, 3, 32, 32)} for _ in range(2)]
    chosen = highest_entropy(model, batches, 0.5)
    assert chosen == {"blocks.0": [1, 2], "blocks.1": [0, 3], "blocks.2": [0, 1], "blocks.3": [0, 1]}
    assert list(model.state_dict()) == names
    layers = [block.attn for block in diffvision.adapt(model, "dex", heads=chosen).blocks]
    assert [layer.dex_heads.nonzero().flatten().tolist() for layer in layers] == list(chosen.values())
