"""A run of the command line that is ended by SIGTERM or SIGKILL and resumed, against the run never stopped."""

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import fit, run, shot, succeeds, write_data
from diffvision.training.fault_tolerance.checkpoints import find_newest
from ranks import alone
from tiny_runs import differences

pytestmark = [pytest.mark.faults, pytest.mark.forks]

ENDED_AT = {
    # where and how -> flags, the exit status, and the step of the newest checkpoint
    "the first step, SIGTERM": (shot(0, signal.SIGTERM), 143, 1),
    "a middle step, SIGTERM": (shot(2, signal.SIGTERM), 143, 3),
    "a middle step, SIGKILL": (shot(2, signal.SIGKILL), -9, 1),
    "the last step, SIGTERM": (shot(3, signal.SIGTERM), 143, 3),
    "validation, SIGTERM": (shot(4, signal.SIGTERM, hook="on_validation_batch_end"), 143, 3),
    "validation, SIGKILL": (shot(4, signal.SIGKILL, hook="on_validation_batch_end"), -9, 3),
}


def state_at_the_end(directory: str) -> dict[str, Any]:
    path, _, _ = find_newest([Path(directory)])
    assert path is not None, f"no exact checkpoint in {directory}"
    content, final = (torch.load(path, weights_only=True) for path in (path, Path(directory, "final.ckpt")))
    state = {name: content[name] for name in ("global_step", "state_dict", "optimizer_states")}
    return state | {"final": final["state_dict"]}


@pytest.mark.parametrize("when", ENDED_AT)
def test_a_run_ended_and_resumed_by_another_process_is_the_run_never_stopped(when):
    """Of 8 batches an epoch, two a step: the signal comes in the middle of an accumulation."""
    write_data(count=4)
    settings = ["--trainer.max_epochs=2", "--trainer.accumulate_grad_batches=2", "--data.evaluation=shards"]
    settings += ["--trainer.limit_val_batches=3", "--trainer.max_steps=-1", "--resume=auto"]
    flags, status, step = ENDED_AT[when]
    command = partial(fit, *settings)
    ended = alone(lambda: sys.exit(run(*command(*flags))[0]))
    assert ended.code == status, ended.output[-300:]
    assert find_newest([Path("kept")])[1] == step
    succeeds(*command())
    succeeds(*command("--trainer.callbacks.dirpath=whole"))
    assert not differences(state_at_the_end("kept"), state_at_the_end("whole"))
