"""Group G, the processes that read data: killed, stopped, failing, or left by their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import battery
import diffvision
from battery.case import Seen, case, stock
from battery.small import short
from diffvision.data import ShardLoader, ShardSet
from diffvision.data.shards.writer import write_manifest, write_tar

LIMIT = 2.0  # seconds without a sample


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ZeroDivisionError("a bug in a transform")


def linger() -> None:
    time.sleep(3600)


ACTS: dict[str, tuple[Callable[[], None], str]] = {
    "killed": (kill, "was ended by SIGKILL"),
    "leaves with exit code 0": (leave, "left with exit code 0"),
    "fails": (fail, "a bug in a transform"),
    "stopped": (stop, "is stopped by a signal"),
    "never comes back": (linger, "is asleep"),
}


class Doing:
    """A kind of sample that does something when it is the turn of one."""

    def __init__(self, act: Callable[[], None], at: int = 20) -> None:
        self.act, self.at, self.made = act, at, 0

    def decode(self, members: object) -> torch.Tensor:
        self.made += 1
        if self.made == self.at:
            self.act()
        return torch.zeros(3, 64, 64)

    def collate(self, items: list[torch.Tensor]) -> dict:
        return {"image": torch.stack(items)}


class Stock(Dataset):
    """The same for a plain DataLoader."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.kind = Doing(act)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.kind.decode(None)


def loader(act: Callable[[], None]) -> ShardLoader:
    samples = [{"__key__": f"{number:03d}", "txt": str(number)} for number in range(96)]
    write_tar(Path("0.tar"), samples)
    write_manifest(Path())
    return ShardLoader(ShardSet("0.tar"), Doing(act), 4, num_workers=2, stall_timeout=LIMIT)


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def ends(name: str) -> Seen:
    """An error in time, that says what happened, and nothing left."""
    import gc

    shared, data = set(os.listdir("/dev/shm")), loader(ACTS[name][0])
    start = time.perf_counter()
    try:
        for _ in data:
            pass
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    seconds = time.perf_counter() - start
    assert ACTS[name][1] in told, told
    assert seconds < LIMIT + 10, f"{seconds:.0f} s"
    del data
    gc.collect()
    for _ in range(100):
        if not children() and set(os.listdir("/dev/shm")) <= shared:
            return Seen(f"{short(told, 110)} (after {seconds:.1f} s; nothing left)")
        time.sleep(0.1)
    raise AssertionError(f"left: processes {children()}, shared memory {set(os.listdir('/dev/shm')) - shared}")


def ends_plain(name: str) -> str:
    """A DataLoader with a time-out of its own, given half a minute."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(30)
    try:
        for _ in DataLoader(Stock(ACTS[name][0]), batch_size=4, num_workers=2, timeout=LIMIT):
            pass
    except Late:
        raise AssertionError(f"still hangs after 30 s, with timeout={LIMIT:.0f}") from None
    except Exception as error:
        return short(f"{type(error).__name__}: {error}", 110)
    raise AssertionError("no error")


class Late(BaseException):
    pass


def _late(*args: object) -> None:
    raise Late


for _name in ACTS:
    _title = f"G1 worker {_name}"
    case(_title, "an error that says so, no process and no shared memory left", quick=_name == "stopped")(
        partial(ends, _name)
    )
    stock(_title)(partial(ends_plain, _name))


_PARENT = """
import sys
from pathlib import Path
from battery.workers import Doing, loader
data = loader(lambda: None)
batches = iter(data)
next(batches)
me = __import__("os").getpid()
Path("workers").write_text(Path(f"/proc/{me}/task/{me}/children").read_text())
print("ready", flush=True)
sys.stdin.read()
"""


@case("G2 parent of workers killed", "its workers end by themselves")
def orphans() -> str:
    found = os.pathsep.join(str(Path(module.__file__).absolute().parents[1]) for module in (battery, diffvision))
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": found},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    workers = Path("workers").read_text().split()
    assert len(workers) == 2, workers
    parent.kill()
    parent.wait()
    start = time.perf_counter()
    while time.perf_counter() - start < 15:
        if not any(_runs(pid) for pid in workers):
            return f"both workers gone after {time.perf_counter() - start:.1f} s"
        time.sleep(0.1)
    raise AssertionError(f"still there: {[pid for pid in workers if _runs(pid)]}")


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@case("G3 whole run suspended and let go on", "no false alarm: the time in which it was stopped does not count")
def suspended() -> Seen:
    data = loader(partial(time.sleep, 0.5))
    helper = subprocess.Popen(
        ["sh", "-c", f"sleep 0.3; kill -STOP -{os.getpgid(0)}; sleep 6; kill -CONT -{os.getpgid(0)}"],
        start_new_session=True,
    )
    count = 0
    for _ in data:
        count += 1
        time.sleep(0.1)
    helper.wait()
    assert count == 24
    return Seen(f"{count} batches, suspended for 6 s with a limit of {LIMIT:.0f} s", lost=0)
