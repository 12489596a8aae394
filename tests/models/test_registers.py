"""Test-time registers on vision transformers whose register neurons were planted, and where there are none."""

import copy

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image

from diffvision.analysis.registers import find_register_neurons
from diffvision.analysis.sinks import OUTLIER, relative_norms
from diffvision.cli import main
from diffvision.export import save_folder
from diffvision.models import language
from diffvision.models.adapt import adapt
from diffvision.opening import open_model

PLANTED = [(0, 7), (1, 3), (1, 11)]  # of green, white and black patches
METHOD = "registers=0-7,1-3,1-11"
COLOURS = [(0, 255, 0), (255, 255, 255), (0, 0, 0)]


@torch.no_grad()
def plant(trunk):
    """Make channel 0 the brightness of a patch and channel 2 its green, and plant neurons that look for them."""
    torch.manual_seed(0)
    kernel = trunk.patch_embed.proj.weight
    kernel.normal_(std=1 / kernel[0].numel() ** 0.5)
    kernel[0], kernel[2] = 5 / kernel[0].numel(), 0.0
    kernel[2] += torch.tensor([-2.5, 5.0, -2.5])[:, None, None] / kernel[0, 0].numel()
    if trunk.patch_embed.proj.bias is not None:
        trunk.patch_embed.proj.bias.zero_()
    trunk.pos_embed.normal_()
    trunk.cls_token.normal_()
    trunk.pos_embed[..., [0, 2]] = 0
    for block in trunk.blocks:
        block.mlp.fc2.weight[5] = 0.0  # channel 5 is of the planted neurons alone
    for (depth, neuron), (channel, weight) in zip(PLANTED, ((2, 4.0), (0, 4.0), (0, -4.0)), strict=True):
        mlp = trunk.blocks[depth].mlp
        mlp.fc1.weight[neuron], mlp.fc1.bias[neuron] = 0.0, -8.0
        mlp.fc1.weight[neuron, channel] = weight
        mlp.fc2.weight[:, neuron] = 0.0
        mlp.fc2.weight[5, neuron] = 20.0
    return trunk.eval()


def draw(folder=None, number=32):
    """Return grey noise with one coloured patch an image, in turns, as pixels [3, 32, 32]; write them to a folder."""
    draws = np.random.default_rng(0)
    images = []
    for i in range(number):
        image = draws.integers(118, 138, (32, 32, 3), dtype=np.uint8)
        row, column = 8 * draws.integers(4, size=2)
        image[row : row + 8, column : column + 8] = COLOURS[i % 3]
        if folder is not None:
            Image.fromarray(image).save(folder / f"{i:02}.png")
        images.append(torch.tensor(image).permute(2, 0, 1) / 127.5 - 1)
    return images


def small(name="vit_tiny_patch16_224", **settings):
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return timm.create_model(name, **shape | settings)


@torch.no_grad()
def hidden(trunk, images):
    """Return the tokens after each block, [blocks, B, N, C]."""
    tokens = trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(torch.stack(images)))))
    return torch.stack([tokens := block(tokens) for block in trunk.blocks])


@pytest.mark.parametrize("settings", [{}, {"pre_norm": True}, {"dynamic_img_size": True}])
def test_planted_neurons_are_found_and_only_their_part_is_moved(settings):
    model, images = plant(small(**settings)), draw()
    with torch.no_grad():
        for block in model.blocks:  # so that tokens are on their own, and each can be compared
            block.attn.proj.weight.zero_()
            block.attn.proj.bias.zero_()
    found = find_register_neurons(model, images)
    assert found.method == METHOD
    assert found.before == pytest.approx(1 / 16)
    assert found.after == 0
    assert found.norm > OUTLIER
    without = copy.deepcopy(model)
    activations = {}
    for depth, block in enumerate(without.blocks):
        block.mlp.fc2.weight.data[5] = 0
        block.mlp.act.register_forward_hook(lambda *_, at=depth: activations.update({at: _[2]}))
    before, expected = hidden(model, images), hidden(without, images)
    after = hidden(adapt(model, found.method), images)
    assert after.shape[2] == 1 + before.shape[2]
    assert torch.equal(after[:, :, 0], before[:, :, 0])  # the class token
    torch.testing.assert_close(after[:, :, 2:], expected[:, :, 1:])  # patches
    norms = torch.stack([relative_norms(one) for one in after[-1]])
    assert (norms[:, 2:] < OUTLIER).all()
    assert (norms[:, 1] > OUTLIER).all()
    values = [activations[depth][..., neuron] for depth, neuron in PLANTED]
    largest = [of_neuron.gather(1, of_neuron.abs().argmax(dim=1, keepdim=True)) for of_neuron in values]
    torch.testing.assert_close(after[-1, :, 1, 5:6], 20 * sum(largest))  # the register


