"""DataLoader workers ignore signals that are sent to all processes of a job: the rank handles them.

torchrun, SLURM and Ctrl-C in a terminal signal all processes. A worker would end at once, and its rank with it, in the
middle of a step and without a checkpoint. `preemption` handles the rank's signals.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

IGNORED = {signal.SIGTERM, signal.SIGINT}
INTERVAL = 1.0  # seconds between two checks that the parent is alive
_shielding = False


@contextmanager
def shield_workers() -> Iterator[None]:
    """Let processes forked inside this context end with their parent, and on SIGTERM only from their parent."""
    global _shielding
    _shielding = True
    try:
        yield
    finally:
        _shielding = False


def _ignore_signals() -> None:
    if _shielding:
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # for later threads too
        threading.Thread(target=_wait_for_parent, args=(os.getppid(),), daemon=True, name="wait-for-parent").start()


def _wait_for_parent(parent: int) -> None:
    """End this process when its parent ends or sends SIGTERM (`Process.terminate`), which is blocked otherwise."""
    while os.getppid() == parent:
        received = signal.sigtimedwait(IGNORED, INTERVAL)
        if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == parent:
            break
    os._exit(0)


os.register_at_fork(after_in_child=_ignore_signals)
