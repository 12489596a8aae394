"""What `evaluate-language` measured of models of several seeds: means, each seed, and paired differences.

    python scripts/studies/seeds.py results/low_bit.json "nll_rise/*" cancellation
    python scripts/studies/seeds.py results/recall_errors.json "8x1/correct" --percent
    python scripts/studies/seeds.py results/low_bit.json --save docs/results/low_bit.json

The models are named NAME-SEED, such as diff-debug-0. A row is a metric, with the difference of each further NAME from
the first one: the mean over seeds and its 95% t interval, paired by seed, p after Holm's correction over the names of
the row. Rows of zeros are left out. `--save` writes the numbers without the intervals of single models.
"""

import argparse
import fnmatch
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from diffvision.evaluation.intervals import PARTS
from grid import differences

Models = Mapping[str, Mapping[str, float | None]]
"""{NAME-SEED: {metric: value, or None where there is none}}."""
DIGITS = 5  # of a saved number


def by_seed(models: Models, metric: str) -> dict[str, dict[int, float]]:
    """Return {NAME: {seed: value}} of a metric, of those that have one."""
    found: dict[str, dict[int, float]] = {}
    for label, metrics in models.items():
        name, _, seed = label.rpartition("-")
        if not (name and seed.isdecimal()):
            raise SystemExit(f"a model is named {label!r}: name each NAME-SEED, such as diff-debug-0")
        of = found.setdefault(name, {})
        if (value := metrics.get(metric)) is not None:
            of[int(seed)] = value
    return found


def metrics_of(models: Models) -> list[str]:
    """Return the names of all metrics, without what belongs to an interval."""
    names = dict.fromkeys(name for metrics in models.values() for name in metrics)
    return [
        name for name in names if not any(name.endswith(part) and name.removesuffix(part) in names for part in PARTS)
    ]


def row(models: Models, metric: str, digits: int, factor: float) -> str | None:
    """Return a metric's row of the table; None if all values are zero."""
    values = {
        name: {seed: factor * value for seed, value in of.items()} for name, of in by_seed(models, metric).items()
    }
    if not any(any(of.values()) for of in values.values()):
        return None
    cells = [
        f"{statistics.mean(of.values()):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in of.values())})"
        if of
        else ""
        for of in values.values()
    ]
    found = differences(values)
    intervals = [found[name].text(digits) if name in found else "" for name in list(values)[1:]]
    return f"| {' | '.join([metric, *cells, *intervals])} |"


def save(content: Mapping[str, object], models: Models, file: Path) -> None:
    """Write the numbers, the options and the machine that this runs on."""
    names = metrics_of(models)
    plain = {
        label: {
            name: value and float(f"{value:.{DIGITS}g}")
            for name in names
            if name in metrics
            for value in [metrics[name]]
        }
        for label, metrics in models.items()
    }
    machine = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__}
    file.write_text(json.dumps({**content, **machine, "models": plain}, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("metrics", nargs="*", help="names of metrics, with * for any text")
    parser.add_argument("--digits", type=int, default=4)
    parser.add_argument("--percent", action="store_true")
    parser.add_argument("--save", type=Path, help="the file to write the numbers to")
    options = parser.parse_args(arguments)
    content = json.loads(options.file.read_text(encoding="utf-8"))
    models: Models = content["models"]
    if options.save:
        save(content, models, options.save)
    names = [name for name in metrics_of(models) if any(fnmatch.fnmatchcase(name, each) for each in options.metrics)]
    if options.metrics and not names:
        raise SystemExit(
            f"no metric is named {' or '.join(options.metrics)}: there are {', '.join(metrics_of(models))}"
        )
    if not names:
        return
    families = by_seed({label: {"": 0.0} for label in models}, "")
    first = next(iter(families))
    if any(len(of) < 2 for of in families.values()):
        raise SystemExit("an interval over seeds needs two or more of each NAME: name the models NAME-SEED")
    others = [f"{name}, from {first}" for name in list(families)[1:]]
    print(f"| metric | {' | '.join([*families, *others])} |")
    print("|---|" + "---:|" * (len(families) + len(others)))
    digits, factor = (0, 100.0) if options.percent else (options.digits, 1.0)
    for name in names:
        if line := row(models, name, digits, factor):
            print(line)


if __name__ == "__main__":
    main()
