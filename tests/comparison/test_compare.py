"""`diffvision compare`: trained runs next to each other, seeds, other models, its files, and what it refuses."""

import json
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from diffvision.cli import main
from diffvision.comparison import compare
from diffvision.data.datasets.digits import png
from diffvision.data.shards.writer import write_evaluation_split
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
            weights = checkpoint["state_dict"]
            changed = {
                name: value + 0.3 * float(lr) / 0.001 * value.std() * torch.randn(value.shape, generator=generator)
                if value.is_floating_point() and value.numel() > 1 and "lambda" not in name
                else value
                for name, value in weights.items()
            }
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
    arguments = [
        "--rounds",
        "1",
        "--batch_size",
        "4",
        "--num_workers",
        "0",
        "--device",
        "cpu",
        "--output",
        ",".join(files),
    ]
    assert main(["compare", *runs, *arguments]) == 0
    out = capsys.readouterr().out
    assert "[slow]: runs/lr0.001-1/checkpoints/epoch=0.ckpt (last, step 3)" in out
    assert "fast: runs/lr0.004-1/checkpoints/epoch=0.ckpt (last, step 3, averaged weights (EMA))" in out
    assert "classification/images, 9 samples" in out
    assert re.search(r"acc1 +\[slow\] +\d+\.\d ± \d+\.\d", out)
    assert "ratio [lowest, highest]" in out  # no markup
    assert max(map(len, out.splitlines())) <= 120  # paths alone are wider than 80

    numbers = json.loads(Path(files[1]).read_text())
    (acc1,) = [row for row in numbers["metrics"] if row["metric"] == "classification/images/acc1"]
    for label, lr in (("[slow]", "0.001"), ("fast", "0.004")):
        each = [evaluate(f"runs/lr{lr}-{seed}/checkpoints/epoch=0.ckpt", data="data/images", tasks="classification",
                         num_workers=0, device="cpu")["classification/images/acc1"] for seed in (0, 1)]  # fmt: skip
        assert acc1["values"][label] == each
    assert " ".join(capsys.readouterr().out.split()).count("averaged weights (EMA)") == 2  # of `evaluate`
    assert acc1["differences"]["fast"]["method"] == "too few seeds (2 < 3)"
    fast = numbers["models"][1]
    assert fast["parameters"] == sum(p.numel() for p in opened("runs/lr0.004-0/checkpoints/epoch=0.ckpt").parameters())
    assert set(fast["lambda"]) == {"blocks.0.attn", "blocks.1.attn"}
    assert len(fast["lambda"]["blocks.0.attn"]) == 2
    assert fast["speed_ratio"]["lowest"] <= fast["speed_ratio"]["highest"]

    page = Path(files[0]).read_text()
    assert page.count("<img") == 2  # curves over steps, lambda
    assert "Across seeds: mean ± standard deviation" in page
    assert "averaged weights (EMA)" in page


def opened(path):
    from diffvision import open_model

    return open_model(path).module


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_and_what_became_of_it(here, capsys):
    """The run's checkpoint of the first epoch and the exported end, on the data that the run names."""
    comparison = compare(["runs/clip", "exported/openclip"], **QUIET)
    assert comparison.labels == ["start", "openclip"]
    assert [row.metric for row in comparison.rows] == [
        "zero_shot/images/acc1",
        "zero_shot/images/mean_per_class_recall",
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


@pytest.fixture
def folder(request, tmp_path):
    """An evaluation folder of twelve samples, of a task: pictures of noise in two colours."""
    names, task = ("red", "blue"), request.param
    generator, rows = np.random.default_rng(0), []
    for number in range(12):
        noise = generator.integers(0, 200, (32, 32, 3))
        first, second = (png((noise + np.eye(3)[channel] * 55).astype(np.uint8)) for channel in (0, 2))
        row = {"__key__": f"{number:03d}"}
        if task == "pairs":
            row |= {"0.png": first, "1.png": second, "0.txt": f"a {names[0]} digit", "1.txt": f"a {names[1]} digit"}
        else:
            row |= {"png": first, "json": json.dumps({"present": [names[0]], "absent": [names[1]]})}
        rows.append(row)
    write_evaluation_split(tmp_path / "noise" / "test", rows)
    (tmp_path / "noise" / "dataset_type.txt").write_text(task)
    return tmp_path / "noise"


@pytest.mark.parametrize(
    ("folder", "paired", "without"),
    [
        ("pairs", {"text_score", "image_score", "group_score", "ties"}, set()),
        ("objects", {"paired_acc", "paired_ties", "accuracy", "recall", "yes_ratio"}, {"auc", "ap", "f1"}),
    ],
    indirect=["folder"],
)
def test_metrics_of_each_task_are_compared_sample_by_sample(folder, paired, without):
    """With the numbers of `evaluate`; metrics that are no mean over samples have no interval."""
    models = ["CLIP-nano.digits", "DiffCLIP-nano.digits"]
    rows = {row.name: row for row in compare(models, data=str(folder), **QUIET).rows}
    methods = {name: row.differences[models[1]].method for name, row in rows.items()}
    assert {name for name, method in methods.items() if method == "paired"} == paired
    assert without <= {name for name, method in methods.items() if method == "no result by sample"}
    settings = {"num_workers": 0, "device": "cpu"}
    for model in models:
        evaluated = evaluate(model, data=str(folder), **settings)
        assert {row.metric: row.values[model] for row in rows.values()}.items() <= {
            metric: [value] for metric, value in evaluated.items()
        }.items()


def test_what_is_refused(here):
    for models, settings, message in (
        (["runs/clip"], {}, "1 model to compare"),
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
