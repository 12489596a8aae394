"""`diffvision.evaluate`: a spec, a path, an open model, several; and the same numbers as the command as JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import diffvision
from diffvision import cli
from diffvision.data.made.digits import png
from diffvision.data.shards.writer import write_evaluation_split, write_lines


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("made") / "colours", np.random.default_rng(0)
    images = [png(rng.integers(0, 256, (32, 32, 3))) for _ in range(6)]
    rows = ({"__key__": f"{i:03d}", "png": image, "cls": str(i % 2)} for i, image in enumerate(images))
    write_evaluation_split(root / "test", rows)
    write_lines(root / "classnames.txt", ["one", "two"])
    write_lines(root / "zeroshot_classification_templates.txt", ["a {c}"])
    return root


@pytest.fixture(scope="module")
def opened():
    torch.manual_seed(0)
    return diffvision.open_model("CLIP-debug")


def test_a_spec_a_path_and_an_open_model_are_the_same(data, opened, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(opened.module.state_dict(), "weights.pt")
    measured = diffvision.evaluate(opened, data, num_workers=0)
    assert {"zero_shot/colours/acc1"} <= measured.keys()
    assert "CLIP-debug, untrained weights" in capsys.readouterr().out
    assert diffvision.evaluate("CLIP-debug", [data], checkpoint="weights.pt", num_workers=0) == measured
    capsys.readouterr()
    assert cli.main(["evaluate", "CLIP-debug", "--checkpoint=weights.pt", f"--data={data}", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["metrics"]["acc1"] == measured["zero_shot/colours/acc1"]
    assert (record["dataset"], record["model"], record["pretrained"]) == ("colours", "CLIP-debug", "weights.pt")


def test_several_models_by_label(data, opened):
    torch.manual_seed(0)
    results = diffvision.evaluate([opened, "twin=CLIP-debug"], str(data), num_workers=0)
    assert list(results) == ["CLIP-debug", "twin"]
    assert results["CLIP-debug"]["zero_shot/colours/acc1"] >= 0


def test_a_module_with_what_belongs_to_it(data, opened):
    mine = diffvision.Model("mine", "open_clip", opened.module, transform=opened.transform, tokenizer=opened.tokenizer)
    measured = diffvision.evaluate(opened, data, num_workers=0)
    assert diffvision.evaluate(mine, data, num_workers=0) == measured


def test_errors_are_exceptions(data, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"model is an object of Linear: .* diffvision\.Model\(name="):
        diffvision.evaluate(nn.Linear(1, 1), data)
    with pytest.raises(ValueError, match="CLIP-debug is open already: give checkpoint to open_model"):
        diffvision.evaluate(opened, data, checkpoint="x.pt")
    with pytest.raises(ValueError, match="the nearest names are CLIP-debug"):
        diffvision.evaluate("CLIP-debgu", data)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        diffvision.evaluate([opened, "runs/nothing.ckpt"], data)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        diffvision.evaluate(Path("CLIP-debug"), data)
    with pytest.raises(ValueError, match="there is no nowhere"):
        diffvision.evaluate(opened, "nowhere")


def test_the_names_of_the_package_are_the_commands():
    from diffvision.comparison.command import compare

    assert diffvision.compare is compare
    assert {"compare", "evaluate", "fit"} <= set(diffvision.__all__) & set(dir(diffvision))
