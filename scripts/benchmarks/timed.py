"""Runs a program and notes when its optimizer stepped and how long it waited for data, for `bench_programs.py`.

    python scripts/benchmarks/timed.py FILE MODULE_OR_FILE [ARGUMENTS]

FILE becomes a JSON of {"steps": seconds of the system's monotonic clock at which the optimizer's steps ended, "waits":
the seconds of each wait for a batch of a DataLoader}. The program is unmodified: torch calls a function after every
step of an optimizer, and DataLoader's iteration is timed from outside.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from diffvision.run import run


def note(file: Path) -> None:
    """Note steps and waits from now on, and write them to a file when this process ends."""
    steps: list[float] = []
    waits: list[float] = []
    iterate = DataLoader.__iter__

    def timed(loader: DataLoader) -> Iterator[Any]:
        batches = iterate(loader)
        while True:
            begun = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            waits.append(time.monotonic() - begun)
            yield batch

    setattr(DataLoader, "__iter__", timed)  # noqa: B010
    register_optimizer_step_post_hook(lambda *_: steps.append(time.monotonic()))
    owner = os.getpid()

    def write() -> None:
        if os.getpid() == owner:
            file.write_text(json.dumps({"steps": steps, "waits": waits}))

    atexit.register(write)


if __name__ == "__main__":
    note(Path(sys.argv[1]).absolute())
    run(sys.argv[2:])
