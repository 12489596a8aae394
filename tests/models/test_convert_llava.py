"""A plain vision-language model with a CLIP tower equals transformers' Llava, read and written."""

import open_clip
import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from diffvision.models.convert.llava import from_llava, to_llava
from diffvision.models.vision_language import VisionLanguageModel, create

IMAGE = 90
TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}


def small_llava(**settings):
    """A Llava whose weights are large."""
    images = {"hidden_act": "quick_gelu", **settings.pop("images", {})}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            image_size=32,
            patch_size=8,
            num_hidden_layers=3,
            num_attention_heads=4,
            **{"hidden_size": 32, "intermediate_size": 96, **images},
        ),
        text_config=LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        ),
        image_token_index=IMAGE,
        image_seq_length=16,
        **settings,
    )
    torch.manual_seed(0)
    return enlarge(LlavaForConditionalGeneration(config))


def enlarge(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 5)
    return model.eval()


def inputs():
    """Two rows, the second padded at the left; three images."""
    ids = torch.tensor([[5, *[IMAGE] * 16, 7, *[IMAGE] * 16, 9], [*[0] * 18, *[IMAGE] * 16, 3]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": torch.randn(3, 3, 32, 32)}


def check_equal(ours, theirs):
    """Logits and gradients are equal, and so is what is generated."""
    batch = inputs()
    labels = batch["input_ids"].masked_fill((batch["input_ids"] == IMAGE) | (batch["attention_mask"] == 0), -100)
    results, gradients = [], []
    for model in (ours, theirs):
        model.zero_grad()
        outputs = model(**batch, labels=labels)
        outputs.loss.backward()
        results.append(outputs.logits.detach())
        own = [p for p in model.parameters() if p.grad is not None]
        patch = next(p.grad for p in own if p.dim() == 4)
        table = next(p.grad for p in own if p.dim() == 2 and p.shape == model.get_input_embeddings().weight.shape)
        gradients.append((patch.clone(), table.clone(), sum((p.grad**2).sum() for p in own)))
    valid = batch["attention_mask"].bool()
    torch.testing.assert_close(results[0][valid], results[1][valid], rtol=1e-4, atol=1e-4)
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    banned = {"suppress_tokens": [IMAGE], "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(**batch, **banned), theirs.generate(**batch, **banned))


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_a_llava_is_read_and_written_back(act, tmp_path):
    llava = small_llava(images={"hidden_act": act, "hidden_size": 44, "intermediate_size": 60})  # 44 * (60 / 44) < 60
    ours = from_llava(llava)
    check_equal(ours, llava)
    to_llava(ours).save_pretrained(tmp_path)
    back = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert back.config.vision_config.hidden_act == act
    before, after = llava.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("tower", ["timm", "OpenCLIP"])
def test_a_model_of_ours_is_written(tower, tmp_path):
    words = {"vocab_size": 97, "max_length": 128}
    name = "vit_base_patch32_clip_quickgelu_224"
    ours = create(tower=name, tower_args=TIMM, language_args=words, image_token_id=IMAGE)
    if tower == "OpenCLIP":
        images = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "head_width": 8}
        words = {"width": 32, "heads": 2, "layers": 1, "vocab_size": 9, "context_length": 4}
        visual = open_clip.CLIP(embed_dim=16, vision_cfg=images, text_cfg=words, quick_gelu=True).visual
        ours = VisionLanguageModel(ours.config, visual, ours.language_model)
    to_llava(enlarge(ours)).save_pretrained(tmp_path)
    check_equal(ours, LlavaForConditionalGeneration.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vision_feature_layer": -1}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"multimodal_projector_bias": False}, "multimodal_projector_bias"),
        ({"images": {"hidden_act": "relu"}}, "relu"),
        ({"images": {"layer_norm_eps": 1e-3}}, "layer_norm_eps"),
    ],
)
def test_a_llava_that_ours_cannot_be(settings, named):
    with pytest.raises(ValueError, match=named):
        from_llava(small_llava(**settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "plain_vit_debug"),
        ({"tower": "diff_vit_debug"}, "diff_vit_debug"),
        ({"tower": "resnet18"}, "resnet18"),
        ({"tower": "vit_tiny_patch16_224"}, "vit_tiny_patch16_224"),
        ({"feature_layer": -1}, "feature_layer"),
        ({"projector": "pixel_shuffle"}, "projector"),
        ({"shuffle": 2}, "shuffle"),
        ({"image_token_id": None}, "image_token_id"),
    ],
)
def test_a_model_that_a_llava_cannot_be(settings, named):
    model = create(**{"image_token_id": IMAGE, **settings})
    with pytest.raises(ValueError, match=named):
        to_llava(model)
