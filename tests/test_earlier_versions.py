"""Runs, checkpoints, exported folders and configurations that an earlier version wrote still open and resume.

`assets/runs_0_1.tar.xz` was written before the package was divided into rooms (commit c82ebe4). It holds shards of
coloured squares, a run of each task that was stopped after the first of three epochs, the folders that `diffvision
export` made of finished runs, and in expected.json what that version computed with them.
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

ARCHIVE = Path(__file__).parent / "assets" / "runs_0_1.tar.xz"


@pytest.fixture
def expected(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, 3, 16, 16, generator=generator), torch.arange(1, 9)[None].repeat(2, 1)


@pytest.mark.quick("clip")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*epoch=0.*")
@pytest.mark.parametrize("task", ["clip", "vision", "text"])
def test_a_run_resumes_to_the_same_end(task, expected):
    assert main(["fit", "--config", f"runs/{task}/config.yaml", "--resume", "must"]) == 0
    rows = _rows(f"runs/{task}/metrics.csv")
    final = expected["final"][task]
    assert max(int(row["step"]) for row in rows) == final.pop("step")
    for name, value in final.items():
        assert float([row[name] for row in rows if row.get(name)][-1]) == pytest.approx(value, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
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
    assert diffvision.open_model("exported/transformers").host == "language"
