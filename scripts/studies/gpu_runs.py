"""Experiments with language models that take minutes of a GPU: runs, each one JSON, several at once.

    python scripts/studies/gpu_tokens.py plan --data runs/gpu/text.xz
    python scripts/studies/gpu_tokens.py run --data runs/gpu/text.xz --output OUT --seconds 540 --at_once 3
    python scripts/studies/gpu_tokens.py report --output OUT
    python scripts/studies/gpu_tokens.py run --data runs/gpu/text.xz --output OUT --dry   # tiny models, a minute of CPU

`run` does what is not done: first the runs that choose learning rates, then those with fresh seeds. It begins none that
would not end in time, by what the others took. The same call again continues.
"""

import argparse
import fcntl
import io
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.ops.attention.choice import attention_backend
from grid import Numbers, Run, best_rate, train_runs
from small_language import fit, steps_trained

TUNING_SEED = 100
LIKELY = 150e12  # FLOPs a second of small models on an H200: a guess, for the plan alone


class Data(Protocol):
    """What a run is trained on, and measured with; a batch [2, B, N] has inputs, and targets (-100: not counted)."""

    def __init__(self, file: Path | None, experiment: "Experiment", part: str, device: torch.device) -> None: ...

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches for training."""

    def loss(self, model: nn.Module) -> float:
        """Return the loss on a part, nats a token."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is trained and measured.

    Attributes:
        name: of the folder of JSON files.
        shape: of the plain model; a layer of another variant has as many parameters.
        families: {name: variant}; the first is plain.
        rate_of: {family: the family whose learning rate it takes}, of those that try none.
        rates: learning rates to try.
        seeds: for the comparison.
        batch: windows a step.
        length: of a window, in tokens.
        steps: of a run's branches, rising.
        tuning_steps: of a run that tries a learning rate.
        warmup: steps.
        data: its batches and loss.
        tested: tokens at most of a text's loss.
        measure: what else is measured of a trained model.
    """

    name: str
    shape: LanguageConfig
    families: Mapping[str, str]
    rates: Sequence[float]
    seeds: Sequence[int]
    batch: int
    length: int
    steps: Sequence[int]
    tuning_steps: int
    warmup: int
    data: type[Data]
    tested: int = 1 << 20
    rate_of: Mapping[str, str] = field(default_factory=dict)
    measure: Callable[[nn.Module, Any], Numbers] = lambda model, data: {}

    def dry(self) -> "Experiment":
        """Return an experiment of the same kind that takes a CPU a minute."""
        shape = replace(self.shape, dim=32, depth=2, num_heads=2, head_dim=16, mlp_dim=96)
        steps = tuple(4 * (number + 1) for number in range(len(self.steps)))
        small = replace(self, shape=shape, batch=2, length=64, steps=steps, tuning_steps=4, warmup=1, tested=1024)
        return replace(small, seeds=self.seeds[:2])

    def create(self, family: str) -> LanguageModel:
        """Return a model with new weights."""
        layers = f"{self.shape.depth}*{self.families[family]}"
        return LanguageModel(replace(self.shape, variant_by_layer=layers))

    def steps_of(self, run: Run) -> Sequence[int]:
        """Return the steps of a run's branches."""
        return [self.tuning_steps] if run.seed == TUNING_SEED else self.steps

    def tuning(self) -> list[Run]:
        """Return the runs that choose learning rates."""
        tuned = [family for family in self.families if family not in self.rate_of]
        return [Run(family, rate, TUNING_SEED) for rate in self.rates for family in tuned]

    def confirming(self, folder: Path) -> list[Run]:
        """Return the runs with fresh seeds, of the families whose learning rate is chosen."""
        rates = {family: self.rate(family, folder) for family in self.families}
        return [Run(family, rate, seed) for seed in self.seeds for family, rate in rates.items() if rate]

    def rate(self, family: str, folder: Path) -> float | None:
        """Return a family's best learning rate; None before all were tried."""
        family = self.rate_of.get(family, family)
        tried = {rate: numbers_of(Run(family, rate, TUNING_SEED), folder) for rate in self.rates}
        if not all(tried.values()):
            return None
        scores = {rate: -n["losses"][-1] for rate, n in tried.items() if n and not n["diverged"]}
        if not scores:
            raise SystemExit(f"{family} diverged at every learning rate of {self.rates}")
        return best_rate(scores)

    def describe(self, folder: Path) -> str:
        """Return how many runs are done, and which diverged."""
        runs = self.tuning() + self.confirming(folder)
        done = {run.name: numbers["diverged"] for run in runs if (numbers := numbers_of(run, folder))}
        total = len(self.tuning()) + len(self.families) * len(self.seeds)
        return f"{len(done)} of {total} runs are done; diverged: {', '.join(filter(done.get, done)) or 'none'}"

    def done(self, folder: Path) -> dict[str, list[Numbers]]:
        """Return what the runs with fresh seeds measured, by family, seed by seed."""
        found: dict[str, list[Numbers]] = {family: [] for family in self.families}
        for run in self.confirming(folder):
            if numbers := numbers_of(run, folder):
                found[run.family].append(numbers)
        return found


