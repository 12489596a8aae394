"""Does a difference of two maps help to reason among sentences that distract? Worded arithmetic, three families.

    diffvision data make arithmetic data/arithmetic --documents 60000 --steps 2 --highest 20
    python scripts/studies/arithmetic.py data --source data/arithmetic   # tokens, in runs/arithmetic/data.pt
    python scripts/studies/arithmetic.py grid                            # the runs, and what they cost
    python scripts/studies/arithmetic.py tune                            # five learning rates a family, one seed
    python scripts/studies/arithmetic.py train                           # fresh seeds
    python scripts/studies/arithmetic.py report --images docs/images

Models of equal parameters within 1% are trained once over the problems, with the loss on the solutions alone, at a
learning rate for each family. `--quick` runs the whole in minutes, on few problems.

Primary metric: the share of right answers, greedy, to test problems about people of unseen names, of as many steps and
distracting sentences as training showed, and of more. A wrong answer is classed by its first wrong step: see
`arithmetic_errors`. A number that was made up may stand in a distracting sentence by
chance, the more easily the more there are; "distracted by chance" is how many solutions of other problems would be
called distracted, to be compared with the share among the wrong answers.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arithmetic_errors import KINDS, judge
from diffvision.analysis.figures.style import COLOURS, legend_below, panels, styled
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.models.language import LanguageModel
from diffvision.models.language.generation import generate
from grid import Grid, Numbers, Run, differences, spread
from language_grid import FAMILIES, RESULTS
from small_language import VOCABULARY, fit

SIZE = "0.3M"
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
GRID = Grid(RESULTS / "arithmetic", tuple(FAMILIES), RATES, ("accuracy",), (1, 2, 3), epochs=1)
ROWS, NEARBY = 16, 50  # of a batch; batches whose rows are sorted by their length
WARMUP = 0.05  # of the steps
VALIDATED = 300  # problems that choose a rate
AT_ONCE, SPARE = 100, 8  # rows that are generated; tokens more than the longest of their solutions
CELL = re.compile(r"(\d+) steps, (\d+) distractors")
MOST_PANELS = 4
MORE_STEPS = "more steps"  # than training showed
BY_CHANCE = "distracted by chance"
QUICK_PROBLEMS, QUICK_EACH = 640, 2  # for training, and of each number of steps and distractors
# Of the processor for a run on 60,000 problems (x86_64), until a family has runs that say what they took.
SECONDS = {"plain": 330, "V1": 400, "V2": 490}
# A digit, and each of a name's two syllables, is a token.
PIECES = r" ?\d| ?[A-Z][aeiou]"


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Write the tokens of the training problems, and the problems of the other splits, to one file."""
    rows = {
        split: [json.loads(line) for line in (source / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation", "test")
    }
    tokenizer = train_tokenizer(
        (f"{row['prompt']}\n{row['response']}\n" for row in rows["train"]), VOCABULARY, pattern=PIECES
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(file.with_suffix(".tokenizer.json"))
    content: dict[str, Any] = {split: rows[split] for split in ("validation", "test")}
    for name, key in (("prompts", "prompt"), ("responses", "response")):
        tokens = [tokenizer.encode(row[key]) for row in rows["train"]]
        content[name] = torch.tensor([token for one in tokens for token in one], dtype=torch.int16)
        content[f"{name}' lengths"] = torch.tensor([len(one) for one in tokens])
    torch.save(content, file)
    total = len(content["prompts"]) + len(content["responses"])
    print(f"{len(rows['train']):,} problems, {total:,} tokens, {len(content['responses']):,} of them learned")


class Data:
    """What `make_data` wrote."""

    def __init__(self, file: Path, quick: bool = False) -> None:
        content = torch.load(file, weights_only=True)
        self.tokenizer = load_tokenizer(file.with_suffix(".tokenizer.json"))
        self.validation: list[dict[str, Any]] = content["validation"]
        self.test: list[dict[str, Any]] = content["test"]
        (self.newline,) = self.tokenizer.encode("\n")
        parts = [content[name].split(content[f"{name}' lengths"].tolist()) for name in ("prompts", "responses")]
        self.train = [self._row(*pair) for pair in zip(*parts, strict=True)]
        self.trained_steps = max(row["steps"] for row in self.validation)
        self.cells = sorted({(row["steps"], row["distractors"]) for row in self.test})
        if quick:
            self.train, self.validation = self.train[:QUICK_PROBLEMS], self.validation[:20]
            self.test = self.test[: QUICK_EACH * len(self.cells)]

    def _row(self, prompt: Tensor, response: Tensor) -> tuple[Tensor, int]:
        """Return the tokens of a problem with its solution, and how many of them are not learned."""
        end = self.tokenizer.eos_id
        row = torch.cat([torch.tensor([end]), prompt, torch.tensor([self.newline]), response, torch.tensor([end])])
        return row, len(prompt) + 2

    def encoded(self, row: dict[str, Any]) -> tuple[Tensor, int]:
        """Return a problem of another split in the same form."""
        return self._row(*(torch.tensor(self.tokenizer.encode(row[key])) for key in ("prompt", "response")))

    @property
    def steps(self) -> int:
        """Batches of one pass over the problems."""
        return len(self.train) // ROWS

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of problems in random order, none of them twice; rows of a batch have similar lengths.

        A batch is (tokens [B, N], padded with 0; of these, which are learned, [B, N]).
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.train), generator=generator)
        for near in order[: self.steps * ROWS].split(ROWS * NEARBY):
            nearby = sorted(near.tolist(), key=lambda number: len(self.train[number][0]))
            chunks = [nearby[start : start + ROWS] for start in range(0, len(nearby), ROWS)]
            for chunk in torch.randperm(len(chunks), generator=generator).tolist():
                yield padded([self.train[number] for number in chunks[chunk]])

    def loss(self, model: nn.Module) -> float:
        """Return a model's loss on validation solutions, nats a token."""
        rows = [self.encoded(row) for row in self.validation[:VALIDATED]]
        total, learned = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(rows), AT_ONCE):
                batch = padded(rows[start : start + AT_ONCE])
                total += loss_of(model, batch).item() * int(batch[1].sum())
                learned += int(batch[1].sum())
        return total / learned


