"""OpenCLIP: our names, the text hook, and everything that OpenCLIP does with its own models."""

import functools
import importlib
import re
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transformer import TextTransformer

from diffvision.models import clip
from diffvision.nn import ATTENTION

DEBUG = [name for name in clip.model_names() if name.endswith("debug")]
TEXT = {"context_length": 12, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2}


def images_and_text(name: str = "CLIP-debug", batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    captions = ["a red seven", "a photo of the number three, written by hand", "two"]
    return torch.randn(batch, 3, 32, 32, generator=generator), open_clip.get_tokenizer(name)(captions)[:batch]


def build(name: str, **settings) -> torch.nn.Module:
    torch.manual_seed(0)
    return open_clip.create_model(name, **settings)


def text_tower(block_type: str | None, **settings) -> TextTransformer:
    torch.manual_seed(0)
    return open_clip.model._build_text_tower(16, {**TEXT, "block_type": block_type, **settings})


# ------------------------------------------------------------------------------------------------- names and the hook


def test_names_are_registered_and_collide_with_nothing():
    own = {path.stem for path in (Path(open_clip.__file__).parent / "model_configs").glob("*.json")}
    assert set(clip.model_names()) <= set(open_clip.list_models())
    assert not own & set(clip.model_names())
    assert not [name for name in clip.model_names() if "siglip" in name.lower() or "coca" in name.lower()]


def test_registering_twice_changes_nothing():
    builder, names = open_clip.model._build_text_tower, open_clip.list_models()
    clip.patch()
    importlib.reload(clip)
    assert open_clip.model._build_text_tower is builder
    assert open_clip.list_models() == names


@pytest.mark.parametrize(
    ("block_type", "settings", "named"),
    [
        ("diffvision", {}, "variant ''"),
        ("diffvision:v9", {}, "v9"),
        ("diffvision:v1:lambda=0.8", {}, "'lambda=0.8'"),
        ("diffvision:v1:lambda_init", {}, "'lambda_init'"),
        ("diffvision:v1:num_heads=4", {}, "num_heads"),
        ("diffvision:standard:lambda_init=0.8", {}, "lambda_init=0.8"),
        ("diffvision:v1:lambda_init=deep", {}, "lambda_init"),
        ("diffvision:v1:head_dim=wide", {}, "head_dim"),
        ("diffvision:v1", {"qk_norm": True}, "qk_norm"),
        ("diffvision:v1", {"hf_model_name": "roberta-base"}, "roberta-base"),
    ],
)
def test_bad_block_type_is_refused(block_type, settings, named):
    with pytest.raises(ValueError, match=named):
        text_tower(block_type, **settings)


def test_blocks_take_the_settings():
    blocks = text_tower("diffvision:v1:lambda_init=depth,head_norm=false,qk_norm=true").transformer.resblocks
    assert [type(block.attn) for block in blocks] == [ATTENTION["v1"]] * 2
    assert blocks[0].attn.lambda_init == pytest.approx(0.2)
    assert blocks[1].attn.lambda_init == pytest.approx(0.8 - 0.6 * 2.718281828**-0.3)
    names = {name for name, _ in blocks[0].named_parameters()}
    assert "attn.q_norm.weight" in names
    assert "attn.head_norm.weight" not in names


@pytest.mark.parametrize("name", DEBUG)
def test_initialisation_is_open_clips_own(name):
    model = build(name)
    width, layers = 64, 2
    for block in model.transformer.resblocks:
        for linear in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj):
            assert linear.weight.std().item() == pytest.approx(width**-0.5, rel=0.05)
            assert not linear.bias.any()
        assert block.attn.proj.weight.std().item() == pytest.approx(width**-0.5 * (2 * layers) ** -0.5, rel=0.05)
        assert not block.attn.proj.bias.any()
    if name == "DiffCLIP-debug":
        lambdas = [value for key, value in model.transformer.named_parameters() if "lambda_" in key]
        assert torch.cat(lambdas).std().item() == pytest.approx(0.1, rel=0.25)


# ------------------------------------------------------------------------------------------------ masks and causality


@pytest.mark.parametrize("settings", [{}, {"no_causal_mask": True}, {"embed_cls": True}])
def test_standard_variant_is_open_clips_own_block(settings):
    plain, ours = text_tower(None, **settings).eval(), text_tower("diffvision:standard", **settings).eval()
    weights = {}
    for key, value in plain.state_dict().items():
        if ".attn.in_proj_" in key:
            for part, chunk in zip("qkv", value.chunk(3), strict=True):
                weights[key.replace("in_proj_", f"{part}_proj.")] = chunk
        else:
            weights[key.replace(".out_proj.", ".proj.")] = value
    ours.load_state_dict(weights)
    text = torch.randint(1, 100, (3, 11 if "embed_cls" in settings else 12))
    text[1, 7:] = 0  # padding, which OpenCLIP masks for the class token
    if "embed_cls" in settings:
        ours.attn_mask, plain.attn_mask = ours.attn_mask[:12, :12], plain.attn_mask[:12, :12]
    torch.testing.assert_close(ours(text), plain(text))


