"""The resume matrix: runs that are interrupted, against runs that are not, in every bit that they leave.

    python scripts/resume_matrix.py [--quick] [--stock] [--jobs 2] [--output docs/benchmarks/resume.md]

Each case is a tiny run (`tiny_runs.py`) in a process of its own; where it is cut, a new trainer and a new module, with
generators seeded otherwise, go on from the newest checkpoint of its directory as `--resume auto` does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch

from forks import each, on_ranks
from tiny_runs import BATCH, BATCHES, EPOCHS, TASKS, Cut, Outcome, Setting, once, quietly, run, unequal, write_data

ONCE = {
    "before the first step": [Cut("on_train_batch_start", 0)],
    "step saved": [Cut("saved", 1)],
    "before the optimizer's step": [Cut("on_before_optimizer_step", 2)],
    "validation begins": [Cut("on_validation_start", 2)],
    "in validation": [Cut("on_validation_batch_end", 2)],
    "in validation, saved there": [Cut("on_validation_batch_end", 2, save=True)],
    "validation ends": [Cut("on_validation_end", 2)],
    "after validation": [Cut("on_train_batch_start", 3)],
    "in accumulation, saved there": [Cut("on_train_batch_end", 4, save=True)],
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
OTHER_WORKERS = {"2 then 0": [2, 0], "0 then 1": [0, 1], "1, 2, 0, 1": [1, 2, 0, 1]}
ON_RANKS = ["step saved", "in validation", "last step of an epoch saved", "three: epoch's end"]


INTRODUCTION = """\
`{command}` trained each task, tiny, with shuffling, dropout, random augmentation, mixup (classification), clipping of
the gradient and two validations in each of {epochs} epochs of {batches} batches. Runs that were interrupted were
compared with one that was not (and had no workers): everything that a checkpoint holds at the end (weights, averages,
optimizer, schedule, loops, callbacks, metrics, the random generators of every rank), every sample as the model saw it,
every value that was logged but throughput, and which checkpoints lay on the disk. After each
interruption a new module and trainer, with generators in another state, went on as `--resume auto` does."""
STOCK = """\
The same with Lightning's own callbacks, our loader and our search for a checkpoint: {counts}. What is equal there
begins anew; a second interruption that such a run does not come to counts as different."""
BEYOND = """\
Not in the matrix: GPUs, torch.compile, FSDP2, several machines. Signals and kills are in the fault battery."""


@dataclass(frozen=True)
class Case:
    """One interrupted run.

    Attributes:
        cut: key of CUTS.
        workers: of its parts, the last of them for all that follow.
        ranks: likewise; one number if it stays.
    """

    setting: Setting
    cut: str
    workers: tuple[int, ...] = (0,)
    ranks: tuple[int, ...] = (1,)
    stock: bool = False

    @property
    def whole(self) -> Case:
        """The same run, not interrupted, without workers: what it is compared with."""
        ranks = (1,) if len(set(self.ranks)) > 1 else self.ranks
        return replace(self, cut="", workers=(0,), ranks=ranks)

    @property
    def group(self) -> str:
        if self.ranks != (1,):
            return "ranks " + " then ".join(map(str, self.ranks))
        return "other workers" if len(self.workers) > 1 else f"{self.workers[0]} workers"


def cases(*, quick: bool = False, stock: bool = False) -> list[Case]:
    """All, or half a dozen of them."""
    settings = [Setting(task, ema, n) for task in TASKS for ema in (False, True) for n in (1, 3)]
    if quick:
        return [
            Case(Setting("language", True, 3), "in accumulation, saved there"),
            Case(Setting("language", True, 3), "three: epoch's end", (1, 2, 0)),
            Case(Setting("language", by="steps"), "last step of the run saved"),
            Case(Setting("classification", True), "in validation, saved there"),
            Case(Setting("classification", True), "three: validation"),
            Case(Setting("clip", True, 3), "last step of an epoch saved"),
        ]
    if stock:
        return [Case(setting, cut, stock=True) for setting in settings if setting.accumulate == 1 for cut in CUTS]
    chosen = [Case(setting, cut) for setting in settings for cut in CUTS]
    chosen += [Case(setting, cut, (n,)) for setting in settings for n in (1, 2) for cut in WITH_WORKERS]
    for setting in settings:
        chosen += [Case(setting, "three: epoch's end", tuple(workers)) for workers in OTHER_WORKERS.values()]
    chosen += [Case(Setting("language", ema=True, by="steps"), cut) for cut in CUTS]
    quiet = [cut for cut, cuts in CUTS.items() if not any("validation" in cut.hook for cut in cuts)]
    chosen += [Case(Setting("language", by="steps, without validation"), cut) for cut in quiet]
    for task in TASKS:
        chosen += [Case(Setting(task, ema=True), cut, ranks=(2,)) for cut in ON_RANKS]
        chosen += [Case(Setting(task), cut, ranks=r) for cut in ON_RANKS[:3] for r in ((1, 2), (2, 1))]
    return chosen


# --- running ---


def outcome_of(data: Path, kept: Path, case: Case) -> Outcome:
    """A case's run, in this process; on several ranks, its parts in processes of their own."""
    cuts = CUTS.get(case.cut, [])
    with contextlib.redirect_stdout(io.StringIO()):  # Lightning's prints, and the data's account
        if case.ranks == (1,):
            return run(data, kept, case.setting, cuts, workers=list(case.workers), stock=case.stock)
        outcome = Outcome()
        for part, cut in enumerate([*cuts, None]):
            world = case.ranks[min(part, len(case.ranks) - 1)]
            parts = on_ranks(partial(one_part, data, kept, case.setting, cut, world, part), world)
            joined(outcome, parts)
        return outcome


