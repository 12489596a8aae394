"""The record of a run, and the tables that compare models, printed and as HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import rich.table

from diffvision.analysis import figures
from diffvision.analysis.curves import Curve
from diffvision.analysis.html_page import Bar, Folded, Part, Picture, Table, bars, spread
from diffvision.evaluation.intervals import FEWEST_SEEDS, RULE, Difference, difference


@dataclass
class Run:
    """One trained model and its measurements.

    Attributes:
        seconds: duration of the training steps, without evaluations.
        speed: samples a second, the median over training.
        metrics: on data that training did not see.
        folder: of the run.
    """

    model: str
    seed: int
    parameters: int
    seconds: float
    speed: float
    metrics: dict[str, float]
    curves: dict[str, Curve]
    folder: Path


def by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each model, one per seed, in the order in which the models come first."""
    models = dict.fromkeys(run.model for run in runs)
    return {model: [run for run in runs if run.model == model] for model in models}


def comparison(runs: Sequence[Run], rows: Mapping[str, tuple[str, float, int]], *, title: str) -> rich.table.Table:
    """Return the table that the demo prints: a column for each model; means, and over seeds the standard deviation.

    Args:
        rows: {title of the row: (metric, factor, decimals)}.
    """
    models = by_model(runs)
    seeds = len({run.seed for run in runs})
    spread_note = f"; mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    table = rich.table.Table("", *models, title=title + spread_note)
    columns = list(models.values())
    for row, (key, factor, digits) in rows.items():
        table.add_row(row, *(spread([factor * run.metrics[key] for run in each], digits) for each in columns))
    table.add_section()
    table.add_row("parameters", *(f"{each[0].parameters:,}" for each in columns))
    table.add_row("samples/s", *(f"{median(run.speed for run in each):,.0f}" for each in columns))
    table.add_row("seconds", *(f"{mean(run.seconds for run in each):.0f}" for each in columns))
    return table


# ---- the page ------------------------------------------------------------------------------------------------------

Rows = Mapping[str, tuple[str, float, int]]
"""{title of the row: (metric, factor, decimals)}."""
Values = Mapping[str, Mapping[str, Sequence[float]]]
"""{model: {metric: [one value per seed]}}."""


def results(
    models: Mapping[str, Sequence[Run]], groups: Mapping[str, Rows], more: Sequence[Sequence[str]], *, note: str
) -> Table:
    """Return the page's table: a bar for each model, and over several seeds the difference with its interval.

    Args:
        models: their runs, the one that the others are compared with first.
        groups: rows under a heading each; where the factor is 100, bars end at 100%.
        more: further rows, at the end.
        note: below the table.
    """
    several = min(map(len, models.values())) > 1
    others = list(models)[1:]
    heads = ["", *models] + ([f"{name} − {next(iter(models))}" for name in others] if several else [])
    rows: list[Sequence[str | Bar]] = []
    for title, group in groups.items():
        rows.append([title])
        for row, (key, factor, digits) in group.items():
            values = {name: [run.metrics[key] for run in runs] for name, runs in models.items()}
            top = 100 if factor == 100 else None
            cells = bars(values, factor=factor, digits=digits, top=top)
            first, *compared = values.values()
            differences = [_difference(first, other, factor) for other in compared] if several else []
            texts = [f"{_interval(one, factor, digits)} {one.verdict}".strip() for one in differences]
            rows.append([f"{row}, %" if factor == 100 else row, *cells, *texts])
    empty = [""] * (len(others) if several else 0)
    rows += [["Size and speed"], *([*cells, *empty] for cells in more)]
    if several:
        note += f" Mean ± standard deviation of {len(next(iter(models.values())))} seeds, each of which is a dot; "
        note += f"differences with their 95% interval over seeds (Welch's). {RULE}"
    return Table(heads, rows, note, models=list(models))


def speed_rows(models: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """Return rows of parameters, speed and seconds of training."""
    return [
        ["parameters", *(f"{runs[0].parameters:,}" for runs in models.values())],
        ["samples/s in training", *(f"{median(run.speed for run in runs):,.0f}" for runs in models.values())],
        ["seconds of training", *(f"{mean(run.seconds for run in runs):,.0f}" for runs in models.values())],
    ]


def values_of(models: Mapping[str, Sequence[Run]]) -> Values:
    """Return the metrics of runs by model and key, a value for each seed."""
    return {name: {key: [run.metrics[key] for run in runs] for key in runs[0].metrics} for name, runs in models.items()}


def verdict(values: Values, first: str, other: str, metrics: Rows) -> str:
    """Return in words which metrics of two models differ; no more than their intervals over seeds say.

    Args:
        values: by model and metric, one value per seed.
        first: a model.
        other: the model that is compared with it.
        metrics: what they are compared by.
    """
    pairs = {name: (values[first][key], values[other][key]) for name, (key, _, _) in metrics.items()}
    if min(len(of_model) for pair in pairs.values() for of_model in pair) < FEWEST_SEEDS:
        return (
            f"Fewer than {FEWEST_SEEDS} seeds of each say little: how much the numbers vary from seed to seed is not "
            f"known, so neither model is called better. `--seeds {FEWEST_SEEDS}` repeats the demo with more."
        )
    words: dict[str, list[str]] = {"higher": [], "lower": [], "not significant": [], "": []}
    for name, (_, factor, digits) in metrics.items():
        one = _difference(*pairs[name], factor)
        words[one.word].append(f"{name} ({_interval(one, factor, digits)})")
    titles = {
        "higher": f"Higher with {other} than with {first}",
        "lower": f"Lower with {other} than with {first}",
        "not significant": f"No significant difference across seeds between {other} and {first}",
        "": "No verdict",
    }
    return " ".join(f"{title}: {', '.join(words[word])}." for word, title in titles.items() if words[word])


def _difference(first: Sequence[float], other: Sequence[float], factor: float) -> Difference:
    """Return the difference of two models over their seeds; where the factor is 100 it is one of shares."""
    return difference(first, other, largest=1.0 if factor == 100 else math.inf)


def _interval(one: Difference, factor: float, digits: int) -> str:
    """Return a difference with its interval, such as "+1.2 [-0.3, 2.7]", or why it has none."""
    value = f"{factor * one.value:+.{digits}f}".replace("-", "−")
    if one.low is None or one.high is None:
        return f"{value}, {one.method}"
    return f"{value} [{factor * one.low:.{digits}f}, {factor * one.high:.{digits}f}]".replace("-", "−")


def duration(models: Mapping[str, Sequence[Run]]) -> str:
    """Return how long a model was trained, the mean of all, in words."""
    seconds = mean(run.seconds for runs in models.values() for run in runs)
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def lambda_pictures(models: Mapping[str, Sequence[Run]]) -> list[Part]:
    """Return curves of lambda by layer of each model that has one, folded; of the first seed."""
    parts: list[Part] = []
    for name, (run, *_) in models.items():
        lambdas = {key.removeprefix("lambda/"): curve for key, curve in run.curves.items() if key.startswith("lambda/")}
        if lambdas:
            picture = Picture(
                figures.lambda_curves(lambdas), f"Lambda of {name} by layer over the steps", "First seed."
            )
            parts.append(Folded(f"λ of {name}, layer by layer", [picture]))
    return parts


def last_checkpoint(run: Path) -> Path:
    """Return the checkpoint that a run's training ended with."""
    return max(run.rglob("final.ckpt"), default=run / "final.ckpt")
