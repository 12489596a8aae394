"""Loss of Transformer, V1 and V2 over parameters, tokens, FLOPs and seconds, on English text.

    python scripts/studies/scaling.py data --source data/text   # what `diffvision data make text` wrote, as tokens
    python scripts/studies/scaling.py grid                      # the runs, and what they cost
    python scripts/studies/scaling.py tune                      # four learning rates at two sizes, one seed
    python scripts/studies/scaling.py train                     # every size, with fresh seeds
    python scripts/studies/scaling.py speed                     # seconds of a training step, families in turns
    python scripts/studies/scaling.py report --images docs/images

`tune` and `train` leave out what is done; each run is one JSON. With `--quick` everything is four hundred times
shorter, at two sizes and two seeds, and goes to a folder below runs/.

Each family has its own learning rates: the vertices of parabolas through four rates at two sizes, and the power law
of the size through both. A run is long enough for the largest number of FLOPs, and branches off for the others.

Primary metric: the validation loss, nats a token, at the largest number of FLOPs, of each family's best size: the
lowest point of a parabola in the logarithm of the size through all sizes.
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import least_squares

from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.progress import track
from grid import best_rate, differences, paired_interval, spread, train_runs
from small_language import BATCH, LENGTH, VOCABULARY, Data, fit, flops_of_step, loss_of, make_data

SIZES = {"0.03M": (32, 2), "0.1M": (64, 2), "0.3M": (96, 3), "0.8M": (128, 4)}  # width and depth
HEAD_DIM = 16
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
HIGHER = {"0.03M": (1.6e-2,)}  # where all families were best at the highest of these
TUNING_SEED, SEEDS = 100, (1, 2, 3)
WARMUP = 0.1  # of the smallest budget's steps
RESULTS = Path(__file__).parents[2] / "docs" / "results"
BOOTSTRAPS = 1000
Point = dict[str, Any]


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
        return f"{self.family.replace(' ', '_')}-{self.size}-{self.rate:g}-{self.seed}"


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
        folder = Path("runs", self.results.name, "quick")
        return replace(
            self, results=folder, sizes=self.sizes[:2], tuned_sizes=self.sizes[:1], seeds=(1, 2), shorter=400
        )

    def budgets_of(self, run: Run) -> list[float]:
        """Return the FLOPs of each length of a run."""
        budgets = [self.tuned_budget] if run.seed == TUNING_SEED else self.budgets
        return [budget / self.shorter for budget in budgets]

    def numbers(self, run: Run) -> Point | None:
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
        """Return the learning rate of a family at a size."""
        if not all(self.numbers(run) for run in self.tuning() if run.family == family):
            raise SystemExit(f"no learning rates are chosen yet for {family}: run `tune` to its end")
        basins = [self.basin(family, tuned) for tuned in self.tuned_sizes]
        best = [math.log(best_rate({rate: -loss for rate, loss in basin.items()})) for basin in basins]
        logs = [math.log(self.families[family].parameters(tuned)) for tuned in self.tuned_sizes]
        slope = (best[-1] - best[0]) / (logs[-1] - logs[0]) if len(logs) > 1 else 0
        return float(f"{math.exp(best[0] + slope * (math.log(self.families[family].parameters(size)) - logs[0])):.3g}")

    def confirming(self) -> list[Run]:
        """Return the runs with fresh seeds, seed by seed."""
        rates = {(family, size): self.rate(family, size) for family in self.families for size in self.sizes}
        return [Run(f, size, rates[f, size], seed) for seed in self.seeds for size in self.sizes for f in self.families]

    def points(self) -> list[Point]:
        """Return what the runs with fresh seeds measured: a point for each of their lengths."""
        done = [numbers for run in self.confirming() if (numbers := self.numbers(run))]
        return [
            {**{key: n[key] for key in ("family", "size", "seed", "parameters")}, **point}
            for n in done
            if not n["diverged"]
            for point in n["points"]
        ]


# ---- runs ----------------------------------------------------------------------------------------------------------


def rates_of(size: str) -> tuple[float, ...]:
    """Return the learning rates that are tried at a size, by all families."""
    return RATES + HIGHER.get(size, ())


Measure = Callable[[LanguageModel, Data], dict[str, Any]]


def train(run: Run, data: Data, study: Study, measure: Measure = lambda model, data: {}) -> dict[str, Any]:
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
    norm, seconds = round(trained.norm, 2), round(trained.seconds)
    numbers |= {"diverged": "", "seconds": seconds, "largest gradient norm": norm, "points": points}
    return {**numbers, **measure(model, data)}


def measure_speed(study: Study, rounds: int = 30) -> None:
    """Time training steps of all families of a size in turns, and write the medians in seconds."""
    torch.set_num_threads(1)
    seconds: dict[str, dict[str, float]] = {}
    windows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    for size in study.sizes:
        models = {name: family.create(size) for name, family in study.families.items()}
        optimizers = {family: torch.optim.AdamW(model.parameters(), fused=True) for family, model in models.items()}
        times: dict[str, list[float]] = {family: [] for family in study.families}
        for _ in range(rounds + 2):
            for family, model in models.items():
                start = time.perf_counter()
                optimizers[family].zero_grad()
                loss_of(model, windows).backward()
                optimizers[family].step()
                times[family].append(time.perf_counter() - start)
        seconds[size] = {family: round(statistics.median(values[2:]), 5) for family, values in times.items()}
    about = {"machine": f"{platform.machine()}, one thread", "torch": torch.__version__, "seconds of a step": seconds}
    study.results.mkdir(parents=True, exist_ok=True)
    (study.results / "speed.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))


# ---- what follows from the points ----------------------------------------------------------------------------------


def lowest(sizes: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Return the size of the lowest loss and that loss, of a parabola in log size, within the sizes tried."""
    logs = np.log(sizes)
    curvature, slope, level = np.polyfit(logs, losses, 2)
    if curvature <= 0:
        index = int(np.argmin(losses))
        return float(sizes[index]), float(losses[index])
    vertex = float(np.clip(-slope / (2 * curvature), logs.min(), logs.max()))
    return math.exp(vertex), float(np.polyval((curvature, slope, level), vertex))


