"""The runs of a study: each a family, a learning rate and a seed, with one JSON; rates are tuned, families compared.

Every family has the learning rate that is best for itself, by the mean of the primary metrics on validation data, with
a seed that is used for nothing else. Differences are paired by seed. A run that is done is not trained again.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from scipy import stats

import diffvision

Numbers = dict[str, Any]
Interval = tuple[float, float, float]  # mean, half of the 95% t interval, p


@dataclass(frozen=True)
class Run:
    """One training."""

    family: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.family.replace(' ', '_')}-{self.rate:g}-{self.seed}"


class Named(Protocol):
    """What has the name of a file."""

    @property
    def name(self) -> str:
        """The name."""


AnyRun = TypeVar("AnyRun", bound=Named)


class Difference(NamedTuple):
    """How far a family's mean is from the first family's, over seeds that both have.

    Attributes:
        mean: of the paired differences.
        width: half of the 95% t interval.
        p: of the paired t test, after Holm's correction over the families of a table.
    """

    mean: float
    width: float
    p: float

    def __str__(self) -> str:
        """Return `text` with one decimal."""
        return self.text(1)

    def text(self, digits: int) -> str:
        """Return the interval, and which is higher where it excludes zero and p is below 5%.

        Where it includes zero the difference is not significant (n.s.), which does not show that the two are equal.
        """
        word = "n.s."
        if abs(self.mean) > self.width:
            name = "unclear" if self.p >= 0.05 else "higher" if self.mean > 0 else "lower"
            word = f"{name} (p {self.p:.2g})"
        low, high = self.mean - self.width, self.mean + self.width
        return f"{self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}] {word}"


@dataclass(frozen=True)
class Grid:
    """The runs of a study, and what they measured.

    Args:
        results: the folder of the JSON files: of a run that did not diverge, with `validation` and `test` metrics.
        families: their names; the others are compared with the first.
        rates: learning rates to try. Of four or more the best is the vertex of a parabola in their logarithm.
        primary: the metrics, 0 to 1, whose mean on validation data is to be high.
        seeds: for the comparison.
        epochs: of every run.
        tuning_seed: for the rates.
        shared: whether to compare the families at the first one's rate as well.
        secondary: the families with the first three seeds only.
        rate_of: {family: the family at whose learning rate it is trained}, of those that are not tuned.
        digits: {metric: its digits}, of those that are no shares; others are printed in percent with one digit.
    """

    results: Path
    families: Sequence[str]
    rates: Sequence[float]
    primary: Sequence[str]
    seeds: Sequence[int]
    epochs: int
    tuning_seed: int = 100
    shared: bool = False
    secondary: Sequence[str] = ()
    rate_of: Mapping[str, str] = field(default_factory=dict)
    digits: Mapping[str, int] = field(default_factory=dict)

    def quick(self) -> Self:
        """Return a grid of the same kind, of short runs at two learning rates and with two seeds."""
        return replace(
            self, results=Path("runs", f"{self.results.name}-quick"), rates=self.rates[:2], seeds=(1, 2), epochs=1
        )

    def numbers(self, run: Run) -> Numbers | None:
        """Return what a run measured; None if it has not been trained."""
        file = self.results / f"{run.name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def tuning(self) -> list[Run]:
        """Return the runs that choose learning rates, those in the middle first."""
        middle = sorted(self.rates, key=lambda rate: abs(math.log(rate / math.sqrt(self.rates[0] * self.rates[-1]))))
        tuned = [family for family in self.families if family not in self.rate_of]
        return [Run(family, rate, self.tuning_seed) for rate in middle for family in tuned]

    def chosen(self, family: str) -> float | None:
        """Return a family's learning rate; None before all its rates were tried."""
        family = self.rate_of.get(family, family)
        runs = {rate: self.numbers(Run(family, rate, self.tuning_seed)) for rate in self.rates}
        if any(numbers is None for numbers in runs.values()):
            return None
        scores = {
            rate: statistics.mean(numbers["validation"][name] for name in self.primary)
            for rate, numbers in runs.items()
            if numbers and not numbers["diverged"]
        }
        if not scores:
            raise SystemExit(f"{family} diverged at every learning rate ({', '.join(map(str, self.rates))})")
        return best_rate(scores)

    def confirming(self) -> list[Run]:
        """Return the runs with fresh seeds, each at its family's rate, before these at the first family's if shared."""
        rates = {family: self.chosen(family) for family in self.families}
        if waiting := [family for family, rate in rates.items() if rate is None]:
            raise SystemExit(f"no learning rate is chosen yet for {', '.join(waiting)}: run `tune` to its end")
        runs = [Run(family, rates[family] or 0, seed) for seed, family in self._fresh()]
        if self.shared:
            rate = rates[self.families[0]] or 0
            runs = [Run(family, rate, seed) for seed, family in self._fresh()] + runs
        return list(dict.fromkeys(runs))

    def _fresh(self) -> list[tuple[int, str]]:
        """Return the seeds for the comparison, each with the families that have it."""
        return [
            (seed, family)
            for number, seed in enumerate(self.seeds)
            for family in self.families
            if number < 3 or family not in self.secondary
        ]

    def train(self, runs: Iterable[Run], train: Callable[[Run], Numbers], part: tuple[int, int] = (0, 1)) -> None:
        """Train the runs that are not done: see `train_runs`."""

        def describe(numbers: Numbers) -> str:
            return str({name: numbers.get("validation", {}).get(name) for name in self.primary})

        train_runs(self.results, runs, train, part, describe)

    def by_seed(self, family: str, metric: str, *, shared: bool = False) -> dict[int, float]:
        """Return a test metric of a family's runs with fresh seeds that did not diverge, a share in percent.

        Args:
            family: its name.
            metric: its name.
            shared: at the first family's learning rate.
        """
        rate = self.chosen(self.families[0] if shared else family)
        runs = {seed: self.numbers(Run(family, rate, seed)) for seed in self.seeds} if rate is not None else {}
        done = {seed: numbers for seed, numbers in runs.items() if numbers and not numbers["diverged"]}
        return {seed: (1 if metric in self.digits else 100) * one["test"][metric] for seed, one in done.items()}

    def differences(self, metric: str, *, shared: bool = False) -> dict[str, Difference]:
        """Return each family's difference to the first, of those with two seeds or more that both have."""
        return differences({family: self.by_seed(family, metric, shared=shared) for family in self.families})

    def table(self, metrics: Sequence[str], *, shared: bool = False) -> str:
        """Return the families' means and differences in Markdown."""
        lines = [
            f"| {self._at(shared)} | " + " | ".join(f"{name} | from {self.families[0]}" for name in metrics) + " |",
            "|---|" + "---:|---|" * len(metrics),
        ]
        differences = [self.differences(name, shared=shared) for name in metrics]
        for family in self.families:
            cells = []
            for name, rows in zip(metrics, differences, strict=True):
                difference = rows[family].text(self.digits.get(name, 1)) if family in rows else ""
                cells += [self._spread(family, name, shared), difference]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def means(self, metrics: Sequence[str], *, shared: bool = False) -> str:
        """Return the families' means alone in Markdown, of secondary metrics."""
        lines = [f"| {self._at(shared)} | " + " | ".join(metrics) + " |", "|---|" + "---:|" * len(metrics)]
        for family in self.families:
            cells = [self._spread(family, name, shared) for name in metrics]
            lines.append(f"| {family} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def tuned(self, metrics: Sequence[str]) -> str:
        """Return a table of validation metrics by learning rate, shares in percent, of the runs that choose one."""
        runs = {(run.family, run.rate): numbers for run in self.tuning() if (numbers := self.numbers(run))}
        families = list(dict.fromkeys(family for family, _ in runs))
        columns = [f"{family}: {metric}" for family in families for metric in metrics]
        lines = [f"| learning rate | {' | '.join(columns)} |", "|---:|" + "---:|" * len(columns)]
        for rate in sorted({rate for _, rate in runs}):
            found = [runs.get((family, rate), {}).get("validation", {}) for family in families]
            cells = [f"{100 * one[metric]:.1f}" if metric in one else "" for one in found for metric in metrics]
            lines.append(f"| {rate:g} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _spread(self, family: str, metric: str, shared: bool) -> str:
        values = self.by_seed(family, metric, shared=shared).values()
        return spread(list(values), self.digits.get(metric, 1))

    def _at(self, shared: bool) -> str:
        return f"at {self.families[0]}'s learning rate" if shared else "at its best learning rate"

    def describe(self) -> str:
        """Return how many runs there are and are done, the core-hours that are left, and the rates that are chosen."""
        rates = {family: self.chosen(family) for family in self.families}
        runs = self.tuning() + ([] if None in rates.values() else self.confirming())
        done = [numbers for run in runs if (numbers := self.numbers(run)) is not None]
        fresh = len(self._fresh())
        later = f", then {fresh}{' to twice as many' if self.shared else ''}" if None in rates.values() else ""
        lines = [f"{len(runs)} runs{later}; {len(done)} are done, {sum(bool(n['diverged']) for n in done)} diverged"]
        if times := [numbers["seconds"] for numbers in done if numbers.get("seconds")]:
            hours = (len(runs) - len(done)) * statistics.mean(times) / 3600
            lines.append(f"{statistics.mean(times):.0f} s each: {hours:.1f} core-hours are left")
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        lines += [f"{machine}, diffvision {diffvision.__version__}", f"learning rates: {rates}"]
        return "\n".join(lines)


def train_runs(
    results: Path,
    runs: Iterable[AnyRun],
    train: Callable[[AnyRun], Numbers],
    part: tuple[int, int],
    describe: Callable[[Numbers], str],
) -> None:
    """Train the runs that are not done, one thread each.

    Args:
        results: the folder of their JSON files.
        runs: in their order.
        train: returns what a run measured.
        part: which runs are this process's, of several: (index, number).
        describe: says what was measured, in the line that is printed when a run is done.
    """
    torch.set_num_threads(1)
    results.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs):
        file = results / f"{run.name}.json"
        if number % part[1] != part[0] or file.is_file():
            continue
        start = time.perf_counter()
        numbers = train(run)
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(numbers, indent=1) + "\n")
        partial.rename(file)
        print(f"{run.name} {describe(numbers)} {numbers['diverged']} {time.perf_counter() - start:.0f} s", flush=True)


