"""Relevance of patches: of the patch that decides, and of first order in the maps."""

import open_clip
import pytest
import torch

import diffvision  # noqa: F401  (registers the models)
from diffvision.analysis.maps import open_layers
from diffvision.analysis.relevance import caption_relevance


def test_relevance_is_of_first_order_in_the_maps():
    """With one layer and one head, relevance is the class token's row of map times gradient, found by differences."""
    torch.manual_seed(1)
    model = open_clip.create_model("DiffCLIP-debug").eval().double()
    trunk = model.visual.trunk
    trunk.blocks = trunk.blocks[:1]
    image = torch.randn(3, 32, 32, dtype=torch.float64)
    texts = open_clip.get_tokenizer("DiffCLIP-debug")(["a seven"])
    relevance, (cosine,) = caption_relevance(model, image, texts)
    layer = next(open_layers(model, {"image": image[None]}))
    applied, caption = layer.weights, model.encode_text(texts, normalize=True)[0]
    attn = trunk.blocks[0].attn

    def score(maps):
        heads = layer.outputs(maps)[2].transpose(0, 1).flatten(1)[None]
        attn.__dict__["forward"] = lambda *_, **__: attn.proj(heads)
        try:
            return (model.encode_image(image[None], normalize=True)[0] @ caption).item()
        finally:
            del attn.__dict__["forward"]

    with torch.no_grad():
        assert score(applied) == pytest.approx(cosine.item())
        row = torch.zeros(len(applied), 16, dtype=torch.float64)
        for head in range(len(applied)):
            for patch in range(16):
                step = torch.zeros_like(applied)
                step[head, 0, 1 + patch] = 1e-5
                slope = (score(applied + step) - score(applied - step)) / 2e-5
                row[head, patch] = max(0, slope * applied[head, 0, 1 + patch].item())
    torch.testing.assert_close(relevance[0].flatten(), row.mean(0), atol=1e-8, rtol=1e-4)
