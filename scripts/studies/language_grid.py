"""Runs of small language models: families, sizes, learning rates and seeds, each run one JSON.

The training itself is in `small_language.py`; what follows from the numbers is each study's.
"""

import argparse
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from diffvision.models.language import LanguageConfig, LanguageModel
from grid import best_rate, train_runs
from small_language import (
    BATCH,
    COOLDOWN,
    LENGTH,
    VOCABULARY,
    Data,
    adamw,
    fit,
    flops_of_step,
    make_data,
    training_step,
)

SIZES = {"0.03M": (32, 2), "0.1M": (64, 2), "0.3M": (96, 3), "0.8M": (128, 4)}  # width and depth
HEAD_DIM = 16
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# Where all families, or (0.1M, in controls.py) six of eight, were best at the highest of these.
HIGHER = {"0.03M": (1.6e-2,), "0.1M": (1.6e-2,)}
TUNING_SEED, SEEDS = 100, (1, 2, 3)
WARMUP = 0.1  # of the smallest budget's steps
RESULTS = Path(__file__).parents[2] / "docs" / "results"
Numbers = dict[str, Any]
Measure = Callable[[LanguageModel, Data], Numbers]


@dataclass(frozen=True)
class Family:
    """What the models of a family have in common.

    Attributes:
        variant: of attention.
        heads: their number, as a share of the plain model's.
        head_dim: width of a map's head.
        head_norm: as `LanguageConfig`'s.
    """

    variant: str
    heads: float = 1
    head_dim: int = HEAD_DIM
    head_norm: bool | None = None

    def create(self, size: str) -> LanguageModel:
        """Return a model with new weights; those of a size have the same parameters within 1%."""
        width, depth = SIZES[size]
        heads = width // HEAD_DIM
        narrower = round((width + heads) / 3) if self.variant == "v2" else 0
        return LanguageModel(
            LanguageConfig(
                vocab_size=VOCABULARY,
                dim=width,
                depth=depth,
                num_heads=round(self.heads * heads),
                head_dim=self.head_dim,
                mlp_dim=round(8 * width / 3) - narrower,
                variant=self.variant,
                max_length=2048,
                head_norm=self.head_norm,
            )
        )

    def parameters(self, size: str) -> int:
        """Return the parameters of a model without its embedding."""
        with torch.device("meta"):
            model = self.create(size)
        return sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()


FAMILIES = {"plain": Family("standard"), "V1": Family("v1", heads=0.5), "V2": Family("v2")}


