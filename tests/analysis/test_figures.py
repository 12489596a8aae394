"""Figures: what is in them, as far as a test can see; how they look was judged by eye."""

import io

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from diffvision.analysis import figures
from diffvision.analysis.curves import Curve
from diffvision.analysis.figures import ImageAttention, colours_of
from diffvision.analysis.figures import training_runs as runs


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
    for colour in colours_of(by_name).values():
        assert (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=1).sum() > 200


def test_lambda_has_a_panel_for_each_tower_and_a_line_for_each_layer():
    curve = Curve([0, 1], [0.8, 0.7])
    names = [f"blocks.{depth}.attn" for depth in range(8)] + ["visual.blocks.11.attn", "transformer.resblocks.0.attn"]
    figure = figures.lambda_curves(dict.fromkeys(names, curve))
    assert [ax.get_title() for ax in figure.axes] == ["blocks", "image tower", "text tower"]
    assert [len(ax.lines) for ax in figure.axes] == [8, 1, 1]
    legends = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in figure.axes]
    assert legends == [["layer 0", "layer 7"], ["layer 11"], ["layer 0"]]
    assert opened(figure).size


def attention(maps, label=""):
    return ImageAttention(np.zeros((8, 8, 3)), np.asarray(maps), label)


def test_attention_panels_have_a_column_for_each_map_of_each_model():
    rng = np.random.default_rng(0)
    diff, plain = rng.random((3, 4, 4)), rng.random((1, 4, 4))
    one = figures.attention_panels({"CLIP": [attention(plain)]}, "layer 3")
    both = figures.attention_panels({"CLIP": [attention(plain)] * 2, "DiffCLIP": [attention(diff)] * 2})
    assert opened(one).shape[1] < opened(both).shape[1]
    titles = [ax.get_title().strip() for ax in both.axes[:5]]
    assert titles == ["image", "attention", "map 1", "map 2", "difference"]
    maps = [ax.images[1] for ax in both.axes if len(ax.images) == 2]
    assert len(maps) == 2 * 4
    assert len({picture.norm.vmax for picture in maps}) == 1  # one scale of colours
    assert {picture.get_interpolation() for picture in maps} == {"bicubic"}
