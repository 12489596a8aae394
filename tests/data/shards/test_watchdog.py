"""Workers that stop, die or fail: an error that says so, within its time, and no process left."""

import gc
import os
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from diffvision.data import ShardLoader, ShardSet
from diffvision.data.shards.watchdog import Pulse, StalledError, WorkerDiedError, watched
from ranks import until


class Doing:
    """Makes numbers of samples, and does something when it is the turn of one."""

    def __init__(self, act, at=25):
        self.act, self.at, self.made = act, at, 0

    def decode(self, members):
        self.made += 1
        if self.made == self.at:
            self.act()
        return torch.zeros(3, 64, 64)

    def collate(self, items):
        return {"image": torch.stack(items)}


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def loader_of(whole, act, workers=2, timeout=0.5, **settings):
    return ShardLoader(ShardSet(whole), Doing(act, **settings), 5, num_workers=workers, stall_timeout=timeout)


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
        (stop, StalledError, r"no sample was made for \d s .*worker \d \(process \d+\) is stopped by a signal"),
        (lambda: time.sleep(60), StalledError, r"worker \d \(process \d+\) is asleep"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            WorkerDiedError,
            r"worker \d \(process \d+\) was ended by SIGKILL",
        ),
        (lambda: os._exit(0), WorkerDiedError, r"worker \d \(process \d+\) left with exit code 0"),
        (lambda: 1 / 0, ZeroDivisionError, "while making the sample 0000"),
    ],
    ids=["stopped", "asleep", "killed", "exited", "raised"],
)
def test_a_worker_that_does_not_go_on_is_a_clear_error(whole, act, error, message):
    before, shm = children(), set(os.listdir("/dev/shm"))
    loader = loader_of(whole, act, timeout=2.0)  # a busy machine may take a second to start a worker
    with pytest.raises(error) as caught:
        list(loader)
    if error is StalledError:
        assert children() <= before  # dead already: DataLoader's signal handler would raise over what follows
    message_and_notes = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(message, message_and_notes), message_and_notes
    del loader, caught
    check_nothing_left(before, shm)


def test_a_busy_training_loop_is_no_stall_and_a_long_wait_is_logged(whole, caplog):
    loader = loader_of(whole, lambda: time.sleep(0.3), timeout=0.6)
    for count, _ in enumerate(loader):
        if count in (1, 12):
            time.sleep(0.9)
    assert count == 19
    (warning,) = {record.message.partition(":")[0] for record in caplog.records}
    assert warning == "no data for 0 s"


def test_progress_anywhere_puts_the_end_off():
    """A loader that waits is not stalled while samples are made, or pieces of a shard arrive."""
    pulse = Pulse()

    class Slow(torch.utils.data.Dataset):
        def __getitem__(self, index):
            for _ in range(10):
                time.sleep(0.1)
                pulse.beat()
            return index

        def __len__(self):
            return 2

    loader = torch.utils.data.DataLoader(Slow(), num_workers=1, batch_size=None)
    assert list(watched(loader, pulse, 0.4)) == [0, 1]


def test_a_limit_that_is_none(whole):
    with pytest.raises(ValueError, match="stall_timeout is 0 seconds"):
        list(loader_of(whole, stop, timeout=0))


def test_the_watch_ends_with_its_loader(whole):
    def threads():
        return [t for t in threading.enumerate() if t.name == "watch-workers"]

    loader = loader_of(whole, lambda: None, workers=1)
    iterator = iter(loader)
    next(iterator)
    assert len(threads()) == 1
    del iterator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(50):
            if not threads():
                return
            time.sleep(0.05)
    raise AssertionError(threads())