@pytest.mark.parametrize("name", DEBUG)
def test_text_is_causal_and_takes_the_fast_path(name, monkeypatch):
    model = build(name).eval()
    calls = []
    attn = model.transformer.resblocks[1].attn
    forward = attn.forward
    monkeypatch.setattr(attn, "forward", lambda x, **masks: calls.append(masks) or forward(x, **masks))
    x = torch.randn(2, 32, 64)
    before = model.transformer(x, attn_mask=model.attn_mask)
    x[:, 20:] = torch.randn(2, 12, 64)
    after = model.transformer(x, attn_mask=model.attn_mask)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 20:], after[:, 20:]).all(-1).any()
    assert calls == [{"is_causal": True}] * 2


@pytest.mark.parametrize("variant", sorted(ATTENTION))
def test_other_masks_are_passed_on(variant):
    transformer = text_tower(f"diffvision:{variant}").eval().transformer
    x = torch.randn(3, 12, 32)
    causal = torch.full((12, 12), float("-inf")).triu(1)
    torch.testing.assert_close(transformer(x, attn_mask=causal), transformer(x))
    bidirectional = text_tower(f"diffvision:{variant}", no_causal_mask=True).eval().transformer
    torch.testing.assert_close(transformer(x, attn_mask=torch.zeros(12, 12)), bidirectional(x))
    padding = torch.zeros(3, 12, 12)
    padding[1, :, 8:] = float("-inf")
    padded = bidirectional(x, attn_mask=padding.repeat_interleave(2, 0))  # OpenCLIP's layout: batch and heads in one
    torch.testing.assert_close(padded[[0, 2]], bidirectional(x)[[0, 2]])
    torch.testing.assert_close(padded[1, :8], bidirectional(x[:, :8])[1])
    with pytest.raises(ValueError, match="boolean"):
        transformer(x, attn_mask=causal == 0)


def test_cross_attention_is_refused():
    block = text_tower("diffvision:v1").transformer.resblocks[0]
    x = torch.randn(1, 12, 32)
    with pytest.raises(ValueError, match="self-attention"):
        block.attention(x, x, x)


# ---------------------------------------------------------------------------------------------------- what users do


@pytest.mark.parametrize(("name", "custom_text"), [("DiffCLIP-debug", True), ("DiffCLIP-V2-debug", False)])
def test_a_locked_tower_trains_what_is_left_with_checkpointing_too(name, custom_text):
    image, text = images_and_text()
    model = build(name, force_custom_text=custom_text).train()
    model.lock_image_tower(unlocked_groups=2)  # the norm belongs to the last block: two blocks
    model.lock_text_tower(unlocked_layers=2)
    model.set_grad_checkpointing()
    open_clip.ClipLoss()(*model(image, text)).backward()
    trained = {key.removeprefix("text.") for key, value in model.named_parameters() if value.grad is not None}
    assert trained == {key.removeprefix("text.") for key, value in model.named_parameters() if value.requires_grad}
    assert {key.split(".")[3] for key in trained if ".blocks." in key} == {"2", "3"}
    assert {key.split(".")[2] for key in trained if ".resblocks." in key} == {"1"}
    assert trained >= {"visual.trunk.norm.weight", "visual.head.proj.weight", "ln_final.weight", "text_projection"}


def test_a_native_image_tower_in_low_precision_leaves_our_lambdas_alone():
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    model = open_clip.CLIP(16, vision, {**TEXT, "block_type": "diffvision:v1"}, cast_dtype=torch.bfloat16)
    open_clip.convert_weights_to_lp(model, torch.bfloat16)
    assert model.transformer.resblocks[0].attn.lambda_q1.dtype == torch.float32
    assert model.transformer.resblocks[0].attn.q_proj.weight.dtype == torch.bfloat16
    assert model.encode_text(torch.randint(1, 100, (2, 12))).isfinite().all()


def test_custom_text_model_is_the_same_model():
    image, text, name = *images_and_text(), "DiffCLIP-debug"
    model, custom = build(name).eval(), build(name, force_custom_text=True).eval()
    assert isinstance(custom, open_clip.CustomTextCLIP)
    custom.load_state_dict(open_clip.model.convert_to_custom_text_state_dict(model.state_dict()))
    with torch.no_grad():
        assert torch.equal(custom.encode_text(text), model.encode_text(text))
        assert torch.equal(custom.encode_image(image), model.encode_image(image))


