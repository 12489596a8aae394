"""Workers that read data in a run that is suspended.

`tests/data/shards/test_worker_batches.py` has workers that are killed or stuck.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from diffvision.data import ShardLoader, ShardSet
from diffvision.data.shards.writer import write_manifest, write_tar
from ranks import alone

pytestmark = [pytest.mark.faults, pytest.mark.forks]
SAMPLES, BATCH = 96, 4


class Slow:
    """A kind of sample that waits once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.made = seconds, 0

    def decode(self, members: object) -> torch.Tensor:
        self.made += 1
        if self.made == 20:
            time.sleep(self.seconds)
        return torch.zeros(3, 64, 64)

    def collate(self, items: list[torch.Tensor]) -> dict:
        return {"image": torch.stack(items)}


def loader_of(seconds: float = 0.0) -> ShardLoader:
    write_tar(Path("0.tar"), [{"__key__": f"{number:03d}", "txt": str(number)} for number in range(SAMPLES)])
    write_manifest(Path())
    return ShardLoader(ShardSet("0.tar"), Slow(seconds), BATCH, num_workers=2, stall_timeout=2.0)


def test_a_run_that_was_suspended_is_not_taken_for_a_stalled_one():
    """It is stopped for six seconds where workers have two to give a sample."""

    def read() -> None:
        os.setsid()
        group = os.getpgid(0)
        wait = f"sleep 0.3; kill -STOP -{group}; sleep 6; kill -CONT -{group}"
        helper = subprocess.Popen(["sh", "-c", wait], start_new_session=True)
        count = 0
        for _ in loader_of(seconds=0.5):
            count += 1
            time.sleep(0.1)
        helper.wait()
        assert count == SAMPLES // BATCH

    ended = alone(read)
    assert ended.code == 0, ended.output
