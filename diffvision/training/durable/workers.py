"""Signals to a whole group of processes are the rank's business: its forked workers leave them to it.

torchrun, SLURM and a terminal's Ctrl-C signal all processes of a job. A DataLoader's worker would end at once, and its
rank with it, in the middle of a step and without a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LEFT = {signal.SIGTERM, signal.SIGINT}
LOOK = 1.0  # seconds between two looks whether the parent lives
_shielding = False


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that are forked inside end on SIGTERM only where it is their parent that sends it, and with it."""
    global _shielding
    _shielding = True
    try:
        yield
    finally:
        _shielding = False


def _leave_signals() -> None:
    if _shielding:
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT)  # for the threads to come too
        threading.Thread(target=_hear_parent, args=(os.getppid(),), daemon=True, name="hear-parent").start()


def _hear_parent(parent: int) -> None:
    """Process.terminate() is the parent's word, which the blocked signal would keep from being heard."""
    while os.getppid() == parent:
        heard = signal.sigtimedwait(LEFT, LOOK)
        if heard is not None and heard.si_signo == signal.SIGTERM and heard.si_pid == parent:
            break
    os._exit(0)


os.register_at_fork(after_in_child=_leave_signals)
