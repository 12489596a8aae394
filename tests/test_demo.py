import re

import numpy as np
import pytest
import yaml

from diffvision import demo
from diffvision.analysis.figures import Curve, LookedAt

LAYERS = ("visual.trunk.blocks.0.attn", "visual.trunk.blocks.1.attn", "transformer.resblocks.0.attn")


def run(model: str, seed: int) -> demo.Run:
    logged = ["train/loss", "zero_shot/digits/acc1", "train/logit_scale"]
    logged += [f"lambda/{name}" for name in LAYERS] if model.startswith("Diff") else []
    rng = np.random.default_rng(seed)
    return demo.Run(
        model=model,
        seed=seed,
        parameters=3_000_000,
        seconds=60.0,
        samples_per_second=1234.0,
        metrics=dict.fromkeys(demo.COLUMNS.values(), 0.5 + 0.1 * seed),
        curves={key: Curve([10, 20, 30], rng.random(3).tolist()) for key in logged},
        pictures=[LookedAt(rng.random((32, 32, 3)), rng.random((3 if "Diff" in model else 1, 4, 4)), "seven")],
    )


def test_report_holds_the_table_and_its_pictures():
    runs = [run(model, seed) for seed in (0, 1) for model in demo.MODELS]
    page = demo.page(runs)
    assert len(re.findall('src="data:image/png;base64,iVBOR', page)) == 5
    assert "55.0 ± 7.1" in page
    assert "3,000,000" in page
    assert "1,234" in page
    assert "http" not in page


def test_one_seed_has_no_spread():
    assert "±" not in demo.page([run(model, 0) for model in demo.MODELS])


def test_the_recipe_is_the_debug_configuration():
    settings = yaml.safe_load(demo.recipe().read_text())
    assert settings["model"]["init_args"]["model"] == "DiffCLIP-debug"


def test_seeds_are_checked_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="seeds must be 1 or more, got 0"):
        demo.demo(str(tmp_path / "out"), seeds=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    """The README's first command: both models trained and compared, and DiffCLIP at 85% or more."""
    demo.demo(str(tmp_path))
    printed = capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 50_000
    accuracy = re.search(r"zero-shot top-1\D+([\d.]+)\D+([\d.]+)", printed)
    assert accuracy is not None
    assert float(accuracy[2]) >= 85.0
