"""The tables of DiffCLIP's paper: pairs, seeds, means and files, from records in runs' folders, and what it refuses."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from clip_table import PARTS, main, make_tables
from diffvision.evaluation.intervals import welch_interval

ZERO_SHOT = {"CLIP-debug": (0.30, 0.31, 0.33), "DiffCLIP-debug-0.2": (0.40, 0.42, 0.41)}


def evaluated(folder: Path, model: str, seed: int, acc1: float) -> Path:
    """Return a run with a record of each evaluation of the paper."""
    path = folder / model / f"seed{seed}"
    (path / "checkpoints").mkdir(parents=True)
    torch.save({"global_step": 7}, path / "checkpoints" / "best.ckpt")
    module = {"model": model, "optimizer": {"lr": 0.001}}
    config = {"seed_everything": seed, "model": {"class_path": "a.ContrastiveModule", "init_args": module}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    record(path, "imagenet", PARTS["zero_shot"].record, acc1=acc1, acc5=1.0)
    record(path, "imagenet-r", PARTS["zero_shot"].record, acc1=0.2)
    for name, share in (("flickr30k", 0.1), ("mscoco_captions", 0.3)):
        recalls = {"image_retrieval_recall@5": share + seed / 100, "text_retrieval_recall@5": share}
        record(path, name, PARTS["retrieval"].record, **recalls)
    record(path, "cifar100", PARTS["linear_probe"].record, acc1=0.5)
    record(path, "cifar100", PARTS["few_shot"].record, acc=0.6, acc_ci95=0.1)
    record(path, "mmvp", PARTS["mmvp"].record, mean_of_7_kinds_image_score=0.2, mean_per_kind_image_score=0.1)
    record(path, "winoground", PARTS["mmvp"].record, mean_per_kind_image_score=0.9)
    return path


def record(path: Path, dataset: str, task: str, weights: str = "best.ckpt", **metrics: float) -> Path:
    file = path / "evaluations" / f"{dataset}_{weights}_{task}.json"
    file.parent.mkdir(exist_ok=True)
    pretrained = f"elsewhere/{path.name}/checkpoints/{weights}"
    content = {"dataset": dataset, "model": path.parent.name, "pretrained": pretrained, "task": task}
    file.write_text(json.dumps(content | {"metrics": metrics, "language": "en"}))
    return file


@pytest.fixture
def call(monkeypatch):
    """(arguments) -> None: what the script's command line does."""

    def called(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["clip_table.py", *arguments])
        main()

    return called


@pytest.fixture
def runs(tmp_path):
    for model, values in ZERO_SHOT.items():
        for seed, acc1 in enumerate(values):
            evaluated(tmp_path / "runs", model, seed, acc1)
    return tmp_path / "runs"


def test_seeds_of_twins(call, runs, tmp_path, capsys):
    files = [str(tmp_path / f"table{ending}") for ending in (".md", ".csv", ".tex")]
    call(*map(str, runs.iterdir()), "--output", *files)
    assert "lacks" not in (printed := capsys.readouterr().out)
    assert max(map(len, printed.split("DiffCLIP-debug-0.2: ")[0].splitlines())) <= 80
    low, high = welch_interval(*ZERO_SHOT.values())
    assert "| seeds | 3 | 3 |  |" in Path(files[0]).read_text()
    shown = f"31.3 ± 1.5 | 41.0 ± 1.0 | +9.7 [{100 * low:+.1f}, {100 * high:+.1f}] higher |"
    markdown, _, latex = (Path(file).read_text() for file in files)
    assert f"| imagenet | {shown}" in markdown
    assert "| mean of 2 image R@5 | 21.0 ± 1.0 | 21.0 ± 1.0 | +0.0 [" in markdown
    assert "| cifar100 | 50.0 ± 0.0 | 50.0 ± 0.0 | +0.0, no spread across seeds |" in markdown
    assert "winoground" not in markdown
    assert (
        "linear probe has sets that are not here: caltech101, dtd, pets, flowers, sun397, aircraft, cifar10, food101."
        in markdown
    )
    assert r"imagenet & 31.3 $\pm$ 1.5 & 41.0 $\pm$ 1.0 &" in latex
    assert latex.count("\\midrule") == len(PARTS)
    with open(files[1], newline="") as file:
        rows = {(row["part"], row["dataset"], row["metric"], row["model"]): row for row in csv.DictReader(file)}
    found = rows["zero_shot", "imagenet", "acc1", "DiffCLIP-debug-0.2"]
    assert float(found["low"]) == pytest.approx(low)
    assert float(rows["retrieval", "mean of 2", "image_retrieval_recall@5", "CLIP-debug"]["mean"]) == pytest.approx(
        0.21
    )


def test_one_seed_of_each_and_what_else_differs(runs, capsys):
    for seed in (1, 2):
        shutil.rmtree(runs / "CLIP-debug" / f"seed{seed}")
        shutil.rmtree(runs / "DiffCLIP-debug-0.2" / f"seed{seed}")
    config = runs / "DiffCLIP-debug-0.2" / "seed0" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.002"))
    for model, step in (("CLIP-debug", 10), ("DiffCLIP-debug-0.2", 9)):
        torch.save({"global_step": step}, runs / model / "seed0" / "checkpoints" / "last.ckpt")
    (table,) = make_tables([str(runs)], [*PARTS])
    assert table.rows[0].differences["DiffCLIP-debug-0.2"].method == "one seed"
    assert table.rows[0].differences["DiffCLIP-debug-0.2"].low is None
    notes = " ".join(table.notes)
    assert "They differ in more than the model: model.init_args.optimizer.lr." in notes
    assert "seed0 to 10, " in notes
    assert "seed0 to 9." in notes


