"""`diffvision inspect`: what it writes of image-text models and a language model, and what it refuses."""

import html
import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from diffvision import cli
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.inspection import inputs, inspect, inspecting
from diffvision.inspection.inspecting import open_models
from diffvision.models import language


def written(folder):
    """The text of the page, and the numbers, of a folder that holds all that it says."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    content = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
    assert sorted(file.name for file in folder.iterdir()) == sorted([*content["files"], "statistics.json"])
    pictures = [name for name in content["files"] if name.endswith(".png")]
    assert page.count("<img") == len(pictures)
    assert not re.search(r'\b(src|href|action|srcset)="(?!data:|#)', page)  # refers to nothing outside of it
    for tag in {*re.findall(r"</(\w+)>", page)}:
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>"), tag
    for name in pictures:
        with Image.open(folder / name) as image:
            assert image.format == "PNG"
            assert min(image.size) > 100
    return html.unescape(re.sub("<[^>]+>", "", page)), content["models"]


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A bright square on a dark ground, and its mask."""
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.full((40, 40, 3), 30, np.uint8)
    pixels[10:30, 10:30] = (250, 200, 40)
    Image.fromarray(pixels).save(folder / "square.png")
    mask = np.zeros((40, 40), np.uint8)
    mask[10:30, 10:30] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    return folder


@pytest.mark.slow
def test_a_pair_of_models_of_images_and_texts(tmp_path, photo):
    """A CLIP and a DiffCLIP side by side."""
    given = f"--image {photo}/square.png --mask {photo}/mask.png --versus CLIP-debug --output {tmp_path / 'pair'}"
    assert cli.main(["inspect", "DiffCLIP-debug", "--text", "- a yellow square, on <black>", *given.split()]) == 0
    words, models = written(tmp_path / "pair")
    assert list(models) == ["DiffCLIP-debug", "CLIP-debug"]
    assert "- a yellow square, on <black>" in words
    titles = ("Image: square.png", "Text tower: - a yellow square", "Image tower, layer by layer", "All numbers")
    assert sorted(titles, key=words.index) == list(titles)  # pictures first, the tables last
    (image, caption), (plain, _) = models["DiffCLIP-debug"], models["CLIP-debug"]
    assert [look["tower"] for look in (image, caption)] == ["image", "caption"]
    assert len(image["layers"]) == 4
    assert len(caption["layers"]) == 2
    for layer in image["layers"]:
        numbers = layer["numbers"]
        assert numbers["row_sum"] == pytest.approx([1 - lam for lam in numbers["lambda"]], abs=1e-5)
        assert numbers["rms_given"] == pytest.approx([0.2 * rms for rms in numbers["rms_after"]], rel=1e-4)
        assert numbers["noise/chance"] == [pytest.approx(0.75, abs=1e-3)]  # a quarter of the image is the square
        assert 0 < min(numbers["relative_entropy/difference"]) <= 1
    for layer in plain["layers"]:
        assert layer["numbers"]["row_sum"] == pytest.approx([1] * 4)
        assert layer["numbers"]["negative"] == [0] * 4
        assert "lambda" not in layer["numbers"]
        assert layer["numbers"]["rms_before"] == layer["numbers"]["rms_given"]
    relevance = image["captions"]["- a yellow square, on <black>"]
    assert -1 <= relevance["cosine"] <= 1
    assert np.sum(relevance["relevance"]) == pytest.approx(1, abs=1e-4)


def test_what_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(inspecting, "draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inspect(model="eyes=diff_vit_debug", output=str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat and the dog saw it. " * 30], 300)
    folder = tmp_path_factory.mktemp("models")
    language.save(language.create("diff-debug", vocab_size=300, max_length=32), folder / "diff", tokenizer)
    language.save(language.create("transformer-debug", vocab_size=300, max_length=32), folder / "plain", tokenizer)
    return folder


def test_a_page_of_a_language_model_and_its_answer(checkpoint, tmp_path):
    output = tmp_path / "text"
    given = ["--text", "the cat sat on the mat and the", "--answer", "cat sat", "--output", str(output)]
    assert cli.main(["inspect", str(checkpoint / "diff"), *given]) == 0
    _, models = written(output)
    ((look,),) = models.values()
    assert look["tower"] == "text"
    numbers = look["layers"][0]["numbers"]
    tokenizer = load_tokenizer(checkpoint / "diff")
    (passage,) = inputs.read_passages(["the cat sat on the mat and the"], ["cat sat"], tokenizer, 32)
    tokens, (start, stop) = len(passage.words), passage.answer
    assert "".join(passage.words[start:stop]).strip() == "cat sat"
    assert numbers["noise/chance"] == [pytest.approx((tokens - 1 - (stop - start)) / tokens)]
    assert max(numbers["effective_rank/map 1"]) <= tokens