@dataclass(frozen=True)
class Run:
    """One training."""

    family: str
    size: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{re.sub(r'[^A-Za-z0-9.]+', '_', self.family)}-{self.size}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """A grid of runs, and what they measured.

    Attributes:
        results: the folder of the JSON files.
        families: the others are compared with the first.
        sizes: keys of `SIZES`.
        tuned_sizes: one or two of them, at which learning rates are tried.
        budgets: FLOPs of a run's lengths, rising.
        tuned_budget: FLOPs of a run that tries a learning rate.
        seeds: for the comparison.
        shorter: the FLOPs are divided by this.
    """

    results: Path = RESULTS / "scaling"
    families: Mapping[str, Family] = field(default_factory=lambda: FAMILIES)
    sizes: Sequence[str] = tuple(SIZES)
    tuned_sizes: Sequence[str] = ("0.03M", "0.8M")
    budgets: Sequence[float] = (5e11, 1e12, 2e12)
    tuned_budget: float = 1e12
    seeds: Sequence[int] = SEEDS
    shorter: float = 1

    def quick(self) -> Self:
        """Return a study of the same kind that takes minutes."""
        folder, sizes = Path("runs", f"{self.results.name}-quick"), self.sizes[:3]
        return replace(self, results=folder, sizes=sizes, tuned_sizes=sizes[:1], seeds=(1, 2), shorter=400)

    def budgets_of(self, run: Run) -> list[float]:
        """Return the FLOPs of each length of a run."""
        budgets = [self.tuned_budget] if run.seed == TUNING_SEED else self.budgets
        return [budget / self.shorter for budget in budgets]

    def flops_of(self, run: Run) -> float:
        """Return the FLOPs of a run: its longest length and the cooldowns of the others."""
        *branches, last = self.budgets_of(run)
        return last + COOLDOWN * sum(branches)

    def numbers(self, run: Run) -> Numbers | None:
        """Return what a run measured; None if it has not been trained."""
        file = self.results / f"{run.name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def tuning(self) -> list[Run]:
        """Return the runs that choose learning rates."""
        return [Run(f, s, rate, TUNING_SEED) for s in self.tuned_sizes for rate in rates_of(s) for f in self.families]

    def basin(self, family: str, size: str) -> dict[float, float]:
        """Return the loss at each learning rate that was tried and did not diverge."""
        tried = {rate: self.numbers(Run(family, size, rate, TUNING_SEED)) for rate in rates_of(size)}
        return {rate: n["points"][0]["loss"] for rate, n in tried.items() if n and not n["diverged"]}

    def rate(self, family: str, size: str) -> float:
        """Return the learning rate of a family at a size: the best at a tuned one, or the power law through two."""
        if not all(self.numbers(run) for run in self.tuning() if run.family == family):
            raise SystemExit(f"no learning rates are chosen yet for {family}: run `tune` to its end")
        basins = [self.basin(family, tuned) for tuned in self.tuned_sizes]
        if not all(basins):
            raise SystemExit(f"{family} diverged at every learning rate of a size: try smaller ones than {RATES}")
        best = [math.log(best_rate({rate: -loss for rate, loss in basin.items()})) for basin in basins]
        logs = [math.log(self.families[family].parameters(tuned)) for tuned in self.tuned_sizes]
        slope = (best[-1] - best[0]) / (logs[-1] - logs[0]) if len(logs) > 1 else 0
        return float(f"{math.exp(best[0] + slope * (math.log(self.families[family].parameters(size)) - logs[0])):.3g}")

    def confirming(self) -> list[Run]:
        """Return the runs with fresh seeds, seed by seed."""
        rates = {(family, size): self.rate(family, size) for family in self.families for size in self.sizes}
        return [Run(f, size, rates[f, size], seed) for seed in self.seeds for size in self.sizes for f in self.families]

    def trained(self) -> list[Numbers]:
        """Return what the runs with fresh seeds measured, but for those that diverged."""
        done = [numbers for run in self.confirming() if (numbers := self.numbers(run))]
        return [numbers for numbers in done if not numbers["diverged"]]


def rates_of(size: str) -> tuple[float, ...]:
    """Return the learning rates that are tried at a size, by all families."""
    return RATES + HIGHER.get(size, ())


def train(run: Run, data: Data, study: Study, measure: Measure = lambda model, data: {}) -> Numbers:
    """Train one run and measure it at each of its lengths, and what else a study measures at the end."""
    torch.manual_seed(run.seed)
    family = study.families[run.family]
    model = family.create(run.size)
    step = flops_of_step(model)
    lengths = [max(4, round(budget / step)) for budget in study.budgets_of(run)]
    numbers = {
        **asdict(run),
        "parameters": family.parameters(run.size),
        "embedding": model.embed.weight.numel(),
        "FLOPs of a step": step,
    }
    warmup = max(1, round(WARMUP * study.budgets[0] / study.shorter / step))
    try:
        trained = fit(model, data, rate=run.rate, warmup=warmup, lengths=lengths, seed=run.seed)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    points = [
        {"budget": budget, "tokens": branch.steps * BATCH * LENGTH, "loss": branch.loss}
        for budget, branch in zip(study.budgets_of(run), trained.branches, strict=True)
    ]
    norm, seconds = round(trained.norm, 2), round(trained.seconds, 2)
    numbers |= {"diverged": "", "seconds": seconds, "largest gradient norm": norm, "points": points}
    return {**numbers, **measure(model, data)}


