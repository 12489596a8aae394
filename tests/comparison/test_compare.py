"""`diffvision compare`: trained runs next to each other, seeds, other models, its files, and what it refuses."""

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from diffvision import open_model
from diffvision.cli import main
from diffvision.comparison import compare
from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.evaluation.evaluate_command import evaluate
from diffvision.models import language

ARCHIVE = Path(__file__).parents[1] / "assets" / "runs.tar.xz"
QUIET = {"rounds": 0, "num_workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of runs, and two models made from one of them, as of two seeds each."""
    root = tmp_path_factory.mktemp("trained")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    text = (root / "runs" / "vision" / "config.yaml").read_text()
    checkpoint = torch.load(root / "runs" / "vision" / "checkpoints" / "epoch=0.ckpt", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for lr in ("0.001", "0.004"):
        for seed in ("0", "1"):
            run = root / "runs" / f"lr{lr}-{seed}"
            shutil.copytree(root / "runs" / "vision", run)
            seeded = re.sub(r"(seed(_everything)?): \d+", rf"\g<1>: {seed}", text).replace("lr: 0.001", f"lr: {lr}")
            (run / "config.yaml").write_text(seeded)
            changed = dict(checkpoint["state_dict"])
            for name, value in changed.items():
                if value.is_floating_point() and value.numel() > 1 and "lambda" not in name:
                    noise = torch.randn(value.shape, generator=generator)
                    changed[name] = value + 0.3 * float(lr) / 0.001 * value.std() * noise
            content = checkpoint | {"state_dict": changed}
            if lr == "0.001":
                del content["current_model_state"]  # without EMA
            torch.save(content, run / "checkpoints" / "epoch=0.ckpt")
    return root


@pytest.fixture
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_seeds_of_two_models(here, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("page.html", "numbers.json")]
    runs = [f"[slow]=runs/lr0.001-{seed}" for seed in (0, 1)] + [f"fast=runs/lr0.004-{seed}" for seed in (0, 1)]
    arguments = f"--rounds 1 --batch_size 4 --num_workers 0 --device cpu --output {','.join(files)}"
    assert main(["compare", *runs, *arguments.split()]) == 0
    out = capsys.readouterr().out
    assert "[slow]: runs/lr0.001-1/checkpoints/epoch=0.ckpt (last, step 3)" in out
    assert "fast: runs/lr0.004-1/checkpoints/epoch=0.ckpt (last, step 3, averaged weights (EMA))" in out
    assert "classification/images, 9 samples" in out
    assert re.search(r"acc1 +\[slow\] +\d+\.\d ± \d+\.\d", out)
    assert "ratio [lowest, highest]" in out  # no markup
    assert max(map(len, out.splitlines())) <= 120  # paths alone are wider than 80

    numbers = json.loads(Path(files[1]).read_text())
    (acc1,) = [row for row in numbers["metrics"] if row["metric"] == "classification/images/acc1"]
    settings = {"data": "data/images", "tasks": "classification", "num_workers": 0, "device": "cpu"}
    for label, lr in (("[slow]", "0.001"), ("fast", "0.004")):
        each = [evaluate(f"runs/lr{lr}-{seed}/checkpoints/epoch=0.ckpt", **settings) for seed in (0, 1)]
        assert acc1["values"][label] == [metrics["classification/images/acc1"] for metrics in each]
    assert " ".join(capsys.readouterr().out.split()).count("averaged weights (EMA)") == 2  # of `evaluate`
    assert acc1["differences"]["fast"]["method"] == "too few seeds (2 < 3)"
    fast, module = numbers["models"][1], open_model("runs/lr0.004-0/checkpoints/epoch=0.ckpt").module
    assert fast["parameters"] == sum(p.numel() for p in module.parameters())
    assert set(fast["lambda"]) == {"blocks.0.attn", "blocks.1.attn"}
    assert len(fast["lambda"]["blocks.0.attn"]) == 2
    assert fast["speed_ratio"]["lowest"] <= fast["speed_ratio"]["highest"]

    page = Path(files[0]).read_text()
    assert page.count("<img") == 2  # curves over steps, lambda
    assert "Across seeds: mean ± standard deviation" in page
    assert "averaged weights (EMA)" in page


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_and_what_became_of_it(here, capsys):
    """The run's checkpoint of the first epoch and the exported end, on the data that the run names."""
    comparison = compare(["runs/clip", "exported/openclip"], **QUIET)
    assert comparison.labels == ["start", "openclip"]
    assert [row.metric for row in comparison.rows] == [
        f"zero_shot/images/{m}" for m in ("acc1", "mean_per_class_recall")
    ]
    acc1 = comparison.rows[0].differences["openclip"]
    assert (acc1.method, acc1.word) == ("too few independent samples (9 < 10)", "")
    assert "too few independent samples (9 < 10)" in " ".join(str(comparison).split())
    assert comparison.models[0].curves["train/loss"][0].steps[-1] > 0
    assert not comparison.models[1].curves
    assert str(comparison).strip() in re.sub(r"[ \t]+$", "", capsys.readouterr().out, flags=re.M)
    assert max(map(len, str(comparison).splitlines())) <= 80
    again = compare(["runs/clip", "exported/openclip"], data="data/images", tasks="zero_shot", **QUIET)
    assert again.to_dict()["metrics"] == comparison.to_dict()["metrics"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_language_models_are_compared_by_their_loss(here):
    comparison = compare(["runs/text", "end=exported/language"], data="data/text/train", **QUIET)
    assert [row.name for row in comparison.rows] == ["nll", "perplexity"]
    nll, perplexity = comparison.rows
    assert torch.tensor(nll.values["end"][0]).exp().item() == pytest.approx(perplexity.values["end"][0])
    assert nll.differences["end"].word == "lower"  # it was trained three times as long
    assert [[*comparison.towers(one)] for one in comparison.models] == [["text"], ["text"]]
    assert perplexity.differences["end"].low < perplexity.differences["end"].value < perplexity.differences["end"].high


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_language_models_of_two_tokenizers(here, tmp_path):
    """Their tokens differ, so only the bits of each byte compare; no interval, because their samples differ."""
    text = "the red square and the blue one\n" * 20
    (tmp_path / "text.txt").write_text(text)
    model = language.create("diffv2-debug", vocab_size=300, max_length=32)
    language.save(model, tmp_path / "other", train_tokenizer([text], 300))
    comparison = compare(["exported/language", str(tmp_path / "other")], data=str(tmp_path / "text.txt"), **QUIET)
    (row,) = comparison.rows
    assert row.metric == "perplexity/text/bits_per_byte"
    assert row.differences["other"].method == "no result by sample"
    assert set(comparison.models[1].lambdas)  # V2's, over the tokens of the text


def test_what_is_refused(here):
    for models, settings, message in (
        ("runs/clip", {}, "1 model to compare"),
        (["runs/clip", "runs/vision"], {}, "start is an image-text model, .* is an image model"),
        (["CLIP-debug", "DiffCLIP-debug"], {}, "no data to compare on: .* give --data FOLDERS"),
        (["runs/clip", "CLIP-debug"], {"output": "page.pdf"}, r"output .*page\.pdf"),
        (["runs/clip", "CLIP-debug"], {"rounds": -1}, "rounds .*-1"),
        (["runs/text", "exported/language"], {"tasks": "needle"}, "tasks are needle, and language models"),
        (["runs/clip", "CLIP-debug"], {"tasks": "retrieval"}, "no folder fits retrieval"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(models, **(QUIET | settings))