# -------------------------------------------------------------------------------------- sizes, twins, published layout


def twin_of(name: str) -> str:
    size = re.fullmatch(r"[A-Za-z]+CLIP-(?:V2-|GDA-|DINT-)?(.+?)(?:-dynamic|-vision|-0\.2)?", name)
    return f"CLIP-{size[1]}"


@functools.cache
def parameters(name: str) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = open_clip.create_model(name, device="meta")
    return {key: value.shape for key, value in model.named_parameters()}


def count(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


KINDS = [*DEBUG, "DiffCLIP-ViT-B-16-dynamic", "DiffCLIP-ViT-B-16-vision"]


@pytest.mark.parametrize(
    "name",
    [
        name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly)
        for name in clip.model_names()
        if not name.startswith("CLIP")
    ],
)
def test_twin_differs_in_attention_only(name):
    ours, plain = parameters(name), parameters(twin_of(name))
    assert set(plain) <= set(ours)
    added = set(ours) - set(plain)
    assert bool(added) == ("Integral" not in name)
    own = {"Gated": (".attn.gate.",), "Sink": (".attn.sink",), "DnA": (".attn.negative_scale",)}
    own |= {"CoDA": (".attn.lambda_", ".attn.theta", ".attn.head_norm.")}
    kinds = own.get(name.partition("CLIP")[0], (".attn.lambda_", ".attn.head_norm."))
    assert all(any(kind in key for kind in kinds) for key in added)
    changed = {key for key in plain if ours[key] != plain[key]}
    # V2 has twice the queries, and a narrower MLP pays for them, as for DnA's queries and values; GDA has keys and
    # values of its groups only.
    parts = (".attn.q_proj.", ".attn.k_proj.", ".attn.v_proj.") if "GDA" in name else (".attn.q_proj.", ".mlp.")
    parts += (".attn.v_proj.",) if "DnA" in name else ()
    assert all(any(part in key for part in parts) for key in changed)
    assert bool(changed) == any(kind in name for kind in ("V2", "GDA", "Gated", "DnA"))
    for key, value in open_clip.get_model_config(name).items():
        if key not in ("vision_cfg", "text_cfg"):
            assert open_clip.get_model_config(twin_of(name))[key] == value


@pytest.mark.quick("DiffCLIP-ViT-B-16-9216", "DiffCLIP-V2-ViT-B-16-167424")
@pytest.mark.parametrize(
    ("name", "added"),
    [
        # V1 adds to each block four lambda vectors and the head norm: 4 x 64 + 128.
        ("DiffCLIP-ViT-B-16", 24 * 384),  # 0.006%, and 0.003% of it is the image tower's
        # V2 trades width x width of the MLP for as many queries. What is left: lambda's projection, and half a width
        # more of biases.
        ("DiffCLIP-V2-ViT-B-16", 12 * (768 * 12 + 384) + 12 * (512 * 8 + 256)),
        # A gate trades as much, and half a width of biases is left.
        ("GatedCLIP-ViT-B-16", 12 * 384 + 12 * 256),
        ("SinkCLIP-ViT-B-16", 12 * 12 + 12 * 8),  # a number for each head
    ],
)
def test_parameter_counts(name, added):
    # OpenCLIP's own has a norm before the blocks (weight and bias), and no bias in its patch embedding.
    plain = count(parameters("ViT-B-16")) - 768
    assert count(parameters(twin_of(name))) == plain
    assert count(parameters(name)) == plain + added


def test_published_size():
    assert count(parameters("CLIP-ViT-B-16")) == 149_619_969
    assert count(parameters("DiffCLIP-ViT-B-16")) == 149_629_185
    assert count(parameters("DiffCLIP-ViT-B-16-vision")) / 149_619_969 - 1 == pytest.approx(3.08e-5, rel=0.01)


def test_openclips_own_image_tower_takes_any_attention():
    cfg = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16, "block_type": "diffvision:v1"}
    tower = open_clip.model._build_vision_tower(8, cfg)
    layers = [block.attn for block in tower.transformer.resblocks]
    assert [(type(layer), layer.num_heads, layer.value_dim) for layer in layers] == [(ATTENTION["v1"], 2, 16)] * 2
    assert tower(torch.randn(2, 3, 32, 32)).shape == (2, 8)
    for wrong in ({"timm_model_name": "plain_vit_debug_clip"}, {"layers": (1, 1, 1, 1)}):
        with pytest.raises(ValueError, match="is for OpenCLIP's transformers"):
            open_clip.model._build_vision_tower(8, {**cfg, **wrong})
    with pytest.raises(ValueError, match=r"vision_cfg sets \['qk_norm'\]"):
        open_clip.model._build_vision_tower(8, {**cfg, "qk_norm": True})
