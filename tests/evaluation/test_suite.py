"""The table of evaluations: which task runs on which folder, and what is printed and written."""

import json
import math

import pytest

from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import (
    EVALUATIONS,
    evaluate,
    plan,
    records,
    write_records,
)

METRICS = {
    "zero_shot/digits/acc1": 0.5,
    "zero_shot/digits/acc5": math.nan,
    "retrieval/digits/image_retrieval_recall@5": 0.25,
    "linear_probe/digits/acc1": 0.875,
    "fewshot_k/digits/lp_acc1": 0.75,
    "fewshot_k/digits/fewshot_k": 5,
}


def test_a_task_that_does_not_fit_the_folder(circle, to_tensor, captioned):
    with pytest.raises(ValueError, match=r"zero_shot.*memory"):
        evaluate(circle, captioned, ["zero_shot"], transform=to_tensor)


def test_tasks_find_their_folders(classified, captioned, swapped):
    folders = [classified, captioned, swapped]
    assert [names for _, names in plan(folders, None, Options())] == [["zero_shot"], ["retrieval"], ["composition"]]
    planned = plan(folders, ["retrieval", "linear_probe"], Options())
    assert [(folder.task, names) for folder, names in planned] == [
        ("retrieval", ["retrieval"]),
        ("zero_shot", ["linear_probe"]),
    ]


def test_what_is_refused_before_anything_runs(classified, captioned, memory_folder):
    with pytest.raises(ValueError, match="evaluation folder"):
        plan([], None, Options())
    with pytest.raises(ValueError, match="composition"):
        plan([classified, captioned], ["zero_shot", "composition"], Options())
    with pytest.raises(ValueError, match="train"):
        plan([memory_folder("zero_shot", {"test": []})], ["linear_probe"], Options())
    with pytest.raises(ValueError, match="zero_shot"):
        plan([classified, classified], None, Options())


@pytest.mark.parametrize(
    ("task", "folder"),
    [("zero_shot", "classified"), ("retrieval", "captioned"), ("composition", "swapped"), ("pairs", "paired")],
)
def test_the_metrics_of_a_task_are_the_ones_that_it_returns(task, folder, circle, to_tensor, numbers, request):
    """What may be monitored; every kind of sample has its metrics besides."""
    metrics = evaluate(circle, request.getfixturevalue(folder), transform=to_tensor, tokenizer=numbers)
    names = {key.split("/")[2] for key in metrics}
    optional = {name for name in EVALUATIONS[task].metrics if name.startswith("mean_")}
    assert EVALUATIONS[task].metrics[0] in names
    assert names - optional == set(EVALUATIONS[task].metrics) - optional


def test_records_have_clip_benchmarks_shape():
    rows = records(METRICS, model="DiffCLIP-debug", pretrained="runs/last.ckpt")
    assert rows[0] == {
        "dataset": "digits",
        "model": "DiffCLIP-debug",
        "pretrained": "runs/last.ckpt",
        "task": "zeroshot_classification",
        "metrics": {"acc1": 0.5, "acc5": None},
        "language": "en",
    }
    tasks = ["zeroshot_classification", "zeroshot_retrieval", "logistic_regression", "linear_probe"]
    assert [row["task"] for row in rows] == tasks
    theirs = [row["metrics"] for row in rows if row["task"] == "linear_probe"]
    assert theirs == [{"lp_acc1": 0.75, "fewshot_k": 5}]  # of CLIP_benchmark's probe, and only of that
    assert all(evaluation.record for evaluation in EVALUATIONS.values())


def test_records_as_one_file_or_as_many(tmp_path):
    rows = records(METRICS, model="DiffCLIP-debug", pretrained="runs/last.ckpt")
    write_records(rows, tmp_path / "new" / "all.json")
    assert json.loads((tmp_path / "new" / "all.json").read_text()) == rows
    write_records(rows, tmp_path / "each")
    names = sorted(path.name for path in (tmp_path / "each").iterdir())
    assert names == [
        "digits_last.ckpt_DiffCLIP-debug_en_linear_probe_fewshot_k5.json",
        "digits_last.ckpt_DiffCLIP-debug_en_logistic_regression.json",
        "digits_last.ckpt_DiffCLIP-debug_en_zeroshot_classification.json",
        "digits_last.ckpt_DiffCLIP-debug_en_zeroshot_retrieval.json",
    ]
    assert json.loads((tmp_path / "each" / names[2]).read_text()) == rows[0]