def run_study(
    grid: Grid,
    description: str | None,
    *,
    make_data: Callable[[Path, Path], None],
    trainer: Callable[[Path, int], Callable[[Run], Numbers]],
    report: Callable[[Grid], None],
    draw: Callable[[Grid, Path], None] | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Run the command line of a study: `data`, `grid`, `tune`, `train` or `report`.

    Args:
        grid: of the study.
        description: for its help.
        make_data: writes the file of data from a source.
        trainer: returns the function that trains a run on the file of data, for a number of epochs.
        report: prints the tables.
        draw: draws the pictures to a folder.
        arguments: of the command line; by default the process's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "grid", "tune", "train", "report"])
    parser.add_argument("--data", type=Path, default=Path("runs", grid.results.name, "data.pt"))
    parser.add_argument("--source", type=Path, help="with data: what it is made of")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of several processes: index and number")
    if draw is not None:
        parser.add_argument("--images", type=Path, help="with report: the folder to draw pictures to")
    parser.add_argument("--quick", action="store_true", help="the whole in minutes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.what == "data" and options.source is None:
        parser.error("data needs --source: what it is made of")
    if not 0 <= options.part[0] < options.part[1]:
        parser.error(f"--part is {options.part[0]} of {options.part[1]}: count the processes from 0")
    grid = grid.quick() if options.quick else grid
    if options.what == "data":
        make_data(options.source, options.data)
    elif options.what in ("tune", "train"):
        runs = grid.tuning() if options.what == "tune" else grid.confirming()
        grid.train(runs, trainer(options.data, grid.epochs), tuple(options.part))
    elif options.what == "grid":
        print(grid.describe())
    else:
        report(grid)
        if draw is not None and options.images:
            draw(grid, options.images)


def contrasts(values: Mapping[tuple[bool, ...], Mapping[int, float]], factors: Sequence[str]) -> dict[str, Difference]:
    """Return `effects`, with Holm's p over all of them."""
    return corrected(effects(values, factors))


def effects(values: Mapping[tuple[bool, ...], Mapping[int, float]], factors: Sequence[str]) -> dict[str, Interval]:
    """Return main effects and pairwise interactions of the factors that vary.

    Args:
        values: {cell: {seed: value}}, of a whole factorial; a cell says for each factor whether it has it.
        factors: their names.
    """
    varying = [factor for factor in range(len(factors)) if len({cell[factor] for cell in values}) > 1]
    seeds = sorted(set.intersection(*(set(of) for of in values.values())))
    intervals = {}
    for chosen in [(one,) for one in varying] + list(combinations(varying, 2)):
        signs = {cell: math.prod(1 if cell[factor] else -1 for factor in chosen) for cell in values}
        scale = len(values) / 2 ** len(chosen)
        found = [sum(signs[cell] * of[seed] for cell, of in values.items()) / scale for seed in seeds]
        intervals[" x ".join(factors[factor] for factor in chosen)] = paired_interval(found)
    return intervals


def processor() -> str:
    """Return the processor's name, and torch's kernels for it."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def processor_folder() -> str:
    """Return the processor's name as a folder's."""
    return "_".join(re.findall(r"\w+", processor()))


def best_rate(scores: dict[float, float]) -> float:
    """Return the learning rate of the best score.

    Of four or more it is the vertex of a parabola in their logarithm, through the best score and the three rates next
    to it, within those four.
    """
    best = max(scores, key=lambda rate: scores[rate])
    if len(scores) < 4:
        return best
    near = sorted(scores, key=lambda rate: abs(math.log(rate / best)))[:4]
    logs = np.log(near)
    curvature, slope, _ = np.polyfit(logs, [scores[rate] for rate in near], 2)
    if curvature >= 0:
        return best
    vertex = math.exp(min(max(-slope / (2 * curvature), logs.min()), logs.max()))
    return float(f"{vertex:.3g}")


def paired_interval(differences: Sequence[float]) -> Interval:
    """Return the mean of differences, half of its 95% t interval, and p of the t test.

    Equal differences have p 0, the limit of the test, or 1 if they are zero.
    """
    mean, freedom = statistics.mean(differences), len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    p = 2 * stats.t.sf(abs(mean) / error, freedom) if error else float(mean == 0)
    return mean, float(stats.t.ppf(0.975, freedom)) * error, float(p)


def differences(values: dict[str, dict[int, float]]) -> dict[str, Difference]:
    """Return `paired`, with Holm's p over all of them."""
    return corrected(paired(values))


def paired(values: Mapping[str, Mapping[int, float]]) -> dict[str, Interval]:
    """Return each family's difference to the first, paired by seed, of those with two seeds or more that both have.

    Args:
        values: {family: {seed: value}}.
    """
    (_, first), *others = values.items()
    shared = {family: sorted(first.keys() & by_seed.keys()) for family, by_seed in others}
    return {
        family: paired_interval([by_seed[seed] - first[seed] for seed in shared[family]])
        for family, by_seed in others
        if len(shared[family]) > 1
    }


def corrected(intervals: Mapping[str, Interval]) -> dict[str, Difference]:
    """Return intervals with Holm's p over all of them."""
    values = holm({name: p for name, (_, _, p) in intervals.items()})
    return {name: Difference(mean, width, values[name]) for name, (mean, width, _) in intervals.items()}


def holm(values: dict[str, float]) -> dict[str, float]:
    """Return p values after Holm's correction.

    Source: Holm 1979.
    """
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[name]))
        corrected[name] = largest
    return corrected


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation; without values, nothing."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"
