"""The lab's demos: the lesson of the image demo, and the language demo."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from diffvision.analysis.curves import Curve
from diffvision.analysis.page import html_page
from diffvision.demo import demo, images, report
from diffvision.lab.demo import lesson, text, text_page


@pytest.mark.slow
def test_a_lesson_that_was_trained_here_says_its_command():
    metrics = dict.fromkeys(images.COLUMNS.values(), 0.5)
    models = (*images.MODELS, lesson.LESSON_MODEL)
    content = lesson.lesson_of([report.Run(model, 0, 3_000_000, 60.0, 1234.0, metrics, {}, None) for model in models])
    section = lesson.section_of(content)
    assert f"{lesson.LESSON_MODEL}: digit 50%, ink 50%, paper 50%" in str(section)
    assert "diffvision demo --lesson --seeds 1" in str(section)


def test_the_lesson_ships_with_the_package():
    """With 0.8 the digit is right and the colours are not; every metric has a value for each seed."""
    content = json.loads(lesson.LESSON.read_text())
    assert set(content["models"]) == {*images.MODELS, lesson.LESSON_MODEL}
    seeds = content["made"]["seeds"]
    for metrics in content["models"].values():
        assert set(metrics) == set(images.COLUMNS.values())
        assert all(len(values) == seeds for values in metrics.values())
    digit, ink = (
        {name: np.mean(m[f"colours/{part}"]) for name, m in content["models"].items()} for part in ("digit", "ink")
    )
    assert min(digit.values()) > 0.8
    assert ink[lesson.LESSON_MODEL] < min(ink[model] for model in images.MODELS)


def test_the_lesson_that_ships_with_the_package_is_in_the_report(tmp_path):
    shipped = lesson.lesson(tmp_path, 1, train=False)
    html = html_page("", "", [shipped])
    assert "DiffCLIP-debug: digit" in html
    assert json.loads(lesson.LESSON.read_text())["made"]["command"] in html


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