def numbers_of(run: Run, folder: Path) -> Numbers | None:
    """Return what a run measured; None if it is not done."""
    file = folder / f"{run.name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


@cache
def read_text(file: Path) -> dict[str, Tensor]:
    """Return the ids of the parts of a text."""
    try:
        content = np.load(io.BytesIO(lzma.decompress(file.read_bytes())))
    except lzma.LZMAError as error:
        raise SystemExit(f"--data must be the file that data/gpu_text.py wrote, got {file}: {error}") from None
    return {part: torch.from_numpy(content[part].astype(np.int16)) for part in content}


class Text:
    """Windows of the text of `data/gpu_text.py`.

    Attributes:
        part: "rates" or "test", for the loss.
    """

    def __init__(self, file: Path | None, experiment: Experiment, part: str, device: torch.device) -> None:
        assert file is not None
        parts = read_text(file)
        self.train, self.part = parts["train"].to(device), parts[part][: experiment.tested].to(device)
        self.batch, self.length = experiment.batch, experiment.length

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield batches [2, B, N] of windows in random order, again and again."""
        generator, count = torch.Generator().manual_seed(seed), (len(self.train) - 1) // self.length
        if count < self.batch:
            raise SystemExit(f"the text must have {self.batch} windows of {self.length} tokens, got {count}")
        while True:
            starts = torch.randperm(count, generator=generator) * self.length
            for chosen in starts[: len(starts) // self.batch * self.batch].view(-1, self.batch):
                yield self.windows(self.train, chosen, self.length)

    def windows(self, tokens: Tensor, starts: Tensor, length: int) -> Tensor:
        """Return inputs and targets [2, B, N]."""
        index = starts.to(tokens.device)[:, None] + torch.arange(length + 1, device=tokens.device)
        return torch.stack([tokens[index[:, :-1]], tokens[index[:, 1:]]])

    def loss(self, model: nn.Module, length: int | None = None) -> float:
        """Return the loss on the part in windows of a length, by default that of training."""
        length = length or self.length
        starts = torch.arange(0, len(self.part) - length, length)
        total = 0.0
        with torch.no_grad():
            for chosen in starts.split(max(1, 8192 // length)):
                total += loss_of(model, self.windows(self.part, chosen, length)).item() * len(chosen)
        return total / len(starts)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss over a batch [2, B, N], on a GPU in bf16 autocast."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(batch[0].long())
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].long().flatten())


def train(experiment: Experiment, run: Run, *, file: Path | None, device: torch.device) -> Numbers:
    """Train one run and measure it."""
    start = time.perf_counter()
    torch.manual_seed(run.seed)
    tunes = run.seed == TUNING_SEED
    data = experiment.data(file, experiment, "rates" if tunes else "test", device)
    model = experiment.create(run.family).to(device)
    step = torch.compile(loss_of, dynamic=False, fullgraph=True) if device.type == "cuda" else loss_of
    numbers: Numbers = {**asdict(run), "parameters": sum(p.numel() for p in model.parameters())}
    if device.type == "cuda":
        step(model, next(data.batches(run.seed))).backward()  # compiles both passes; `fit` drops the gradients
    setup = time.perf_counter() - start
    numbers |= {"torch": torch.__version__, "device": device_name(device), "setup seconds": round(setup, 1)}
    try:
        steps = experiment.steps_of(run)
        trained = fit(model, data, rate=run.rate, warmup=experiment.warmup, lengths=steps, seed=run.seed, loss_of=step)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error), "seconds": time.perf_counter() - start}
    numbers |= {"diverged": "", "losses": [branch.loss for branch in trained.branches]}
    numbers |= {"largest gradient norm": round(trained.norm, 2)}
    numbers |= {} if tunes else experiment.measure(model, data)
    if device.type == "cuda":
        numbers["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return {**numbers, "seconds": round(time.perf_counter() - start, 1)}


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextmanager
def claimed(run: Run, folder: Path) -> Iterator[bool]:
    """Hold a run, so that no other process trains it; False if another holds it or it is done."""
    with open(folder / f"{run.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield numbers_of(run, folder) is None


def work(experiment: Experiment, folder: Path, file: Path | None, deadline: float) -> None:
    """Train one run after the other until all are done or the next would not end in time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # families of a process share the code that is compiled
    while True:
        runs = experiment.tuning() + experiment.confirming(folder)
        left = [run for run in runs if numbers_of(run, folder) is None]
        fits = [run for run in left if time.time() + expected_seconds(experiment, run, folder) < deadline]
        if not fits and (left or all(experiment.rate(family, folder) for family in experiment.families)):
            return
        for run in fits:
            with claimed(run, folder) as mine:
                if mine:
                    one = partial(train, experiment, file=file, device=device)
                    train_runs(folder, [run], one, (0, 1), lambda numbers: str(numbers.get("losses", "")))
                    break
        else:
            time.sleep(1)


