import itertools
import re

import numpy as np
import pytest
import yaml

from diffvision.analysis.curves import Curve
from diffvision.analysis.figures import ImageAttention
from diffvision.demo import demo, images, report, text

LAYERS = ("visual.trunk.blocks.0.attn", "visual.trunk.blocks.1.attn", "transformer.resblocks.0.attn")


def run(model: str, seed: int) -> report.Run:
    logged = ["train/loss", "zero_shot/digits/acc1", "train/logit_scale"]
    logged += [f"lambda/{name}" for name in LAYERS] if model.startswith("Diff") else []
    rng = np.random.default_rng(seed)
    return report.Run(
        model=model,
        seed=seed,
        parameters=3_000_000,
        seconds=60.0,
        speed=1234.0,
        metrics=dict.fromkeys(images.COLUMNS.values(), 0.5 + 0.1 * seed),
        curves={key: Curve([10, 20, 30], rng.random(3).tolist()) for key in logged},
        shown=[ImageAttention(rng.random((32, 32, 3)), rng.random((3 if "Diff" in model else 1, 4, 4)), "seven")],
    )


def test_report_holds_the_table_and_its_pictures():
    runs = [run(model, seed) for seed in (0, 1) for model in images.MODELS]
    page = images.page(runs)
    assert len(re.findall('src="data:image/png;base64,iVBOR', page)) == 5
    assert "55.0 ± 7.1" in page
    assert "3,000,000" in page
    assert "1,234" in page
    assert "http" not in page


def test_one_seed_has_no_spread():
    assert "±" not in images.page([run(model, 0) for model in images.MODELS])


def test_the_recipe_is_the_debug_configuration():
    settings = yaml.safe_load(report.recipe("clip/debug.yaml").read_text())
    assert settings["model"]["init_args"]["model"] == "DiffCLIP-debug"


def test_seeds_are_checked_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="seeds must be 1 or more, got 0"):
        demo(str(tmp_path / "out"), seeds=0)
    assert not (tmp_path / "out").exists()


def test_the_language_report_holds_its_table_and_pictures():
    rng = np.random.default_rng(0)
    metrics = {key: 0.25 for key, _, _ in text.ROWS.values()}
    for pair, length, depth in itertools.product(text.OPTIONS.needles, text.OPTIONS.lengths, text.OPTIONS.depths):
        metrics[f"needle/{pair}/accuracy/{length}/{depth:g}"] = 0.25
    logged = ["train/loss", "val/loss", "lambda/blocks.0.attn"]
    runs = [
        report.Run(
            model=model,
            seed=seed,
            parameters=361_000,
            seconds=60.0,
            speed=9876.0,
            metrics={key: value + 0.01 * seed for key, value in metrics.items()},
            curves={key: Curve([10, 20, 30], rng.random(3).tolist()) for key in logged},
            shown="def main(<argv>)",
        )
        for seed in (0, 1)
        for model in text.MODELS
    ]
    page = text.page(runs)
    assert len(re.findall('src="data:image/png;base64,iVBOR', page)) == 4
    assert "0.255 ± 0.007" in page
    assert "26 ± 1" in page
    assert "9,876" in page
    assert "def main(&lt;argv&gt;)" in page


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


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    """The README's first command: both models trained and compared, and DiffCLIP at 85% or more."""
    demo(str(tmp_path))
    printed = capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 50_000
    accuracy = re.search(r"zero-shot top-1\D+([\d.]+)\D+([\d.]+)", printed)
    assert accuracy is not None
    assert float(accuracy[2]) >= 85.0
