"""Loss of Transformer, V1 and V2 over parameters, tokens, FLOPs and seconds, on English text and documentation.

    python scripts/studies/scaling.py data --source data/text   # what data/text.py wrote, as tokens
    python scripts/studies/scaling.py grid                      # the runs, and what they cost
    python scripts/studies/scaling.py tune                      # learning rates at two sizes, one seed
    python scripts/studies/scaling.py train                     # every size, with fresh seeds
    python scripts/studies/scaling.py speed                     # seconds of a training step, families in turns
    python scripts/studies/scaling.py report --images docs/images

`tune` and `train` leave out what is done; each run is one JSON. With `--quick` everything is four hundred times
shorter, at three sizes and two seeds, and goes to a folder below runs/.

Each family has its own learning rates: the vertices of parabolas through four rates at two sizes, and the power law
of the size through both. A run is long enough for the largest number of FLOPs, and branches off for the others.
Differences are paired by seed, which decides the order of the text; the weights at the start differ.

Primary metric: the validation loss, nats a token, at the largest number of FLOPs, of each family's best size: the
vertex of the parabola, in the logarithm of the size, through the size of the lowest mean loss and its neighbours.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from diffvision.analysis.figures.style import colours_of, legend_below, new_figure, styled
from grid import differences, paired_interval, spread
from language_grid import Study, describe, rate_table, rates_of, run_study, step_seconds
from small_language import BATCH, LENGTH

LARGEST = 3.0  # of a log multiplier
Point = dict[str, Any]


def points_of(study: Study) -> list[Point]:
    """Return a point for each length of each run with a fresh seed, families in their order."""
    runs = sorted(study.trained(), key=lambda numbers: list(study.families).index(numbers["family"]))
    keys = ("family", "size", "seed", "parameters")
    return [{**{key: numbers[key] for key in keys}, **point} for numbers in runs for point in numbers["points"]]


def families_of(points: Sequence[Point]) -> list[str]:
    """Return the families of points, in their order."""
    return list(dict.fromkeys(point["family"] for point in points))


# ---- what follows from the points ----------------------------------------------------------------------------------


class Best(NamedTuple):
    """The best size of a family at a number of FLOPs.

    Attributes:
        size: its parameters, without the embedding.
        losses: by seed, at that size.
        bound: "≤" or "≥" if it is the smallest or the largest that was tried, else "".
    """

    size: float
    losses: dict[int, float]
    bound: str


def best_of(points: Sequence[Point], family: str, budget: float) -> Best:
    """Return a family's best size: where the parabola through the best one and its neighbours is lowest.

    Each seed's loss is its own parabola's at that size; at the smallest or largest size it is the loss there.
    """
    chosen = [p for p in points if (p["family"], p["budget"]) == (family, budget)]
    by_size: dict[float, dict[int, float]] = {}
    for point in sorted(chosen, key=lambda point: point["parameters"]):
        by_size.setdefault(point["parameters"], {})[point["seed"]] = point["loss"]
    seeds = sorted(set.intersection(*(set(losses) for losses in by_size.values())))
    sizes = list(by_size)
    means = [statistics.mean(by_size[size][seed] for seed in seeds) for size in sizes]
    index = int(np.argmin(means))
    if index in (0, len(sizes) - 1):
        return Best(sizes[index], {seed: by_size[sizes[index]][seed] for seed in seeds}, "≥" if index else "≤")
    near = sizes[index - 1 : index + 2]
    logs = np.log(near)
    curvature, slope, _ = np.polyfit(logs, means[index - 1 : index + 2], 2)
    vertex = -slope / (2 * curvature)
    curves = {seed: np.polyfit(logs, [by_size[size][seed] for size in near], 2) for seed in seeds}
    return Best(math.exp(vertex), {seed: float(np.polyval(curve, vertex)) for seed, curve in curves.items()}, "")


def ratio_of(xs: Sequence[float], ys: Sequence[float], others: Sequence[float], losses: Sequence[float]) -> float:
    """Return how much of x the second curve needs for a loss of the first: below 1 if it is the better one.

    The worse curve's last point is looked up on the better one, in the logarithm of x; NaN where that one has no loss
    as high, for nothing is extrapolated.

    Args:
        xs, ys: x and loss of the first curve, loss falling.
        others, losses: those of the second.
    """
    if losses[-1] <= ys[-1]:
        return math.exp(np.interp(-ys[-1], -np.array(losses), np.log(others), left=math.nan)) / xs[-1]
    return others[-1] / math.exp(np.interp(-losses[-1], -np.array(ys), np.log(xs), left=math.nan))


Ratios = dict[str, dict[int, float]]
Curves = dict[tuple[str, int], list[tuple[float, float]]]


def ratios_of(curves: Curves, families: Sequence[str]) -> Ratios:
    """Return by family and seed the ratio to the first family's curve.

    Args:
        curves: (x, loss) by family and seed.
        families: the others are compared with the first.
    """
    ratios: Ratios = {}
    for family, seed in curves:
        if family != families[0] and (families[0], seed) in curves:
            base, other = (zip(*sorted(curves[name, seed]), strict=True) for name in (families[0], family))
            ratios.setdefault(family, {})[seed] = ratio_of(*base, *other)
    return ratios


def token_ratios(points: Sequence[Point], size: str) -> Ratios:
    """Return how many of the first family's tokens give an equal loss at a size."""
    curves: Curves = {}
    for p in points:
        if p["size"] == size:
            curves.setdefault((p["family"], p["seed"]), []).append((p["tokens"], p["loss"]))
    return ratios_of(curves, families_of(points))