def lowest_by_seed(points: Sequence[Point], family: str, budget: float) -> dict[int, tuple[float, float]]:
    """Return by seed the size of the lowest loss at a number of FLOPs, and that loss."""
    found = {}
    for seed in sorted({point["seed"] for point in points}):
        chosen = [p for p in points if (p["family"], p["budget"], p["seed"]) == (family, budget, seed)]
        if len(chosen) > 2:
            found[seed] = lowest([p["parameters"] for p in chosen], [p["loss"] for p in chosen])
    return found


def ratio_of(xs: Sequence[float], ys: Sequence[float], others: Sequence[float], losses: Sequence[float]) -> float:
    """Return how much of x the second curve needs for a loss of the first: below 1 if it is the better one.

    The worse curve's last point is looked up on the better one, so that nothing is extrapolated; losses are
    interpolated in the logarithm of x.

    Args:
        xs, ys: x and loss of the first curve, loss falling.
        others, losses: those of the second.
    """
    if losses[-1] <= ys[-1]:
        return math.exp(np.interp(-ys[-1], -np.array(losses), np.log(others))) / xs[-1]
    return others[-1] / math.exp(np.interp(-losses[-1], -np.array(ys), np.log(xs)))


def residuals(values: np.ndarray, table: np.ndarray, column: int) -> np.ndarray:
    """Return log loss - log of E + A N^-alpha + B D^-beta, where a family's N or D (the column) counts multiplied.

    Args:
        values: log E, log A, alpha, log B, beta, and the log multipliers of the families after the first.
        table: [4, points]: the family's index, log N, log D and log loss.
        column: of the table, 1 or 2.
    """
    e, log_a, alpha, log_b, beta, *multipliers = values
    logs = [table[1], table[2]]
    logs[column - 1] = logs[column - 1] + np.array([0.0, *multipliers])[table[0].astype(int)]
    return np.log(math.exp(e) + np.exp(log_a - alpha * logs[0]) + np.exp(log_b - beta * logs[1])) - table[3]


