"""Two processes, of which one has more images or all of them, give one process's numbers."""

import json
import os
import socket

import pytest
import torch

from diffvision.evaluation.distributed import process_group
from diffvision.evaluation.evaluate_command import evaluate as run
from diffvision.evaluation.suite import evaluate

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes inherit the model")


def _rank(rank, port, home, function, arguments, settings):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    (home / f"{rank}.json").write_text(json.dumps(function(*arguments, **settings)))


def on_two_ranks(home, function, *arguments, **settings):
    """Return what a function returns on each of two ranks, which torchrun's variables describe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.multiprocessing.start_processes(_rank, (port, home, function, arguments, settings), 2, start_method="fork")
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(2)]


def evaluate_all(model, folders, **settings):
    metrics = {}
    with process_group("cpu"):
        for number, folder in enumerate(folders):
            found = evaluate(model, folder, **settings)
            metrics |= {f"{number} {name}": value for name, value in found.items()}
    return metrics


def test_two_ranks_equal_one(
    tmp_path, circle, to_tensor, numbers, classified, captioned, swapped, paired, memory_folder
):
    # Three captioned images: one and two a rank; one image of a single class: none and one.
    lone = memory_folder("zero_shot", {"test": [(10, 0)]}, classnames=["10", "200"], templates=["{c}"])
    asked = [(10, ["15", "100"]), (100, ["95", "20", "10", "250"]), (200, ["210", "190"])]
    objects = memory_folder("objects", {"test": asked}, templates=["{c}"])
    alone = memory_folder("pairs", {"test": paired.rows["test"][:2]})  # on one rank; the other one has nothing
    folders = [classified, captioned, swapped, paired, alone, objects, lone]
    settings = {"transform": to_tensor, "tokenizer": numbers}
    expected = pytest.approx(evaluate_all(circle, folders, **settings), nan_ok=True)
    assert on_two_ranks(tmp_path, evaluate_all, circle, folders, **settings, batch_size=2) == [expected] * 2


def test_ranks_of_torchrun_have_the_numbers_of_one_process(colours, tmp_path):
    settings = {"model": "DiffCLIP-nano.digits", "data": str(colours), "device": "cpu", "num_workers": 0}
    expected = pytest.approx(run(**settings), nan_ok=True)
    assert on_two_ranks(tmp_path, run, **settings, output=str(tmp_path / "records")) == [expected] * 2
    assert len(list((tmp_path / "records").iterdir())) == 3
