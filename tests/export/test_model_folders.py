"""Folders that the libraries load by themselves: the same model, transform and tokenizer as before."""

import json

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image

from diffvision.export import save_folder


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 60, 3), dtype=np.uint8))


def test_open_clip_loads_the_run(runs, exported, image):
    """With its transform and tokenizer; tests/test_round_trips.py has the outputs."""
    transform = open_clip.create_model_and_transforms(f"local-dir:{exported / 'clip'}")[2]
    tokenizer, texts = open_clip.get_tokenizer(f"local-dir:{exported / 'clip'}"), ["a photo of a seven", "seven"]
    assert torch.equal(transform(image), runs.clip.eval_transform(image))
    assert torch.equal(tokenizer(texts), runs.clip.tokenizer(texts))
    assert sorted(path.suffix for path in (exported / "clip").iterdir()) == [".json", ".md", ".safetensors"]


def test_timm_loads_the_run(runs, exported, image):
    model = timm.create_model(f"local-dir:{exported / 'vision'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    batch = runs.vision.eval_transform(image)[None]
    assert batch.shape[-2:] == (48, 48)
    assert torch.equal(transform(image)[None], batch)
    with torch.no_grad():
        assert torch.equal(model(batch), runs.vision.model.eval()(batch))
    assert model.pretrained_cfg["label_names"] == ["zero", "one", "two"]
    values = json.loads((exported / "vision" / "config.json").read_text())
    assert values["model_args"] == {"img_size": 48}  # nothing of how it was trained
    assert "license" not in values["pretrained_cfg"]


def test_transformers_loads_the_run_through_its_wrapper_of_timm(runs, exported, image, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, batch = exported / "vision", runs.vision.eval_transform(image)[None]
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "zero", 1: "one", 2: "two"}
    own = runs.vision.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch).logits, own(batch))
        model.save_pretrained(tmp_path)
        again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        torch.testing.assert_close(again(batch), own(batch))
        features = transformers.AutoModel.from_pretrained(folder).eval()(batch).last_hidden_state
        torch.testing.assert_close(features, own.forward_features(batch))


def test_a_models_own_architecture_arguments(tmp_path):
    """As a converter writes them: a registered name, its arguments, and further keys."""
    model = timm.create_model("plain_vit_debug", num_classes=0, depth=2)
    config = {"architecture": "plain_vit_debug", "depth": 2}
    save_folder(model, tmp_path / "model", config=config, more={"label_names": [], "made_by": "a test"})
    again = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert len(again.blocks) == 2
    assert again.num_classes == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["made_by"] == "a test"


def test_bad_input_leaves_nothing(tmp_path):
    model = timm.create_model("diff_vit_debug")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"destination .*there is there"):
        save_folder(model, tmp_path / "there", config={})
    with pytest.raises(ValueError, match=r"config.json cannot hold what"):
        save_folder(model, tmp_path / "new", config={"norm_layer": torch.nn.LayerNorm})
    model.half().head.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"1 tensors .* not finite, first"):
        save_folder(model, tmp_path / "new", config={})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_clip_built_by_its_class_needs_its_preprocessing(tmp_path):
    config = open_clip.get_model_config("CLIP-debug")
    model = open_clip.CLIP(**config)
    with pytest.raises(ValueError, match="the mean and std of its images are"):
        save_folder(model, tmp_path / "new", config=config)
    assert not list(tmp_path.iterdir())
    given = {"mean": [0.3, 0.3, 0.3], "std": [0.2, 0.2, 0.2]}
    save_folder(model, tmp_path / "new", config=config, preprocess=given)
    again = open_clip.create_model(f"local-dir:{tmp_path / 'new'}")
    assert list(again.visual.preprocess_cfg["mean"]) == given["mean"]
