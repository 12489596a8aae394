"""The table of timm models: names, sizes and heads by the rules, timm's own initialisation, and timm's own results."""

import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import diffvision
from diffvision import nn as diffnn
from diffvision.models import vit

FAMILIES = ("plain", "diff", "diffv2", "gda", "dint", "vca", "gated", "sink", "integral")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_classes": 10}


def on_meta(name: str, **settings) -> VisionTransformer:
    return timm.create_model(name, device="meta", **settings)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def fill(model: nn.Module, source: nn.Module) -> None:
    """Weights of a timm transformer, its fused qkv split, into ours; every key of both is used."""
    state = {}
    for key, value in source.state_dict().items():
        if ".attn.qkv." in key:
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
                state[key.replace("qkv", projection)] = part
        else:
            state[key.replace("sub_norm", "head_norm")] = value
    model.load_state_dict(state)


# ---------------------------------------------------------------------------------------------------------------- names


def test_every_name_is_listed_with_its_configuration():
    patterns = ("diff*", *(f"{family}_vit*" for family in (*FAMILIES, "dna", "coda") if not family.startswith("diff")))
    ours = {name for pattern in patterns for name in timm.list_models(pattern)}
    assert ours == set(vit.model_names())
    assert set(timm.list_models("diff*", name_matches_cfg=True)) == set(timm.list_models("diff*"))
    assert timm.list_models("diff*", pretrained=True) == ["diff_vit_debug.digits"]
    assert not set(timm.list_models(module="vision_transformer")) & ours
    assert vit.ALIASES.keys() <= ours
    assert not [name for name in ours if "siglip" in name or "coca" in name]  # names that OpenCLIP switches on


@pytest.mark.parametrize("settings", [{}, {"features_only": True}, {"num_classes": 0}])
def test_untrained_names_pretend_to_no_weights(settings):
    assert not timm.is_model_pretrained("dint_vit_debug")
    with pytest.raises(RuntimeError, match="dint_vit_debug"):
        timm.create_model("dint_vit_debug", pretrained=True, **settings)


# ---------------------------------------------------------------------------------------------------------------- sizes


SHARED = sorted(set(vit.SHAPES) & {name.removeprefix("vit_") for name in timm.list_models("vit_*")})


@pytest.mark.parametrize(
    "shape", [s if s.startswith("base") else pytest.param(s, marks=pytest.mark.nightly) for s in SHARED]
)
def test_parameters_against_timms_plain_model(shape):
    """V1 at timm's shape is timm's model and six head sizes a block; where it differs, it is by name."""
    plain = on_meta(f"vit_{shape}", num_classes=1000)
    model = on_meta(f"diff_vit_{shape}")
    assert count(model) == count(plain) + len(model.blocks) * 6 * model.blocks[0].attn.head_dim
    ours = {key: value.shape for key, value in model.state_dict().items() if ".attn." not in key}
    assert ours == {key: value.shape for key, value in plain.state_dict().items() if ".attn." not in key}
    assert plain.default_cfg["input_size"] == model.default_cfg["input_size"]
    for setting in ("global_pool", "num_prefix_tokens", "no_embed_class", "pool_include_prefix"):
        assert getattr(model, setting) == getattr(plain, setting), setting


def test_shapes_shared_with_timm():
    own = {"debug", "tiny_patch16_reg4_gap_256", "small_patch16_reg4_gap_256", "so150m_patch16_224"}
    assert set(vit.SHAPES) - set(SHARED) == own


def inits(name: str, **settings) -> list[float]:
    return [block.attn.lambda_init for block in on_meta(name, **settings).blocks]


def test_lambda_init_by_name_and_by_setting():
    schedule = [diffnn.depth_lambda_init(depth) for depth in range(12)]
    assert inits("diff_vit_base") == schedule
    assert inits("diff_vit_base_patch16_clip_dynamic_224") == schedule
    assert inits("diff_vit_base_patch16_clip_224") == [0.8] * 12
    assert inits("diff_vit_base", lambda_init=0.5, depth=2) == [0.5] * 2
    assert inits("diff_vit_base_patch16_clip_224", lambda_init="depth") == schedule


