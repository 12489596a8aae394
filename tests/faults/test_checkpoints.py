"""Checkpoints of a real run: killed at random moments of a save, or on a full disk."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from command_line import KEPT, fit, refused, succeeds, write_data
from diffvision.training.fault_tolerance.checkpoints import (
    LAST,
    RUN_KEY,
    DurableCheckpointIO,
    find_newest,
    remove_temporary_files,
)
from tiny_runs import plain_checkpoint

pytestmark = pytest.mark.faults
KILLS = 20


def content(step: int) -> dict:
    return plain_checkpoint({f"weight{i}": torch.full((1 << 18,), float(step)) for i in range(30)}, step) | {
        RUN_KEY: {"exact": True}
    }


def save_without_end(path: Path, first: int) -> None:
    for step in range(first, first + 1000):
        DurableCheckpointIO().save_checkpoint(content(step), path)


@pytest.mark.forks
def test_a_save_killed_at_random_moments_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """With TMPDIR on another file system, where a rename could not be atomic."""
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    folder = tmp_path / "kept"
    folder.mkdir()
    path, step = folder / LAST, 1
    DurableCheckpointIO().save_checkpoint(content(step), path)
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=save_without_end, args=(path, step + 1))
        process.start()
        time.sleep(0.05 + 0.4 * random.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        newest, saved, faults = find_newest([folder])
        assert (newest, faults) == (path, {})
        remove_temporary_files(folder)
        assert {p.name for p in folder.iterdir()} == {path.name}
        assert saved >= step
        step = saved


def test_a_disk_that_fills_up_during_a_run_is_one_error_and_the_checkpoint_before_stays(files_up_to):
    write_data()
    succeeds(*fit(steps=2))
    before = {path: path.read_bytes() for path in KEPT.glob("*.ckpt")}
    with files_up_to(100_000):
        refused(*fit("--resume=auto", steps=3), words="no checkpoint can be written to")
    assert (KEPT / LAST).read_bytes() == before[KEPT / LAST]
    assert {path.name for path in KEPT.iterdir()} <= {*(path.name for path in before), ".lock", "step=2.ckpt.replaced",
                                                       "final.ckpt.replaced"}  # fmt: skip
