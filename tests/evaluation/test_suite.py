"""The table of evaluations: which task runs on which folder, and what is printed and written."""

import json
import math

import pytest

from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import EVALUATIONS, evaluate, plan, records, write_records

METRICS = {
    "zero_shot/digits/acc1": 0.5,
    "zero_shot/digits/acc5": math.nan,
    "retrieval/digits/image_retrieval_recall@5": 0.25,
    "linear_probe/digits/acc1": 0.875,
    "fewshot_k/digits/lp_acc1": 0.75,
    "fewshot_k/digits/fewshot_k": 5,
}


def test_tasks_find_their_folders(classified, captioned, swapped):
    folders = [classified, captioned, swapped]
    assert [names for _, names in plan(folders, None, Options())] == [["zero_shot"], ["retrieval"], ["composition"]]
    planned = plan(folders, ["retrieval", "linear_probe"], Options())
    assert planned == [(captioned, ["retrieval"]), (classified, ["linear_probe"])]


def test_what_is_refused_before_anything_runs(classified, captioned, memory_folder):
    for folders, tasks, named in (
        ([], None, "evaluation folder"),
        ([classified, captioned], ["zero_shot", "composition"], "composition.*memory"),
        ([memory_folder("zero_shot", {"test": []})], ["linear_probe"], "train"),
        ([classified, classified], None, "zero_shot"),
    ):
        with pytest.raises(ValueError, match=named):
            plan(folders, tasks, Options())


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


def test_records_have_clip_benchmarks_shape_in_one_file_or_many(tmp_path):
    model = {"model": "DiffCLIP-debug", "pretrained": "runs/last.ckpt"}
    rows = records(METRICS, **model)
    metrics = {"task": "zeroshot_classification", "metrics": {"acc1": 0.5, "acc5": None}}
    assert rows[0] == {"dataset": "digits", **model, **metrics, "language": "en"}
    tasks = ["zeroshot_classification", "zeroshot_retrieval", "logistic_regression", "linear_probe"]
    assert [row["task"] for row in rows] == tasks
    theirs = [row["metrics"] for row in rows if row["task"] == "linear_probe"]
    assert theirs == [{"lp_acc1": 0.75, "fewshot_k": 5}]  # of CLIP_benchmark's probe, and only of that
    assert all(evaluation.record for evaluation in EVALUATIONS.values())
    write_records(rows, tmp_path / "new" / "all.json")
    assert json.loads((tmp_path / "new" / "all.json").read_text()) == rows
    others = records(METRICS, **model | {"pretrained": "others/last.ckpt"})
    write_records(rows + others, tmp_path / "both")
    assert len(list((tmp_path / "both").iterdir())) == 2 * len(rows)
    write_records(rows, tmp_path / "each")
    names = sorted(path.name for path in (tmp_path / "each").iterdir())
    assert names == [
        "digits_last.ckpt_DiffCLIP-debug_en_linear_probe_fewshot_k5.json",
        "digits_last.ckpt_DiffCLIP-debug_en_logistic_regression.json",
        "digits_last.ckpt_DiffCLIP-debug_en_zeroshot_classification.json",
        "digits_last.ckpt_DiffCLIP-debug_en_zeroshot_retrieval.json",
    ]
    assert json.loads((tmp_path / "each" / names[2]).read_text()) == rows[0]
