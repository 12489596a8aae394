"""torch.export: programs of every kind of model, saved and loaded, at sizes other than those they were traced with."""

import json

import open_clip
import pytest
import timm
import torch
from open_clip.coca_model import CoCa

from diffvision.export.graphs import graphs
from diffvision.export.program import export_program, save_program


def loaded(graph, file):
    """The program, through a file, and what is written in it."""
    save_program(export_program(graph), file, graph.about)
    extra = {"about.json": ""}
    return torch.export.load(file, extra_files=extra).module(), json.loads(extra["about.json"])


def images(batch, model):
    return torch.randn(batch, *model.pretrained_cfg["input_size"])


def test_a_vit_is_equal_at_any_batch_and_comes_with_its_preprocessing(tmp_path):
    model = timm.create_model("diff_vit_debug", depth=1, num_classes=5).train()
    program, about = loaded(graphs(model, name="diff_vit_debug")["model"], tmp_path / "model.pt2")
    assert all(module.training for module in model.modules())  # as it was
    for batch in (1, 5):
        image = images(batch, model)
        torch.testing.assert_close(program(image), model.eval()(image))
    assert (about["model"], about["variant"]) == ("diff_vit_debug", "v1")
    assert json.loads(about["mean"]) == list(model.pretrained_cfg["mean"])
    assert json.loads(about["input_size"]) == list(model.pretrained_cfg["input_size"])


def test_both_towers_of_a_clip_are_equal_and_carry_their_own_weights_alone():
    sizes = {"width": 32, "layers": 1, "block_type": "diffvision:v1"}
    vision = {**sizes, "image_size": 16, "patch_size": 8, "head_width": 16}
    text = {**sizes, "context_length": 8, "vocab_size": 50, "heads": 2}
    model = open_clip.CLIP(16, vision, text).eval()
    both = graphs(model)
    image, tokens = torch.randn(3, 3, 16, 16), torch.randint(1, 50, (5, 8))
    program = {name: export_program(graph) for name, graph in both.items()}
    with torch.no_grad():
        torch.testing.assert_close(program["image"].module()(image), model.encode_image(image, normalize=True))
        torch.testing.assert_close(program["text"].module()(tokens), model.encode_text(tokens, normalize=True))
    sizes = {name: sum(value.numel() for value in own.state_dict.values()) for name, own in program.items()}
    assert sum(sizes.values()) == sum(value.numel() for value in model.state_dict().values()) - 1  # logit_scale
    assert float(both["text"].about["logit_scale"]) == pytest.approx(model.logit_scale.exp().item())
    assert len(list(model.parameters())) > len(list(both["text"].module.parameters()))
    assert model.visual is both["image"].module.model.visual  # the model itself is whole


@pytest.mark.slow
def test_what_was_built_otherwise_than_its_name_says_is_exported_as_it_is():
    grey = timm.create_model("diff_vit_debug", depth=1, in_chans=1, img_size=(32, 48))
    graph = graphs(grey)["model"]
    assert json.loads(graph.about["input_size"]) == [1, 32, 48]
    image = torch.randn(3, 1, 32, 48)
    torch.testing.assert_close(export_program(graph).module()(image), grey.eval()(image))
    with pytest.raises(ValueError, match="FeatureGetterNet is not a timm"):
        graphs(timm.create_model("diff_vit_debug", features_only=True))


@pytest.mark.slow
def test_openclips_half_precision_takes_images_of_what_meets_them():
    model = open_clip.create_model("DiffCLIP-debug", precision="fp16").eval()
    image = torch.randn(1, 3, 32, 32).half()
    own = export_program(graphs(model)["image"]).module()
    torch.testing.assert_close(own(image), model.encode_image(image, normalize=True), atol=2e-3, rtol=0)


@pytest.mark.slow
def test_both_towers_of_a_coca_are_equal_without_its_decoder():
    text = {"context_length": 8, "vocab_size": 40, "width": 32, "heads": 2, "layers": 1}
    model = CoCa(  # its image tower gives tokens beside the features
        16, text, {**text, "block_type": "diffvision:v1", "embed_cls": True, "output_tokens": True},
        {"image_size": 16, "patch_size": 8, "layers": 1, "width": 32, "head_width": 16, "attentional_pool": True,
         "attn_pooler_heads": 2, "output_tokens": True},
    ).eval()  # fmt: skip
    both = graphs(model)
    given = {"image": torch.randn(1, 3, 16, 16), "text": torch.randint(1, 40, (3, 8))}
    expected = {"image": model.encode_image(given["image"]), "text": model.encode_text(given["text"])}
    for name, graph in both.items():
        program = export_program(graph)
        torch.testing.assert_close(program.module()(given[name]), expected[name])
        assert not any("decoder" in own for own in program.state_dict)


def test_what_cannot_be_exported_is_one_clear_error():
    with torch.device("meta"):
        empty = timm.create_model("diff_vit_debug")
    with pytest.raises(ValueError, match="VisionTransformer is on the meta"):
        graphs(empty)
    with pytest.raises(ValueError, match="Linear"):
        graphs(torch.nn.Linear(2, 2))

    class Deciding(torch.nn.Module):
        def forward(self, image):
            return image if image.sum() > 0 else -image

    model = timm.create_model("diff_vit_debug", depth=1)
    model.norm = Deciding()
    with pytest.raises(ValueError, match="VisionTransformer cannot be"):
        export_program(graphs(model)["model"])
