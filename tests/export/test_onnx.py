"""ONNX: onnxruntime gives what torch gives, of every kind of model, at sizes other than those that were traced."""

import json
import sys

import numpy as np
import onnxruntime
import open_clip
import pytest
import timm
import torch

import diffvision
from diffvision.export.graphs import graphs
from diffvision.export.onnx import save_onnx
from diffvision.models.adapt import set_dex_lambda
from diffvision.nn import ATTENTION


def session(graph, file):
    save_onnx(graph, file)
    return onnxruntime.InferenceSession(file)


def largest_difference(own, model, batches=(1, 3)):
    """Between onnxruntime and torch, over batches other than the traced one."""
    worst = 0.0
    for batch in batches:
        image = torch.randn(batch, *model.pretrained_cfg["input_size"])
        with torch.no_grad():
            expected = model(image).numpy()
        worst = max(worst, float(np.abs(own.run(None, {"image": image.numpy()})[0] - expected).max()))
    return worst


@pytest.mark.slow
def test_a_vit_agrees_and_says_what_it_is(tmp_path):
    model = timm.create_model("diff_vit_debug", depth=1).eval()
    own = session(graphs(model, name="diff_vit_debug")["model"], tmp_path / "model.onnx")
    assert largest_difference(own, model) < 1e-4
    about = own.get_modelmeta().custom_metadata_map
    assert (about["model"], about["variant"]) == ("diff_vit_debug", "v1")
    assert json.loads(about["std"]) == list(model.pretrained_cfg["std"])
    assert own.get_inputs()[0].shape == ["batch", *model.pretrained_cfg["input_size"]]
    assert b"site-packages" not in (tmp_path / "model.onnx").read_bytes()  # nothing of where it was made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diff_vit_debug", "gda_vit_debug"])
@pytest.mark.filterwarnings("ignore")  # the exporter's deprecation, and the tracer's of every shape that is read
def test_the_torchscript_exporter_agrees_too(name, tmp_path):
    """The one that timm's onnx_export.py uses by default."""
    model = timm.create_model(name, depth=1).eval()
    image = torch.randn(2, *model.pretrained_cfg["input_size"])
    axes = {"image": {0: "batch"}}
    torch.onnx.export(model, (image,), tmp_path / "m.onnx", dynamo=False, input_names=["image"], dynamic_axes=axes)
    assert largest_difference(onnxruntime.InferenceSession(tmp_path / "m.onnx"), model) < 1e-4


@pytest.mark.slow
def test_both_towers_of_a_clip_agree(tmp_path):
    model = open_clip.create_model("DiffCLIP-debug").eval()
    own = {name: session(graph, tmp_path / f"{name}.onnx") for name, graph in graphs(model).items()}
    image, tokens = torch.randn(3, 3, 32, 32), torch.randint(1, 50, (1, model.context_length))
    with torch.no_grad():
        expected = [model.encode_image(image, normalize=True), model.encode_text(tokens, normalize=True)]
    found = [own["image"].run(None, {"image": image.numpy()}), own["text"].run(None, {"tokens": tokens.numpy()})]
    for ours, theirs in zip(expected, found, strict=True):
        np.testing.assert_allclose(theirs[0], ours.numpy(), atol=1e-4, rtol=0)


SHORT = ("v1", "v2", "v1_dint", "gda", "dex", "vca")  # one of each kind of layer


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.slow if v in SHORT else pytest.mark.nightly) for v in (*ATTENTION, "vca")],
)
def test_every_variant_of_attention_agrees(variant, vit, tmp_path):
    model = timm.create_model("vca_vit_debug", depth=1).eval() if variant == "vca" else vit(variant)
    assert largest_difference(session(graphs(model)["model"], tmp_path / "model.onnx"), model) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_an_adapted_model_agrees_and_stays_as_it_is(method, vit, tmp_path):
    model = diffvision.adapt(vit("standard"), method).eval()
    if method == "dex":
        torch.nn.init.normal_(model.blocks[0].attn.dex)
        set_dex_lambda(model, 0.5)
    graph = graphs(model)["model"]
    assert largest_difference(session(graph, tmp_path / "model.onnx"), model) < 1e-4
    assert graph.about["variant"] == method
    assert (method == "dex") == hasattr(model.blocks[0].attn, "dex")


def test_without_onnx_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    model = timm.create_model("diff_vit_debug")
    with pytest.raises(ValueError, match="onnx needs onnxscript: pip install"):
        save_onnx(graphs(model)["model"], tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
