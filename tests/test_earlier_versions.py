"""Runs, checkpoints, exported folders and configurations that an earlier version wrote still open and resume.

Each archive in `assets/` has shards of coloured squares, an interrupted run of each task, folders written by
`diffvision export`, and what that version computed with them in expected.json.

`runs_0_1.tar.xz` was written before the package was divided into layers (commit c82ebe4). Its runs stopped after the
first of three epochs. `runs_0_2.tar.xz` was written before modules moved to `lab`, `models/vit.py` and
`training/fault_tolerance` (commit 1c57986). Its runs have EMA, and SIGTERM stopped them in the middle of the second
epoch. They were started from `recipes/`, whose class paths name modules in full:

    diffvision fit --config recipes/clip.yaml   # SIGTERM at step 8; also vision (step 8) and text (step 16)
    diffvision export runs/clip exported/openclip   # also runs/vision to timm, runs/text to transformers
    diffvision export v2 exported/transformers_v2   # a small randomly initialised diffv2-1m
    diffvision export runs/vision exported/int8.safetensors --to int8
    diffvision fit --config runs/clip/config.yaml --resume must   # in a copy: the final metrics of expected.json
"""

import csv
import json
import shutil
import tarfile
from pathlib import Path

import open_clip
import pytest
import timm
import torch

import diffvision
from diffvision.cli import main
from diffvision.models import language

ASSETS = Path(__file__).parent / "assets"


@pytest.fixture(params=["0_1", "0_2"])
def expected(request, tmp_path, monkeypatch):
    with tarfile.open(ASSETS / f"runs_{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


only_0_2 = pytest.mark.parametrize("expected", ["0_2"], indirect=True)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, 16, 16, generator=generator), torch.arange(1, 9)[None].repeat(2, 1)


@pytest.mark.quick("0_1-clip", "0_2-clip")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*epoch=0.*", "ignore::FutureWarning")
@pytest.mark.parametrize("task", ["clip", "vision", "text"])
def test_a_run_resumes_to_the_same_end(task, expected):
    assert main(["fit", "--config", f"runs/{task}/config.yaml", "--resume", "must"]) == 0
    _check_metrics(task, expected["final"][task])


@pytest.mark.quick("clip-0_2")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@only_0_2
@pytest.mark.parametrize("task", ["clip", "vision", "text"])
def test_a_recipe_with_old_class_paths_trains_to_the_same_end(task, expected):
    shutil.rmtree("runs")
    assert main(["fit", "--config", f"recipes/{task}.yaml"]) == 0
    _check_metrics(task, expected["final"][task])


def _check_metrics(task, final):
    rows = _rows(f"runs/{task}/metrics.csv")
    assert max(int(row["step"]) for row in rows) == final.pop("step")
    for name, value in final.items():
        assert float([row[name] for row in rows if row.get(name)][-1]) == pytest.approx(value, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("expected", ["0_1"], indirect=True)
@pytest.mark.usefixtures("expected")
def test_a_finished_run_is_extended_by_whole_epochs():
    """With these settings ModelCheckpoint saves at the end of training alone, where no epoch is unfinished."""
    text = Path("runs/vision/config.yaml").read_text()
    Path("last.yaml").write_text(
        text.replace("save_top_k: -1", "save_top_k: 0").replace("save_last: null", "save_last: true")
    )
    shutil.rmtree("runs/vision")
    for epochs in (1, 3):
        assert main(["fit", "--config", "last.yaml", "--resume", "auto", "--trainer.max_epochs", str(epochs)]) == 0
    steps = [int(row["step"]) for path in Path("runs/vision").glob("metrics*.csv") for row in _rows(path)]
    assert set(steps) == set(range(3 * 3))


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@torch.no_grad()
def test_an_exported_openclip_folder_opens(expected, inputs):
    images, texts = inputs
    model = open_clip.create_model("local-dir:exported/openclip").eval()
    torch.testing.assert_close(model.encode_image(images)[:, :4], torch.tensor(expected["openclip"]))
    torch.testing.assert_close(model.encode_text(texts)[:1, :4], torch.tensor(expected["openclip_text"]))


@torch.no_grad()
def test_an_exported_timm_folder_opens(expected, inputs):
    model = timm.create_model("local-dir:exported/timm", pretrained=True).eval()
    torch.testing.assert_close(model(inputs[0]), torch.tensor(expected["timm"]))


@torch.no_grad()
@only_0_2
def test_an_int8_file_opens(expected, inputs):
    model = diffvision.open_model("exported/int8.safetensors").module.eval()
    torch.testing.assert_close(model(inputs[0]), torch.tensor(expected["int8"]))


@torch.no_grad()
def test_a_saved_language_model_opens(expected, inputs):
    model = language.load("exported/language")
    torch.testing.assert_close(model(inputs[1])[0, -1, :4], torch.tensor(expected["language"]))


@torch.no_grad()
def test_the_line_of_code_in_a_transformers_folder_still_runs(expected, inputs):
    transformers = pytest.importorskip("transformers")
    assert (
        "from diffvision.models.hugging_face import" in Path("exported/transformers/modeling_diffvision.py").read_text()
    )
    model = transformers.AutoModelForCausalLM.from_pretrained("exported/transformers", trust_remote_code=True).eval()
    torch.testing.assert_close(model(inputs[1]).logits[0, -1, :4], torch.tensor(expected["transformers"]))


@torch.no_grad()
@only_0_2
def test_the_code_in_a_v2_folder_still_runs(expected, inputs):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("exported/transformers_v2", trust_remote_code=True).eval()
    torch.testing.assert_close(model(inputs[1]).logits[0, -1, :4], torch.tensor(expected["transformers_v2"]))
    model = diffvision.open_model("exported/transformers_v2").module
    torch.testing.assert_close(model(inputs[1])[0, -1, :4], torch.tensor(expected["transformers_v2_language"]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_checkpoint_and_folder_says_what_it_is(expected):
    hosts = {"clip": "open_clip", "vision": "timm", "text": "language"}
    for task, host in hosts.items():
        for path in Path("runs", task, "checkpoints").glob("*.ckpt"):
            model = diffvision.open_model(path)
            assert (model.host, model.run) == (host, Path("runs", task).absolute())
    for folder, host in {"openclip": "open_clip", "timm": "timm", "language": "language"}.items():
        assert diffvision.open_model(f"exported/{folder}").host == host
    pytest.importorskip("transformers")
    for folder in Path("exported").glob("transformers*"):
        assert diffvision.open_model(folder).host == "language"
