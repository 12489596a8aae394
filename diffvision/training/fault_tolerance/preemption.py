"""Signals: every rank agrees after a step, one checkpoint is written before the next, and the run ends.

Lightning's handlers work inside the signal (a broadcast, a save), and hang where only one rank receives it; these only
note it. In an evaluation the run ends between two batches; `last.ckpt` is then of the step before it. Workers of a rank
are in `workers`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.checkpoints import PREEMPTED
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.workers import shield_workers

PATIENCE = 1.0  # seconds of training after which ranks ask each other for signals; less than a step: after each step
MOST = 16  # steps after which they ask at the latest, as steps may become slower
AGAIN = b"Ctrl-C: saving after this step and ending; a second one ends at once\n"
_IGNORED: set[int] = set()  # signals that this process ignores since a run of it was preempted


class Preempted(SIGTERMException):
    """A run that has saved and ends because of a signal; Python exits with 128 + its number: 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Preemption(pl.Callback):
    """Saves and ends a fit on SIGTERM and SIGINT, and requeues it under SLURM.

    A signal to one rank stops all. Ranks agree over a separate gloo group on the CPU, without synchronising devices.

    Args:
        last: writes preempted.ckpt, replacing an earlier one; None: nothing is saved.
    """

    def __init__(self, last: LastCheckpoint | None) -> None:
        self.last = last
        self.received: set[int] = set()
        self._group: Any = None  # None: there is one rank
        self._agreed = 0  # the signal that is acted on before the next batch
        self._known: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)  # of several received, the last one counts
        self._requeues: int | None = None
        self._before: dict[int, Any] = {}
        self._shield = ExitStack()
        self._trainer: pl.Trainer | None = None
        self._turns = 0
        self._asked, self._steps, self._every = 0.0, 0, 1  # when they asked last, steps since, and until they ask

    # --- signals ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Install the signal handlers. Before this, signals have their usual effect: there is nothing to save."""
        if stage != "fit":
            return
        self._trainer, self._agreed = trainer, 0
        if trainer.world_size > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        environment = lightning_internals.disable_signal_handlers(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self._requeues = environment.requeue_signal
            self._known = (self._requeues, signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            self._shield.enter_context(shield_workers())
            for number in self._known:
                before = signal.getsignal(number)
                if before is signal.SIG_IGN and number in _IGNORED:  # the process fits again, as a notebook may
                    before = signal.SIG_DFL
                if before is not signal.SIG_IGN:  # as SIGINT is in the background
                    self._before[number] = before
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received.add(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            stderr = sys.__stderr__.fileno() if sys.__stderr__ else 2
            os.write(stderr, (b"\r\x1b[K" if os.isatty(stderr) else b"\n") + AGAIN)  # replaces the progress line

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self.received.clear()
        self._shield.close()
        self._group = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers; in a preempted run, ignore further signals until the process ends."""
        if isinstance(exception, Preempted):
            lightning_internals.forget_started_ranks(trainer.strategy.launcher)
            # torchrun sends another signal to all ranks when the first has ended, which would kill the others before
            # they return their exit status. Python keeps SIG_IGN to its end, but no handler.
            noted = set(self._before) - {signal.SIGINT}
            self._before |= dict.fromkeys(noted, signal.SIG_IGN)
            _IGNORED.update(noted)
        self._restore()

    def _max_over_ranks(self, *numbers: int) -> list[int]:
        """Return the maximum of each number over all ranks."""
        if self._group is None:
            return list(numbers)
        sent = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._group)
        return sent.tolist()

    def _agree_on_signal(self) -> int:
        """Return the signal that any rank has received, the same on all ranks; 0 if none.

        Ranks also agree on when to ask again: after the steps that the slowest makes in `PATIENCE` seconds.
        """
        took = (time.monotonic() - self._asked) / max(self._steps, 1)
        *received, slowest = self._max_over_ranks(*(number in self.received for number in self._known), int(1e3 * took))
        self._every = 1 if self._group is None else min(int(1e3 * PATIENCE) // max(slowest, 1), MOST)
        self._asked, self._steps = time.monotonic(), 0
        return max(
            (number for number, seen in zip(self._known, received, strict=True) if seen),
            default=0,
            key=self._known.index,
        )

    # --- where the ranks act ---

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a run that has not trained yet if a signal came; nothing is saved."""
        if number := self._agree_on_signal():
            raise Preempted(number)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """After a step, agree on whether to end before the next; several ranks do so every `PATIENCE` seconds."""
        if lightning_internals.is_accumulating(trainer):
            return
        self._steps += 1
        if self._steps < self._every:
            return
        self._agreed = self._agree_on_signal()
        if self._agreed and self.last is not None:
            self.last.record_position(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """On a signal, save, requeue the job and end."""
        if self._agreed:
            path = None if self.last is None else self.last.save(trainer, PREEMPTED)
            saved = "no ModelCheckpoint says where to save, so nothing is saved" if path is None else f"saved {path}"
            self._end(trainer, self._agreed, f"{saved} at step {trainer.global_step}")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set how often ranks will agree in this validation: as often as the one with the fewest batches."""
        batches = sum(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        self._turns = -self._max_over_ranks(-int(min(batches, sys.maxsize)))[0]

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Between two batches of a validation, end the run if a signal came."""
        if self._turns > 0:
            self._turns -= 1
            self._interrupt(trainer)

    def watch_signals(self, batches: Any) -> Iterator[Any]:
        """Yield the batches of an evaluation; between two of them, end the run if a signal came."""
        turns = -self._max_over_ranks(-len(batches))[0]
        for number, batch in enumerate(batches):
            if number < turns and self._trainer is not None:
                self._interrupt(self._trainer)
            yield batch

    def _interrupt(self, trainer: pl.Trainer) -> None:
        """End the run during an evaluation if a signal came."""
        number = self._agreed or self._agree_on_signal()
        if number and trainer.state.fn == "fit":
            self._end(trainer, number, f"ended in an evaluation after step {trainer.global_step}")

    def _end(self, trainer: pl.Trainer, number: int, what: str) -> NoReturn:
        if trainer.is_global_zero:
            remedy = "to resume, run the same command with --resume auto (and without --ckpt_path)"
            print(f"{signal.Signals(number).name}: {what}; {remedy}", file=sys.stderr, flush=True)
            if number == self._requeues:
                requeue()
        raise Preempted(number)


def watch_signals(trainer: pl.Trainer, batches: Any) -> Iterable:
    """Return the batches of an evaluation; in a protected fit, the run may end between two of them."""
    watching = lightning_internals.find_callbacks(trainer, Preemption)
    return watching[0].watch_signals(batches) if watching else batches


def requeue() -> None:
    """Ask SLURM to run this job again, as Lightning does."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"diffvision: error: job {job} was not requeued: {error}", file=sys.stderr, flush=True)
