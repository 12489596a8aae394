"""`variant_by_layer`: which layers are of which variant, equal parameters, and what models of it survive."""

import json

import pytest
import timm
import torch
from torch import nn

import diffvision
from diffvision.models import language
from diffvision.models.adapt import merge_dex
from diffvision.models.by_layer import as_text, matched_heads, variants_by_layer
from diffvision.models.language.generation import generate
from diffvision.models.language.hugging_face import as_transformers
from diffvision.nn import Attention, DiffAttention, DiffAttentionV2

LOWER = "1*standard"


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


# ---- the text ------------------------------------------------------------------------------------------------------


def test_the_text_names_layers_from_the_first_up():
    assert variants_by_layer(None, "v1", 3) == ["v1"] * 3
    assert variants_by_layer("2*standard", "v1", 3) == ["standard", "standard", "v1"]
    assert variants_by_layer("standard+2*v2", "v1", 4) == ["standard", "v2", "v2", "v1"]
    assert variants_by_layer("+".join(["standard", "v1"] * 2), "v1", 4) == ["standard", "v1"] * 2
    for variants in (["standard", "v1", "v1"], ["v1", "standard", "v1"]):
        assert variants_by_layer(as_text(variants, "v1"), "v1", 3) == variants
    assert as_text(["v1", "v1"], "v1") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4*plain", "'plain' is no variant; choose from standard, v1"),
        ("0*standard", "with '0' layers of 'standard': give text such as"),
        ("4*standard", "4 layers, and there are 3: name at most 3"),
        (["standard"], r"of a list of variants, '\+'.join\(variants\)"),
    ],
)
def test_bad_texts_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        variants_by_layer(text, "v1", 3)


def test_heads_of_matched_layers():
    assert matched_heads("v2", "v1_dual", 4, 2) == (8, 4)
    assert matched_heads("v1", "standard", 8, 2) == (4, 1)
    with pytest.raises(ValueError, match=r"num_heads.*3"):
        matched_heads("v1", "standard", 3)
    with pytest.raises(ValueError, match=r"num_heads.*4"):
        matched_heads("v1", "v2", 4, 1)


# ---- language models -----------------------------------------------------------------------------------------------


def mixed(name="diff-debug", text=LOWER, **more):
    torch.manual_seed(0)
    return language.create(name, variant_by_layer=text, **more).eval()


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_layers_of_a_language_model_are_those_of_its_twins(kv_heads):
    """A plain layer within a V1 model is a layer of the Transformer of its size, weight for weight."""
    model, plain = mixed(num_kv_heads=kv_heads and 1), language.create("transformer-debug", num_kv_heads=kv_heads)
    assert [type(layer) for layer in model.attention_layers()] == [Attention, DiffAttention]
    assert model.blocks[0].attn.num_heads == plain.blocks[0].attn.num_heads == 2 * model.config.num_heads
    assert model.blocks[1].attn.lambda_init == language.create("diff-debug").blocks[1].attn.lambda_init
    model.blocks[0].load_state_dict(plain.blocks[0].state_dict())
    x = torch.randn(1, 5, 64)
    torch.testing.assert_close(model.blocks[0](x), plain.blocks[0](x))


@pytest.mark.parametrize("size", ["debug", "3m"])
@pytest.mark.parametrize("family", ["transformer", "diff", "diffv2"])
def test_parameters_of_mixed_language_models_are_those_of_the_model(family, size):
    with torch.device("meta"):
        whole = language.create(f"{family}-{size}")
        for variant in ("standard", "v1", "v2", "v1_dint"):
            other = language.create(f"{family}-{size}", variant_by_layer=f"1*{variant}")
            assert other.attention_layers()[0].variant == variant
            assert count(other) == pytest.approx(count(whole), rel=1.5e-3)
            assert other.config.head_dim == other.attention_layers()[0].head_dim


@pytest.mark.parametrize(("name", "text"), [("diff-debug", "standard"), ("diffv2-debug", "v1+v2")])
def test_generation_with_caches_of_different_sizes(name, text):
    model = mixed(name, text)
    tokens = [5, 6, 7, 8, 9]
    made = generate(model, [tokens, [3, 4]], max_new_tokens=6, temperature=0)[0]
    for _ in range(6):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    assert list(made)[-6:] == tokens[-6:]


def test_weights_of_other_layers_are_refused(tmp_path):
    language.save(mixed(), tmp_path / "a")
    config = tmp_path / "a" / "config.json"
    values = json.loads(config.read_text())
    for wrong, layer in ((None, 0), ("2*standard", 1)):
        config.write_text(json.dumps({**values, "variant_by_layer": wrong}))
        with pytest.raises(ValueError, match=rf"blocks\.{layer}\.attn"):
            language.load(tmp_path / "a")
    with pytest.raises(ValueError, match="3 layers"):
        mixed(text="3*standard")


def test_what_has_one_variant_only_refuses_mixed_models():
    with pytest.raises(ValueError, match="variant_by_layer"):
        as_transformers(mixed())
    with pytest.raises(ValueError, match=r"blocks.1 has attention of v1"):
        diffvision.adapt(mixed(), method="v2")


def test_merging_dex_leaves_the_other_layers():
    model = mixed("transformer-debug", "dex+v1")
    nn.init.normal_(model.blocks[0].attn.dex, std=0.1)
    tokens = torch.randint(0, 4096, (1, 7))
    expected = model(tokens)
    merge_dex(model)
    assert (model.config.variant, model.config.variant_by_layer) == ("standard", "1*standard+1*v1")
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
    assert merge_dex(mixed("transformer-debug", "dex")).config.variant_by_layer is None


# ---- timm ----------------------------------------------------------------------------------------------------------


def test_a_vit_of_two_variants(tmp_path):
    model = timm.create_model("diff_vit_debug", variant_by_layer="2*standard", lambda_init=0.6, num_classes=5).eval()
    plain = timm.create_model("plain_vit_debug", num_classes=5).eval()
    assert [type(block.attn) for block in model.blocks] == [Attention] * 2 + [DiffAttention] * 2
    assert model.blocks[3].attn.lambda_init == 0.6
    model.blocks[1].load_state_dict(plain.blocks[1].state_dict())
    x = torch.randn(1, 17, 64)
    torch.testing.assert_close(model.blocks[1](x), plain.blocks[1](x))
    image = torch.randn(2, 3, 32, 32)
    expected = model(image)
    timm.models.save_for_hf(model, tmp_path, model_args={"variant_by_layer": "2*standard", "lambda_init": 0.6})
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(image), expected)


@pytest.mark.parametrize("family", ["diff", "diffv2", "gda", "dint"])
def test_parameters_of_mixed_vits_are_those_of_the_model(family):
    name = f"{family}_vit_base_patch16_224"
    with torch.device("meta"):
        model = timm.create_model(name, variant_by_layer="4*standard", depth=6)
        assert count(model.blocks[0]) == count(timm.create_model("vit_base_patch16_224", depth=1).blocks[0])
        if family != "gda":
            assert count(model) == pytest.approx(count(timm.create_model(name, depth=6)), rel=2e-3)
            other = timm.create_model(name, variant_by_layer="2*v2", depth=6)
            assert isinstance(other.blocks[0].attn, DiffAttentionV2)
            assert count(other) == pytest.approx(count(model), rel=2e-3)
