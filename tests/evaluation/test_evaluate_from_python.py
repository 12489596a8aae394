"""`diffvision.evaluate`: a spec, a path, an open model, several; and the same numbers as the command as JSON."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import diffvision
from diffvision import cli
from diffvision.data.datasets.digits import png
from diffvision.data.images.folders import ImageEvaluationFolder
from diffvision.evaluation import evaluate_command as command
from diffvision.models.architecture import architecture


@pytest.fixture(scope="module")
def data(colours):
    return colours / "zero_shot"


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
    mine = diffvision.Model("mine", "open_clip", opened.module, transform=opened.transform, tokenizer=opened.tokenizer)
    assert diffvision.evaluate(mine, data, num_workers=0) == measured
    capsys.readouterr()
    assert cli.main(["evaluate", "CLIP-debug", "--checkpoint=weights.pt", f"--data={data}", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["metrics"]["acc1"] == measured["zero_shot/colours/acc1"]
    assert (record["dataset"], record["model"], record["pretrained"]) == ("colours", "CLIP-debug", "weights.pt")


def test_weights_of_a_tag_are_recorded_beside_a_file_of_its_name(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").write_text("no weights")
    for model in (diffvision.open_model("CLIP-nano.digits"), "CLIP-nano.digits"):
        diffvision.evaluate(model, data, output="out.json", num_workers=0)
        (record,) = json.loads(Path("out.json").read_text())
        assert (record["model"], record["pretrained"]) == ("CLIP-nano", "digits")


def test_labels_are_kept_in_json_and_of_one_model(data, capsys):
    assert cli.main(["evaluate", "CLIP-debug", "twin=CLIP-debug", f"--data={data}", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["label"] for record in records] == ["CLIP-debug", "twin"]
    assert cli.main(["evaluate", "twin=CLIP-debug", f"--data={data}", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["model"], "label" in record) == ("CLIP-debug", False)
    assert cli.main(["evaluate", "V1/0.8=CLIP-debug", "CLIP-debug", f"--data={data}"]) == 1
    assert "the label 'V1/0.8' of CLIP-debug has a '/' in it" in capsys.readouterr().err


def test_a_run_s_directory_is_its_best_checkpoint_and_its_training_data_is_warned_of(data, opened, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    about = {"model": "CLIP-debug", "architecture": architecture(opened.module)}
    state = {f"model.{key}": value for key, value in opened.module.state_dict().items()}
    content = {"pytorch-lightning_version": "2.6", "state_dict": state, "diffvision": about}
    torch.save(content, tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / "config.yaml").write_text(f"data: {{init_args: {{train: [elsewhere, {data / 'test'}]}}}}")
    with pytest.warns(UserWarning, match="zero_shot/test"):
        measured = diffvision.evaluate(tmp_path, data, num_workers=0)
    out = capsys.readouterr().out
    assert out.startswith("zero_shot/colours: 3 classes, ")
    assert "\nCLIP-debug, " in out  # and the file
    assert measured == diffvision.evaluate(opened, data, num_workers=0)


def test_pictures_that_were_trained_on_are_warned_of_unless_they_are_divided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n in range(2):
        for folder in ("all", "divided/train", "divided/val"):
            file = tmp_path / folder / "ab"[n] / f"{n}.png"
            file.parent.mkdir(parents=True)
            file.write_bytes(png(np.zeros((8, 8, 3))))
    for name in ("all", "divided"):
        (tmp_path / "config.yaml").write_text(f"data: {{init_args: {{train: {name}}}}}")
        planned = [(ImageEvaluationFolder(name), ["zero_shot"])]
        with pytest.warns(UserWarning, match="all is what x was") if name == "all" else nullcontext():
            command._warn_of_training(SimpleNamespace(name="x", run=tmp_path), planned, "test")