def one_part(data: Path, kept: Path, setting: Setting, cut: Cut | None, world: int, part: int) -> Outcome:
    torch.set_num_threads(1)
    outcome = Outcome(began=[-1] * part)
    many = {"devices": world, "strategy": "ddp"} if world > 1 else {}
    with quietly():
        ended = once(data, kept, setting, outcome, cut, ranks="any", **many)
    if ended != (cut is None):
        raise AssertionError(f"not interrupted at {cut}" if cut else "did not end")
    return outcome


def joined(whole: Outcome, ranks: list[Outcome]) -> None:
    """Add a part of a run: each global batch is the ranks' slices one after another."""
    first = ranks[0]
    batches = {n: [digest for rank in ranks for digest in rank.samples[n]] for n in first.samples}
    whole.samples |= batches
    whole.rows |= {step: whole.rows.get(step, {}) | row for step, row in first.rows.items()}
    whole.began, whole.resumed = whole.began + first.began[-1:], whole.resumed + first.resumed
    whole.checkpoint, whole.files = first.checkpoint, first.files


def verdict(case: Case, outcome: Outcome, whole: Outcome) -> list[str]:
    """What differs from the run that was not interrupted. On another number of ranks only samples have to be equal."""
    if len(set(case.ranks)) == 1:
        return unequal(whole, outcome)
    given = [[d for n in sorted(o.samples) for d in o.samples[n]] for o in (whole, outcome)]
    assert len(given[0]) == EPOCHS * BATCHES * BATCH
    return [] if given[0] == given[1] else ["samples"]


def kept_in(root: Path, case: Case, whole: bool) -> Path:
    return root / f"{'whole' if whole else 'cut'}-{abs(hash((case, whole))):x}"


def checked(data: Path, root: Path, case: Case) -> tuple[list[str], float, list[int]]:
    """What differs, the seconds that it took, and where the run began each time."""
    begun = time.perf_counter()
    whole = torch.load(kept_in(root, case.whole, True).with_suffix(".pt"), weights_only=False)
    kept = kept_in(root, case, False)
    try:
        outcome = outcome_of(data, kept, case)
        return verdict(case, outcome, whole), time.perf_counter() - begun, outcome.began
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        kept.with_suffix(".end").unlink(missing_ok=True)


