"""The study of trained models on small random ones: families are one function at first, and the whole runs."""

import numpy as np
import pytest
import timm
import torch

import pretrained
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.export.model_folders import save_folder
from diffvision.models import language
from diffvision.nn import DiffAttentionV2


@pytest.fixture
def text(tmp_path):
    """A small language model, its tokenizer, and random text in its tokens."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat 0123456789"], 300)
    model = language.create("transformer-debug", vocab_size=tokenizer.vocab_size)
    language.save(model, tmp_path / "text", tokenizer)
    splits = {split: torch.randint(tokenizer.vocab_size, (1000,)) for split in ("train", "validation", "test")}
    torch.save(splits, tmp_path / "text.pt")
    return tmp_path / "text.pt"


@pytest.fixture
def images(tmp_path):
    """A small ViT of patches of 14 pixels, and random images."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=42, patch_size=14, num_classes=0, depth=2)
    sizes = {"img_size": 42, "patch_size": 14, "num_classes": 0, "depth": 2}
    save_folder(model, tmp_path / "images", config=sizes)
    splits = ("train", "validation", "test")
    made = {name: (torch.randint(256, (64, 28, 28)).byte(), torch.randint(10, (64,)).byte()) for name in splits}
    torch.save(made, tmp_path / "images.pt")
    return tmp_path / "images.pt"


@pytest.mark.parametrize("part", ["text", "images"])
def test_families_are_one_function_at_first(part, request):
    data = pretrained.PARTS[part](request.getfixturevalue(part))
    batch = next(data.batches(1))
    with torch.no_grad():
        losses = {family: data.loss(data.create(family).eval(), batch).item() for family in pretrained.FAMILIES}
    assert np.ptp(list(losses.values())) < 2e-6 * losses["plain"]


def test_v2_and_its_control_differ_in_the_sign_alone(text):
    data = pretrained.Text(text)
    models = {family: data.create(family) for family in ("sum", "V2")}
    trained = {
        family: sum(p.numel() for p in model.parameters() if p.requires_grad) for family, model in models.items()
    }
    assert trained["sum"] == trained["V2"]
    x = torch.randn(1, 5, 64)
    lambdas = [
        [layer.compute_lambda(x) for layer in model.modules() if isinstance(layer, DiffAttentionV2)]
        for model in models.values()
    ]
    for added, subtracted in zip(*lambdas, strict=True):
        assert torch.equal(added, -subtracted)


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["text", "images"])
def test_the_study_in_its_quick_form(part, tmp_path, monkeypatch, capsys, request):
    file = request.getfixturevalue(part)
    monkeypatch.chdir(tmp_path)
    for what in ("tune", "train"):
        pretrained.main([part, what, "--quick", f"--data={file}"])
    capsys.readouterr()
    pretrained.main([part, "report", "--quick", f"--data={file}"])
    printed = capsys.readouterr().out
    assert "16 runs; 16 are done, 0 diverged" in printed
    assert "V2 from sum" in printed
    assert "nan" not in printed
