"""The resume matrix: where, and under which settings, tiny runs are interrupted and resumed.

`test_resume_matrix.py` runs its cells; the runs themselves are in `tiny_runs.py`.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ranks import on_ranks
from tiny_runs import BATCH, BATCHES, EPOCHS, TASKS, Cut, Outcome, Setting, once, quietly, run, unequal, write_data

ONCE = {
    "before the first step": [Cut("on_train_batch_start", 0)],
    "step saved": [Cut("saved", 1)],
    "before the optimizer's step": [Cut("on_before_optimizer_step", 2)],
    "validation begins": [Cut("on_validation_start", 2)],
    "in validation": [Cut("on_validation_batch_end", 2)],
    "validation ends": [Cut("on_validation_end", 2)],
    "after validation": [Cut("on_train_batch_start", 3)],
    "in accumulation": [Cut("on_train_batch_end", 4)],
    "last step of an epoch saved": [Cut("saved", 5)],
    "an epoch's last validation begins": [Cut("on_validation_start", 5)],
    "an epoch begins": [Cut("on_train_epoch_start", 5)],
    "first step of an epoch saved": [Cut("saved", 6)],
    "last step of the run saved": [Cut("saved", 11)],
}
THRICE = {
    "three: steps": [Cut("saved", 1), Cut("saved", 2), Cut("on_train_batch_start", 8)],
    "three: epoch's end": [Cut("on_validation_start", 5), Cut("on_train_epoch_start", 5), Cut("saved", 6)],
    "three: validation": [
        Cut("on_validation_batch_end", 2),
        Cut("on_validation_end", 2),
        Cut("on_validation_start", 11),
    ],
}
CUTS = ONCE | THRICE
WITH_WORKERS = ["step saved", "in validation", "last step of an epoch saved", "an epoch begins", *THRICE]
OTHER_WORKERS = [(2, 0), (0, 1), (1, 2, 0, 1)]
ON_RANKS = ["step saved", "in validation", "last step of an epoch saved", "three: epoch's end"]


@dataclass(frozen=True)
class Case:
    """One interrupted run, a cell of the matrix.

    Attributes:
        cut: key of CUTS; empty for a run that is not interrupted.
        workers: number of workers of each of its parts; the last holds for all that follow.
        ranks: number of processes of each of its parts, in the same way.
    """

    setting: Setting
    cut: str
    workers: tuple[int, ...] = (0,)
    ranks: tuple[int, ...] = (1,)

    @property
    def whole(self) -> Case:
        """The same run, not interrupted and without workers: what it is compared with."""
        ranks = (1,) if len(set(self.ranks)) > 1 else self.ranks
        return replace(self, cut="", workers=(0,), ranks=ranks)

    def __str__(self) -> str:
        s = self.setting
        averages = "-ema" if s.ema else ""
        workers, ranks = ("+".join(map(str, numbers)) for numbers in (self.workers, self.ranks))
        name = f"{s.task}-{s.by}{averages}-accumulate {s.accumulate}-workers {workers}-ranks {ranks}-{self.cut}"
        return name.replace(" ", "_")


def cases() -> list[Case]:
    """Return all cells of the matrix."""
    settings = [Setting(task, ema, n) for task in TASKS for ema in (False, True) for n in (1, 3)]
    chosen = [Case(setting, cut) for setting in settings for cut in CUTS]
    chosen += [Case(setting, cut, (n,)) for setting in settings for n in (1, 2) for cut in WITH_WORKERS]
    chosen += [Case(setting, "three: epoch's end", workers) for setting in settings for workers in OTHER_WORKERS]
    chosen += [Case(Setting("language", ema=True, by="steps"), cut) for cut in CUTS]
    quiet = [cut for cut, cuts in CUTS.items() if not any("validation" in cut.hook for cut in cuts)]
    chosen += [Case(Setting("language", by="steps, without validation"), cut) for cut in quiet]
    for task in TASKS:
        chosen += [Case(Setting(task, ema=True), cut, ranks=(2,)) for cut in ON_RANKS]
        chosen += [Case(Setting(task), cut, ranks=ranks) for cut in ON_RANKS[:3] for ranks in ((1, 2), (2, 1))]
    return chosen


def outcome_of(data: Path, kept: Path, case: Case) -> Outcome:
    """Run a case in this process; on several ranks, run each of its parts in forked processes."""
    cuts = CUTS.get(case.cut, [])
    # Lightning prints, and so does the data's account.
    with contextlib.redirect_stdout(io.StringIO()):
        if case.ranks == (1,):
            return run(data, kept, case.setting, cuts, workers=list(case.workers))
        outcome = Outcome()
        for part, cut in enumerate([*cuts, None]):
            world_size = case.ranks[min(part, len(case.ranks) - 1)]
            parts = on_ranks(partial(one_part, data, kept, case.setting, cut, world_size, part), world_size)
            add(outcome, parts)
        return outcome


def one_part(data: Path, kept: Path, setting: Setting, cut: Cut | None, world_size: int, part: int) -> Outcome:
    outcome = Outcome(began=[-1] * part)
    devices = {"devices": world_size, "strategy": "ddp"} if world_size > 1 else {}
    with quietly():
        ended = once(data, kept, setting, outcome, cut, ranks="any", **devices)
    if ended != (cut is None):
        raise AssertionError(f"not interrupted at {cut}" if cut else "did not end")
    return outcome


class Matrix:
    """Compares interrupted runs with those never stopped, each of which is trained once."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.whole: dict[Case, Outcome] = {}
        write_data(self.data)

    def check(self, case: Case, kept: Path) -> None:
        outcome = outcome_of(self.data, kept, case)
        assert len(outcome.began) == 1 + len(CUTS[case.cut])
        if case.whole not in self.whole:
            self.whole[case.whole] = outcome_of(self.data, self.root / f"whole{len(self.whole)}", case.whole)
        assert verdict(case, outcome, self.whole[case.whole]) == []


def add(whole: Outcome, ranks: list[Outcome]) -> None:
    """Add a part of a run, of which each rank has its slice of every batch."""
    first = ranks[0]
    batches = {n: [digest for rank in ranks for digest in rank.samples[n]] for n in first.samples}
    whole.samples |= batches
    whole.rows |= {step: whole.rows.get(step, {}) | row for step, row in first.rows.items()}
    whole.began, whole.resumed = whole.began + first.began[-1:], whole.resumed + first.resumed
    whole.checkpoint, whole.files = first.checkpoint, first.files
    whole.generators, whole.metrics = first.generators, first.metrics


def verdict(case: Case, outcome: Outcome, whole: Outcome) -> list[str]:
    """Return what differs from the run never stopped. On another number of ranks only samples must be equal."""
    if len(set(case.ranks)) == 1:
        return unequal(whole, outcome)
    given = [[d for n in sorted(o.samples) for d in o.samples[n]] for o in (whole, outcome)]
    assert len(given[0]) == EPOCHS * BATCHES * BATCH
    return [] if given[0] == given[1] else ["samples"]
