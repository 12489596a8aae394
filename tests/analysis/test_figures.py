"""Figures: what is in them, as far as a test can see; how they look was judged by eye."""

import io
import math

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from diffvision.analysis import figures
from diffvision.analysis.curves import Curve
from diffvision.analysis.figures import ImageAttention, runs


@pytest.fixture(autouse=True)
def _global_state_is_left_alone():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


def opened(figure):
    image = Image.open(io.BytesIO(figures.png(figure)))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


def test_seeds_become_mean_and_spread():
    curves = [Curve([0, 10, 20], [0.0, 1.0, 2.0]), Curve([5, 20], [1.5, 3.0])]
    steps, mean, spread = runs._over_seeds(curves)
    assert steps.tolist() == [5, 10, 20]  # what both cover
    assert mean.tolist() == pytest.approx([1.0, 1.5, 2.5])
    assert spread[0] == pytest.approx(np.std([0.5, 1.5], ddof=1))


def test_run_curves_draw_every_run_in_its_colour():
    steps = list(range(50))
    by_name = {"CLIP": [Curve(steps, [1.0] * 50)], "DiffCLIP": [Curve(steps, [2.0] * 50), Curve(steps, [3.0] * 50)]}
    pixels = opened(figures.run_curves({"loss": by_name, "accuracy": by_name})).reshape(-1, 3)
    for colour in figures.COLOURS[:2]:
        assert (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=1).sum() > 200


def test_a_run_has_a_panel_for_each_metric_that_says_something():
    curve, nothing = Curve([0, 1], [0.8, 0.7]), Curve([0, 1], [0.0, 0.0])
    layers = {f"lambda/blocks.{depth}.attn": curve for depth in range(3)}
    none = {"train/skipped_steps": nothing, "zero_shot/x/acc5": Curve([1], [math.nan]), "data/seen": curve}
    figure = figures.run_overview({"val/acc1": curve, "train/loss": curve, "lambda": curve, **layers, **none})
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert titles == ["train/loss", "val/acc1", "λ, a line a layer"]
    assert len(figure.axes[2].lines) == 3
    assert opened(figures.run_overview({})).size  # a run that logged nothing


def test_lambda_curves_part_the_towers():
    assert runs._tower("visual.trunk.blocks.3.attn") == "image tower"
    assert runs._tower("text.transformer.resblocks.0.attn") == "text tower"
    assert runs._tower("blocks.11.attn") == "blocks"
    curve = Curve([0, 1], [0.8, 0.7])
    one = opened(figures.lambda_curves({"visual.trunk.blocks.0.attn": curve}))
    two = opened(figures.lambda_curves({"visual.trunk.blocks.0.attn": curve, "transformer.resblocks.0.attn": curve}))
    assert two.shape[1] == pytest.approx(2 * one.shape[1], abs=2)


def test_the_differences_colours_are_centred_at_zero():
    flat = np.full((2, 4, 4), 0.01)
    zero = np.zeros((1, 4, 4))
    zero[0, 0, 0] = 0.5  # a positive outlier alone must not turn zero blue
    row = ImageAttention(np.zeros((8, 8, 3)), np.concatenate([flat, zero]), "seven")
    pixels = opened(figures.attention_panels([row], "layer 3")).reshape(-1, 3).astype(int)
    white = np.asarray(mpl.colormaps["RdBu_r"](0.5)[:3]) * 255
    assert (np.abs(pixels - white).max(axis=1) <= 2).sum() > 5000
    one_map = ImageAttention(np.zeros((8, 8, 3)), flat[:1])
    assert (
        opened(figures.attention_panels([one_map, one_map])).shape[1] < opened(figures.attention_panels([row])).shape[1]
    )


def test_metric_bars_take_seeds_and_single_values():
    metrics = {"top-1": {"CLIP": [0.8, 0.9], "DiffCLIP": [0.85]}, "R@1": {"CLIP": [0.1, 0.2], "DiffCLIP": [0.3]}}
    assert opened(figures.metric_bars(metrics)).shape[1] > 400
    assert opened(figures.metric_bars({"speed": {"CLIP": [1200.0]}}, unit="samples/s")).size
