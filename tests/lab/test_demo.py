"""The lab's demos: the lesson of the image demo, and the language demo."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from diffvision.analysis.curves import Curve
from diffvision.demo import demo, images, images_page, report
from diffvision.lab.demo import lesson, text, text_page


@pytest.mark.slow
def test_a_lesson_that_was_trained_here_says_its_command():
    metrics = dict.fromkeys(images.COLUMNS.values(), 0.5)
    models = (*images.MODELS, lesson.LESSON_MODEL)
    content = lesson.lesson_of([report.Run(model, 0, 3_000_000, 60.0, 1234.0, metrics, {}, None) for model in models])
    section = images_page._lesson(content)
    assert f"{lesson.LESSON_MODEL}: digit 50%, ink 50%, paper 50%" in str(section)
    assert "diffvision demo --lesson --seeds 1" in str(section)


@pytest.mark.slow
def test_the_language_report_holds_its_table_and_pictures():
    rng = np.random.default_rng(0)
    metrics = {key: 0.25 for key, _, _ in text.ROWS.values()}
    for pair, length, depth in itertools.product(text.OPTIONS.needles, text.OPTIONS.lengths, text.OPTIONS.depths):
        metrics[f"needle/{pair}/accuracy/{length}/{depth:g}"] = 0.25
    logged = ["train/loss", "val/loss", "lambda/blocks.0.attn"]
    all_runs = [
        report.Run(
            model=model,
            seed=seed,
            parameters=361_000,
            seconds=60.0,
            speed=9876.0,
            metrics={key: value + 0.01 * seed for key, value in metrics.items()},
            curves={key: Curve([10, 20, 30], rng.random(3).tolist()) for key in logged},
            shown={
                "writes": "def main(<argv>)",
                "words": ["the", "code", "is", "7", "the", "code", "is"],
                "answer": [3, 4],
                "reads": {kind: rng.random(7).tolist() for kind in text_maps(model)},
            },
        )
        for seed in (0, 1)
        for model in text.MODELS
    ]
    models = {name: report.of_model(all_runs, model) for model, name in text.MODELS.items()}
    page = text_page.page(models, Path("runs/demo"))
    assert "0.255 ± 0.007" in page
    assert "26 ± 1" in page
    assert "9,876" in page
    assert "def main(&lt;argv&gt;)" in page
    assert len(re.findall("<svg", page)) >= 7


def text_maps(model: str) -> list[str]:
    return ["attention"] if model.startswith("transformer") else ["map 1", "map 2", "difference"]


@pytest.mark.nightly
def test_the_language_demo(tmp_path, capsys, monkeypatch):
    """`diffvision demo --language` with an eighth of its steps: the losses fall from the logarithm of 4,096 (8.3)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "STEPS", 150)
    demo(str(tmp_path), language=True)
    printed = capsys.readouterr().out
    assert (tmp_path / "language.html").stat().st_size > 50_000
    losses = re.search(r"validation loss\D+([\d.]+)\D+([\d.]+)\D+([\d.]+)", printed)
    assert losses is not None
    assert all(float(loss) < 7.5 for loss in losses.groups())
    assert "def main(" in printed
