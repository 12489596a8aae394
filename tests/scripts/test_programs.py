"""What the scripts that run other people's programs make for them."""

from pathlib import Path

import open_clip
import timm
import torch

import openclip_inputs
from diffvision.data.images.folders import EvaluationFolder
from diffvision.data.shards.writer import write_evaluation_split, write_shards
from diffvision.evaluation.prompts import prompts_of

IMAGE = b"not decoded here"


def test_digits_get_the_names_of_imagenet(tmp_path: Path):
    digits = [{"__key__": f"{i}", "cls": str(i % 3), "png": IMAGE, "txt": "the digit"} for i in range(4)]
    write_shards(tmp_path / "digits/train", digits, per_shard=2)
    write_evaluation_split(tmp_path / "digits/zero_shot/test", digits)
    openclip_inputs.as_imagenet(tmp_path / "digits", tmp_path / "named")
    written = [(sample["png"], sample["txt"]) for sample in openclip_inputs.samples(tmp_path / "named/train")]
    names = ["tench", "goldfish", "great white shark", "tench"]
    assert written == [(IMAGE, f"a photo of a {name}.".encode()) for name in names]
    images = sorted(path.relative_to(tmp_path / "named/images") for path in (tmp_path / "named/images").rglob("*.png"))
    assert images == [Path("0/0.png"), Path("0/3.png"), Path("1/1.png"), Path("2/2.png")]
    prompts = prompts_of(EvaluationFolder(tmp_path / "named/zero_shot"))
    assert list(prompts.classnames) == list(open_clip.IMAGENET_CLASSNAMES)
    assert len(prompts.templates) == len(open_clip.OPENAI_IMAGENET_TEMPLATES)


def test_a_classifier_becomes_an_image_tower(tmp_path: Path):
    classifier = timm.create_model("diff_vit_debug_clip", num_classes=10)
    torch.save(classifier.state_dict(), tmp_path / "classifier.pt")
    openclip_inputs.with_tower("DiffCLIP-debug", tmp_path / "classifier.pt", tmp_path / "start.pt")
    model = open_clip.create_model("DiffCLIP-debug", pretrained=str(tmp_path / "start.pt"))
    tower = {name: value for name, value in classifier.state_dict().items() if not name.startswith("head.")}
    torch.testing.assert_close(dict(model.visual.trunk.state_dict()), tower, rtol=0, atol=0)
