"""Group B, without signals: runs that are cut or killed and go on, against runs that are not, in every bit they leave.

The same runs and comparisons as those of `resume_matrix.py`, which has all places to cut at.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

import tiny_runs
from battery.case import Seen, case, none_left, stock
from battery.plain import Plain, loader, trainer
from battery.small import fit, goes, raised, refused, shards, short
from forks import forked, on_ranks
from resume_matrix import Case, joined, one_part, outcome_of, verdict
from tiny_runs import TASKS, Cut, Outcome, Setting, once, quietly, run, unequal, write_data

DATA = Path("data")
THREE = [Cut("saved", 0), Cut("on_before_optimizer_step", 2), Cut("on_validation_batch_end", 5)]


def flat(outcome: Outcome) -> list[str]:
    return [digest for number in sorted(outcome.samples) for digest in outcome.samples[number]]


def equal(outcome: Outcome, whole: Outcome) -> Seen:
    """What was seen of a run that is to be bit-equal to another; AssertionError where it is not."""
    differing = unequal(whole, outcome)
    assert not differing, f"{len(differing)} differ: {differing[0]}"
    begins = ", ".join(str(number) for number in outcome.began)
    return Seen(f"bit-equal; begun at batches {begins}", none_left(flat(outcome), flat(whole)))


def cut(setting: Setting, cuts: list[Cut], workers: list[int]) -> Seen:
    write_data(DATA)
    whole = run(DATA, Path("whole"), setting, [], workers=[0])
    return equal(run(DATA, Path("kept"), setting, cuts, workers=workers), whole)


for task in TASKS:
    case(f"B2 three interruptions in an epoch, {task}", "the end is bit-equal to that of the run never stopped")(
        partial(cut, Setting(task, ema=True), THREE, [0])
    )
for workers in (0, 1, 2):
    for accumulate in (1, 3):
        case(
            f"B4 {workers} workers, accumulation {accumulate}",
            "bit-equal, with dropout, mixup and augmentation",
        )(partial(cut, Setting("classification", accumulate=accumulate), [Cut("saved", 5)], [workers]))
case("B6 other numbers of workers on resume", "bit-equal to the run without workers and interruptions")(
    partial(cut, Setting("clip"), THREE[1:], [2, 0, 1])
)


class Epoch(pl.Callback):
    """Ends a plain run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            raise tiny_runs.Interrupted


def plain_resume() -> Seen:
    """Three interruptions of an epoch of 8 batches that are shuffled."""
    keeps = ModelCheckpoint("kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    seen: list[float] = []
    for step, until in ((0, 2), (2, 4), (4, 6), (6, None)):
        module = Plain()
        path = f"kept/step={step}.ckpt" if step else None
        with suppress(tiny_runs.Interrupted):
            trainer(8, keeps, Epoch(-1 if until is None else until)).fit(module, loader(), ckpt_path=path)
        seen += module.seen
    lost = none_left(seen, [float(number) for number in range(64)])
    assert not lost, f"{lost} samples of an epoch of 64 lost or repeated, without a word"
    return Seen("every sample once", lost)


for task in TASKS:
    stock(f"B2 three interruptions in an epoch, {task}")(plain_resume)


def dies_there(self: tiny_runs.Cutter, hook: str, trainer: pl.Trainer) -> None:
    if self.cut and (hook, trainer.fit_loop.total_batch_idx) == (self.cut.hook, self.cut.batch):
        os.kill(os.getpid(), signal.SIGKILL)


def killed_part(setting: Setting, where: Cut) -> None:
    tiny_runs.Cutter.reached = dies_there
    with quietly():
        once(DATA, Path("kept"), setting, Outcome(), where)


def killed(where: Cut) -> Seen:
    """A run killed in the middle of work, and gone on with by another process."""
    setting = Setting("language", ema=True)
    write_data(DATA)
    assert "the process died" in raised(partial(forked, partial(killed_part, setting, where)))
    rest = run(DATA, Path("kept"), setting, [], workers=[0])
    whole = run(DATA, Path("whole"), setting, [], workers=[0])
    first = rest.began[0]
    assert first > 0, "begun anew"
    there = {number: own for number, own in whole.samples.items() if number >= first}
    rows = {step: row for step, row in whole.rows.items() if step in rest.rows}
    return equal(rest, Outcome(whole.checkpoint, there, rows, whole.files, resumed=whole.resumed))


for what, where in {
    "in a step": Cut("on_before_optimizer_step", 4),
    "in validation": Cut("on_validation_batch_end", 5),
    "as an epoch begins": Cut("on_train_epoch_start", 5),
}.items():
    case(f"B3 kill -9 {what}", "goes on from the last checkpoint, bit-equal to the run never stopped")(
        partial(killed, where)
    )


@case("B6 other numbers of processes on resume", "refused; with --resume_ranks any every sample comes as it would have")
def other_ranks() -> Seen:
    shards()
    goes(*fit(steps=1))
    two = ["--trainer.devices=2", "--trainer.strategy=ddp_fork"]
    message = refused(*fit("--resume=auto", *two), words="1 processes trained it and here are 2")
    chosen = Case(Setting("language"), "step saved", ranks=(2, 1))
    write_data(DATA)
    outcome = outcome_of(DATA, Path("cut"), chosen)
    whole = outcome_of(DATA, Path("whole"), chosen.whole)
    assert not verdict(chosen, outcome, whole)
    return Seen(f"{short(message, 90)}; with any: equal", none_left(flat(outcome), flat(whole)))


@case("B6 another batch size on resume", "refused with a clear reason")
def other_batch_size() -> str:
    shards()
    goes(*fit(steps=1))
    return short(refused(*fit("--resume=auto", "--data.batch_size=16"), words="batch_size was 8 and is 16 now"))


@case("B6 other settings on resume", "goes on, and names each of them in one line", quick=True)
def other_settings() -> str:
    shards()
    goes(*fit(steps=1))
    told = goes(*fit("--resume=auto", "--model.optimizer.lr=0.1", "--model.mixup={mixup_alpha: 0.5}"))
    line, *_ = [line for line in told.splitlines() if "it continues with other settings than before: " in line]
    assert "optimizer.lr 0.1 (was 0.0005)" in line
    assert "mixup" in line
    return short(line.partition("it continues")[2])


@case("B6 two processes", "bit-equal, with the generators of each")
def same_ranks() -> Seen:
    setting, outcome, whole = Setting("language", ema=True), Outcome(), Outcome()
    write_data(DATA)
    for kept, cuts, into in (("kept", [Cut("saved", 1), None], outcome), ("whole", [None], whole)):
        for part, where in enumerate(cuts):
            joined(into, on_ranks(partial(one_part, DATA, Path(kept), setting, where, 2, part), 2))
    return equal(outcome, whole)
