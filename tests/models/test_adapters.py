"""PEFT's LoRA and torch's parametrizations around our projections: nothing goes round them."""

import copy

import open_clip
import pytest
import timm
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import diffvision
from diffvision.models import language
from diffvision.nn import ATTENTION
from diffvision.nn.dex import DexAttention

peft = pytest.importorskip("peft")
PROJECTIONS = r".*\.attn\.(q_proj|k_proj|v_proj|proj)"


def hugging_face(name):
    from diffvision.models.language.hugging_face import as_transformers

    return as_transformers(language.create(name, vocab_size=20, tied=False))


def both_towers(model, images, tokens):
    return torch.cat([model.encode_image(images), model.encode_text(tokens)])


TOKENS = torch.arange(14).reshape(2, 7)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().reshape(2, 3, 32, 32)
CASES = {  # name: (model, targets, layers that are wrapped, call)
    "timm": (lambda: timm.create_model("diff_vit_debug", num_classes=4), "all-linear", 25, lambda m: m(IMAGES)),
    "OpenCLIP": (
        lambda: open_clip.create_model("DiffCLIP-debug"),
        PROJECTIONS,
        24,
        lambda m: both_towers(m, IMAGES, torch.arange(2 * 24).reshape(2, 24)),
    ),
    "text, tied": (lambda: language.create("diffv2-debug", vocab_size=20), "all-linear", 16, lambda m: m(TOKENS)),
    "text": (lambda: language.create("diff-debug", vocab_size=20, tied=False), "all-linear", 15, lambda m: m(TOKENS)),
    "Llama": (lambda: hugging_face("transformer-debug"), "all-linear", 14, lambda m: m(TOKENS).logits),
    "DiffLlama": (lambda: hugging_face("diff-debug"), "all-linear", 14, lambda m: m(TOKENS).logits),
    "DiffLlamaV2": (lambda: hugging_face("diffv2-debug"), "all-linear", 16, lambda m: m(TOKENS).logits),
}


@pytest.fixture(scope="module", params=CASES)
def wrapped(request):
    """(the model as it was, the same in LoRA, how to call it)."""
    make, targets, count, call = CASES[request.param]
    torch.manual_seed(0)
    plain = make().eval()
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=targets)).eval()
    assert len(loras(model)) == count
    return plain, model, call


def loras(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


def test_every_lora_is_heard(wrapped):
    plain, model, call = wrapped
    with torch.no_grad():
        before = call(model)
        torch.testing.assert_close(before, call(plain), rtol=0, atol=0)
        for name, layer in loras(model).items():
            layer.lora_B["default"].weight.fill_(0.5)
            assert not torch.equal(call(model), before), f"{name} is gone round"
            layer.lora_B["default"].weight.zero_()


def test_lora_trains_merges_and_is_kept(wrapped, tmp_path):
    plain, model, call = wrapped
    with torch.no_grad():
        before = call(plain)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.Adam(trained.values(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        call(model).square().sum().backward()
        optimizer.step()
    assert [name for name, p in trained.items() if not p.grad.any()] == []
    assert [name for name, p in frozen.items() if not torch.equal(p, model.get_parameter(name))] == []
    with torch.no_grad():
        after = call(model)
        assert (after - before).abs().max() > 1e-2
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
        torch.testing.assert_close(call(again), after, rtol=0, atol=0)
        merged = again.merge_and_unload()
        assert loras(merged) == {}
        assert merged.state_dict().keys() == plain.state_dict().keys()
        torch.testing.assert_close(call(merged), after, rtol=1e-5, atol=1e-5)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("kind", [*ATTENTION.values(), DexAttention])
def test_parametrized_weights_are_heard(kind):
    layer = kind(32, 4, head_dim=4)
    x = torch.randn(2, 5, 32)
    for name, parameter in list(layer.named_parameters()):
        with torch.no_grad():
            parameter.uniform_(0.2, 0.6)  # also where it is zero to begin with
        own, other = copy.deepcopy(layer), copy.deepcopy(layer)
        with torch.no_grad():
            other.get_parameter(name).mul_(2)
        register_parametrization(own.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], Doubled())
        torch.testing.assert_close(own(x), other(x), msg=lambda text, name=name: f"{name}: {text}")


def test_weights_alone_are_refused_where_something_is_around_them():
    model = language.create("diff-debug", vocab_size=20, tied=False)
    inner = peft.get_peft_model(model, peft.LoraConfig(target_modules=["head"])).base_model.model
    with pytest.raises(ValueError, match=r"is wrapped in peft\..*: merge it"):
        _ = inner.head_weight
    model = diffvision.adapt(language.create("transformer-debug", vocab_size=20), "dex")
    register_parametrization(model.blocks[0].attn.proj, "weight", Doubled())
    with pytest.raises(ValueError, match="proj is wrapped"):
        diffvision.models.adapt.merge_dex(model)


@pytest.mark.parametrize("target", ["qkv", "proj"])
def test_adapt_refuses_adapters_and_changes_nothing(target):
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=[rf"attn.{target}"]), model)
    with pytest.raises(ValueError, match=f"{target} is wrapped"):
        diffvision.adapt(model)
    assert isinstance(model.blocks[0].attn, timm.layers.Attention)
