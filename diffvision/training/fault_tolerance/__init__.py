"""Fault tolerance: atomic checkpoints, exact resuming, signals, and steps that are not finite.

    with protect(trainer, module, resume="auto") as checkpoint:
        trainer.fit(module, data, ckpt_path=checkpoint)

Other packages import these names, and from the modules inside only `lightning_internals`.
"""

from diffvision.training.fault_tolerance.checkpoints import read_step
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.finite import StepGuard, gather_from_ranks
from diffvision.training.fault_tolerance.preemption import Preempted, watch_signals
from diffvision.training.fault_tolerance.protection import protect
from diffvision.training.fault_tolerance.resume import Ranks, Resume

__all__ = [
    "LastCheckpoint",
    "Preempted",
    "Ranks",
    "Resume",
    "StepGuard",
    "gather_from_ranks",
    "protect",
    "read_step",
    "watch_signals",
]
