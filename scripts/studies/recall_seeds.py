"""What recall errors of several seeds say: means, each seed, and Welch's intervals over seeds.

    python scripts/studies/recall_seeds.py results/recall_errors.json

Reads what `evaluate-language --tasks recall_errors` wrote of models that are named NAME-SEED, such as diff-debug-0, and
prints a table in percent: for each class of answer and number of facts the mean of a NAME (each seed), and the interval
of each further NAME minus the first one's. `right of the copied` is correct / (correct + distracted), of two facts or
more. Rows of zeros are left out.
docs/guides/faithfulness.md has the table.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffvision.evaluation.intervals import welch_interval

COPIED = "right of the copied"
Shares = dict[tuple[str, int], dict[str, list[float]]]
"""Of a class of answer and a number of facts: each name's shares by seed."""


def shares(models: Mapping[str, Mapping[str, float]], facts: Sequence[int]) -> Shares:
    """Return the shares, those that are zero throughout left out."""
    found: Shares = {}
    for answer in ("correct", "distracted", "fabricated", "malformed", COPIED):
        for count in facts:
            if count == 1 and answer == COPIED:
                continue
            cell: dict[str, list[float]] = {}
            for label, metrics in models.items():
                name, _, seed = label.rpartition("-")
                if not (name and seed.isdecimal()):
                    raise SystemExit(f"a model is named {label!r}: name each NAME-SEED, such as diff-debug-0")
                cell.setdefault(name, []).append(share(metrics, answer, count))
            if any(map(any, cell.values())):
                found[answer, count] = cell
    return found


def share(metrics: Mapping[str, float], answer: str, count: int) -> float:
    if answer != COPIED:
        return metrics[f"{count}x1/{answer}"]
    right, other = (metrics[f"{count}x1/{each}"] for each in ("correct", "distracted"))
    return right / (right + other) if right + other else float("nan")


def row(answer: str, count: int, by_name: Mapping[str, list[float]]) -> str:
    """Return a row of the table."""
    percent = {name: [100 * value for value in values] for name, values in by_name.items()}
    cells = [f"{statistics.mean(values):.0f} ({', '.join(f'{value:.0f}' for value in values)})"
             for values in percent.values()]  # fmt: skip
    first, *others = percent.values()
    intervals = ["{:+.0f} to {:+.0f}".format(*welch_interval(first, other)) for other in others]
    return f"| {' | '.join([answer, str(count), *cells, *intervals])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    content = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    table = shares(content["models"], content["options"]["facts"])
    names = list(next(iter(table.values())))
    if any(len(values) < 2 for values in next(iter(table.values())).values()):
        raise SystemExit("an interval over seeds needs two or more of each NAME: name the models NAME-SEED")
    print("| answer | facts | " + " | ".join([*names, *(f"{name} - {names[0]}" for name in names[1:])]) + " |")
    print("|---|" + "---:|" * (2 * len(names)))
    for (answer, count), by_name in table.items():
        print(row(answer, count, by_name))


if __name__ == "__main__":
    main()