def flops_ratios(points: Sequence[Point]) -> Ratios:
    """Return how many of the first family's FLOPs give an equal loss, each at its best size."""
    curves: Curves = {}
    for budget, family in itertools.product(budgets_of(points), families_of(points)):
        for seed, loss in best_of(points, family, budget).losses.items():
            curves.setdefault((family, seed), []).append((budget, loss))
    return ratios_of(curves, families_of(points))


def budgets_of(points: Sequence[Point]) -> list[float]:
    """Return the numbers of FLOPs, rising."""
    return sorted({point["budget"] for point in points})


# ---- the fit -------------------------------------------------------------------------------------------------------


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


def fitted(table: np.ndarray, column: int) -> np.ndarray:
    """Return the values of `residuals` that fit best from several starts, by Huber's loss."""
    multipliers = [0.0] * int(table[0].max())
    starts = [
        np.array([e, a, alpha, b, alpha, *multipliers])
        for e, alpha, a, b in itertools.product((-1.0, 0.5), (0.2, 0.5), (2.0, 6.0), (2.0, 6.0))
    ]
    low, high = [-5, -5, 0.01, -5, 0.01], [2, 30, 3, 30, 3]
    bounds = ([*low, *([-LARGEST] * len(multipliers))], [*high, *([LARGEST] * len(multipliers))])
    results = [
        least_squares(residuals, one, bounds=bounds, loss="huber", f_scale=1e-3, args=(table, column)) for one in starts
    ]
    return min(results, key=lambda result: float(result.cost)).x


class Multipliers(NamedTuple):
    """What a family's parameters or tokens count, of families after the first.

    Attributes:
        best: of the fit [families - 1].
        error: root mean square of the fit's residuals, of the loss.
    """

    best: np.ndarray
    error: float


def fit_multipliers(points: Sequence[Point], column: int) -> Multipliers:
    """Fit the multipliers to the points of all families: of parameters (column 1) or tokens (2)."""
    names = families_of(points)
    rows = [(names.index(p["family"]), *np.log([p["parameters"], p["tokens"], p["loss"]])) for p in points]
    table = np.array(rows).T
    best = fitted(table, column)
    return Multipliers(np.exp(best[5:]), math.sqrt(float(np.mean(residuals(best, table, column) ** 2))))


# ---- report --------------------------------------------------------------------------------------------------------


def loss_table(points: Sequence[Point]) -> Iterator[str]:
    """Yield a table of the lowest loss over sizes at each number of FLOPs, and of its size."""
    first = families_of(points)[0]
    yield f"| FLOPs | family | lowest loss | from {first} | its parameters without embedding |"
    yield "|---:|---|---:|---|---:|"
    for budget in budgets_of(points):
        best = {family: best_of(points, family, budget) for family in families_of(points)}
        rows = differences({family: one.losses for family, one in best.items()})
        for family, one in best.items():
            difference = rows[family].text(3) if family in rows else ""
            size = f"{one.bound} {one.size / 1e6:.2f}M".strip()
            yield f"| {budget:.3g} | {family} | {spread(list(one.losses.values()), 3)} | {difference} | {size} |"