@pytest.mark.parametrize("host", ["timm", "open_clip"])
def test_the_folder_opens_again_with_the_neurons_in_its_configuration(host, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    images = draw(tmp_path / "images")
    if host == "timm":
        model = plant(small())
        model.pretrained_cfg |= {"crop_pct": 1.0}
        timm.models.save_for_hf(model, tmp_path / "plain", safe_serialization=True)
    else:
        text = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
        vision = {"timm_model_name": "plain_vit_debug_clip", "image_size": 32, "timm_pool": "", "timm_proj": "linear"}
        config = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
        model = open_clip.CustomTextCLIP(**config).eval()
        plant(model.visual.trunk)
        model.visual.preprocess_cfg = {"size": [32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
        save_folder(model, tmp_path / "plain", config=config | {"custom_text": True})
    arguments = ["adapt", f"local-dir:{tmp_path}/plain", f"{tmp_path}/moved"]
    assert main([*arguments, "--method=registers", f"--data={tmp_path}/images"]) == 0
    assert f"{METHOD}: of 32 images' patches 6.25% are outliers, then 0.00%" in capsys.readouterr().out
    file = tmp_path / "moved" / ("config.json" if host == "timm" else "open_clip_config.json")
    assert METHOD in file.read_text()
    opened = open_model(f"local-dir:{tmp_path}/moved").module
    adapt(model, METHOD)
    batch = torch.stack(images)
    with torch.no_grad():
        outputs = [getattr(one, "encode_image", one)(batch) for one in (model, opened)]
    assert torch.equal(*outputs)
    if host == "timm":
        features = timm.create_model(
            f"local-dir:{tmp_path}/moved", pretrained=True, features_only=True, out_indices=[0]
        )
        assert [one.shape for one in features(batch)] == [(32, 32, 4, 4)]


def test_what_has_no_register_neurons_is_refused():
    images = draw()
    plain = small()
    torch.nn.init.normal_(plain.pos_embed)
    with pytest.raises(ValueError, match=r"1\.\d\d times .*\(32 images\)"):
        find_register_neurons(plain, images)
    with pytest.raises(ValueError, match="2 images are too few"):
        find_register_neurons(plant(small()), images[:2])
    with pytest.raises(ValueError, match="has register tokens already"):
        find_register_neurons(small(reg_tokens=1), images)
    with pytest.raises(ValueError, match="has SwiGLU for an MLP"):
        find_register_neurons(small(mlp_layer=timm.layers.SwiGLU), images)
    with pytest.raises(ValueError, match="Distilled takes no register"):
        find_register_neurons(small("deit_tiny_distilled_patch16_224"), images)
    with pytest.raises(ValueError, match="LanguageModel takes no register"):
        find_register_neurons(language.create("transformer-debug", vocab_size=64), images)
    with pytest.raises(ValueError, match="is adapted already"):
        find_register_neurons(small("adapted_vit.v2.vit_tiny_patch16_224"), images)
    with pytest.raises(ValueError, match="neuron 1-128: choose below 128"):
        adapt(small(), "registers=1-128")
    torch.nn.init.constant_(plain.pos_embed[0, 3], 9.0)  # an outlier from the start, which no neuron makes
    with pytest.raises(ValueError, match="leave 32 of 32 outliers"):
        find_register_neurons(plain, images)
    with pytest.raises(ValueError, match="method is 'registers=5'"):
        timm.create_model("adapted_vit.registers=5.vit_tiny_patch16_224")


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    language.save(language.create("transformer-debug", vocab_size=64), tmp_path / "text")
    timm.models.save_for_hf(plant(small()), tmp_path / "plain", safe_serialization=True)
    (tmp_path / "two").mkdir()
    draw(tmp_path / "two", 2)
    for model, data, message in (
        (tmp_path / "text", "two", "LanguageModel takes no register"),
        (f"local-dir:{tmp_path}/plain", "two", "2 images are too few"),
        (f"local-dir:{tmp_path}/plain", "none", "there is no such file or folder"),
        (f"local-dir:{tmp_path}/plain", None, "give --data FOLDER, of 16 or more"),
    ):
        data = [] if data is None else [f"--data={tmp_path / data}"]
        assert main(["adapt", str(model), f"{tmp_path}/out", "--method=registers", *data]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "two" / "broken.png").write_bytes(b"no image")
    assert main(["adapt", str(model), f"{tmp_path}/out", "--method=registers", f"--data={tmp_path}/two"]) == 1
    assert "broken.png: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
