"""The control that `clip.py` lacks: is V2, or a gate, better than plain on emoji at either one's learning rate?

    python scripts/studies/data/emoji.py data/emoji31 --source F --validation_percent 31
    python scripts/studies/clip.py data --source data/emoji31 --data runs/clip_control/data.pt
    python scripts/studies/clip_control.py grid      # the runs, and what they cost
    python scripts/studies/clip_control.py tune      # what is done is left out
    python scripts/studies/clip_control.py train
    python scripts/studies/clip_control.py report

Towers, recipe and training are those of `clip.py`. Rates are chosen on 506 validation names and not 147. That leaves
1,109 of 1,468 test pictures, and 5,488 of 6,112 training pictures: Noto's of validation names are not trained on.

Declared before the first run:

- Primary metric: image R@1 on the unseen style. All others are secondary.
- Rates: five a family with seed 101, chosen as in `clip.py`. Ten seeds that no study of emoji has used, 11 to 20.
- Arms: plain, V2 and gate at their own rates, plain at V2's rate, V2 at plain's rate.
- Interval: 95%, over seeds and pictures, both drawn with replacement 10,000 times, paired by seed and picture.
- V2 at its own rate is "better" only if both intervals lie above zero: from plain at its own rate, and from plain at
  V2's rate. It is "level" only if both lie within 0.5 points of zero. Else a difference is "not shown".
- The gate is secondary, by the same rule. V2 at plain's rate is printed, and decides nothing.
- All runs are of one kind of processor. Nothing is stated before all are done; a run that diverged counts as no hit.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import clip
from clip import PRIMARY, Data
from diffvision.evaluation.intervals import crossed_interval
from diffvision.evaluation.per_sample import PerSample, count_each
from diffvision.evaluation.retrieval import recall
from grid import Grid, Numbers, Run, processor, run_study, spread
from small_clip import SmallClip, Towers

FAMILIES = {
    "plain": clip.FAMILIES["plain"],
    "V2": clip.FAMILIES["V2"],
    "gate": Towers(  # as in cures.py
        settings={"variant": "gated"}, text_settings={"block_type": "diffvision:gated", "mlp_ratio": 3.5}
    ),
}
ARMS = {  # name: family, and the family whose learning rate it has
    "plain": ("plain", "plain"),
    "V2": ("V2", "V2"),
    "gate": ("gate", "gate"),
    "plain at V2's rate": ("plain", "V2"),
    "V2 at plain's rate": ("V2", "plain"),
}
PLAIN = ("plain", "plain at V2's rate")
MARGIN = 0.5  # points


class Arms(Grid):
    """A grid whose runs with fresh seeds are those of `ARMS`."""

    def confirming(self) -> list[Run]:
        """Return the runs with fresh seeds, all arms of a seed one after the other."""
        if None in map(self.chosen, self.families):
            raise SystemExit("no learning rates are chosen yet: run `tune` to its end")
        return list(dict.fromkeys(run for seed in self.seeds for run in self.runs_of(seed).values()))

    def runs_of(self, seed: int) -> dict[str, Run]:
        """Return each arm's run with a seed."""
        return {arm: Run(family, self.chosen(rate_of) or 0, seed) for arm, (family, rate_of) in ARMS.items()}

    def done(self) -> dict[str, list[Numbers]]:
        """Return the runs that are done by arm, none before learning rates are chosen."""
        done: dict[str, list[Numbers]] = {arm: [] for arm in ARMS}
        if all(self.chosen(family) for family in self.families):
            for seed in self.seeds:
                for arm, run in self.runs_of(seed).items():
                    done[arm] += [numbers] if (numbers := self.numbers(run)) else []
        return done

    def train(self, runs: Iterable[Run], train: Callable[[Run], Numbers], part: tuple[int, int] = (0, 1)) -> None:
        """Train the runs that are not done; refuse another kind of processor than theirs."""
        if others := self.processors() - {processor()}:
            raise SystemExit(f"the runs in {self.results} are of {', '.join(others)}: move them away to begin again")
        super().train(runs, train, part)

    def processors(self) -> set[str]:
        """Return the kinds of processor of the runs that are done."""
        done = [json.loads(file.read_text()) for file in self.results.glob("*.json")]
        return {numbers["processor"] for numbers in done if "processor" in numbers}

    def _fresh(self) -> list[tuple[int, str]]:
        return [(seed, arm) for seed in self.seeds for arm in ARMS]


