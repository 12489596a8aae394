"""Two processes of which one has more images, or all of them, give the one process's numbers."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from diffvision.evaluation.suite import evaluate


def _rank(rank, path, setup, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        model, transform, tokenizer, folders = setup
        metrics = {}
        for folder in folders:
            folder.name = f"{folder.name}{len(folder.rows['test'])}"
            metrics |= evaluate(model, folder, transform=transform, tokenizer=tokenizer, batch_size=2)
        results.put(metrics)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes inherit the model, which spawning would pickle")
def test_two_ranks_equal_one(
    tmp_path, circle, to_tensor, numbers, classified, captioned, swapped, paired, memory_folder
):
    # Three captioned images: one and two a rank; one image of a single class: none and one.
    lone = memory_folder("zero_shot", {"test": [(10, 0)]}, classnames=["10", "200"], templates=["{c}"])
    asked = [(10, ["15", "100"]), (100, ["95", "20", "10", "250"]), (200, ["210", "190"])]
    objects = memory_folder("objects", {"test": asked}, templates=["{c}"])
    alone = memory_folder("pairs", {"test": paired.rows["test"][:2]})  # on one rank; the other one has nothing
    folders = [classified, captioned, swapped, paired, alone, objects, lone]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    setup = (circle, to_tensor, numbers, folders)
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "store", setup, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    both = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
    assert all(process.exitcode == 0 for process in ranks)
    expected = {}
    for folder in folders:
        folder.name = f"{folder.name}{len(folder.rows['test'])}"
        expected |= evaluate(circle, folder, transform=to_tensor, tokenizer=numbers)
    assert both[0] == pytest.approx(expected, nan_ok=True)
    assert both[1] == pytest.approx(expected, nan_ok=True)
