"""Does a difference of two maps help to reason among sentences that distract? Worded arithmetic, three families.

    diffvision data make arithmetic data/arithmetic --documents 80000 --steps 3 --highest 99
    python scripts/studies/arithmetic.py data --source data/arithmetic   # tokens, in runs/arithmetic/data.pt
    python scripts/studies/arithmetic.py grid                            # the runs, and what they cost
    python scripts/studies/arithmetic.py tune                            # four learning rates a family, one seed
    python scripts/studies/arithmetic.py train                           # fresh seeds
    python scripts/studies/arithmetic.py report --images docs/images

Models of equal parameters within 1% are trained once over the problems, with the loss on the solutions alone, at a
learning rate for each family. `--quick` runs the whole in minutes, on few problems.

Primary metric: the share of right answers, greedy, to test problems about people of unseen names, of as many steps and
distracting sentences as training showed, and of more. A wrong answer is classed by its first wrong step: see
`diffvision.evaluation.language.mathematics.errors`.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.evaluation.language.mathematics.errors import KINDS, judge
from diffvision.models.language import LanguageModel
from diffvision.models.language.generation import generate
from grid import Grid, Numbers, Run
from language_grid import FAMILIES, RATES, RESULTS
from small_language import VOCABULARY, fit

SIZE = "0.3M"
GRID = Grid(RESULTS / "arithmetic", tuple(FAMILIES), RATES, ("accuracy",), (1, 2, 3))
ROWS, NEARBY = 16, 50  # of a batch; batches whose rows are sorted by their length
WARMUP = 0.05  # of the steps
VALIDATED, AT_ONCE, SPARE = (
    300,
    100,
    8,
)  # problems that choose a rate; rows that are generated; tokens over the solution's
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

    def __init__(self, file: Path) -> None:
        content = torch.load(file, weights_only=True)
        self.tokenizer = load_tokenizer(file.with_suffix(".tokenizer.json"))
        self.validation: list[dict[str, Any]] = content["validation"]
        self.test: list[dict[str, Any]] = content["test"]
        (self.newline,) = self.tokenizer.encode("\n")
        parts = [content[name].split(content[f"{name}' lengths"].tolist()) for name in ("prompts", "responses")]
        self.train = [self._row(*pair) for pair in zip(*parts, strict=True)]

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
    family = FAMILIES[run.family]
    model = family.create(SIZE)
    numbers: Numbers = {**asdict(run), "size": SIZE, "parameters": family.parameters(SIZE), "problems": len(data.train)}
    warmup = max(1, round(WARMUP * data.steps))
    try:
        trained = fit(model, data, rate=run.rate, warmup=warmup, lengths=[data.steps], seed=run.seed, loss_of=loss_of)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    return {
        **numbers,
        "diverged": "",
        "seconds": round(trained.seconds, 2),
        "largest gradient norm": round(trained.norm, 2),
        "loss": trained.branches[-1].loss,
        "validation": measure(model, data, data.validation[:VALIDATED]),
        "test": measure(model, data, data.test),
    }


def measure(model: LanguageModel, data: Data, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of each kind of answer, the first wrong step, and the accuracy by steps and distractors."""
    kinds: dict[tuple[int, int], list[str]] = {}
    wrong = []
    for row, written in zip(rows, answers(model, data, rows), strict=True):
        judged = judge(row["prompt"], row["response"], written)
        kinds.setdefault((row["steps"], row["distractors"]), []).append(judged.kind)
        if judged.kind != "correct":
            wrong.append((judged.first_wrong or 1) / (row["steps"] + 1))
    counts = Counter(kind for cell in kinds.values() for kind in cell)
    metrics = {"accuracy": counts["correct"] / len(rows)}
    metrics |= {kind: counts[kind] / len(rows) for kind in KINDS[1:]}
    metrics |= {"first wrong step": statistics.mean(wrong)} if wrong else {}
    cells = {cell_name(*cell): Counter(kinds[cell])["correct"] / len(kinds[cell]) for cell in sorted(kinds)}
    return {name: round(value, 5) for name, value in (metrics | cells).items()}


def cell_name(steps: int, distractors: int) -> str:
    """Return the metric of one number of steps and of distractors."""
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
