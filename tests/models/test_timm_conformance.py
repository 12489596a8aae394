"""What timm asks of its own models (its tests/test_models.py, and what its users rely on), asked of ours.

timm's tests pick their cases by names like `vit_*`, so ours need their own. A debug, a register, a V2 model and one
with Visual-Contrast Attention go through everything here, and more in test_conformance.py; every registered name
(nightly, one of each kind always) goes through what needs no arithmetic, on the meta device.
"""

import math

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models import FeatureInfo, get_notrace_functions, get_notrace_modules
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from diffvision.models import vit

DEBUG, V2, VCA = "diff_vit_debug", "diffv2_vit_debug", "vca_vit_debug"
REGISTERS = "diff_vit_tiny_patch16_reg4_gap_256"
NAMES = [DEBUG, REGISTERS, V2, VCA]
# Where a test's time goes with the number of operations: fewer layers, fewer tokens.
SHORT = {name: {"depth": 3} for name in (DEBUG, V2, VCA)} | {REGISTERS: {"depth": 3, "img_size": 64}}

each_model = pytest.mark.parametrize("name", NAMES)


def build(name: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **settings).eval()


def images(model: nn.Module, batch: int = 2, chans: int = 3) -> Tensor:
    return torch.randn(batch, chans, *model.patch_embed.img_size)


def tokens(model: nn.Module) -> int:
    return model.num_prefix_tokens + model.patch_embed.num_patches


def classes(name: str) -> int:
    """As timm does, a name has the classes of its first weights: digits' ten for two of ours."""
    return 10 if name in ("diff_vit_debug", "plain_vit_debug") else 1000


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# ----------------------------------------------------------------------------------- every registered name, on meta


