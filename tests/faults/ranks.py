"""Forked processes that do the same thing as the ranks of one group, without a launcher.

A process is forked from the test's own, which has imported all that it needs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Ended(NamedTuple):
    """What became of a rank: its exit code (None where it had to be killed), and all that it printed."""

    code: int | None
    output: str


class Ranks:
    """Forked processes, each of which calls `work` with the environment variables of torch.distributed.

    Args:
        root: folder for what each of them prints.
        work: function without arguments.
        count: number of processes.
    """

    def __init__(self, root: Path, work: Callable[[], object], count: int = 2) -> None:
        self.root, port = root, free_port()
        root.mkdir(exist_ok=True)
        context = multiprocessing.get_context("fork")
        self.processes = [context.Process(target=self._rank, args=(work, rank, port)) for rank in range(count)]
        self.begun = time.monotonic()
        for process in self.processes:
            process.start()

    def _rank(self, work: Callable[[], object], rank: int, port: int) -> None:
        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with (self.root / f"output{rank}").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        # pytest would keep warnings to itself.
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *args, **kwargs: print(message, file=sys.stderr)
        code: object = 0
        try:
            work()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # The exit status that Python gives for SystemExit.
        os._exit(0 if code is None else code if isinstance(code, int) else 1)

    def ended(self, seconds: float = 60.0) -> list[Ended]:
        """Wait for the end of all of them; after so many seconds they are killed."""
        codes = []
        for process in self.processes:
            process.join(max(0.0, self.begun + seconds - time.monotonic()))
            codes.append(process.exitcode)
        for process in self.processes:
            process.kill()
            process.join()
        outputs = [(self.root / f"output{rank}").read_text() for rank in range(len(codes))]
        return [Ended(*rank) for rank in zip(codes, outputs, strict=True)]


def on_ranks(function: Callable[[], Any], world_size: int) -> list[Any]:
    """Return what a function returns on each of several ranks. AssertionError where one of them fails."""
    with tempfile.TemporaryDirectory() as directory:

        def work() -> None:
            os.environ["WORLD_SIZE"] = str(world_size)
            torch.set_num_threads(1)
            torch.save(function(), Path(directory, os.environ["LOCAL_RANK"] + ".pt"))

        for rank in Ranks(Path(directory), work, world_size).ended(600):
            assert rank.code == 0, rank.output
        return [torch.load(Path(directory, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def alone(function: Callable[[], object], seconds: float = 60.0) -> Ended:
    """Call a function in one forked process and wait for its end."""
    with tempfile.TemporaryDirectory() as directory:
        (process,) = Ranks(Path(directory), function, count=1).ended(seconds)
    assert process.code is not None, f"hung for {seconds:g} s: {process.output[-600:]}"
    return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition. AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def send(*numbers: int) -> Callable[[], None]:
    """Return a function that sends signals to the process that calls it."""

    def act() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