def test_clip_towers_are_diffclips():
    model = on_meta("diff_vit_base_patch16_clip_224")
    norms = {name: module.eps for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    assert len(norms) == 25
    assert set(norms.values()) == {1e-5}
    assert isinstance(model.norm_pre, nn.Identity)
    assert model.patch_embed.proj.bias is not None
    assert on_meta("diff_vit_base").norm.eps == 1e-6  # timm's


def test_attention_settings():
    model = timm.create_model("diff_vit_debug", num_kv_heads=1, head_dim=8, head_norm=False, rotary=100.0)
    attention = model.blocks[0].attn
    assert (attention.num_kv_heads, attention.head_dim, attention.rotary) == (1, 8, 100.0)
    assert isinstance(attention.head_norm, nn.Identity)
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()
    for name, useless in (("diff_vit_debug", "lambda_start"), ("diffv2_vit_debug", "lambda_init")):
        with pytest.raises(TypeError, match=useless):
            timm.create_model(name, **{useless: 0.5})
    with pytest.raises(ValueError, match="head_norm=True"):
        timm.create_model("diff_vit_debug", scale_attn_norm=True)
    with pytest.raises(ValueError, match=r"dim \(64\) must be a multiple of 6"):
        timm.create_model("diff_vit_debug", num_heads=3)


# ------------------------------------------------------------------------------------------------------- initialisation


@pytest.mark.quick("False-diffv2_vit_tiny", "True-diff_vit_tiny", "False-plain_vit_small_patch16_clip_224")
@pytest.mark.parametrize("name", ["diff_vit_tiny", "diffv2_vit_tiny", "plain_vit_small_patch16_clip_224"])
@pytest.mark.parametrize("again", [False, True])
def test_initialised_by_timm(name, again):
    """As timm's ViT: Linear N(0, 0.02) truncated far out, no bias; lambdas N(0, 0.1), norms 1."""
    model = timm.create_model(name, img_size=64)
    if again:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7.0)
        model.init_weights()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), path
            assert module.bias is None or not module.bias.any(), path
    if hasattr(model.blocks[0].attn, "lambda_q1"):
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        lambdas = torch.cat([getattr(block.attn, name) for block in model.blocks for name in names])
        assert lambdas.std().item() == pytest.approx(0.1, rel=0.1)
        assert lambdas.mean().item() == pytest.approx(0.0, abs=0.01)
        assert all((block.attn.head_norm.weight == 1).all() for block in model.blocks)
        assert model.blocks[0].attn.compute_lambda().item() == pytest.approx(0.2, abs=0.5)


# --------------------------------------------------------------------------------------------------- timm's own results

TIMM = {
    "": {},
    "registers": {"class_token": False, "reg_tokens": 4, "no_embed_class": True, "global_pool": "avg"},
    "layer_scale": {"init_values": 0.1, "qkv_bias": False, "pre_norm": True},
}


@pytest.mark.parametrize("settings", TIMM.values(), ids=TIMM)
@pytest.mark.parametrize(
    ("name", "attention", "heads"), [("plain_vit_debug", "attn", 4), ("diff_vit_debug", "diff", 3)]
)
def test_equals_timm_on_copied_weights(name, attention, heads, settings):
    """The plain twin is timm's ViT, and V1 is timm's ViT with timm's differential attention: outputs and gradients."""
    source = VisionTransformer(**SMALL, **settings, num_heads=heads, attn_layer=attention)
    with torch.no_grad():
        for parameter in source.parameters():  # weights large enough that every part shows in the output
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = timm.create_model(name, **SMALL, **settings, num_heads=heads)
    fill(model, source)
    batch = torch.randn(2, 3, 32, 32)
    outputs, expected = model(batch), source(batch)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.forward_features(batch), source.forward_features(batch), rtol=1e-5, atol=1e-5)
    outputs.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(source.named_parameters())
    for index, block in enumerate(model.blocks):
        parts = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj]
        fused: Tensor = torch.cat([part.weight.grad for part in parts])
        torch.testing.assert_close(fused, theirs[f"blocks.{index}.attn.qkv.weight"].grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        model.patch_embed.proj.weight.grad, theirs["patch_embed.proj.weight"].grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_registers_of_any_family(family, tmp_path):
    with_registers, without = (timm.create_model(f"{family}_vit_debug", reg_tokens=count) for count in (4, 0))
    with_registers(torch.randn(1, 3, 32, 32)).sum().backward()
    assert with_registers.reg_token.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="reg_token"):
        without.load_state_dict(with_registers.state_dict())
    timm.models.save_for_hf(with_registers, tmp_path, safe_serialization=True)
    assert timm.create_model(f"local-dir:{tmp_path}", pretrained=True).num_reg_tokens == 4
    with pytest.raises(ValueError, match="reg_tokens must be 4"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, reg_tokens=1)


def test_registers_that_an_adapted_model_does_not_have(tmp_path):
    model = diffvision.adapt(timm.create_model("plain_vit_debug", depth=1))
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    with pytest.raises(ValueError, match="reg_tokens must be 0"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, reg_tokens=4)


# --------------------------------------------------------------------------------------------- what torch's tools do


@pytest.fixture(params=["diff", "gda", "vca", "sink"])
def long_rows(request):
    """A model with more keys than the formula is chosen for, and an image."""
    model = timm.create_model(f"{request.param}_vit_debug", img_size=80, depth=1, num_classes=10).eval()
    return model, torch.randn(2, 3, 80, 80)


@pytest.mark.filterwarnings("ignore")  # the tracer's, of every shape that is read
def test_a_traced_model_gives_the_same_and_needs_none_of_our_operators(long_rows):
    model, image = long_rows
    traced = torch.jit.trace(model, image)
    torch.testing.assert_close(traced(image), model(image))
    assert not [node.kind() for node in traced.inlined_graph.nodes() if "diffvision" in node.kind()]


def test_forward_mode_gives_the_directional_derivative(long_rows):
    model, image = (part.double() for part in long_rows)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, found = torch.func.jvp(model, (image,), (image,))
        expected = (model(image * (1 + 1e-5)) - model(image * (1 - 1e-5))) / 2e-5
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_torchscript_is_refused_in_a_sentence(long_rows):
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(long_rows[0])
