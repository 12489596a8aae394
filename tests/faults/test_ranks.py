"""Two ranks that train: the port is taken, or one sees other shards.

`tests/training/fault_tolerance/test_preemption.py` has ranks that end, and signals to either.
"""

import os
import socket
import sys
from pathlib import Path

import pytest

from command_line import KEPT, fit, run, write_data
from ranks import Ranks

pytestmark = [pytest.mark.faults, pytest.mark.forks]
COMMAND = ("--trainer.devices=2", "--trainer.strategy=ddp")


def test_a_port_that_is_taken_is_named():
    write_data()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        def rank() -> None:
            os.environ["MASTER_PORT"] = port
            sys.exit(run(*fit(*COMMAND))[0])

        (first,) = Ranks(Path("ranks"), rank, count=1).ended()
    assert first.code == 1, first.output[-300:]
    assert any("EADDRINUSE" in line and port in line for line in first.output.splitlines())


def test_a_shard_that_is_missing_on_one_rank_is_an_error_before_the_first_step():
    write_data("all")
    write_data("some", count=7)

    def work() -> None:
        data = "all" if os.environ["LOCAL_RANK"] == "0" else "some"
        sys.exit(run(*fit(*COMMAND, data=data))[0])

    ended = Ranks(Path("ranks"), work).ended(30)
    assert [rank.code for rank in ended] == [1, 1]
    assert any("error: all ranks must read the same shards" in rank.output for rank in ended)
    assert not list(KEPT.glob("*.ckpt"))
