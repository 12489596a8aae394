"""Functions that both demos share: training by a recipe, the table that compares models, and the HTML page."""

import base64
import html
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diffvision.analysis.curves import Curve, read_metrics
from diffvision.analysis.figures import png
from diffvision.training.fit import fit
from diffvision.training.recipes import recipe


@dataclass
class Run:
    """One trained model and its measurements.

    Attributes:
        seconds: duration of `fit`, including its evaluations.
        speed: samples or tokens a second, the median over training.
        metrics: on data that training did not see.
        shown: further content of the report: pictures of attention, or a generated text.
    """

    model: str
    seed: int
    parameters: int
    seconds: float
    speed: float
    metrics: dict[str, float]
    curves: dict[str, Curve]
    shown: Any


@dataclass
class Trained:
    """The result of `train`: the trained module, and the fields of `Run` that are known after training."""

    module: Any
    seconds: float
    curves: dict[str, Curve]

    def run(self, model: str, seed: int, unit: str, metrics: dict[str, float], shown: Any) -> Run:
        """Return the record of the run; `unit` is "samples" or "tokens", what the speed counts."""
        parameters = sum(p.numel() for p in self.module.model.parameters())
        speed = statistics.median(self.curves[f"train/{unit}_per_second"].values)
        return Run(model, seed, parameters, self.seconds, speed, metrics, self.curves, shown)


def train(config: str, model: str, seed: int, directory: Path, *arguments: str) -> Trained:
    """Run `diffvision fit` with a file of configs/, for one model and seed.

    Args:
        directory: the parent of the run's directory.
        arguments: further arguments of `diffvision fit`.
    """
    root, start = directory / f"{model}-{seed}", time.perf_counter()
    cli = fit(
        [
            "fit",
            f"--config={recipe(config)}",
            f"--seed_everything={seed}",
            f"--model.init_args.model={model}",
            f"--data.init_args.seed={seed}",
            f"--trainer.default_root_dir={root}",
            f"--trainer.logger.init_args.save_dir={root}",
            *arguments,
        ]
    )
    log: Any = cli.trainer.logger
    return Trained(cli.model, time.perf_counter() - start, read_metrics(log.log_dir))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, followed by the standard deviation if there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def of_model(runs: Sequence[Run], model: str) -> list[Run]:
    """Return the model's runs, one per seed."""
    return [run for run in runs if run.model == model]


def comparison(
    runs: Sequence[Run], names: Mapping[str, str], rows: Mapping[str, tuple[str, float, int]], *, title: str, unit: str
) -> Table:
    """Return the table that a demo prints: a column for each model; means, and over seeds the standard deviation.

    Args:
        names: {model: title of its column}.
        rows: {title of the row: (metric, factor, decimals)}.
        unit: "samples" or "tokens".
    """
    seeds = len({run.seed for run in runs})
    spread_note = f"; mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    table = Table("", *names.values(), title=title + spread_note)
    by_model = [of_model(runs, model) for model in names]
    for row, (key, factor, digits) in rows.items():
        table.add_row(row, *(spread([factor * run.metrics[key] for run in each], digits) for each in by_model))
    table.add_section()
    table.add_row("parameters", *(f"{each[0].parameters:,}" for each in by_model))
    table.add_row(f"{unit}/s", *(f"{statistics.median(run.speed for run in each):,.0f}" for each in by_model))
    table.add_row("seconds", *(f"{statistics.mean(run.seconds for run in each):.0f}" for each in by_model))
    return table


def as_text(table: Table) -> str:
    """Return the table in plain characters."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(table)
    return console.export_text()


def html_page(title: str, table: str, sections: Sequence[tuple[str, str, Any]], sample: str = "") -> str:
    """Return one HTML page with its pictures embedded.

    Args:
        table: in plain characters.
        sections: (title, text, matplotlib Figure) each.
        sample: preformatted text at the end of the page.
    """
    body = "".join(
        f"<h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>"
        f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{base64.b64encode(png(figure)).decode()}">'
        for heading, text, figure in sections
    )
    body += f"<h2>Samples</h2><pre>{html.escape(sample)}</pre>" if sample else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>diffvision demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ max-width: 100%; }} pre {{ line-height: 1.2; overflow-x: auto; }} p {{ color: #555; }}
</style>
<h1>{html.escape(title)}</h1>
<pre>{html.escape(table)}</pre>
{body}
</html>
"""
