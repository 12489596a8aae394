"""Folders of composition with kinds, of pairs and of objects on disk: the command, its files, and `compare`."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from diffvision.comparison import compare
from diffvision.data.shards.writer import write_evaluation_split, write_lines
from diffvision.evaluation import intervals
from diffvision.evaluation.evaluate_command import evaluate as run

COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 230), "grey": (120, 120, 120)}
QUIET = {"num_workers": 0, "device": "cpu"}
CAPTIONS = [f"a {name} {shape}" for name in COLOURS for shape in ("square", "field")]


def png(colour):
    noise = np.random.default_rng(sum(colour)).integers(0, 25, (32, 32, 3))
    file = io.BytesIO()
    Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "colours"
    names, images = list(COLOURS), {name: png(colour) for name, colour in COLOURS.items()}
    others = names[1:] + names[:1]
    both = list(zip(names, others, strict=True))
    composition, pairs, objects = [], [], []
    for number, (name, other) in enumerate(both):
        key = {"__key__": f"s{number}"}
        kind = json.dumps({"kind": "swapped colours" if number < 3 else "same words"})
        wrong = f"a {other} square" if number < 3 else f"a {name} square"
        composition.append(key | {"png": images[name], "txt": f"a {name} square\n{wrong}\n", "json": kind})
        members = {"0.png": images[name], "1.png": images[other], "json": kind}
        pairs.append(key | members | {"0.txt": f"a {name} square", "1.txt": f"a {other} square"})
        asked = json.dumps({"present": [f"{name} square"], "absent": [f"{other} square"]})
        objects.append(key | {"png": images[name], "json": asked})
    for kind, samples in (("composition", composition), ("pairs", pairs), ("objects", objects)):
        write_evaluation_split(root / kind / "test", samples)
        write_lines(root / kind / "dataset_type.txt", [kind])
    write_lines(root / "objects" / "zeroshot_classification_templates.txt", ["a {c}", "the {c}"])
    return root


def test_the_command_on_all_three(data, tmp_path, capsys):
    torch.manual_seed(0)
    cache = str(tmp_path / "cache")
    settings = {"data": str(data), "cache": cache, **QUIET}
    metrics = run("DiffCLIP-debug", output=str(tmp_path / "records.json"), **settings)
    tasks = [key.partition("/")[0] for key in metrics]
    assert list(dict.fromkeys(tasks)) == ["composition", "pairs", "objects"]
    composition = {k.removeprefix("composition/colours/"): v for k, v in metrics.items() if k.startswith("comp")}
    assert composition["ties"] == 1 / 4  # the same caption twice, whose features differ in their last bits
    by_kind = [composition[f"acc/{kind}"] for kind in ("swapped colours", "same words")]
    assert composition["acc"] == pytest.approx((3 * by_kind[0] + by_kind[1]) / 4)
    assert composition["mean_per_kind_acc"] == pytest.approx(sum(by_kind) / 2)
    assert metrics["pairs/colours/group_score"] <= metrics["pairs/colours/text_score"]
    assert {"auc", "ap", "f1", "yes_ratio"} < {k.rpartition("/")[2] for k in metrics if k.startswith("objects")}

    rows = json.loads((tmp_path / "records.json").read_text())
    assert [row["task"] for row in rows] == ["image_caption_selection", "image_caption_pairs", "object_presence"]
    assert rows[0]["metrics"] == composition
    printed = capsys.readouterr().out
    assert "acc/swapped colours" in printed

    torch.manual_seed(0)
    assert run("DiffCLIP-debug", **settings) == pytest.approx(metrics, nan_ok=True)


def test_two_models_compared_sample_by_sample(data, monkeypatch):
    monkeypatch.setattr(intervals, "FEWEST_SAMPLES", 4)
    models = ["a=DiffCLIP-debug", "b=CLIP-debug"]
    comparison = compare(models, data=str(data), rounds=0, **QUIET)
    rows = {row.metric: row for row in comparison.rows}
    assert rows["composition/colours/acc"].differences["b"].method == "paired"
    assert rows["composition/colours/acc/swapped colours"].count == 3
    assert rows["pairs/colours/mean_per_kind_group_score"].differences["b"].method == "paired"
    assert rows["objects/colours/paired_acc"].count == 4
    assert rows["objects/colours/recall"].differences["b"].method == "paired"
    assert rows["objects/colours/auc"].differences["b"].method == "no result by sample"
    assert "composition/colours/acc, 1 and 3 samples" in str(comparison)