def fitted(table: np.ndarray, column: int, start: np.ndarray | None = None) -> np.ndarray:
    """Return the values of `residuals` that fit best, by Huber's loss; of several starts if none is given."""
    multipliers = [0.0] * (len(FAMILIES) - 1)
    starts = [
        np.array([e, a, alpha, b, alpha, *multipliers])
        for e, alpha, a, b in itertools.product((-1.0, 0.5), (0.2, 0.5), (2.0, 6.0), (2.0, 6.0))
    ]
    low, high = [-5, -5, 0.01, -5, 0.01], [2, 30, 3, 30, 3]
    bounds = ([*low, *([-3] * len(multipliers))], [*high, *([3] * len(multipliers))])
    results = [
        least_squares(residuals, one, bounds=bounds, loss="huber", f_scale=1e-3, args=(table, column))
        for one in (starts if start is None else [start])
    ]
    return min(results, key=lambda result: float(result.cost)).x


def bootstrapped(points: Sequence[Point], column: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the multipliers of the families after the first, and those of resampled seeds [count, families - 1].

    Seeds are drawn anew for each family and size, and the whole is fitted again, from the best fit.
    """
    names = list(FAMILIES)
    rows = [(names.index(p["family"]), *np.log([p["parameters"], p["tokens"], p["loss"]])) for p in points]
    table = np.array(rows).T
    best = fitted(table, column)
    cells: dict[tuple[str, str], dict[int, list[int]]] = {}
    for index, p in enumerate(points):
        cells.setdefault((p["family"], p["size"]), {}).setdefault(p["seed"], []).append(index)
    generator, drawn = np.random.default_rng(0), []
    for _ in track(range(count), "bootstrap"):
        sample: list[int] = []
        for seeds in cells.values():
            for seed in generator.choice(list(seeds), size=len(seeds)):
                sample += seeds[seed]
        drawn.append(fitted(table[:, sample], column, best)[5:])
    return np.exp(best[5:]), np.exp(drawn)


def token_ratios(points: Sequence[Point], size: str) -> dict[str, dict[int, float]]:
    """Return by family and seed how many of the plain model's tokens give the same loss at a size."""
    first, *others = FAMILIES
    ratios: dict[str, dict[int, float]] = {}
    for family in others:
        for seed in sorted({point["seed"] for point in points}):
            base, other = (
                sorted(
                    (p["tokens"], p["loss"]) for p in points if (p["family"], p["size"], p["seed"]) == (f, size, seed)
                )
                for f in (first, family)
            )
            if len(base) == len(other) > 1:
                xs, ys = zip(*base, strict=True)
                ratios.setdefault(family, {})[seed] = ratio_of(xs, ys, *zip(*other, strict=True))
    return ratios


# ---- report --------------------------------------------------------------------------------------------------------


def describe(study: Study) -> str:
    """Return how many runs there are and are done, and the core-hours that are left, by what the others took."""
    runs = study.tuning()
    tuned = all(study.numbers(run) for run in runs)
    count = len(study.sizes) * len(study.families) * len(study.seeds)
    later = "" if tuned else f", then {count} of {1.15 * study.budgets[-1]:.2g} FLOPs each"
    runs += study.confirming() if tuned else []
    done = {run: numbers for run in runs if (numbers := study.numbers(run))}
    diverged = sum(bool(numbers["diverged"]) for numbers in done.values())
    lines = [f"{len(runs)} runs{later}; {len(done)} are done, {diverged} diverged"]
    if times := [(sum(study.budgets_of(run)), n["seconds"]) for run, n in done.items() if not n["diverged"]]:
        speed = sum(seconds for _, seconds in times) / sum(flops for flops, _ in times)
        left = sum(speed * sum(study.budgets_of(run)) for run in runs if run not in done)
        lines.append(f"{1e-9 / speed:.0f} GFLOP a second and core: {left / 3600:.1f} core-hours are left")
    return "\n".join(lines)


def rate_table(study: Study) -> Iterator[str]:
    """Yield a table of the loss over the learning rate, and of the rates that follow from it."""
    rates = sorted({rate for size in study.tuned_sizes for rate in rates_of(size)})
    yield f"| size | family | {' | '.join(f'{rate:g}' for rate in rates)} | best | largest gradient norm |"
    yield "|---|---|" + "---:|" * (len(rates) + 2)
    for size in study.tuned_sizes:
        for family in study.families:
            tried = [study.numbers(Run(family, size, rate, TUNING_SEED)) for rate in rates]
            cells = [("" if one is None else one["diverged"] or f"{one['points'][0]['loss']:.3f}") for one in tried]
            norms = [numbers["largest gradient norm"] for numbers in tried if numbers and not numbers["diverged"]]
            yield f"| {size} | {family} | {' | '.join(cells)} | {study.rate(family, size):g} | {max(norms):g} |"


def loss_table(points: Sequence[Point]) -> Iterator[str]:
    """Yield a table of the lowest loss over sizes at each number of FLOPs, and of its size."""
    yield "| FLOPs | family | lowest loss | from plain | its size |"
    yield "|---:|---|---:|---|---:|"
    for budget in sorted({point["budget"] for point in points}):
        found = {family: lowest_by_seed(points, family, budget) for family in FAMILIES}
        losses = {family: {seed: loss for seed, (_, loss) in of.items()} for family, of in found.items()}
        rows = differences(losses)
        for family in FAMILIES:
            sizes = spread([size / 1e6 for size, _ in found[family].values()], 2)
            difference = rows[family].text(3) if family in rows else ""
            yield f"| {budget:.3g} | {family} | {spread(list(losses[family].values()), 3)} | {difference} | {sizes}M |"


def size_table(points: Sequence[Point], speed: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield a table by size: the loss at the most FLOPs, and tokens and seconds for the plain one's loss."""
    largest = max(point["budget"] for point in points)
    yield "| size | family | loss | from plain | tokens for an equal loss, x plain's | seconds, x plain's |"
    yield "|---|---|---:|---|---|---|"
    for size in dict.fromkeys(point["size"] for point in points):
        chosen = [p for p in points if p["size"] == size and p["budget"] == largest]
        losses = {family: {p["seed"]: p["loss"] for p in chosen if p["family"] == family} for family in FAMILIES}
        rows, ratios = differences(losses), token_ratios(points, size)
        for family in FAMILIES:
            cells = [spread(list(losses[family].values()), 3), rows[family].text(3) if family in rows else "", "", ""]
            if len(values := list(ratios.get(family, {}).values())) > 1:
                cells[2] = interval(values)
                if size in speed:
                    cost = speed[size][family] / speed[size]["plain"]
                    cells[3] = interval([value * cost for value in values])
            yield f"| {size} | {family} | {' | '.join(cells)} |"


def interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean of ratios and its 95% t interval."""
    mean, width, _ = paired_interval([math.log(ratio) for ratio in ratios])
    return f"{math.exp(mean):.2f} [{math.exp(mean - width):.2f}, {math.exp(mean + width):.2f}]"


def fit_table(points: Sequence[Point], count: int) -> Iterator[str]:
    """Yield a table of what the shared fit says of parameters and tokens."""
    _, *others = FAMILIES
    yield f"| for an equal loss, x plain's | {' | '.join(others)} |"
    yield "|---|" + "---|" * len(others)
    for column, name in ((1, "parameters"), (2, "tokens")):
        # A family whose parameters count m times as many needs 1 / m of them.
        best, drawn = bootstrapped(points, column, count)
        low, high = np.percentile(1 / drawn, [2.5, 97.5], axis=0)
        cells = [f"{1 / m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in zip(best, low, high, strict=True)]
        yield f"| {name} | {' | '.join(cells)} |"


def report(study: Study) -> None:
    """Print the tables, in Markdown."""
    print(describe(study), end="\n\n")
    print("\n".join(rate_table(study)), end="\n\n")
    if not (points := study.points()):
        return
    file = study.results / "speed.json"
    speed = json.loads(file.read_text())["seconds of a step"] if file.is_file() else {}
    for table in (
        loss_table(points),
        size_table(points, speed),
        fit_table(points, round(BOOTSTRAPS / study.shorter) or 1),
    ):
        print("\n".join(table), end="\n\n")


@styled
def draw(study: Study) -> Any:
    """Return a figure: loss over size, tokens, FLOPs and seconds, and over the learning rate; means over seeds."""
    points = study.points()
    file = study.results / "speed.json"
    speed = json.loads(file.read_text())["seconds of a step"]
    figure, axes = panels(6, width=2.4, height=3.2)
    colours, middle = colours_of(FAMILIES), study.sizes[1]
    for family, colour in colours.items():
        means: dict[tuple[str, float], Point] = {}
        for size in study.sizes:
            for budget in sorted({p["budget"] for p in points}):
                same = [p for p in points if (p["family"], p["size"], p["budget"]) == (family, size, budget)]
                if same:
                    loss = statistics.mean(p["loss"] for p in same)
                    seconds = same[0]["tokens"] / (BATCH * LENGTH) * speed[size][family]
                    means[size, budget] = {**same[0], "loss": loss, "seconds": seconds}
        budgets = sorted({budget for _, budget in means})
        for budget in budgets:
            line = [means[size, budget] for size in study.sizes if (size, budget) in means]
            axes[0].plot([p["parameters"] for p in line], [p["loss"] for p in line], ".-", color=colour, linewidth=1.2)
        line = [means[middle, budget] for budget in budgets if (middle, budget) in means]
        axes[1].plot([p["tokens"] for p in line], [p["loss"] for p in line], ".-", color=colour, label=family)
        best = [min((p for (_, b), p in means.items() if b == budget), key=lambda p: p["loss"]) for budget in budgets]
        for ax, key in ((axes[2], "budget"), (axes[3], "seconds")):
            ax.plot([p[key] for p in best], [p["loss"] for p in best], ".-", color=colour)
        for ax, size in zip(axes[4:], study.tuned_sizes, strict=True):
            basin = study.basin(family, size)
            ax.plot(list(basin), list(basin.values()), ".-", color=colour)
    titles = ["each number of FLOPs", f"{middle} parameters", "best size", "best size"]
    titles += [f"{size} parameters" for size in study.tuned_sizes]
    labels = ["parameters", "tokens", "FLOPs", "seconds, one core", "learning rate", "learning rate"]
    for ax, title, label in zip(axes, titles, labels, strict=True):
        ax.set(title=title, xlabel=label, xscale="log")
        ax.minorticks_off()
    axes[0].set_ylabel("validation loss, nats a token")
    return legend_below(figure, axes[1])


def run_study(
    study: Study,
    description: str | None,
    report: Callable[[Study], None],
    draw: Callable[[Study], Any],
    measure: Measure = lambda model, data: {},
) -> None:
    """Run the command line of a study of small language models.

    Args:
        study: the grid.
        description: for its help.
        report: prints the tables.
        draw: returns the picture.
        measure: what is measured of a trained model besides its loss.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "grid", "tune", "train", "speed", "report"])
    parser.add_argument("--data", type=Path, default=Path("runs/scaling/data.pt"))
    parser.add_argument("--source", type=Path, help="with data: what `diffvision data make text` wrote")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of several processes: index and number")
    parser.add_argument("--images", type=Path, help="with report: the folder to draw the picture to")
    parser.add_argument("--quick", action="store_true", help="the whole in minutes, to see that it runs")
    options = parser.parse_args()
    study = study.quick() if options.quick else study
    if options.what == "data":
        make_data(options.source, options.data)
    elif options.what in ("tune", "train"):
        runs = study.tuning() if options.what == "tune" else study.confirming()
        data = Data(options.data)
        train_runs(
            study.results,
            runs,
            lambda run: train(run, data, study, measure),
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
            name = f"{study.results.name}.svg"
            draw(study).savefig(options.images / name, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    run_study(Study(), __doc__, report, draw)
