"""Workers that hang, die or fail: an error that says so, within its time, and no process left."""

import gc
import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from diffvision.data.shards.report import WorkerError
from ranks import until


def loader_of(corpus, whole, act):
    """A loader whose workers act when it is the turn of the 25th image."""
    images = count(1)

    def transform(image):
        if next(images) == 25:
            act()
        return torch.zeros(3, 64, 64)

    settings = {"num_workers": 2, "stall_timeout": 2.0}  # a busy machine may take a second to start a worker
    return corpus.loader(whole, 5, transform=transform, **settings)


def children():
    pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes()}


def check_nothing_left(before, shm):
    gc.collect()  # a traceback may hold its frames in a circle
    until(lambda: children() <= before and set(os.listdir("/dev/shm")) <= shm, 60, "the end of all workers")


# DataLoader's signal handler may raise inside a weak reference's callback, where Python drops the error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.quick("raised", "killed")
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: time.sleep(60), WorkerError, "stall_timeout"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), WorkerError, "DataLoader worker .*num_workers"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), WorkerError, "/dev/shm"),
        (lambda: os._exit(0), WorkerError, "DataLoader worker "),
        (lambda: 1 / 0, ZeroDivisionError, "while making the sample 0000"),
        (lambda: os.stat("/nowhere"), OSError, "while making the sample 0000"),
    ],
    ids=["asleep", "killed", "bus", "exited", "raised", "unreadable"],
)
def test_a_worker_that_does_not_go_on_is_a_clear_error(corpus, whole, act, error, message):
    before, shm = children(), set(os.listdir("/dev/shm"))
    loader = loader_of(corpus, whole, act)
    with pytest.raises(error) as caught:
        list(loader)
    message_and_notes = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(message, message_and_notes), message_and_notes
    del loader, caught
    check_nothing_left(before, shm)


def test_a_busy_training_loop_is_no_stall(corpus, whole):
    for number, _ in enumerate(loader_of(corpus, whole, list)):
        if number == 12:
            time.sleep(2.5)
    assert number == 19
