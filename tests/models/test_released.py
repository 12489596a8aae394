"""Released weights by name: tags that download from a stand-in for the Hub, with the authors' tiny checkpoint."""

import io
import json

import open_clip
import pytest
import torch
from golden_tower import TOWER
from safetensors.torch import load_file

from diffvision.models import released, vit
from diffvision.models.checkpoint import read_state
from diffvision.models.convert import diffclip
from diffvision.opening import open_model

REPOSITORY = "someone/tiny"


@pytest.fixture
def tiny(hub, assets, tmp_path, monkeypatch):
    """The name of an OpenCLIP model of the tiny checkpoint's size, whose tag `cc` is on the stand-in for the Hub."""
    hub.files[REPOSITORY] = {"checkpoint_best.pt": (assets / "diffclip_checkpoint.pt").read_bytes()}
    monkeypatch.setattr(diffclip, "TOWER", "{}_vit_patch{}_clip_{}")
    monkeypatch.setitem(vit.SIZES, "golden", vit.Size(64, 2, 4, 2))
    monkeypatch.setitem(vit.MODELS, TOWER, vit.MODELS["diff_vit_debug_clip"])
    config, _ = diffclip.from_diffclip(read_state(assets / "diffclip_checkpoint.pt"))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "DiffCLIP-golden.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "configs")
    tag = released._diffclip(REPOSITORY)
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "DiffCLIP-golden", {"cc": tag})
    yield "DiffCLIP-golden"
    open_clip.factory._MODEL_CONFIG_PATHS.remove(tmp_path / "configs")
    open_clip.factory._MODEL_CONFIGS.pop("DiffCLIP-golden")


def test_a_tag_gives_the_model_of_the_released_file(tiny, hub, assets, tmp_path):
    """The authors' embeddings come out, with their normalisation; the second time nothing is converted."""
    cache = tmp_path / "cache"
    model, _, transform = open_clip.create_model_and_transforms(tiny, pretrained="cc", cache_dir=str(cache))
    golden = load_file(assets / "diffclip_io.safetensors")
    model.eval().double()
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(golden["image"]), golden["image_embed"], atol=1e-6, rtol=0)
        torch.testing.assert_close(model.encode_text(golden["text"]), golden["text_embed"], atol=1e-6, rtol=0)
    assert list(transform.transforms[-1].mean) == [0.485, 0.456, 0.406]
    (made,) = cache.rglob("open_clip_model.safetensors")
    before = made.stat()
    del hub.asked[:]
    open_clip.create_model(tiny, pretrained="cc", cache_dir=str(cache))
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert hub.asked == ["checkpoint_best.pt"]  # its headers: whether there is a newer one
    assert open_model(str(made.parent)).library == "open_clip"  # it is a whole folder


def test_a_file_that_is_no_diffclip_leaves_nothing(tiny, hub, tmp_path):
    buffer = io.BytesIO()
    torch.save({"state_dict": {"head.weight": torch.zeros(2, 2)}}, buffer)
    hub.files[REPOSITORY] = {"checkpoint_best.pt": buffer.getvalue()}
    with pytest.raises(RuntimeError, match=r"checkpoint_best\.pt holds 1 tensors"):
        open_clip.create_model(tiny, pretrained="cc", cache_dir=str(tmp_path / "cache"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if "openclip" in path.parts[-1] and path.is_dir()]


def test_tags_are_those_of_our_models_and_their_activation():
    for name, tags in released.TAGS.items():
        assert open_clip.list_pretrained_tags_by_model(name) == list(tags)
        for tag in tags.values():
            assert tag["quick_gelu"] is open_clip.get_model_config(name)["quick_gelu"]
