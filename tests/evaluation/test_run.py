"""A model by name on folders of tars: what `diffvision evaluate` does."""

import json

import open_clip
import pytest
import torch

from diffvision.data.images.folders import EvaluationFolder
from diffvision.evaluation import evaluate
from diffvision.evaluation.evaluate_command import evaluate as run
from diffvision.evaluation.options import Options


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(open_clip.create_model("DiffCLIP-debug").state_dict(), path)
    return str(path)


def test_all_tasks_of_all_folders(colours, checkpoint, tmp_path, capsys):
    output = tmp_path / "records.json"
    metrics = run(
        model="DiffCLIP-debug",
        data=str(colours),
        checkpoint=checkpoint,
        tasks="zero_shot,retrieval,composition,linear_probe,few_shot",
        output=str(output),
        num_workers=0,
        device="cpu",
        options=Options(ways=3, episodes=20, fewshot_k=2),
    )
    tasks = dict.fromkeys(key.partition("/")[0] for key in metrics)
    assert " ".join(tasks) == "zero_shot linear_probe fewshot_k fewshot_episodes retrieval composition"
    assert metrics["linear_probe/colours/acc1"] == 1.0  # colours are easily told apart, even by random features
    assert metrics["retrieval/colours/text_retrieval_recall@5"] == 1.0
    rows = json.loads(output.read_text())
    assert [row["task"] for row in rows][-2:] == ["zeroshot_retrieval", "image_caption_selection"]
    assert {(row["dataset"], row["pretrained"]) for row in rows} == {("colours", checkpoint)}
    printed = capsys.readouterr().out
    assert "DiffCLIP-debug" in printed
    assert "image_retrieval_recall@10" in printed


def test_several_models_have_a_column_each(colours, tmp_path, capsys):
    models = ["first=CLIP-nano.digits", "second=DiffCLIP-nano.digits"]
    settings = {"data": str(colours / "zero_shot"), "num_workers": 0, "device": "cpu"}
    both = run(models, **settings, output=str(tmp_path / "records"))
    assert list(both) == ["first", "second"]
    assert both["second"] == run("DiffCLIP-nano.digits", **settings)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "acc1" in line and line.count("0.") + line.count("1.") == 2]
    assert f"{both['first']['zero_shot/colours/acc1']:.4f}" in row
    written = [json.loads(path.read_text()) for path in (tmp_path / "records").iterdir()]
    assert sorted(record["label"] for record in written) == ["first", "second"]
    with pytest.raises(ValueError, match="'x'"):
        run(["x=CLIP-debug", "x=DiffCLIP-debug"], **settings)
    with pytest.raises(ValueError, match=r"checkpoint.*'x\.pt'"):
        run(models, **settings, checkpoint="x.pt")


@pytest.mark.parametrize(("own", "precision"), [("bf16", "fp32"), ("pure_bf16", "fp32"), ("fp32", "bf16")])
def test_half_precision_of_the_model_or_of_the_evaluation(colours, own, precision):
    model, _, transform = open_clip.create_model_and_transforms("DiffCLIP-debug", precision=own)
    settings = {"transform": transform, "tokenizer": open_clip.get_tokenizer("DiffCLIP-debug"), "precision": precision}
    metrics = evaluate(model, EvaluationFolder(colours / "retrieval"), **settings)
    assert metrics["retrieval/colours/text_retrieval_recall@10"] == 1.0
    probed = evaluate(model, EvaluationFolder(colours / "zero_shot"), ["linear_probe"], **settings)
    assert probed["linear_probe/colours/acc1"] == 1.0
