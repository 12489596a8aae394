"""Checkpoints on disk: killed at every point of a save, damaged, on a full disk."""

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from diffvision.training.fault_tolerance import checkpoints
from diffvision.training.fault_tolerance.checkpoints import (
    LAST,
    PREEMPTED,
    RUN_KEY,
    DurableCheckpointIO,
    find_newest,
    read_step,
    remove_temporary_files,
)
from tiny_runs import plain_checkpoint

IO = DurableCheckpointIO()


def content(step: int) -> dict:
    state = {"weight": torch.full((4096,), float(step))}
    return plain_checkpoint(state, step) | {RUN_KEY: {"exact": True}}


def save(path: Path, step: int) -> Path:
    IO.save_checkpoint(content(step), path)
    return path


# --- killed while it saves ---

# Where a save touches the disk: the tensors' write, the file's sync, its rename and the directory's sync.
TOUCHES, RENAME = 4, 3


def save_until_killed(number: int, path: Path) -> None:
    touches = 0

    def counted(call):
        def touch(*args):
            nonlocal touches
            touches += 1
            if touches == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return touch

    checkpoints.torch.save = counted(torch.save)
    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    save(path, 2)


def run_killed(number: int, path: Path) -> bool:
    """Whether a process that saves a second step was killed at that touch of the disk, or had fewer of them."""
    process = multiprocessing.get_context("fork").Process(target=save_until_killed, args=(number, path), daemon=True)
    process.start()
    process.join(20)
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("number", range(1, TOUCHES + 2))
def test_a_save_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(number, tmp_path):
    """Over the only good one: after each kill it is whole, and the next start finds no leavings."""
    last = save(tmp_path / LAST, 1)
    assert run_killed(number, last) == (number <= TOUCHES)
    step = 1 if number <= RENAME else 2
    assert find_newest([tmp_path]) == (last, step, {})
    torch.testing.assert_close(IO.load_checkpoint(last)["state_dict"], content(step)["state_dict"])
    remove_temporary_files(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {LAST}
    save(last, 3)  # and a run continues from there
    assert read_step(last) == 3


# --- damaged ---


def cut(path):
    os.truncate(path, 100)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewritten(**values):
    def change(path):
        torch.save({k: v for k, v in (content(2) | values).items() if v is not None}, path)

    return change


DAMAGE = [
    (cut, "is damaged"),
    (flip, "has other bytes than were saved"),
    (lambda path: (path.unlink(), path.mkdir()), "is damaged"),
    (lambda path: torch.save([1], path), "is not a checkpoint with an optimizer"),
    (rewritten(here=Path(".")), "holds more than tensors and plain values"),
    (rewritten(optimizer_states=None), "is not a checkpoint with an optimizer"),
    (rewritten(**{RUN_KEY: {"exact": False}}), "does not say that it resumes exactly"),
    (rewritten(**{RUN_KEY: None}), "does not say that it resumes exactly"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(damage, reason, tmp_path):
    first, second = save(tmp_path / LAST, 1), save(tmp_path / PREEMPTED, 2)
    assert find_newest([tmp_path]) == (second, 2, {})
    damage(second)
    path, step, faults = find_newest([tmp_path, tmp_path / "none"])
    assert (path, step) == (first, 1)
    assert list(faults) == [second]
    assert reason in faults[second]


# --- disks and content that refuse ---


def test_a_full_disk_is_one_error_and_the_checkpoint_before_stays(tmp_path):
    path = save(tmp_path / LAST, 1)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"last\.ckpt: File too large: make room"):
            save(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {LAST}


def test_an_error_at_the_end_of_a_save_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = save(tmp_path / LAST, 1)

    def failing(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no checkpoint can be written"):
        save(path, 2)
    assert read_step(path) == 1
    assert {p.name for p in tmp_path.iterdir()} == {LAST}


def test_objects_are_refused_before_they_replace_anything(tmp_path):
    path = save(tmp_path / LAST, 1)
    with pytest.raises(ValueError, match=r"would hold objects of pathlib\.\w+"):
        IO.save_checkpoint(content(2) | {"here": Path(".")}, path)
    assert read_step(path) == 1
    torch.save({"here": Path(".")}, tmp_path / "other.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        IO.load_checkpoint(tmp_path / "other.ckpt")
