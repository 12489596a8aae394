"""A model by name on folders of tars: what `diffvision evaluate` does."""

import json
import multiprocessing
import os
import socket

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
    tasks = [key.partition("/")[0] for key in metrics]
    assert list(dict.fromkeys(tasks)) == [
        *("zero_shot", "linear_probe", "fewshot_k", "fewshot_episodes"),
        *("retrieval", "composition"),
    ]
    assert metrics["linear_probe/colours/acc1"] == 1.0  # colours are easily told apart, even by random features
    assert metrics["retrieval/colours/text_retrieval_recall@5"] == 1.0
    rows = json.loads(output.read_text())
    assert [row["task"] for row in rows][-2:] == ["zeroshot_retrieval", "image_caption_selection"]
    assert {(row["dataset"], row["pretrained"]) for row in rows} == {("colours", checkpoint)}
    printed = capsys.readouterr().out
    assert "DiffCLIP-debug" in printed
    assert "image_retrieval_recall@10" in printed


def _torchrun_rank(rank, port, settings, results):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    results.put(run(**settings))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forked processes need not import everything again")
@pytest.mark.filterwarnings("ignore:.*does not record its architecture")
def test_several_models_have_a_column_each(colours, tmp_path, capsys):
    paths = []
    for number in range(2):
        torch.manual_seed(number)
        paths.append(tmp_path / str(number) / "last.ckpt")
        paths[-1].parent.mkdir()
        state = {f"model.{name}": value for name, value in open_clip.create_model("CLIP-debug").state_dict().items()}
        about = {"pytorch-lightning_version": "2.6.6", "state_dict": state, "diffvision": {"model": "CLIP-debug"}}
        torch.save(about, paths[-1])
    models = [f"first={paths[0]}", f"second={paths[1]}"]
    settings = {"data": str(colours / "zero_shot"), "num_workers": 0, "device": "cpu"}
    both = run(models, **settings, output=str(tmp_path / "records"))
    assert list(both) == ["first", "second"]
    assert both["second"] == run(str(paths[1]), **settings)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "acc1" in line and line.count("0.") + line.count("1.") == 2]
    assert f"{both['first']['zero_shot/colours/acc1']:.4f}" in row
    written = [json.loads(path.read_text()) for path in sorted((tmp_path / "records").iterdir())]
    assert sorted(record["pretrained"] for record in written) == [str(path) for path in paths]
    with pytest.raises(ValueError, match="'last'"):
        run([str(path) for path in paths], **settings)
    with pytest.raises(ValueError, match=r"checkpoint.*'x\.pt'"):
        run(models, **settings, checkpoint="x.pt")


def test_ranks_of_torchrun_have_the_numbers_of_one_process(colours, checkpoint, tmp_path):
    settings = {
        "model": "DiffCLIP-debug",
        "data": str(colours),
        "checkpoint": checkpoint,
        "device": "cpu",
        "num_workers": 0,
    }
    expected = run(**settings)
    settings["output"] = str(tmp_path / "records")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_torchrun_rank, args=(rank, port, settings, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
    assert found[0] == pytest.approx(expected, nan_ok=True)
    assert found[1] == pytest.approx(expected, nan_ok=True)
    assert len(list((tmp_path / "records").iterdir())) == 3


def test_half_precision_is_enough_for_the_probe(colours, checkpoint):
    settings = {"model": "DiffCLIP-debug", "data": str(colours), "checkpoint": checkpoint, "device": "cpu"}
    metrics = run(**settings, tasks="linear_probe", precision="bf16", num_workers=0)
    assert metrics["linear_probe/colours/acc1"] == 1.0


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_models_that_are_in_half_precision_themselves(colours, precision):
    model, _, transform = open_clip.create_model_and_transforms("DiffCLIP-debug", precision=precision)
    folder = EvaluationFolder(colours / "retrieval")
    metrics = evaluate(model, folder, transform=transform, tokenizer=open_clip.get_tokenizer("DiffCLIP-debug"))
    assert metrics["retrieval/colours/text_retrieval_recall@10"] == 1.0
