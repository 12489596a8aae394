"""`diffvision interpolate`: the ends are the two models, and unequal models are refused."""

import json

import open_clip
import pytest
import torch

from diffvision import cli
from diffvision.export.export_commands import interpolate
from diffvision.export.model_folders import save_folder
from diffvision.opening import open_model


def weights(model) -> dict[str, torch.Tensor]:
    return open_model(model).module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIP-nano", "diff_vit_debug"])
def test_the_ends_are_the_two_models(tmp_path, name):
    before, after = f"{name}.digits", tmp_path / "after"
    model = open_model(before)
    with torch.no_grad():
        for value in model.module.parameters():
            value.add_(torch.rand_like(value) / 3)
    save_folder(model.module, after, config=model.config, preprocess=model.preprocess)
    for alpha in (0.0, 0.25, 1.0):
        interpolate(before, str(after), str(tmp_path / f"{alpha}"), alpha=alpha)
    start, end = weights(before), weights(after)
    assert all(torch.equal(value, start[key]) for key, value in weights(tmp_path / "0.0").items())
    assert all(torch.equal(value, end[key]) for key, value in weights(tmp_path / "1.0").items())
    between = open_model(tmp_path / "0.25")
    for key, value in between.module.state_dict().items():
        torch.testing.assert_close(value, 0.75 * start[key] + 0.25 * end[key])
    assert list(between.preprocess["mean"]) == list(model.preprocess["mean"])
    (config,) = (tmp_path / "0.25").glob("*.json")
    assert json.loads(config.read_text())["interpolated"]["alpha"] == 0.25


def test_unequal_models_and_other_bad_input_are_refused(tmp_path, capsys):
    target, nano = tmp_path / "out", "CLIP-nano.digits"
    refused = [
        (nano, "DiffCLIP-nano.digits", "0.5", "lambda_q1"),
        (nano, "CLIP-nano", "0.5", "new weights"),
        ("diffv2-nano.stdlib", nano, "0.5", "is a language model"),
        (nano, nano, "1.5", "alpha"),
    ]
    for first, second, alpha, reason in refused:
        assert cli.main(["interpolate", first, second, str(target), "--alpha", alpha]) == 1
        assert reason in capsys.readouterr().err
    model = open_model(nano)
    other = {"mean": [0.5, 0.5, 0.5]}
    save_folder(model.module, tmp_path / "mean", config=model.config, preprocess={**model.preprocess, **other})
    with pytest.raises(ValueError, match=r"preprocess.mean \[0.33"):
        interpolate(nano, str(tmp_path / "mean"), str(target))
    nano = "DiffCLIP-nano.digits"
    model = open_model(nano)
    model.config["text_cfg"]["block_type"] = "diffvision:v1:lambda_init=0.3"  # its weights have the same shapes
    text = open_clip.model._build_text_tower(64, model.config["text_cfg"], model.config["quick_gelu"])
    model.module.transformer = text.transformer
    save_folder(model.module, tmp_path / "lambda", config=model.config, preprocess=model.preprocess)
    with pytest.raises(ValueError, match=r"lambda_init 0.2 there and 0.3 here"):
        interpolate(nano, str(tmp_path / "lambda"), str(target))
    assert not target.exists()
