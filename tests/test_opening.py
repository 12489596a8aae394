"""Models by name with weights of every origin."""

import argparse

import open_clip
import pytest
import safetensors.torch
import timm
import torch

from diffvision.models.architecture import architecture
from diffvision.models.checkpoint import read_checkpoint
from diffvision.opening import open_model

NAME = "DiffCLIP-debug"


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    return open_clip.create_model(NAME)


def same(model, other):
    state = other.state_dict()
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def lightning_checkpoint(model, about=None):
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    return {"pytorch-lightning_version": "2.6.6", "state_dict": state, "epoch": 3, "diffvision": about or {}}


def test_open_clip_by_name_without_weights():
    loaded = open_model("CLIP-debug")
    assert not loaded.module.training
    assert loaded.tokenizer(["a dog"]).shape == (1, loaded.module.context_length)


@pytest.mark.parametrize("layout", ["plain", "open_clip", "safetensors"])
def test_open_clip_files(tmp_path, trained, layout):
    path = tmp_path / ("weights.safetensors" if layout == "safetensors" else "weights.pt")
    if layout == "safetensors":
        safetensors.torch.save_file(trained.state_dict(), path)
    elif layout == "open_clip":  # as open_clip_train writes it, from a DDP run
        state = {f"module.{key}": value for key, value in trained.state_dict().items()}
        torch.save({"epoch": 1, "name": "run", "state_dict": state, "optimizer": {}}, path)
    else:
        torch.save(trained.state_dict(), path)
    assert same(open_model(NAME, str(path)).module, trained)


def test_open_clip_local_directory(tmp_path, trained):
    import json

    config = {"model_cfg": open_clip.get_model_config(NAME), "preprocess_cfg": {"mean": [0.1, 0.2, 0.3]}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "open_clip_model.safetensors")
    loaded = open_model(f"local-dir:{tmp_path}")
    assert same(loaded.module, trained)
    assert tuple(loaded.transform.transforms[-1].mean) == (0.1, 0.2, 0.3)


def test_training_run_with_its_preprocessing(tmp_path, trained):
    path = tmp_path / "last.ckpt"
    kept = {"mean": [0.485, 0.456, 0.406], "std": [0.2, 0.2, 0.2], "size": (32, 32), "interpolation": "bilinear"}
    built = architecture(trained, open_clip.get_model_config(NAME))
    about = {"model": NAME, "preprocess": kept, "architecture": built}
    torch.save(lightning_checkpoint(trained, about), path)
    loaded = open_model(NAME, path)
    assert same(loaded.module, trained)
    assert tuple(loaded.transform.transforms[-1].mean) == (0.485, 0.456, 0.406)
    assert "bilinear" in str(loaded.transform)
    other = open_model(NAME, path, preprocess={"mean": [0.0, 0.0, 0.0]})  # what the caller says comes first
    assert tuple(other.transform.transforms[-1].mean) == (0.0, 0.0, 0.0)
    assert tuple(other.transform.transforms[-1].std) == (0.2, 0.2, 0.2)
    with pytest.raises(ValueError, match="is of the model 'DiffCLIP-debug', not 'CLIP-debug'"):
        open_model("CLIP-debug", path)


def test_compiled_training_run(tmp_path, trained):
    path = tmp_path / "last.ckpt"
    content = lightning_checkpoint(trained)
    content["state_dict"] = {
        key.replace("model.", "model._orig_mod."): value for key, value in content["state_dict"].items()
    }
    torch.save(content, path)
    assert same(open_model(NAME, path).module, trained)


def test_timm_by_name_and_averaged_weights(tmp_path):
    model = timm.create_model("diff_vit_debug", num_classes=7)
    path = tmp_path / "model.pth"
    ema = {key: value + 1 for key, value in model.state_dict().items()}
    torch.save({"arch": "diff_vit_debug", "state_dict": model.state_dict(), "state_dict_ema": ema}, path)
    loaded = open_model("diff_vit_debug", path, preprocess={"mean": [0.1, 0.2, 0.3]})
    assert loaded.tokenizer is None
    torch.testing.assert_close(loaded.module.state_dict(), ema)  # and as many classes as it was trained with
    assert "0.1000, 0.2000, 0.3000" in str(loaded.transform)


def test_arguments_beside_the_weights(tmp_path, trained):
    """timm's train.py keeps an argparse.Namespace in its checkpoints, and so do others."""
    path = tmp_path / "last.pth.tar"
    torch.save({"state_dict": trained.state_dict(), "args": argparse.Namespace(lr=1, betas=[0.9, 0.98])}, path)
    assert same(open_model(NAME, str(path)).module, trained)


def test_names_that_nobody_knows(tmp_path):
    with pytest.raises(
        ValueError,
        match="neither OpenCLIP nor timm has a model 'DiffCLIP-debugg': the nearest names are DiffCLIP-debug",
    ):
        open_model("DiffCLIP-debugg")
    with pytest.raises(FileNotFoundError, match="no checkpoint file"):
        open_model(NAME, str(tmp_path / "none.pt"))
    with pytest.raises(ValueError, match=r"'laion2b' is neither a file nor pretrained weights .* it has no pretrained"):
        open_model(NAME, "laion2b")
    with pytest.raises(ValueError, match="its pretrained weights are openai"):
        open_model("ViT-B-32", "laion9")
    with pytest.raises(ValueError, match="it has no pretrained weights"):
        open_model("diff_vit_debug", "in1k")
    with pytest.raises(ValueError, match="preprocess has size: it takes mean, std"):
        open_model(NAME, preprocess={"size": 3})


def test_files_that_cannot_be_used(tmp_path, trained):
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": trained.state_dict(), "args": tmp_path}, path)
    with pytest.raises(ValueError, match=r"holds more than tensors and plain values.*save its state_dict alone"):
        open_model(NAME, path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or no checkpoint"):
        open_model(NAME, path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match="holds no tensors by name"):
        read_checkpoint(path)
    torch.save(lightning_checkpoint(open_clip.create_model("CLIP-debug")), path)
    with pytest.raises(ValueError, match=r"does not fit the model .* Missing key"):
        open_model(NAME, path)