def padded(rows: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return a batch of rows."""
    tokens = nn.utils.rnn.pad_sequence([row.long() for row, _ in rows], batch_first=True)
    positions = torch.arange(tokens.shape[1])
    begins, ends = (torch.tensor(bounds)[:, None] for bounds in zip(*((n, len(row)) for row, n in rows), strict=True))
    return tokens, (positions >= begins) & (positions < ends)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of the learned tokens; the head is computed for these alone."""
    tokens, learned = batch
    states = model.hidden(tokens[:, :-1])[learned[:, 1:]]
    return F.cross_entropy(model.logits(states), tokens[:, 1:][learned[:, 1:]])


# ---- runs ----------------------------------------------------------------------------------------------------------


def train(run: Run, data: Data) -> Numbers:
    """Train one run, and return what it measured."""
    torch.manual_seed(run.seed)
    start = time.process_time()
    family = FAMILIES[run.family]
    model = family.create(SIZE)
    numbers: Numbers = {**asdict(run), "size": SIZE, "parameters": family.parameters(SIZE), "problems": len(data.train)}
    warmup = max(1, round(WARMUP * data.steps))
    try:
        trained = fit(model, data, rate=run.rate, warmup=warmup, lengths=[data.steps], seed=run.seed, loss_of=loss_of)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    numbers |= {
        "diverged": "",
        "largest gradient norm": round(trained.norm, 2),
        "loss": trained.branches[-1].loss,
        "validation": measure(model, data, data.validation[:VALIDATED]),
        "test": measure(model, data, data.test),
    }
    return {**numbers, "seconds": round(time.process_time() - start, 2)}


def measure(model: LanguageModel, data: Data, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return shares of answers: right ones, in all and by steps and distractors, and what the others are."""
    judged = [
        (row, judge(row["prompt"], row["response"], written))
        for row, written in zip(rows, answers(model, data, rows), strict=True)
    ]
    groups: dict[str, list[bool]] = {}
    for row, judgement in judged:
        steps, distractors = row["steps"], row["distractors"]
        seen = steps <= data.trained_steps
        names = ["accuracy", cell_name(steps, distractors), at_distractors(distractors) if seen else MORE_STEPS]
        for name in names:
            groups.setdefault(name, []).append(judgement.kind == "correct")
    groups |= {kind: [judgement.kind == kind for _, judgement in judged] for kind in KINDS[1:]}
    for (row, judgement), other in zip(judged, of_other_problems(rows), strict=True):
        distracted = {"distracted": judgement.kind, BY_CHANCE: judge(row["prompt"], row["response"], other).kind}
        groups.setdefault(BY_CHANCE, []).append(distracted[BY_CHANCE] == "distracted")
        for name, kind in distracted.items():
            groups.setdefault(f"{name} {at_distractors(row['distractors'])}", []).append(kind == "distracted")
    groups["wrong first step"] = [judgement.first_wrong == 1 for _, judgement in judged]
    return {name: round(sum(values) / len(values), 5) for name, values in groups.items()}


def of_other_problems(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield for each problem the right solution of the next one with as many steps and distractors."""
    cells: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        cells.setdefault((row["steps"], row["distractors"]), []).append(row["response"])
    following = {cell: iter([*solutions[1:], solutions[0]]) for cell, solutions in cells.items()}
    return (next(following[row["steps"], row["distractors"]]) for row in rows)


def at_distractors(distractors: int) -> str:
    """Return the metric of as many steps as training showed, by the number of distractors."""
    return f"among {distractors}"


def cell_name(steps: int, distractors: int) -> str:
    """Return the metric of one number of steps and of distractors, which `CELL` matches."""
    return f"{steps} steps, {distractors} distractors"


def answers(model: LanguageModel, data: Data, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a model writes after each problem, greedily."""
    encoded = [data.encoded(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: len(encoded[number][0]))
    written = [""] * len(rows)
    for start in range(0, len(order), AT_ONCE):
        numbers = order[start : start + AT_ONCE]
        prompts = [encoded[number][0][: encoded[number][1]].tolist() for number in numbers]
        most = max(len(encoded[number][0]) - encoded[number][1] for number in numbers) + SPARE
        stop = (data.tokenizer.eos_id,)
        new = generate(model, prompts, max_new_tokens=most, stop=stop, vocab_size=data.tokenizer.vocab_size)
        for number, tokens in zip(numbers, new, strict=True):
            written[number] = data.tokenizer.decode(tokens)
    return written


# ---- tables and picture --------------------------------------------------------------------------------------------


def list_runs(grid: Grid) -> None:
    """Print the runs with what they cost, and what is left in core-hours."""
    runs = [(run.family, f"{run.rate:g}", run.seed, grid.numbers(run)) for run in grid.tuning()]
    if None in (rates := {family: grid.chosen(family) for family in grid.families}).values():
        runs += [(family, "chosen", seed, None) for seed in grid.seeds for family in rates]
    else:
        runs += [(run.family, f"{run.rate:g}", run.seed, grid.numbers(run)) for run in grid.confirming()]
    took: dict[str, list[float]] = {family: [] for family in grid.families}
    for family, _, _, numbers in runs:
        took[family] += [numbers["seconds"]] if numbers and not numbers["diverged"] else []
    left = 0.0
    for family, rate, seed, numbers in runs:
        seconds = statistics.mean(took[family]) if took[family] else SECONDS[family]
        left += 0 if numbers else seconds
        state = numbers["diverged"] or f"took {numbers['seconds']:.0f} s" if numbers else f"about {seconds:.0f} s"
        print(f"{family:<6} learning rate {rate:<7} seed {seed:<4} {state}")
    print(f"{len(runs)} runs, {sum(bool(run[-1]) for run in runs)} are done; {left / 3600:.1f} core-hours are left")


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    print(grid.describe(), end="\n\n")
    cells = cells_of(grid)
    distractors = sorted({d for _, d in cells})
    print(grid.tuned(["accuracy"]), end="\n\n")
    print(grid.table(["accuracy", MORE_STEPS]), end="\n\n")
    print(grid.table([at_distractors(d) for d in distractors]), end="\n\n")
    print(grid.means([*KINDS[1:], "wrong first step", BY_CHANCE]), end="\n\n")
    for d in filter(None, distractors):
        of_wrong = {family: of_the_wrong(grid, family, d, cells) for family in grid.families}
        shares = ", ".join(f"{family} {spread(list(of.values()))}" for family, of in of_wrong.items())
        others = ", ".join(f"{family} {found}" for family, found in differences(of_wrong).items())
        chance = statistics.mean(grid.by_seed(grid.families[0], f"{BY_CHANCE} {at_distractors(d)}").values())
        print(f"distracted among {d}, % of the wrong answers: {shares}; by chance {chance:.1f}; {others}")
    print()
    for family in grid.families:
        print(f"| {family}, steps | {' | '.join(f'{d} distractors' for d in distractors)} |")
        print("|---|" + "---:|" * len(distractors))
        for steps in sorted({k for k, _ in cells}):
            values = [spread(list(grid.by_seed(family, cell_name(steps, d)).values())) for d in distractors]
            print(f"| {steps} | {' | '.join(values)} |")
        print()


def of_the_wrong(grid: Grid, family: str, distractors: int, cells: set[tuple[int, int]]) -> dict[int, float]:
    """Return how many of the wrong answers to problems with so many distractors are distracted, in %, by seed."""
    steps = [k for k, d in cells if d == distractors]  # each of as many problems
    right = [grid.by_seed(family, cell_name(k, distractors)) for k in steps]
    distracted = grid.by_seed(family, f"distracted {at_distractors(distractors)}")
    return {seed: 100 * share / (100 - statistics.mean(of[seed] for of in right)) for seed, share in distracted.items()}


def cells_of(grid: Grid) -> set[tuple[int, int]]:
    """Return the numbers of steps and distractors that the first run with a fresh seed was measured at."""
    numbers = next((n for run in grid.confirming() if (n := grid.numbers(run)) and not n["diverged"]), None)
    if numbers is None:
        raise SystemExit("no run with a fresh seed is done: run `train`")
    return {(int(match[1]), int(match[2])) for name in numbers["test"] if (match := CELL.fullmatch(name))}


@styled
def draw(grid: Grid) -> Any:
    """Return a figure: accuracy over the distracting sentences, a panel for each number of steps."""
    cells = cells_of(grid)
    steps = sorted({k for k, _ in cells})[:MOST_PANELS]
    distractors = sorted({d for _, d in cells})
    figure, axes = panels(len(steps), width=3.0, height=3.4, sharey=True)
    for ax, k in zip(axes, steps, strict=True):
        for family, colour in zip(grid.families, COLOURS, strict=False):
            values = [list(grid.by_seed(family, cell_name(k, d)).values()) for d in distractors]
            means = [statistics.mean(each) for each in values]
            bars = [statistics.stdev(each) if len(each) > 1 else 0 for each in values]
            ax.errorbar(distractors, means, bars, label=family, linewidth=1.2, capsize=2, color=colour)
        ax.set(title=f"{k} step{'s' * (k > 1)}", xlabel="distracting sentences", xticks=distractors, ylim=(-3, 103))
    axes[0].set_ylabel("right answers, %")
    return legend_below(figure, axes[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "grid", "tune", "train", "report"])
    parser.add_argument("--data", type=Path, default=Path("runs/arithmetic/data.pt"))
    parser.add_argument("--source", type=Path, help="with data: what `diffvision data make arithmetic` wrote")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of several processes: index and number")
    parser.add_argument("--images", type=Path, help="with report: the folder to draw the picture to")
    parser.add_argument("--quick", action="store_true", help="the whole in minutes, to see that it runs")
    options = parser.parse_args(arguments)
    grid = GRID.quick() if options.quick else GRID
    if options.what == "data":
        if options.source is None:
            parser.error("data needs --source: the folder that `diffvision data make arithmetic` wrote")
        make_data(options.source, options.data)
    elif options.what in ("tune", "train"):
        runs = grid.tuning() if options.what == "tune" else grid.confirming()
        data = Data(options.data, options.quick)
        grid.train(runs, lambda run: train(run, data), tuple(options.part))
    elif options.what == "grid":
        list_runs(grid)
    else:
        report(grid)
        if options.images:
            draw(grid).savefig(options.images / "arithmetic.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
