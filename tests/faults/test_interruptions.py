"""A run of the command line that is ended by SIGTERM or SIGKILL and resumed, against the run never stopped."""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import tiny_runs
from command_line import fit, run, shot, succeeds, write_data
from diffvision.training.fault_tolerance.checkpoints import find_newest
from ranks import alone
from tiny_runs import Cut, Outcome, Setting, once, quietly, unequal

pytestmark = [pytest.mark.faults, pytest.mark.forks]

SIGTERM_AT = {
    "the first step": (shot(0, signal.SIGTERM), 1),
    "a middle step": (shot(2, signal.SIGTERM), 3),
    "the last step": (shot(3, signal.SIGTERM), 3),
    "validation": (shot(4, signal.SIGTERM, hook="on_validation_batch_end"), 3),
}


def state_at_the_end(directory: str) -> dict[str, Any]:
    path, _, _ = find_newest([Path(directory)])
    assert path is not None, f"no exact checkpoint in {directory}"
    content, final = (torch.load(path, weights_only=True) for path in (path, Path(directory, "final.ckpt")))
    state = {name: content[name] for name in ("global_step", "state_dict", "optimizer_states")}
    return state | {"final": final["state_dict"]}


@pytest.mark.parametrize("when", SIGTERM_AT)
def test_a_run_ended_by_sigterm_and_resumed_is_the_run_never_stopped(when):
    """Of 8 batches an epoch, two a step: the signal comes in the middle of an accumulation."""
    write_data(count=4)
    settings = ["--trainer.max_epochs=2", "--trainer.accumulate_grad_batches=2", "--data.evaluation=shards"]
    settings += ["--trainer.limit_val_batches=3", "--trainer.max_steps=-1"]
    command = partial(fit, *settings, "--resume=auto")
    flags, steps = SIGTERM_AT[when]
    ended = alone(lambda: sys.exit(run(*command(*flags))[0]))
    assert ended.code == 143, ended.output[-300:]
    assert find_newest([Path("kept")])[1] == steps
    succeeds(*command())
    succeeds(*command("--trainer.callbacks.dirpath=whole"))
    assert not tiny_runs.differences(state_at_the_end("kept"), state_at_the_end("whole"))


KILLED_AT = {
    "a step": Cut("on_before_optimizer_step", 4),
    "validation": Cut("on_validation_batch_end", 5),
    "an epoch's start": Cut("on_train_epoch_start", 5),
}


@pytest.mark.parametrize("when", KILLED_AT)
def test_a_run_killed_and_resumed_by_another_process_is_the_run_never_stopped(when, monkeypatch):
    setting, cut = Setting("language", ema=True), KILLED_AT[when]
    data, kept = Path("data"), Path("kept")
    tiny_runs.write_data(data)

    def die(self: tiny_runs.Cutter, hook: str, trainer: pl.Trainer) -> None:
        if self.cut and (hook, trainer.fit_loop.total_batch_idx) == (self.cut.hook, self.cut.batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def first_part() -> None:
        tiny_runs.Cutter.reached = die
        with quietly():
            once(data, kept, setting, Outcome(), cut)

    assert alone(first_part).code == -signal.SIGKILL
    rest = tiny_runs.run(data, kept, setting, [], workers=[0])
    whole = tiny_runs.run(data, Path("whole"), setting, [], workers=[0])
    (first,) = rest.began
    assert first > 0, "begun anew"
    samples = {number: digests for number, digests in whole.samples.items() if number >= first}
    rows = {step: row for step, row in whole.rows.items() if step in rest.rows}
    assert not unequal(rest, replace(whole, samples=samples, rows=rows))