def measure_speed(study: Study, rounds: int = 30) -> None:
    """Time training steps of all families of a size in turns, and write the medians in seconds."""
    torch.set_num_threads(1)
    seconds: dict[str, dict[str, float]] = {}
    windows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    for size in study.sizes:
        models = {name: family.create(size) for name, family in study.families.items()}
        optimizers = {family: adamw(model, RATES[0]) for family, model in models.items()}
        times: dict[str, list[float]] = {family: [] for family in study.families}
        for _ in range(rounds + 2):
            for family, model in models.items():
                start = time.perf_counter()
                training_step(model, optimizers[family], windows)
                times[family].append(time.perf_counter() - start)
        seconds[size] = {family: round(statistics.median(values[2:]), 5) for family, values in times.items()}
    about = {"machine": f"{platform.machine()}, one thread", "torch": torch.__version__, "seconds of a step": seconds}
    study.results.mkdir(parents=True, exist_ok=True)
    (study.results / "speed.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))


def step_seconds(study: Study) -> dict[str, dict[str, float]]:
    """Return the seconds of a training step by size and family; empty before they were measured."""
    file = study.results / "speed.json"
    return json.loads(file.read_text())["seconds of a step"] if file.is_file() else {}


def describe(study: Study) -> str:
    """Return how many runs there are and are done, and the core-hours that are left, by what the others took."""
    runs = study.tuning()
    tuned = all(study.numbers(run) for run in runs)
    count = len(study.sizes) * len(study.families) * len(study.seeds)
    one = Run(next(iter(study.families)), study.sizes[0], 0, study.seeds[0])
    later = "" if tuned else f", then {count} of {study.flops_of(one):.2g} FLOPs each"
    runs += study.confirming() if tuned else []
    done = {run: numbers for run in runs if (numbers := study.numbers(run))}
    diverged = sum(bool(numbers["diverged"]) for numbers in done.values())
    lines = [f"{len(runs)} runs{later}; {len(done)} are done, {diverged} diverged"]
    if times := [(study.flops_of(run), n["seconds"]) for run, n in done.items() if not n["diverged"]]:
        took = sum(seconds for _, seconds in times)
        speed = took / sum(flops for flops, _ in times)
        left = sum(speed * study.flops_of(run) for run in runs if run not in done)
        lines.append(
            f"{took / 3600:.1f} core-hours of training, {1e-9 / speed:.0f} GFLOP a second; {left / 3600:.1f} are left"
        )
    return "\n".join(lines)


def rate_table(study: Study) -> Iterator[str]:
    """Yield a table of the loss over the learning rate, and of the rates that follow from it."""
    rates = sorted({rate for size in study.tuned_sizes for rate in rates_of(size)})
    yield f"| size | family | {' | '.join(f'{rate:g}' for rate in rates)} | chosen | largest gradient norm |"
    yield "|---|---|" + "---:|" * (len(rates) + 2)
    for size in study.tuned_sizes:
        for family in study.families:
            tried = [study.numbers(Run(family, size, rate, TUNING_SEED)) for rate in rates]
            cells = [("" if one is None else one["diverged"] or f"{one['points'][0]['loss']:.3f}") for one in tried]
            norms = [numbers["largest gradient norm"] for numbers in tried if numbers and not numbers["diverged"]]
            yield f"| {size} | {family} | {' | '.join(cells)} | {study.rate(family, size):g} | {max(norms):g} |"


def run_study(
    study: Study,
    description: str | None,
    report: Callable[[Study], None],
    draw: Callable[[Study], Any],
    measure: Measure = lambda model, data: {},
    arguments: Sequence[str] | None = None,
) -> None:
    """Run the command line of a study of small language models.

    Args:
        study: the grid.
        description: for its help.
        report: prints the tables.
        draw: returns the picture.
        measure: what is measured of a trained model besides its loss.
        arguments: of the command line; by default the process's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "grid", "tune", "train", "speed", "report"])
    parser.add_argument("--data", type=Path, default=Path("runs/scaling/data.pt"))
    parser.add_argument("--source", type=Path, help="with data: what `data/text.py` wrote")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of several processes: index and number")
    parser.add_argument("--images", type=Path, help="with report: the folder to draw the picture to")
    parser.add_argument("--quick", action="store_true", help="the whole in minutes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.what == "data" and options.source is None:
        parser.error("data needs --source: the folder that `data/text.py` wrote")
    if not 0 <= options.part[0] < options.part[1]:
        parser.error(f"--part is {options.part[0]} of {options.part[1]}: count the processes from 0")
    study = study.quick() if options.quick else study
    if options.what == "data":
        make_data(options.source, options.data)
    elif options.what in ("tune", "train"):
        data, tunes = Data(options.data), options.what == "tune"
        train_runs(
            study.results,
            study.tuning() if tunes else study.confirming(),
            lambda run: train(run, data, study) if tunes else train(run, data, study, measure),
            tuple(options.part),
            lambda numbers: " ".join(f"{point['loss']:.3f}" for point in numbers.get("points", ())),
        )
    elif options.what == "speed":
        measure_speed(study)
    elif options.what == "grid":
        print(describe(study))
    else:
        report(study)
        if options.images:
            options.images.mkdir(parents=True, exist_ok=True)
            name = f"{study.results.name}.svg"
            draw(study).savefig(options.images / name, facecolor="white", metadata={"Date": None})
