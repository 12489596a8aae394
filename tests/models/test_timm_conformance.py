"""What timm asks of its own models (its tests/test_models.py, and what its users rely on), asked of ours.

timm's tests pick their cases by names like `vit_*`, so ours need their own. A debug, a register, a V2 model and one
with Visual-Contrast Attention go through everything here, and more in test_conformance.py; every registered name
(nightly, one of each kind always) goes through what needs no arithmetic, on the meta device.
"""

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models import get_notrace_functions, get_notrace_modules
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchvision.models.feature_extraction import create_feature_extractor

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


@each_model
def test_features_only(name):
    model = build(name, **SHORT[name])
    batch = images(model)
    features = build(name, features_only=True, out_indices=[0, 2], **SHORT[name])(batch)
    torch.testing.assert_close(features, model.forward_intermediates(batch, [0, 2], intermediates_only=True))


# --------------------------------------------------------------------------------------- initialisation and optimizers


@each_model
def test_layer_decay_groups(name):
    model = build(name)
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.75
    )
    of = {id(parameter): group for group in groups for parameter in group["params"]}
    names = {parameter: of[id(value)] for parameter, value in model.named_parameters()}
    for parameter, group in names.items():
        if parameter.startswith("blocks."):
            depth = int(parameter.split(".")[1])
            assert group["lr_scale"] == pytest.approx(0.75 ** (len(model.blocks) - depth)), parameter
    assert names["blocks.0.attn.q_proj.weight"]["weight_decay"] == 0.05
    for parameter, value in model.named_parameters():
        if value.ndim == 1 or parameter in ("cls_token", "reg_token", "pos_embed"):
            assert names[parameter]["weight_decay"] == 0, parameter


# ------------------------------------------------------------------------------------------------ tracing and compiling


@pytest.mark.quick("diff_vit_debug", "diff_vit_tiny_patch16_reg4_gap_256")
@each_model
def test_fx_forward_is_exact(name):
    """Traced as timm's tests trace a model."""
    model = build(name, **SHORT[name])
    leaves = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    traced = create_feature_extractor(model, ["head"], tracer_kwargs=leaves | {"param_shapes_constant": True})
    batch = images(model)
    with torch.inference_mode():
        assert torch.equal(traced(batch)["head"], model(batch))


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
