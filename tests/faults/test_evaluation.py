"""Evaluations on disks that fill up, and results that are written while the process is killed."""

import io
import json
import multiprocessing
import os
import signal
import time
from contextlib import redirect_stdout
from pathlib import Path

import open_clip
import pytest
import torch

from command_line import numbered
from diffvision import evaluate
from diffvision.data.shards.writer import write_tar
from diffvision.evaluation.output_files import write_json

pytestmark = pytest.mark.faults
IMAGES, CLASSES = 100, 10


def write_data() -> None:
    """Write an evaluation folder of numbered images, and weights."""
    Path("numbers/test").mkdir(parents=True)
    write_tar(Path("numbers/test/0.tar"), [numbered(number) for number in range(IMAGES)])
    Path("numbers/classnames.txt").write_text("".join(f"number {number}\n" for number in range(CLASSES)))
    Path("numbers/zeroshot_classification_templates.txt").write_text("a photo of {c}\n{c}\n")
    torch.save(open_clip.create_model("DiffCLIP-debug").state_dict(), "weights.pt")


def evaluated(**settings: str) -> dict[str, float]:
    model = {"model": "DiffCLIP-debug", "checkpoint": "weights.pt", "data": "numbers", "device": "cpu"}
    return evaluate(**model, **settings, batch_size=16, num_workers=0)


def test_a_disk_that_is_full_under_the_cache_is_a_warning(files_up_to):
    write_data()
    expected = evaluated()
    with pytest.warns(UserWarning, match="cannot be written"), redirect_stdout(io.StringIO()), files_up_to(400):
        assert evaluated(cache="cache") == expected  # pytest's file of what is printed may not grow either
    assert not list(Path("cache").rglob("*.part"))


def test_a_disk_that_is_full_while_results_are_written_leaves_those_before(files_up_to):
    write_json(Path("results/metrics.json"), {"before": 1})
    with pytest.raises(OSError, match="File too large"), files_up_to(4000):
        write_json(Path("results/metrics.json"), list(range(10_000)))
    assert [json.loads(path.read_text()) for path in Path("results").iterdir()] == [{"before": 1}]


def write_without_end() -> None:
    for number in range(100_000):
        write_json(Path("results.json"), [number] * 20_000)


@pytest.mark.forks
def test_results_of_a_process_killed_while_it_writes_them_are_whole():
    write_json(Path("results.json"), [0] * 20_000)
    for number in range(20):
        process = multiprocessing.get_context("fork").Process(target=write_without_end)
        process.start()
        time.sleep(0.05 + number / 100)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert len(set(json.loads(Path("results.json").read_text()))) == 1