def expected_parameters(name: str) -> int:
    """The count in closed form, from the sizes alone."""
    variant, shape = vit.MODELS[name]
    width, depth, heads, diff_heads, mlp_ratio = vit.SIZES[shape.size]
    attention = {
        "standard": 4 * width * width + 4 * width,
        "v1": 4 * width * width + 4 * width + 6 * (width // diff_heads // 2),  # 4 lambda vectors, a norm of 2 sizes
        "v2": 5 * width * width + 5 * width + heads * width,  # twice the query, and lambda of each token and head
    }
    attention["v1_dint"] = attention["v1"]
    attention["sink"], attention["integral"] = attention["standard"] + heads, attention["standard"]
    attention["gated"] = 5 * width * width + 5 * width  # a gate of each channel
    attention["dna"] = 6 * width * width + 6 * width + heads  # two queries and values
    # Lambda of each token and head, a norm, and an angle for each pair of channels.
    attention["coda"] = attention["standard"] + heads * (width + 1) + width // heads + width // 2
    if variant == "gda":  # a query for each signal and noise head; two keys and a value of 2 sizes for each group
        size, groups = width // diff_heads // 2, diff_heads // vit.GROUPED[name.removeprefix("gda_vit_")]
        rows = (diff_heads + groups) * size + 4 * groups * size + width
        attention["gda"] = rows * (width + 1) + 6 * size
    hidden = int(width * (mlp_ratio - {"v2": 0.5, "gated": 0.5, "dna": 1.0}.get(variant, 0.0)))
    if variant == "vca":  # two embeddings of the pooled tokens, a convolution; 8 lambda vectors and 2 norms of a head
        pooled = (shape.image // shape.patch // 2) ** 2
        attention["vca"] = attention["standard"] + (2 * pooled + 10) * width + 10 * (width // heads)
        hidden -= pooled + 6
    block = attention[variant] + 2 * width * hidden + hidden + width + 4 * width
    patches = (shape.image // shape.patch) ** 2
    prefix = 4 if "_reg4_" in name else 1
    positions = patches if "_reg4_" in name and shape.size != "so150m" else patches + prefix
    stem = 3 * shape.patch**2 * width + width + (positions + prefix) * width
    return stem + depth * block + 2 * width + classes(name) * (width + 1)


FAMILIES = ("diff", "diffv2", "plain", "gda", "dint", "gated", "sink", "integral", "dna", "coda")
KINDS = [f"{family}_vit_debug" for family in FAMILIES]
KINDS += ["diff_vit_base_patch16_224", "vca_vit_small", "diff_vit_so150m_patch16_224", "diffv2_vit_base_patch16_224"]


@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in vit.model_names()]
)
def test_every_size_on_the_meta_device(name):
    model = timm.create_model(name, device="meta")
    config, shape = model.default_cfg, vit.MODELS[name].shape
    assert config["architecture"] == name
    assert sum(parameter.numel() for parameter in model.parameters()) == expected_parameters(name)
    assert config["input_size"] == (3, shape.image, shape.image)
    state = model.state_dict()
    assert f"{config['classifier']}.weight" in state
    assert f"{config['first_conv']}.weight" in state
    assert all(parameter.ndim > 0 for parameter in model.parameters())  # FSDP2 takes no 0-dim parameter

    batch = torch.empty(2, *config["input_size"], device="meta")
    width, grid = vit.SIZES[shape.size].width, shape.image // shape.patch
    prefix = 4 if "_reg4_gap_" in name else 1
    features = model.forward_features(batch)
    assert features.shape == (2, prefix + grid * grid, width)
    assert model.forward_head(features, pre_logits=True).shape == (2, width)
    assert model.forward_head(features).shape == (2, classes(name))


# -------------------------------------------------------------------------------------------- forward and backward


@each_model
def test_dropouts_layer_scale_and_norms_train(name):
    drops = {"drop_rate": 0.1, "pos_drop_rate": 0.1, "patch_drop_rate": 0.25, "proj_drop_rate": 0.1}
    drops |= {"attn_drop_rate": 0.1, "drop_path_rate": 0.1}
    if name == VCA:  # which has neither
        drops |= {"patch_drop_rate": 0.0, "attn_drop_rate": 0.0}
    more = {"init_values": 0.1, "qk_norm": True, "scale_mlp_norm": True, "fix_init": True, "norm_layer": "rmsnorm"}
    model = build(name, **SHORT[name], **drops, **more)
    batch = images(model)
    torch.testing.assert_close(model(batch), model(batch), rtol=0, atol=0)
    model.train()
    first = model(batch)
    first.sum().backward()
    assert (first != model(batch)).any()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("name", [name for name in NAMES if name != VCA])
def test_masks_reach_the_attention(name):
    model = build(name, **SHORT[name])
    batch, length = images(model), tokens(model)
    everything = torch.ones(length, length, dtype=torch.bool)
    torch.testing.assert_close(model(batch, attn_mask=everything), model(batch))
    causal = model.forward_features(batch, is_causal=True)
    torch.testing.assert_close(model.forward_features(batch, attn_mask=everything.tril()), causal)
    changed = model.patch_embed.proj.kernel_size[0]
    batch[..., -changed:, -changed:] += 1  # the last patch, which no earlier token may see
    later = model.forward_features(batch, is_causal=True)
    torch.testing.assert_close(later[:, :-1], causal[:, :-1])
    assert (later[:, -1] != causal[:, -1]).any()


def test_visual_contrast_refuses_what_it_cannot_do():
    for name in (VCA, "vca_vit_debug_clip"):
        with pytest.raises(ValueError, match="pools a whole grid: leave"):
            build(name, patch_drop_rate=0.25)
    model = build(VCA)
    with pytest.raises(ValueError, match="takes no mask"):
        model(images(model), attn_mask=torch.ones(17, 17, dtype=torch.bool))
    with pytest.raises(ValueError, match="gradient checkpointing needs one"):
        build(VCA, dynamic_img_size=True).set_grad_checkpointing()
    with pytest.raises(TypeError, match="'vca' attention, which takes no"):
        build(VCA, num_kv_heads=1)


def test_visual_contrast_at_other_sizes_keeps_its_pooled_tokens():
    """A grid's own height and width matter, and a resized model equals one made for that size."""
    torch.manual_seed(0)
    model = build(VCA, dynamic_img_size=True)
    wide, high = torch.randn(1, 3, 16, 48), torch.randn(1, 3, 48, 16)
    outputs = model(wide), model(high)
    for batch, expected in zip((wide, high), outputs, strict=True):
        resized = build(VCA)
        resized.load_state_dict(model.state_dict())
        resized.set_input_size(img_size=tuple(batch.shape[-2:]))
        assert resized.blocks[0].attn.contrast_embed.shape == (2, 4, 64)
        torch.testing.assert_close(resized(batch), expected)


# ------------------------------------------------------------------------------------------ features and classifiers


@each_model
def test_features_only(name):
    model = build(name, features_only=True, **SHORT[name])
    batch = torch.randn(2, 3, *model.model.patch_embed.img_size)
    outputs = model(batch)
    assert len(outputs) == len(model.feature_info.channels()) == 3
    for output, channels, reduction in zip(
        outputs, model.feature_info.channels(), model.feature_info.reduction(), strict=True
    ):
        assert output.shape == (2, channels, *[math.ceil(edge / reduction) for edge in batch.shape[-2:]])
        assert output.isfinite().all()
    chosen = build(name, features_only=True, out_indices=[0, 2], **SHORT[name])(batch)
    assert len(chosen) == 2
    torch.testing.assert_close(chosen, [outputs[0], outputs[2]])


@each_model
def test_forward_intermediates(name):
    model = build(name, **SHORT[name])
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    batch = images(model, 1)
    output, intermediates = model.forward_intermediates(batch, output_fmt="NCHW")
    assert len(intermediates) == len(info.channels()) == len(model.blocks)
    for feature, channels, reduction in zip(intermediates, info.channels(), info.reduction(), strict=True):
        assert feature.shape == (1, channels, *[edge // reduction for edge in batch.shape[-2:]])
    torch.testing.assert_close(output, model.forward_features(batch))
    model.set_grad_checkpointing()
    torch.testing.assert_close(model.forward_intermediates(batch)[0], output, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- input sizes


@each_model
def test_dynamic_img_size(name):
    fixed = build(name, **SHORT[name])
    model = build(name, **SHORT[name], dynamic_img_size=True)
    batch = images(fixed)
    torch.testing.assert_close(model(batch), fixed(batch))
    patch = model.patch_embed.patch_size[0]
    assert model(torch.randn(2, 3, 3 * patch, 5 * patch)).shape == (2, classes(name))
    padded = build(name, **SHORT[name], dynamic_img_size=True, dynamic_img_pad=True)
    assert padded(torch.randn(1, 3, 3 * patch + 1, 5 * patch - 1)).shape == (1, classes(name))


# --------------------------------------------------------------------------------------- initialisation and optimizers


@each_model
def test_layer_decay_groups(name):
    model = build(name)
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.75
    )
    of = {id(parameter): group for group in groups for parameter in group["params"]}
    names = {parameter: of[id(value)] for parameter, value in model.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert names["head.weight"]["lr_scale"] == 1
    for index in range(len(model.blocks)):
        scales = [group["lr_scale"] for parameter, group in names.items() if parameter.startswith(f"blocks.{index}.")]
        assert scales == pytest.approx([0.75 ** (len(model.blocks) - index)] * len(scales))
    stem = names["patch_embed.proj.weight"]["lr_scale"]
    assert stem == names["pos_embed"]["lr_scale"] < names["blocks.0.attn.q_proj.weight"]["lr_scale"]
    assert names["blocks.0.attn.q_proj.weight"]["weight_decay"] == 0.05
    for parameter, value in model.named_parameters():
        if value.ndim == 1 or parameter in ("cls_token", "reg_token", "pos_embed"):
            assert names[parameter]["weight_decay"] == 0, parameter


# ------------------------------------------------------------------------------------------------ tracing and compiling


def _fx_model(model: nn.Module) -> nn.Module:
    """As timm's tests trace a model."""
    tracing = {
        "leaf_modules": get_notrace_modules(),
        "autowrap_functions": get_notrace_functions(),
        "param_shapes_constant": True,
    }
    train_nodes, eval_nodes = get_graph_node_names(model, tracer_kwargs=tracing)
    returned = {"train_return_nodes": [train_nodes[-1]], "eval_return_nodes": [eval_nodes[-1]]}
    return create_feature_extractor(model, **returned, tracer_kwargs=tracing)


@pytest.mark.quick("diff_vit_debug", "diff_vit_tiny_patch16_reg4_gap_256")
@each_model
def test_fx_forward_is_exact(name):
    model = build(name, **SHORT[name])
    batch = images(model)
    traced = _fx_model(model)
    with torch.inference_mode():
        (output,) = traced(batch).values()
        assert torch.equal(output, model(batch))


# ---------------------------------------------------------------------------------------------- precision and sharding


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [DEBUG, V2])
def test_fsdp2(name, one_process):
    model = build(name).train()
    expected = model(batch := images(model))
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    outputs = model(batch)
    torch.testing.assert_close(outputs, expected)
    outputs.mean().backward()
    assert all(gradient is not None for gradient in gradients(model).values())