def lowest_runs(points: Sequence[Point]) -> str:
    """Return the differences at the most FLOPs of each seed's lowest run: nothing is interpolated between sizes."""
    largest = budgets_of(points)[-1]
    losses: dict[str, dict[int, float]] = {}
    for p in points:
        if p["budget"] == largest:
            of_family = losses.setdefault(p["family"], {})
            of_family[p["seed"]] = min(p["loss"], of_family.get(p["seed"], math.inf))
    rows = differences(losses)
    return f"lowest run of each seed at {largest:.3g}: " + "; ".join(
        f"{name} {row.text(3)}" for name, row in rows.items()
    )


def size_table(points: Sequence[Point], speed: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield a table by size: the loss at the most FLOPs, and tokens and seconds for the first family's loss."""
    first, *_ = families = families_of(points)
    largest = budgets_of(points)[-1]
    heads = ("size", "family", "tokens", "loss", f"from {first}", f"tokens for an equal loss, x {first}'s")
    yield f"| {' | '.join(heads)} | seconds, x {first}'s |"
    yield "|---|---|---:|---:|---|---|---|"
    for size in dict.fromkeys(point["size"] for point in points):
        chosen = [p for p in points if p["size"] == size and p["budget"] == largest]
        losses = {family: {p["seed"]: p["loss"] for p in chosen if p["family"] == family} for family in families}
        rows, ratios = differences(losses), token_ratios(points, size)
        for family in families:
            tokens = next(f"{p['tokens'] / 1e6:.2f}M" for p in chosen if p["family"] == family)
            values = list(ratios.get(family, {}).values())
            cost = [speed[size][family] / speed[size][first]] if size in speed else []
            cells = [tokens, spread(list(losses[family].values()), 3), rows[family].text(3) if family in rows else ""]
            cells += [interval(values), interval([value * one for value in values for one in cost])]
            yield f"| {size} | {family} | {' | '.join(cells)} |"


def interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean of ratios and its 95% t interval; "" of fewer than two."""
    if len(ratios) < 2:
        return ""
    if any(map(math.isnan, ratios)):
        return "out of range"
    mean, width, _ = paired_interval([math.log(ratio) for ratio in ratios])
    return f"{math.exp(mean):.2f} [{math.exp(mean - width):.2f}, {math.exp(mean + width):.2f}]"


def equal_loss_table(points: Sequence[Point]) -> Iterator[str]:
    """Yield a table of what an equal loss takes: FLOPs as measured; parameters or tokens by two fits, one each."""
    first, *others = families_of(points)
    yield f"| for an equal loss, x {first}'s | {' | '.join(others)} | the fit's error |"
    yield "|---|" + "---|" * len(others) + "---:|"
    ratios = flops_ratios(points)
    yield f"| FLOPs, each at its best size | {' | '.join(interval(list(ratios[name].values())) for name in others)} | |"
    for column, name in ((1, "parameters, if these alone differ"), (2, "tokens, if these alone differ")):
        # A family whose parameters count m times as many needs 1 / m of them.
        best, error = fit_multipliers(points, column)
        yield f"| {name} | {' | '.join(needed(1 / best))} | {100 * error:.1f}% |"


def needed(ratios: np.ndarray) -> list[str]:
    """Return each family's ratio; nothing is identified by a fit that ends at the bound of one of them."""
    if np.any(np.abs(np.log(ratios)) > 0.99 * LARGEST):
        return ["not identified"] * len(ratios)
    return [f"{ratio:.2f}" for ratio in ratios]


def speed_table(study: Study) -> Iterator[str]:
    """Yield a table of FLOPs and seconds of a training step, and of parameters."""
    yield "| size | family | parameters | embedding | FLOPs of a step | milliseconds of a step |"
    yield "|---|---|---:|---:|---:|---:|"
    seconds = step_seconds(study)
    trained = {(numbers["size"], numbers["family"]): numbers for numbers in study.trained()}
    for (size, family), one in trained.items():
        time = f"{1000 * seconds[size][family]:.1f}" if size in seconds else ""
        counts = f"{one['parameters']:,} | {one['embedding']:,} | {one['FLOPs of a step']:.3g}"
        yield f"| {size} | {family} | {counts} | {time} |"


def report(study: Study) -> None:
    """Print the tables, in Markdown."""
    print(describe(study), end="\n\n")
    print("\n".join(rate_table(study)), end="\n\n")
    if points := points_of(study):
        print("\n".join(loss_table(points)), lowest_runs(points), sep="\n\n", end="\n\n")
        tables = (size_table(points, step_seconds(study)), equal_loss_table(points))
        for table in (*tables, speed_table(study)):
            print("\n".join(table), end="\n\n")


@styled
def draw(study: Study) -> Any:
    """Return a figure: loss over size, tokens, FLOPs and seconds, and over the learning rate; means over seeds."""
    points, speed = points_of(study), step_seconds(study)
    if not speed:
        raise SystemExit(f"no seconds in {study.results}: run `speed`")
    figure = new_figure(4.6, 7.2)  # two columns: a phone shows 4.6 inches at about their size
    count = 4 + len(study.tuned_sizes)
    axes = figure.subplots(3, 2).ravel()[:count]
    for unused in figure.axes[count:]:
        unused.set_axis_off()
    middle = study.sizes[1]
    for family, colour in colours_of(study.families).items():
        means = means_of([p for p in points if p["family"] == family])
        for budget in budgets_of(points):
            line = [means[size, budget] for size in study.sizes]
            bars = [p["deviation"] for p in line]
            axes[0].errorbar([p["parameters"] for p in line], [p["loss"] for p in line], bars, color=colour, marker=".")
        line = [means[middle, budget] for budget in budgets_of(points)]
        axes[1].plot([p["tokens"] for p in line], [p["loss"] for p in line], ".-", color=colour, label=family)
        best = [min((means[size, b] for size in study.sizes), key=lambda p: p["loss"]) for b in budgets_of(points)]
        axes[2].plot([p["budget"] for p in best], [p["loss"] for p in best], ".-", color=colour)
        seconds = [p["tokens"] / (BATCH * LENGTH) * speed[p["size"]][family] for p in best]
        axes[3].plot(seconds, [p["loss"] for p in best], ".-", color=colour)
        for ax, size in zip(axes[4:], study.tuned_sizes, strict=True):
            basin = study.basin(family, size)
            ax.plot(list(basin), list(basin.values()), ".-", color=colour)
    titles = ["each number of FLOPs", f"{middle} parameters", "best size tried", "best size tried"]
    titles += [f"{size}, one seed" for size in study.tuned_sizes]
    labels = ["non-embedding parameters", "tokens", "FLOPs", "seconds on one core"]
    labels += ["learning rate"] * len(study.tuned_sizes)
    for ax, title, label in zip(axes, titles, labels, strict=True):
        ax.set(title=title, xlabel=label, xscale="log")
        ax.minorticks_off()
    axes[0].set_xticks([study.families["plain"].parameters(size) for size in study.sizes], study.sizes)
    axes[2].set_xticks(budgets_of(points), [f"{budget:g}" for budget in budgets_of(points)], fontsize=8)
    for ax, size in zip(axes[4:], study.tuned_sizes, strict=True):
        ax.set_xticks(rates_of(size), [f"{1000 * rate:g}e-3" for rate in rates_of(size)], fontsize=8)
    figure.supylabel("validation loss, nats per token", fontsize=9)
    return legend_below(figure, axes[1])


def means_of(points: Sequence[Point]) -> dict[tuple[str, float], Point]:
    """Return one point for each size and number of FLOPs: the mean and the standard deviation of the loss."""
    cells: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        cells.setdefault((point["size"], point["budget"]), []).append(point)
    means = {}
    for key, same in cells.items():
        losses = [point["loss"] for point in same]
        deviation = statistics.stdev(losses) if len(losses) > 1 else 0
        means[key] = {**same[0], "loss": statistics.mean(losses), "deviation": deviation}
    return means


if __name__ == "__main__":
    run_study(Study(), __doc__, report, draw)
