"""Groups C6 (ranks with different data) and G (ranks that fail, parents that are gone)."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from battery.case import case, stock
from battery.ranks import Ranks, alive, children, kill, until
from battery.small import fit, run, shards, short
from battery.two_ranks import KEPT, Line, plain_fit, two
from diffvision.training.durable.checkpoints import newest_valid
from diffvision.training.durable.rank_monitor import LAUNCHER


class Counted(IterableDataset):
    """As many samples as its rank has, and no word of how many."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        return iter([torch.ones(3)] * self.counts[int(os.environ["LOCAL_RANK"])])


class Sized(Counted):
    """That says how many."""

    def __len__(self) -> int:
        return self.counts[int(os.environ["LOCAL_RANK"])]


def _uneven(kind: type[Counted], ours: bool) -> str:
    ranks = two(Line(), DataLoader(kind(6, 4)), ours=ours)
    assert [rank.code for rank in ranks] == [0, 0], f"exit statuses {[rank.code for rank in ranks]}"
    assert all("made 8 steps" in rank.told for rank in ranks), "other numbers of steps"
    return short(next(line for line in ranks[0].told.splitlines() if "rank" in line and "batch" in line))


def _empty(kind: type[Counted], ours: bool) -> str:
    ranks = two(Line(), DataLoader(kind(6, 0)), ours=ours)
    assert [rank.code for rank in ranks] == [1, 1], f"exit statuses {[rank.code for rank in ranks]}"
    return short(next(line for line in ranks[0].told.splitlines() if "Error: ra" in line or "LostRank: " in line), 250)


for kind, words in {Counted: "of unknown length", Sized: "that know it"}.items():
    name = f"C6 two ranks with 6 and 4 batches, loaders {words}"
    case(name, "both make 4 steps an epoch; what is left out is told")(partial(_uneven, kind, True))
    stock(name)(partial(_uneven, kind, False))
    name = f"C6 two ranks with 6 and 0 batches, loaders {words}"
    case(name, "one error on both that names the rank")(partial(_empty, kind, True))
    stock(name)(partial(_empty, kind, False))


@case("C6 a shard is missing on one rank's disk", "one error before the first step, which names the ranks")
def _other_shards() -> str:
    shards("all")
    shards("some", count=7)

    def work() -> None:
        data = "all" if os.environ["LOCAL_RANK"] == "0" else "some"
        sys.exit(run(*fit("--trainer.devices=2", "--trainer.strategy=ddp", data=data))[0])

    ranks = Ranks(Path("ranks"), work).ended(30)
    told = [line for rank in ranks for line in rank.told.splitlines() if "error: ranks see different shards" in line]
    assert [rank.code for rank in ranks] == [1, 1], f"exit statuses {[rank.code for rank in ranks]}"
    assert told
    assert not list(KEPT.glob("*.ckpt"))
    return short(told[0], 250)


MET = "because the process that ranks meet at is gone"  # rank 0 has it: it may go before it is asked what it was


def leave() -> None:
    os._exit(0)


def boom() -> None:
    raise KeyError("no such colour")


def _gone(do: Callable[[], object], words: str, whom: int, ours: bool, saves: bool = False) -> str:
    module = Line(3, do, (whom,))
    module.saves = saves
    ranks = two(module, ours=ours)
    left = ranks[1 - whom]
    assert left.code not in (0, None), f"the rank that was left ended with {left.code}"
    path, faults = newest_valid([KEPT])
    if ours:
        told = left.told.count(words) + left.told.count(MET)
        assert told == 1, left.told[-500:]
        assert path == KEPT / "step=2.ckpt"
        assert not faults
    line = next((line for line in reversed(left.told.splitlines()) if "Error: " in line or "LostRank: " in line), "")
    return f"status {left.code} after {left.seconds:.1f} s: {short(line)}"


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "is killed": (kill, "another rank is gone without a word"),
    "exits with status 0": (leave, "another rank is gone without a word"),
    "raises an exception": (boom, "has failed: KeyError: 'no such colour'"),
}
for number, (words, (do, told)) in enumerate(ENDS.items()):
    for whom in (0, 1):
        name = f"G{5 + number} rank {whom} of two {words}"
        case(
            name, "the other ends within 10 s, not with 0, and says that a rank is gone; the last checkpoint is intact"
        )(partial(_gone, do, told, whom, True))
        stock(name)(partial(_gone, do, told, whom, False))


name = "G7 rank 1 of two raises an exception, and ModelCheckpoint saves on exceptions"
case(name, "both end within 10 s, not with 0; the last checkpoint is intact")(
    partial(_gone, *ENDS["raises an exception"], 1, True, True)
)
stock(name)(partial(_gone, *ENDS["raises an exception"], 1, False, True))


@case("G8 the port that ranks meet at is taken", "both ranks end within 10 s, not with 0; the port is named")
def _port() -> str:
    def train(rank: int) -> None:
        os.environ.update(MASTER_PORT=port, LOCAL_RANK=str(rank))
        plain_fit(Line(), ours=True, devices=2)

    def first() -> None:
        os.environ[LAUNCHER] = str(os.getpid())
        second = multiprocessing.get_context("fork").Process(target=train, args=(1,))
        second.start()
        Path("second").write_text(str(second.pid))
        train(0)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (ended,) = Ranks(Path("ranks"), first, count=1).ended()
        assert ended.code == 1, f"exit status {ended.code}: {ended.told[-300:]}"
        until(lambda: not alive(int(Path("second").read_text())), 5, "the end of rank 1, which waits at the port")
    line = next(line for line in ended.told.splitlines() if "EADDRINUSE" in line)
    return f"status 1 after {ended.seconds:.1f} s: {short(line[line.index('port') :])}"


@case("G9 the process that started the ranks is killed", "no rank and no worker lives on; /dev/shm as before")
def _parent() -> str:
    before = set(os.listdir("/dev/shm"))

    def launch() -> None:
        os.environ[LAUNCHER] = str(os.getpid())
        ranks = Ranks(Path("ranks"), train)
        Path("pids").write_text(" ".join(map(str, ranks.pids)))
        time.sleep(60)

    def train() -> None:
        data = DataLoader(torch.ones(999, 3), num_workers=1)
        plain_fit(Line(3, Path("trains").touch), data, ours=True, devices=2, epochs=-1)

    launcher = multiprocessing.get_context("fork").Process(target=launch)
    launcher.start()
    until(Path("trains").exists, 20, "a run that trains")
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    pids += [worker for pid in pids for worker in children(pid)]
    launcher.kill()
    began = time.monotonic()
    until(lambda: not any(map(alive, pids)), 15, "the end of ranks and workers")
    leaked = set(os.listdir("/dev/shm")) - before
    assert not leaked, f"left in /dev/shm: {sorted(leaked)}"
    return f"2 ranks and {len(pids) - 2} workers gone after {time.monotonic() - began:.1f} s"
