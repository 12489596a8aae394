"""Model cards: of a run, of no run, and nothing hostile in them."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import timm
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from diffvision import adapt
from diffvision.export.card import attention_layers, bibtex, last_results, model_card, write_card
from diffvision.export.finite_weights import open_for_export
from diffvision.opening import Model


def test_the_card_of_a_run(exported):
    card = ModelCard.load(exported / "clip" / "README.md")
    assert card.data.library_name == "open_clip"
    assert card.data.pipeline_tag == "zero-shot-image-classification"
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["diffvision", "differential-attention"]
    text = card.text
    assert "| attention, image tower | v1, 4 layers of 2 heads of 16, lambda_init 0.8 |" in text
    assert "after 20 steps" in text  # the checkpoint's, not the run's last
    assert "| zero_shot/digits/acc1 | 0.5000 |" in text
    assert "someone" not in text  # no path of the configuration
    assert "hammoud2025diffclip" in text
    vision = ModelCard.load(exported / "vision" / "README.md")
    assert (vision.data.license, vision.data.library_name) == (None, "timm")
    assert "after 40 steps" in vision.text
    assert "| val/acc1 | 0.6000 |" in vision.text


def test_without_a_run_nothing_is_invented(exported, tmp_path):
    write_card(tmp_path, open_for_export(exported / "vision"))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    text = (tmp_path / "README.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Load it", "## Versions", "## Sources"]
    assert "![" not in text


@pytest.mark.parametrize("kind", ["clip", "vision"])
def test_the_lines_that_load_it_run(exported, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(exported / kind)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "image.jpg")
    text = (exported / kind / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code.replace("image.jpg", str(tmp_path / "image.jpg")), "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


def test_models_of_others():
    """timm's own: no import of this package; adapted: what it became."""
    model = timm.create_model("plain_vit_debug")
    kept = timm.data.resolve_model_data_config(model)
    source = Model("vit_other", "timm", model, {"num_classes": 1000}, preprocess=kept)
    text = model_card(source)
    assert "differential" not in text.partition("## Versions")[0].replace("library", "")
    adapt(model, "v2")
    text = model_card(source)
    assert "import diffvision, timm" in text
    assert "| attention | v2, 4 layers of 4 heads of 16 |" in text
    assert "ye2026differential" in text
    plain = Model("test_vit", "timm", timm.create_model("test_vit"), {"num_classes": 1000}, preprocess=kept)
    assert not attention_layers(plain.module)
    assert "import diffvision" not in model_card(plain)


def test_metrics_are_those_of_the_weights():
    curves = {"val/loss": ([9, 19, 29], [3.0, 2.0, 2.5]), "train/loss": ([5, 25], [3.0, 2.0])}
    assert last_results(curves, 20) == ({"val/loss": 2.0}, 20)
    assert last_results(curves, None) == ({"val/loss": 2.5}, 30)
    assert last_results(curves, 5) == ({}, None)


def test_sources_follow_the_layers():
    assert bibtex(["standard"], "test_convnet", "timm") == ""
    assert "2510.06949" in bibtex(["gda"], "gda_vit", "timm")
    assert "2501.17486" in bibtex(["v1_dint"], "dint_vit", "timm")
    assert "2511.00833" in bibtex(["vca"], "vca_vit", "timm")
    assert "2505.16333" in bibtex(["dex"], "ViT-B-32", "open_clip")
    assert "2508.18387" in bibtex(["integral"], "integral_vit", "timm")
    assert "diffclip" not in bibtex(["standard"], "CLIP-ViT-B-16", "open_clip")


@pytest.mark.parametrize(
    ("name", "is_differential"), [("gated", False), ("sink", False), ("integral", False), ("diff", True)]
)
def test_a_card_calls_differential_what_takes_a_difference(name, is_differential, tmp_path):
    timm.models.save_for_hf(timm.create_model(f"{name}_vit_debug"), tmp_path, safe_serialization=True)
    card = ModelCard(model_card(open_for_export(tmp_path)))
    assert ("differential-attention" in card.data.tags) == is_differential
    assert ("with differential attention" in card.text) == is_differential
    assert ("2410.05258" in card.text) == is_differential


def test_the_language_models_card(runs):
    text = model_card(open_for_export(runs.paths["text"]))
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "| parameters |" in text


HOSTILE = [
    "<script>alert(1)</script>",
    "a | b\n\n# Heading\n\n<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1)) ![seen](https://example.org/seen.png)",
    "`<b>`` \\| <i>```\n</details><script>alert(2)</script>\n```",
    "---\nlicense: mit\n---\n<!-- x --> &lt;script&gt;",
]


class _Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src")]

    def handle_comment(self, data):
        self.tags.append("comment")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_card_shows_what_it_is_given(hostile, exported, tmp_path):
    """Names of metrics and models are text, in the card as the Hub renders it."""
    source = open_for_export(exported / "vision")
    plain = model_card(source, {"val/x": 0.5}, 2)
    metrics = {f"val/{hostile}": 0.5, "val/inf": math.inf, "val/nan": math.nan}
    card = model_card(replace(source, name=hostile), metrics, 2, license=hostile)
    front, text = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["license"] == hostile
    page = _Tags(MarkdownIt("commonmark").enable("table").render(text))
    known = {*_Tags(MarkdownIt("commonmark").enable("table").render(plain.split("\n---\n", 1)[1])).tags}
    assert set(page.tags) <= known
    assert page.links == []
    assert page.tags.count("h1") == 1