GRID = Arms(
    clip.GRID.results.with_name("clip_control"),
    tuple(FAMILIES),
    rates=clip.GRID.rates,
    primary=PRIMARY,
    seeds=tuple(range(11, 21)),
    epochs=clip.GRID.epochs,
    tuning_seed=101,
)


def hits(trained: SmallClip, data: Data) -> dict[str, Any]:
    """Return the numbers of the test pictures that their caption retrieves first, and the kind of processor."""
    name = "retrieval/test"
    images, texts = trained.images(data.images[name]), trained.texts(data.captions.of[name])
    found = recall(images, texts, torch.arange(len(images)), (1,))
    right = found["image_retrieval_recall@1"]
    assert isinstance(right, PerSample)
    return {"pictures": len(images), "hits": right.values.nonzero()[:, 0].tolist(), "processor": processor()}


def trainer(file: Path, epochs: int) -> Callable[[Run], Numbers]:
    """Return the function that trains a run on the data of a file."""
    data = Data(file)
    return lambda run: clip.train(run, data, epochs, FAMILIES, also=hits)


def by_picture(done: dict[str, list[Numbers]]) -> dict[str, list[PerSample]]:
    """Return image R@1 of each arm's runs picture by picture."""
    pictures = max(run.get("pictures", 0) for runs in done.values() for run in runs)
    right = {}
    for arm, runs in done.items():
        rows = torch.zeros(len(runs), pictures, dtype=torch.bool)
        for row, run in zip(rows, runs, strict=True):
            row[run.get("hits", [])] = True
        right[arm] = [count_each(row) for row in rows]
    return right


def verdict(intervals: Sequence[tuple[float, float]]) -> str:
    """Return what the declared rule says of intervals in points, each (low, high)."""
    if all(low > 0 for low, _ in intervals):
        return "better"
    return "level" if all(low >= -MARGIN and high <= MARGIN for low, high in intervals) else "not shown"


def differences(right: dict[str, list[PerSample]], arm: str) -> dict[str, tuple[float, float, float]]:
    """Return an arm's differences from the plain arms above it, each as mean, low and high in points."""
    found = {}
    for plain in PLAIN[: PLAIN.index(arm)] if arm in PLAIN else PLAIN:
        mean = sum(run.mean() for run in right[arm]) - sum(run.mean() for run in right[plain])
        low, high = crossed_interval(right[plain], right[arm])
        found[plain] = (100 * mean / len(right[arm]), 100 * low, 100 * high)
    return found


def table(right: dict[str, list[PerSample]]) -> list[str]:
    """Return the table of the arms and the verdicts, as lines of Markdown."""
    lines = [f"| {len(right['plain'][0].values):,} pictures | image R@1 ↑ | from plain | from plain at V2's rate |"]
    lines.append("|---|---:|---|---|")
    verdicts = {}
    for arm, runs in right.items():
        found = differences(right, arm)
        cells = [f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" for mean, low, high in found.values()]
        cells += [""] * (len(PLAIN) - len(cells))
        lines.append(f"| {arm} | {spread([100 * run.mean() for run in runs], 2)} | {' | '.join(cells)} |")
        verdicts[arm] = verdict([(low, high) for _, low, high in found.values()])
    return [*lines, "", f"V2: {verdicts['V2']}. Gate (secondary): {verdicts['gate']}."]


def report(grid: Grid) -> None:
    """Print the table and the verdicts, in Markdown; before all runs are done, how many are."""
    assert isinstance(grid, Arms)
    print(grid.describe(), end="\n\n")
    done = grid.done()
    if any(len(runs) < len(grid.seeds) for runs in done.values()) or len(grid.processors()) != 1:
        print("unfinished, or of several kinds of processor: no statement yet")
        return
    print(f"processor: {', '.join(grid.processors())}", end="\n\n")
    print(*table(by_picture(done)), sep="\n")


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=clip.make_data, trainer=trainer, report=report)