def test_the_evaluated_checkpoint_is_named_where_it_is_not_the_best(runs):
    state = {"monitor": "acc1", "best_model_path": "new.ckpt", "best_model_score": torch.tensor(0.9)}
    run = runs / "CLIP-debug" / "seed0"
    torch.save({"global_step": 9, "callbacks": {"ModelCheckpoint": state}}, run / "checkpoints" / "new.ckpt")
    (table,) = make_tables([str(runs)], ["zero_shot"])
    assert f"{run} (best.ckpt, which is not its best); " in table.notes[0]


def test_models_without_a_twin_and_runs_of_others(runs):
    evaluated(runs, "DiffCLIP-ViT-B-16", 0, 0.5)
    shutil.rmtree(runs / "CLIP-debug")
    other = runs / "language" / "version_0"
    (other / "checkpoints").mkdir(parents=True)
    (other / "config.yaml").write_text("model: {class_path: LanguageModule}")
    tables = make_tables([str(runs)], [*PARTS])
    assert [table.labels for table in tables] == [["DiffCLIP-ViT-B-16"], ["DiffCLIP-debug-0.2"]]
    assert not tables[0].rows[0].differences
    assert f"Left out, no trained CLIPs: {other}." in tables[-1].notes
    assert all(len(row) in (1, 2) for row in tables[0].cells())


def test_sets_of_the_paper_have_exact_names(tmp_path):
    """ImageNet-ReaL has other labels of ImageNet's images, and Caltech-256 other classes."""
    run = evaluated(tmp_path, "CLIP-debug", 0, 0.3)
    for name in ("imagenet-real", "imagenet_a_plus", "my-imagenetv2", "wds_imagenet_sketch"):
        record(run, name, PARTS["zero_shot"].record, acc1=0.2)
    for name in ("wds_vtab-caltech101", "caltech256", "oxford_pets", "small-food101"):
        record(run, name, PARTS["linear_probe"].record, acc1=0.5)
    (table,) = make_tables([str(tmp_path)], ["zero_shot", "out_of_distribution", "linear_probe"])
    parts = [row.metric.split("/")[:2] for row in table.rows]
    assert [name for part, name in parts if part == "out_of_distribution"] == [
        "imagenet-r",
        "wds_imagenet_sketch",
        "mean of 2",
    ]
    assert ["zero_shot", "imagenet-real"] in parts
    (note,) = [note for note in table.notes if note.startswith("The paper's linear probe")]
    assert note.endswith("not here: dtd, flowers, sun397, aircraft, cifar10, food101.")


def test_what_is_refused(call, runs, capsys):
    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            call(str(runs), *words)
        return capsys.readouterr().err.splitlines()[-1]

    first = runs / "CLIP-debug" / "seed1"
    lost = first / "evaluations" / "cifar100_best.ckpt_logistic_regression.json"
    lost.rename(first / "kept")
    evaluate = f"diffvision evaluate {first} --data DATA --tasks linear_probe --output {first}/evaluations"
    assert f"{first} lacks linear_probe on cifar100: {evaluate}, or choose --parts" in refusal()
    call(str(runs), "--parts", "zero_shot", "few_shot")
    capsys.readouterr()
    assert "probe" in refusal("--parts", "probe")
    assert "table.pdf" in refusal("--output", "table.pdf")
    (first / "kept").rename(lost)
    for file in runs.glob("*/*/evaluations/mmvp*"):
        file.unlink()
    assert "lacks mmvp: diffvision evaluate" in refusal()

    saved = first / "checkpoints" / "best.ckpt"
    before = os.path.getmtime(saved)
    os.utime(saved, (os.path.getmtime(lost) + 1,) * 2)
    assert "best.ckpt is newer than" in refusal()
    for file in first.glob("evaluations/*.json"):  # all others were evaluated again
        os.utime(file, (os.path.getmtime(lost) + 2 * (file != lost),) * 2)
    assert f"best.ckpt is newer than {lost}" in refusal()
    os.utime(saved, (before,) * 2)
    other = record(first, "imagenet", PARTS["zero_shot"].record, weights="last.ckpt", acc1=0.3)
    assert "has evaluations of best.ckpt and last.ckpt" in refusal()
    other.write_text(other.read_text().replace("seed1", "seed2"))
    assert "not of this run" in refusal()
    copied = record(first, "imagenet", PARTS["zero_shot"].record, acc1=0.31)
    of_another = runs.parent / "other" / "seed1" / "checkpoints" / "best.ckpt"
    of_another.parent.mkdir(parents=True)
    of_another.write_bytes(b"other weights")
    copied.write_text(copied.read_text().replace("elsewhere", str(runs.parent / "other")))
    other.unlink()
    assert "not of this run" in refusal()  # though both are called seed1
    shutil.copy(first / "checkpoints" / "best.ckpt", of_another)
    call(str(runs), "--parts", "zero_shot")
    capsys.readouterr()
    other.write_text(copied.read_text().replace("0.31", "0.32"))
    assert "zero_shot/imagenet/acc1 is not what another file of the folder has" in refusal()
    other.write_text("[1]")
    assert "is not what `diffvision evaluate` writes" in refusal()
    shutil.rmtree(runs)
    runs.mkdir()
    assert "no run of a CLIP in" in refusal()