def write_whole(data: Path, root: Path, case: Case) -> None:
    kept = kept_in(root, case, True)
    torch.save(outcome_of(data, kept, case), kept.with_suffix(".pt"))


def matrix(chosen: list[Case], root: Path, jobs: int = 1) -> Iterator[tuple[Case, list[str], float]]:
    """Each case, what differs in it, and its seconds."""
    torch.set_num_threads(1)
    data = root / "data"
    write_data(data)
    wholes = list(dict.fromkeys(case.whole for case in chosen))
    for number, good, result in each([partial(write_whole, data, root, case) for case in wholes], jobs):
        if not good:
            raise RuntimeError(f"the run that is not interrupted failed: {wholes[number]}: {result}")
    for number, good, result in each([partial(checked, data, root, case) for case in chosen], jobs):
        case = chosen[number]
        yield (case, result[0], result[1]) if good else (case, [str(result)], 0.0)


# --- telling ---


def told(results: list[tuple[Case, list[str], float]], title: str) -> str:
    """A table: a line for each setting, a column for each group; cases bit-equal of cases run."""
    groups = list(dict.fromkeys(case.group for case, _, _ in results))
    settings = list(dict.fromkeys(case.setting for case, _, _ in results))
    columns = [title, "ends by", "EMA", "accumulation", *groups]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for setting in settings:
        cells = []
        for group in groups:
            own = [not differing for case, differing, _ in results if (case.setting, case.group) == (setting, group)]
            cells.append(f"{sum(own)}/{len(own)}" if own else "")
        named = [setting.task, setting.by, "on" if setting.ema else "off", str(setting.accumulate)]
        lines.append(f"| {' | '.join(named + cells)} |")
    return "\n".join(lines)


def counts(results: list[tuple[Case, list[str], float]]) -> str:
    exact = [not d for case, d, _ in results if len(set(case.ranks)) == 1]
    other = [not d for case, d, _ in results if len(set(case.ranks)) > 1]
    text = f"bit-equal {sum(exact)}/{len(exact)}"
    return text + (f"; other number of ranks, samples exact {sum(other)}/{len(other)}" if other else "")


def page(results: list[Any], stock: list[Any], command: str) -> str:
    """The page of the documentation."""
    machine = (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread a process; Python {platform.python_version()}"
    )
    versions = f"{machine}, torch {torch.__version__}, Lightning {lightning.__version__}"
    cuts = "\n".join(f"- {name}" for name in CUTS)
    parts = ["# The resume matrix", INTRODUCTION.format(command=command, epochs=EPOCHS, batches=BATCHES)]
    parts += [f"**{counts(results)}.** {versions}.", told(results, "task")]
    if stock:
        parts += [STOCK.format(counts=counts(stock)), told(stock, "stock")]
    parts += [f"Where they were interrupted:\n\n{cuts}", BEYOND]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a dozen cases")
    parser.add_argument("--stock", action="store_true", help="plain Lightning too")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--output", type=Path, help="write the page here")
    args = parser.parse_args()
    found = []
    for stock in (False, True) if args.stock else (False,):
        results = []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            for case, differing, seconds in matrix(cases(quick=args.quick, stock=stock), Path(root), args.jobs):
                results.append((case, differing, seconds))
                good = "equal" if not differing else f"{len(differing)} differ: {differing[0]}"
                print(
                    f"{seconds:5.1f} s  {case.setting} {case.cut}, {case.group} {list(case.workers)}: {good}",
                    flush=True,
                )
        results.sort(key=lambda result: str(result[0]))
        found.append(results)
        print(told(results, "stock" if stock else "task"), counts(results), sep="\n")
    if args.output:
        command = (
            "python scripts/resume_matrix.py" + (" --quick" if args.quick else "") + (" --stock" if args.stock else "")
        )
        args.output.write_text(page(found[0], found[1] if args.stock else [], command))


if __name__ == "__main__":
    main()