def expected_seconds(experiment: Experiment, run: Run, folder: Path) -> float:
    """Return the seconds of a run, estimated from the slowest setup and step so far; 0 before any run is done."""
    done = [(one, n) for one in experiment.tuning() + experiment.confirming(folder) if (n := numbers_of(one, folder))]
    done = [(one, n) for one, n in done if not n["diverged"]]
    setup = max((n["setup seconds"] for _, n in done), default=0)
    speeds = [(n["seconds"] - n["setup seconds"]) / steps_trained(experiment.steps_of(one)) for one, n in done]
    return setup + max(speeds, default=0) * steps_trained(experiment.steps_of(run))


def plan(experiment: Experiment, file: Path | None) -> str:
    """Return a table of the runs, FLOPs, likely seconds of training and memory, and the bytes to carry."""
    lines = [f"{experiment.name}: {len(experiment.tuning())} runs of {experiment.tuning_steps:,} steps choose rates"]
    lines += ["| family | parameters | runs | steps | PFLOP a run | seconds, likely | GiB, likely |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    tokens, total = experiment.batch * experiment.length, 0.0
    for family in experiment.families:
        model = experiment.create(family)
        with attention_backend("eager"), FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, experiment.length, dtype=torch.long))
        steps = steps_trained(experiment.steps)
        tuned = 0 if family in experiment.rate_of else len(experiment.rates) * experiment.tuning_steps
        flops = 3 * experiment.batch * counter.get_total_flops()
        seconds = flops * steps / LIKELY
        total += flops * (steps * len(experiment.seeds) + tuned) / LIKELY
        parameters = sum(p.numel() for p in model.parameters())
        shape = experiment.shape
        memory = (16 * parameters + tokens * (40 * shape.dim * shape.depth + 12 * shape.vocab_size)) / 2**30
        row = [family, f"{parameters / 1e6:.2f}M", len(experiment.seeds), f"{steps:,}", f"{flops * steps / 1e15:.2f}"]
        lines.append(f"| {' | '.join(map(str, row))} | {seconds:.0f} | {memory:.0f} |")
    carried = f"{file.stat().st_size / 1e6:.1f} MB to carry" if file else "nothing to carry"
    lines.append(f"about {total:.0f} s in all if the GPU does {LIKELY / 1e12:.0f} TFLOP/s, which is a guess; {carried}")
    return "\n".join(lines)


def run_experiment(experiment: Experiment, description: str | None, report: Callable[[Experiment, Path], str]) -> None:
    """Run the command line of an experiment.

    Args:
        experiment: what is trained.
        description: for its help.
        report: returns the tables and what the decision rule says, from the folder of JSON files.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "run", "work", "report"], help="work: one process of `run`")
    parser.add_argument("--data", type=Path, help="the file that data/gpu_text.py wrote")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of results")
    parser.add_argument("--seconds", type=float, default=540, help="when to end, counted from now")
    parser.add_argument("--at_once", type=int, default=1, help="processes on the GPU")
    parser.add_argument("--dry", action="store_true", help="tiny models and a few steps")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.at_once < 1:
        parser.error(f"--at_once must be at least 1, got {options.at_once}")
    if experiment.data is Text and options.what != "report" and not (options.data and options.data.is_file()):
        parser.error(f"--data must be the file that data/gpu_text.py wrote, got {options.data}")
    experiment = experiment.dry() if options.dry else experiment
    folder = options.output / (experiment.name + ("-dry" if options.dry else ""))
    folder.mkdir(parents=True, exist_ok=True)
    until = options.until or time.time() + options.seconds
    if options.what == "plan":
        print(plan(experiment, options.data))
    elif options.what == "work":
        work(experiment, folder, options.data, until)
    elif options.what == "run":
        words = [sys.executable, sys.argv[0], "work", "--output", str(options.output), "--until", str(until)]
        words += ["--data", str(options.data)] if options.data else []
        words += ["--dry"] if options.dry else []
        processes = [subprocess.Popen(words) for _ in range(options.at_once)]
        if failed := [process for process in processes if process.wait()]:
            raise SystemExit(f"{len(failed)} of {len(processes)} processes ended with an error; run again to continue")
    if options.what in ("run", "report"):
        print(experiment.describe(folder), report(experiment, folder), sep="\n\n")