@pytest.mark.slow
def test_a_model_of_two_variants(checkpoint, tmp_path):
    model = language.create("diff-debug", vocab_size=300, max_length=32, variant_by_layer="v1+standard")
    language.save(model, tmp_path / "mixed", checkpoint / "diff" / "tokenizer.json")
    inspect(str(tmp_path / "mixed"), text="the cat sat on the mat", output=str(tmp_path / "page"))
    words, models = written(tmp_path / "page")
    ((look,),) = models.values()
    v1, standard = ({key.partition("/")[2] for key in layer["numbers"]} for layer in look["layers"])
    assert {"map 1", "map 2", "difference"} <= v1
    assert standard >= {"attention"}
    assert "map 1" not in standard
    lam = look["layers"][0]["numbers"]["lambda"][0]
    sums = [np.mean(layer["numbers"]["row_sum"]) for layer in look["layers"]]
    assert sums == pytest.approx([1 - lam, 1], abs=1e-5)
    assert not re.search(r"\bnan\b", words)


def test_models_of_one_name_are_told_apart(checkpoint):
    plain, diff = str(checkpoint / "plain"), str(checkpoint / "diff")
    labelled = open_models(f"a={plain}", versus=f"b={diff}", tokenizer=None, device="cpu")
    assert [one.name for one in labelled] == ["a", "b"]
    same = open_models(f"a={plain}", versus=f"a={diff}", tokenizer=None, device="cpu")
    assert [one.name for one in same] == ["a A", "a B"]
    named = open_models("diff-debug", diff, tokenizer=None, device="cpu")
    assert [(one.name, one.weights) for one in named] == [("diff-debug", diff)]


def test_pictures_are_shown_as_the_model_has_them(photo):
    (picture,) = inputs.read_pictures([str(photo / "square.png")], [str(photo / "mask.png")])
    config = timm.data.resolve_model_data_config(timm.create_model("diff_vit_debug"))
    seen = inputs.transform_picture(picture, timm.data.create_transform(**config, is_training=False))
    assert seen.tensor.shape == (3, 32, 32)
    assert seen.shown[16, 16].tolist() == pytest.approx([250 / 255, 200 / 255, 40 / 255], abs=0.01)
    assert seen.shown[0, 0].tolist() == pytest.approx([30 / 255] * 3, abs=0.01)
    patches = inputs.share_by_patch(seen.inside, 4, 4).view(4, 4)
    assert patches[1:3, 1:3].min() > 0.9
    assert patches[0].max() < 0.1


def test_samples_know_their_regions():
    for picture in inputs.sample_pictures():
        region = np.asarray(picture.region)
        assert region.shape == picture.image.size[::-1]
        assert set(np.unique(region)) == {0, 255}
        assert 0.03 < (region > 0).mean() < 0.6
        (caption,) = picture.captions
        assert any(word in caption for word in ("three", "seven", "zero"))


CLIP, VIT, PHOTO, DIFF = "DiffCLIP-debug", "diff_vit_debug", "{photo}/square.png", "{models}/diff"


@pytest.mark.parametrize(
    ("word", "given"),
    [
        ("is there already", {"model": VIT, "output": "{tmp}/file"}),
        ("--checkpoint", {"model": "diff-debug"}),
        ("ResNet", {"model": "resnet10t"}),
        ("no image file", {"model": VIT, "image": "{tmp}/none.png"}),
        ("2 masks", {"model": VIT, "image": [PHOTO], "mask": [PHOTO, PHOTO]}),
        ("masks", {"model": VIT, "mask": [PHOTO]}),
        ("answers", {"model": VIT, "answer": "x"}),
        ("texts .*9", {"model": CLIP, "text": list("abcdefghi")}),
        ("24 tokens", {"model": CLIP, "text": "a seven " * 20}),
        ("an image-text model and diff_vit_debug is an image model", {"model": CLIP, "versus": VIT}),
        ("a language model and CLIP-debug", {"model": DIFF, "versus": "CLIP-debug"}),
        ("two models", {"model": DIFF, "versus": "x", "checkpoint": "y"}),
        ("images are given", {"model": DIFF, "image": [PHOTO]}),
        ("'horse'", {"model": DIFF, "text": "the cat", "answer": "horse"}),
    ],
)
def test_bad_input_is_refused_before_work(word, given, checkpoint, photo, tmp_path, monkeypatch):
    monkeypatch.setattr(inspecting, "_measure", lambda *_: pytest.fail("work has begun"))
    (tmp_path / "file").write_text("x")
    places = {"tmp": tmp_path, "photo": photo, "models": checkpoint}
    filled = {
        name: [one.format(**places) for one in value] if isinstance(value, list) else value.format(**places)
        for name, value in ({"output": "{tmp}/new"} | given).items()
    }
    with pytest.raises((ValueError, FileNotFoundError), match=word):
        inspect(**filled)
    assert not (tmp_path / "new").exists()
