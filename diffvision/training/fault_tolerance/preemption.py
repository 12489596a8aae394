"""Signals: every rank agrees after a step, one checkpoint is written, and the run ends or continues.

Lightning's handlers work inside the signal (a broadcast, a save), and hang where only one rank receives it; these only
note it. The ranks act between two batches of training or of an evaluation. Workers of a rank are in `workers`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from diffvision.training.fault_tolerance import lightning_internals
from diffvision.training.fault_tolerance.ranks import Peers
from diffvision.training.fault_tolerance.workers import shield_workers

SAVED = "preempted.ckpt"
SAVE = signal.SIGUSR2  # the run continues
PATIENCE = 1.0  # seconds of training after which ranks ask each other for signals; less than a step: after each step
MOST = 16  # steps after which they ask at the latest, as steps may become slower
AGAIN = b"Ctrl-C: saving after this step and ending; a second one ends at once\n"


class Preempted(SIGTERMException):
    """A run that has saved and ends because of a signal; Python exits with 128 + its number: 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Preemption(pl.Callback):
    """Lets a fit save and end on SIGTERM and SIGINT, save and continue on SIGUSR2, and requeue itself under SLURM.

    One checkpoint, preempted.ckpt next to those of the first ModelCheckpoint, is replaced each time. This should be the
    last of the callbacks, so that those before it are done with the step.

    Args:
        peers: the run's ranks; a signal to one is one to all.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.received: set[int] = set()
        self._known: tuple[int, ...] = (SAVE, signal.SIGINT, signal.SIGTERM)  # of several received, the last one counts
        self._requeues: int | None = None
        self._before: dict[int, Any] = {}
        self._shield = ExitStack()
        self._trainer: pl.Trainer | None = None
        self._turns = 0
        self._asked, self._steps, self._every = 0.0, 0, 1  # when they asked last, steps since, and until they ask

    # --- signals ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to note signals; before, each has its usual effect, because there is nothing to save."""
        if stage != "fit":
            return
        self._trainer = trainer
        self.peers.join(trainer)
        environment = lightning_internals.cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self._requeues = environment.requeue_signal
            self._known = (SAVE, self._requeues, signal.SIGINT, signal.SIGTERM)
        lightning_internals.disable_signal_handlers(trainer)
        if threading.current_thread() is threading.main_thread():
            self._shield.enter_context(shield_workers())
            for number in self._known:
                before = signal.getsignal(number)
                if number in IGNORED_TO_THE_END:  # the process did not end but fits again, as a notebook may
                    IGNORED_TO_THE_END.remove(number)
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

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()
        self.peers.leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give signals their former effect; in a preempted run further ones are ignored until the process ends."""
        noted = set(self._before) - {signal.SIGINT}
        if isinstance(exception, Preempted):
            lightning_internals.forget_started_ranks(trainer.strategy.launcher)
            ignore_until_the_end(noted)
            self._before = {number: handler for number, handler in self._before.items() if number not in noted}
        self._restore()
        self.peers.leave()

    def _agree_on_signal(self) -> int:
        """Return the signal that any rank has received, the same on all; 0 for none.

        Ranks also agree on how many steps of the slowest of them take `PATIENCE`, and ask again after so many.
        """
        took = (time.monotonic() - self._asked) / max(self._steps, 1)
        *received, slowest = self.peers.max([*(number in self.received for number in self._known), int(1e3 * took)])
        self._every = min(int(1e3 * PATIENCE) // max(slowest, 1), MOST) if self.peers.world > 1 else 1
        self._asked, self._steps = time.monotonic(), 0
        return max(
            (number for number, seen in zip(self._known, received, strict=True) if seen),
            default=0,
            key=self._known.index,
        )

    # --- where the ranks act ---

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a run that has not trained yet, without a checkpoint."""
        if (number := self._agree_on_signal()) not in (0, SAVE):
            raise Preempted(number)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Act after a step on what the ranks have agreed on; several ranks ask each other every `PATIENCE` seconds."""
        if lightning_internals.is_accumulating(trainer):
            return
        self._steps += 1
        if self._steps < self._every:
            return
        number = self._agree_on_signal()
        last = trainer.global_step == trainer.max_steps  # then the run ends by itself
        if number and not (last and number != SAVE):
            self._act(trainer, number)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count how often the ranks will ask each other in this validation."""
        batches = sum(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        # Ranks may have different numbers of batches: they ask as often as all of them can.
        self._turns = self.peers.min(int(min(batches, sys.maxsize)))

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Act between two batches of a validation."""
        if self._turns > 0:
            self._turns -= 1
            self._interrupt(trainer)

    def watch_signals(self, batches: Any) -> Iterator[Any]:
        """Yield the batches of a long evaluation on all ranks; between two of them a run may end."""
        turns = self.peers.min(len(batches))
        for number, batch in enumerate(batches):
            if number < turns and self._trainer is not None:
                self._interrupt(self._trainer)
            yield batch

    def _interrupt(self, trainer: pl.Trainer) -> None:
        """End a run in an evaluation, if a signal asks for it; one that only asks to save waits for the next step."""
        number = self._agree_on_signal()
        if number in (0, SAVE) or trainer.state.fn != "fit":
            return
        if trainer.sanity_checking:
            raise Preempted(number)
        self._act(trainer, number)

    # --- what is done ---

    def _act(self, trainer: pl.Trainer, number: int) -> None:
        """Save on a signal; unless it asks only for that, requeue the job and stop."""
        name = signal.Signals(number).name
        path = preempted_path(trainer)
        if path is None:
            report = f"{name}: no ModelCheckpoint says where to save, so nothing is saved"
        else:
            trainer.save_checkpoint(path)  # has a barrier: when it returns, the file is complete
            report = f"{name}: saved {path} at step {trainer.global_step}"
            if number != SAVE:
                report += "; to resume, run the same command with --resume auto (and without --ckpt_path)"
        self.received.discard(SAVE)
        if trainer.is_global_zero:
            print(report, file=sys.stderr, flush=True)
        if number == SAVE:
            return
        if number == self._requeues and trainer.is_global_zero:
            requeue()
        raise Preempted(number)


IGNORED_TO_THE_END: set[int] = set()


def ignore_until_the_end(numbers: Iterable[int]) -> None:
    """Ignore signals until this process ends.

    torchrun sends another one to all ranks when the first of them has ended, which would kill the others before they
    return their exit status. Python keeps SIG_IGN to its end, but no handler.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
        IGNORED_TO_THE_END.add(number)


def preempted_path(trainer: pl.Trainer) -> str | None:
    """Return where a signal's checkpoint is saved: next to those of the first ModelCheckpoint."""
    directories = [saver.dirpath for saver in lightning_internals.find_callbacks(trainer, ModelCheckpoint)]
    return next((os.path.join(directory, SAVED) for directory in directories if directory), None)


def watch_signals(trainer: pl.Trainer, batches: Any) -> Iterable:
    """Return the batches of a long evaluation in a fit, between which the run acts on signals if it is protected."""
    watching = lightning_internals.find_callbacks(trainer, Preemption)
    return watching[0].watch_signals(batches) if watching else batches


def requeue() -> None:
    """Ask SLURM to run this job again, as Lightning does."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch("[0-9_-]+", job):
        raise ValueError(f"SLURM_JOB_ID is {job!r}: set it to the job's number")
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"diffvision: error: job {job} was not requeued: {error}", file=sys.stderr, flush=True)


@contextmanager
def forward_signals(trainer: pl.Trainer) -> Iterator[None]:
    """Forward signals to the ranks that this process has forked and only waits for, and end as they do."""
    launcher: Any = trainer.strategy.launcher
    waits = lightning_internals.forks_ranks(launcher) and threading.current_thread() is threading.main_thread()
    before = {}
    for number in (signal.SIGTERM, SAVE) if waits else ():
        before[number] = signal.signal(number, lambda number, frame: launcher.kill(number))
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code <= 128:
            raise
        ignore_until_the_end(before)
        before.clear()
        raise SystemExit(error.exit_code) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
