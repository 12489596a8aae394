"""Signals: every rank agrees at the next step, one checkpoint is written, and the run ends or goes on.

Lightning's own handlers work inside of the signal (a broadcast, a save) and so hang where one rank alone has it; these
only note it down. What is agreed is acted upon between two batches of training or of an evaluation.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from diffvision.training.durable.rank_monitor import Peers
from diffvision.training.durable.workers import shielded

SAVED = "preempted.ckpt"
SAVE = signal.SIGUSR2  # and go on
AGAIN = b"Ctrl-C: saving after this step and ending; once more ends at once\n"


class Preempted(SIGTERMException):
    """A run that has saved and ends because of a signal; Python exits with 128 + its number: 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Preemption(pl.Callback):
    """Has a fit save and end on SIGTERM and SIGINT, save and go on on SIGUSR2, and requeue itself under SLURM.

    One checkpoint, preempted.ckpt beside those of the first ModelCheckpoint, is replaced each time. It should be the
    last of the callbacks, so that those before it have done with the step.

    Args:
        peers: the run's ranks; a signal to one is one to all.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.received: set[int] = set()
        self._known: tuple[int, ...] = (SAVE, signal.SIGINT, signal.SIGTERM)  # the last that came in counts
        self._requeues: int | None = None
        self._before: dict[int, Any] = {}
        self._shield = ExitStack()
        self._trainer: pl.Trainer | None = None
        self._turns = 0

    # --- signals ---

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """From here on a signal is noted down; before, each has its usual effect, for there is nothing to save."""
        if stage != "fit":
            return
        self._trainer = trainer
        self.peers.join(trainer)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self._requeues = environment.requeue_signal
            self._known = (SAVE, self._requeues, signal.SIGINT, signal.SIGTERM)
        # Lightning's: its handlers, and a broadcast on the accelerator before each batch, which waits for its queue.
        vars(trainer._signal_connector)["register_signal_handlers"] = nothing
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = nothing
        if threading.current_thread() is threading.main_thread():
            self._shield.enter_context(shielded())
            for number in self._known:
                before = signal.getsignal(number)
                if number in IGNORED_TO_THE_END:  # it did not end: it fits again, as a notebook may
                    IGNORED_TO_THE_END.remove(number)
                    before = signal.SIG_DFL
                if before is not signal.SIG_IGN:  # as of SIGINT in the background
                    self._before[number] = before
                    signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.received.add(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            stderr = sys.__stderr__.fileno() if sys.__stderr__ else 2
            os.write(stderr, (b"\r\x1b[K" if os.isatty(stderr) else b"\n") + AGAIN)  # in place of the run's line

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self.received.clear()
        self._shield.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        noted = set(self._before) - {signal.SIGINT}
        if isinstance(exception, Preempted):
            ignore_until_the_end(noted)
            self._before = {number: handler for number, handler in self._before.items() if number not in noted}
        self._restore()

    def _agreed(self) -> int:
        """The signal that any rank has received, the same on all; 0 for none."""
        received = self.peers.most([number in self.received for number in self._known])
        return max(
            (number for number, there in zip(self._known, received, strict=True) if there),
            default=0,
            key=self._known.index,
        )

    # --- where they are acted upon ---

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (number := self._agreed()) not in (0, SAVE):
            raise Preempted(number)  # nothing is trained yet

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        number = self._agreed()
        last = trainer.global_step == trainer.max_steps  # then the run ends by itself
        if number and not (last and number != SAVE):
            self._act(trainer, number)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = sum(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        # Where ranks have different numbers of batches, only so often do all of them come by.
        self._turns = self.peers.least(int(min(batches, sys.maxsize)))

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._turns > 0:
            self._turns -= 1
            self._interrupt(trainer)

    def asking(self, batches: Any, description: str = "") -> Iterator[Any]:
        """The same batches, of an evaluation on all ranks that takes long; between two of them a run may end."""
        turns = self.peers.least(len(batches))
        for number, batch in enumerate(batches):
            if number < turns and self._trainer is not None:
                self._interrupt(self._trainer)
            yield batch

    def _interrupt(self, trainer: pl.Trainer) -> None:
        """In an evaluation: end, if that is wanted; what is to be saved alone can wait for the next step."""
        number = self._agreed()
        if number in (0, SAVE) or trainer.state.fn != "fit":
            return
        if trainer.sanity_checking:
            raise Preempted(number)
        self._act(trainer, number)

    # --- what is done ---

    def _act(self, trainer: pl.Trainer, number: int) -> None:
        name = signal.Signals(number).name
        path = saved_path(trainer)
        if path is None:
            told = f"{name}: no ModelCheckpoint says where to save, so nothing is saved"
        else:
            trainer.save_checkpoint(path)  # with a barrier: when it returns, the file is whole
            told = f"{name}: saved {path} at step {trainer.global_step}"
            if number != SAVE:
                told += "; to resume, run the same command with --resume auto (and without --ckpt_path)"
        self.received.discard(SAVE)
        if trainer.is_global_zero:
            print(told, file=sys.stderr, flush=True)
        if number == SAVE:
            return
        if number == self._requeues and trainer.is_global_zero:
            requeue()
        raise Preempted(number)


IGNORED_TO_THE_END: set[int] = set()


def ignore_until_the_end(numbers: Iterable[int]) -> None:
    """For a process that ends because of a signal: another one, as torchrun sends to all ranks when the first of them
    has ended, would kill it before it has given its exit status. Python keeps SIG_IGN, and no handler, to its end."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
        IGNORED_TO_THE_END.add(number)


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what Lightning would do."""


def saved_path(trainer: pl.Trainer) -> str | None:
    """Where a signal's checkpoint goes: beside those of the first ModelCheckpoint."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            return os.path.join(callback.dirpath, SAVED)
    return None


def asking(trainer: pl.Trainer) -> Callable[[Any, str], Iterable] | None:
    """What a long evaluation inside of a fit goes through its batches with, so that a signal is heard between them."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it unannounced
    return next((own.asking for own in callbacks if isinstance(own, Preemption)), None)


def requeue() -> None:
    """Have SLURM run this job again, as Lightning does."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch("[0-9_-]+", job):
        raise ValueError(f"SLURM_JOB_ID is {job!r}, which is no job's number")
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"diffvision: error: job {job} was not requeued: {error}", file=sys.stderr, flush=True)


@contextmanager
def forwarded(trainer: pl.Trainer) -> Iterator[None]:
    """Around a fit: a process that only waits for ranks it has forked hands signals on, and ends as they do."""
    launcher: Any = trainer.strategy.launcher
    waits = hasattr(launcher, "_start_method") and threading.current_thread() is threading.main_thread()
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
