"""Transformer, V1 and V2 at equal parameters, tokens and data, as docs/results/language.md reports them.

    python scripts/studies/study_language.py data    --output runs/study
    python scripts/studies/study_language.py train   --output runs/study --sizes 1m --tokens 2_000_000 --seeds 0 1 2
    python scripts/studies/study_language.py report  --output runs/study --results docs/results

`train` leaves out what is done already and may be started several times at once: a process takes a run by making its
directory. A run is `diffvision fit --config configs/language/recall.yaml` with another model, seed,
number of steps and learning rate, and `diffvision evaluate-language`'s functions on what came out.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffvision.analysis import figures
from diffvision.analysis.curves import Curve, read_metrics
from diffvision.data.make import make, tokenize, tokenizer
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import documents_of
from diffvision.data.text.tokenizers import load_tokenizer
from diffvision.evaluation.language.documents import rows_of
from diffvision.evaluation.language.heads import head_statistics
from diffvision.evaluation.language.label_mapping import label_mapping_tasks
from diffvision.evaluation.language.many_shot import many_shot, order_robustness
from diffvision.evaluation.language.needle import needle
from diffvision.evaluation.language.outliers import outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.models import language
from diffvision.training.fit import fit

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "language" / "recall.yaml"
FAMILIES = {"transformer": "Transformer", "diff": "V1", "diffv2": "V2"}
LENGTH, BATCH = 256, 2
LR = 1.5e-3
CHECK = ("1m", 250_000)  # size and tokens of the runs at several learning rates
EVALUATED_TOKENS = 65_536  # of the validation text
NEEDLES = ((128, 1, 1), (256, 1, 1), (128, 4, 2), (256, 4, 2))  # length, needles, asked for
SHOTS, ORDER_SHOTS = (4, 16, 32), 16


@dataclass(frozen=True)
class Run:
    """What a run is; the rest is the same for all."""

    family: str
    size: str
    tokens: int
    seed: int
    lr: float = LR

    @property
    def model(self) -> str:
        return f"{self.family}-{self.size}"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.tokens}-{self.lr:g}-{self.seed}"


def data(output: Path) -> None:
    """Make the corpus and its tokenizer, and both as token shards."""
    make("stdlib", str(output / "text" / "stdlib"))
    make("recall", str(output / "text" / "recall"))
    text = {"stdlib": output / "text/stdlib/train", "recall": output / "text/recall"}
    tokenizer([str(path) for path in text.values()], str(output / "tokenizer.json"), 4096)
    text["validation"] = output / "text/stdlib/validation"
    for name, path in text.items():
        tokenize(str(path), str(output / "tokens" / name), str(output / "tokenizer.json"))


def train(output: Path, runs: Sequence[Run], threads: int) -> None:
    torch.set_num_threads(threads)
    # A run that is ended removes its directory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for run in runs:
        directory = output / "runs" / run.name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            # It is done, or another process has it.
            continue
        try:
            result = train_and_evaluate(run, output, directory)
        except BaseException:
            shutil.rmtree(directory)
            raise
        (directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def train_and_evaluate(run: Run, output: Path, directory: Path) -> dict[str, Any]:
    start = time.perf_counter()
    tokens = output / "tokens"
    steps = run.tokens // (LENGTH * BATCH)
    cli = fit(
        [
            "fit",
            f"--config={RECIPE}",
            f"--seed_everything={run.seed}",
            f"--model.init_args.model={run.model}",
            "--model.init_args.tokenizer=null",
            f"--model.init_args.optimizer.lr={run.lr}",
            f"--model.init_args.optimizer.end_lr={run.lr / 30}",
            f"--data.init_args.train=[{tokens / 'stdlib'},{tokens / 'recall'}]",
            f"--data.init_args.evaluation={tokens / 'validation'}",
            f"--data.init_args.length={LENGTH}",
            f"--data.init_args.batch_size={BATCH}",
            f"--data.init_args.seed={run.seed}",
            f"--trainer.max_steps={steps}",
            f"--trainer.val_check_interval={max(1, steps // 8)}",
            f"--trainer.default_root_dir={directory}",
            f"--trainer.logger.init_args.save_dir={directory}",
            "--trainer.limit_val_batches=8",
            "--trainer.enable_progress_bar=false",
        ]
    )
    seconds = time.perf_counter() - start
    module: Any = cli.model
    log: Any = cli.trainer.logger
    curves = read_metrics(log.log_dir)
    kept = {k: v for k, v in curves.items() if k.startswith("lambda/") or k in ("val/loss", "train/grad_norm")}
    return {
        **asdict(run),
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "steps": steps,
        "seconds": seconds,
        "tokens_per_second": statistics.median(curves["train/tokens_per_second"].values),
        "metrics": measure(module.model, output),
        "curves": {key: [list(curve.steps), list(curve.values)] for key, curve in kept.items()},
    }


def measure(model: language.LanguageModel, output: Path) -> dict[str, float]:
    """Return all metrics of a trained model."""
    words = load_tokenizer(output / "tokenizer.json")
    documents, left = [], EVALUATED_TOKENS
    for text in documents_of(ShardSet(output / "text/stdlib/validation"), TextMember("txt")):
        documents.append(torch.tensor(words.encode(text)[:left]))
        if (left := left - len(documents[-1])) <= 0:
            break
    rows = rows_of(documents, LENGTH)[:32]
    metrics = {"nll": perplexity(model, documents, window=LENGTH, batch_size=8)["nll"]}
    for length, needles, queries in NEEDLES:
        result = needle(
            model, words, lengths=(length,), needles=needles, queries=queries, samples=20, form="synthetic", seed=1
        )
        metrics[f"needle/{needles}x{queries}/{length}"] = result["accuracy"]
    tasks = label_mapping_tasks(8, classes=4, queries=16, seed=1)
    result = many_shot(model, words, tasks, shots=SHOTS, max_length=LENGTH)
    metrics |= {f"many_shot/{key}": value for key, value in result.items()}
    result = order_robustness(model, words, tasks, shots=ORDER_SHOTS, permutations=10, max_length=LENGTH)
    metrics |= {f"order/{key}": value for key, value in result.items()}
    metrics |= {f"outliers/{key}": value for key, value in outliers(model, rows).items()}
    metrics |= {f"heads/{key}": value for key, value in head_statistics(model, rows[:8]).items()}
    return metrics


ROWS = {  # title -> (metric, factor, decimals)
    "validation loss, nats a token": ("nll", 1, 3),
    "1 needle at 128 tokens, %": ("needle/1x1/128", 100, 0),
    "1 needle at 256 tokens, %": ("needle/1x1/256", 100, 0),
    "4 needles, 2 asked for, at 128 tokens, %": ("needle/4x2/128", 100, 0),
    "4 needles, 2 asked for, at 256 tokens, %": ("needle/4x2/256", 100, 0),
    "label mapping, 4 demonstrations, %": ("many_shot/accuracy/4", 100, 0),
    "label mapping, 16 demonstrations, %": ("many_shot/accuracy/16", 100, 0),
    "label mapping, 32 demonstrations, %": ("many_shot/accuracy/32", 100, 0),
    "order of 16, random: best - worst, points": ("order/random/spread", 100, 1),
    "order of 16, by class: best - worst, points": ("order/alternating/spread", 100, 1),
    "largest attention logit": ("outliers/attention_logits/top_1", 1, 1),
    "100th largest attention logit": ("outliers/attention_logits/top_100", 1, 1),
    "median attention logit": ("outliers/attention_logits/median", 1, 2),
    "largest hidden state": ("outliers/hidden_states/top_1", 1, 1),
    "100th largest hidden state": ("outliers/hidden_states/top_100", 1, 1),
    "median hidden state": ("outliers/hidden_states/median", 1, 2),
}
Result = dict[str, Any]


def report(output: Path, results: Path) -> None:
    """Write language.json and pictures, and print the tables."""
    finished = [json.loads(path.read_text()) for path in sorted((output / "runs").glob("*/result.json"))]
    if not finished:
        raise SystemExit(f"no run is finished in {output}: train first")
    results.mkdir(parents=True, exist_ok=True)
    about = {"machine": f"{platform.machine()}, {os.cpu_count()} CPU(s)", "torch": torch.__version__, "runs": finished}
    (results / "language.json").write_text(json.dumps(about) + "\n")
    for (size, tokens), group in groups([r for r in finished if r["lr"] == LR and (r["size"], r["tokens"]) != CHECK]):
        by_family = {name: [r for r in group if r["family"] == family] for family, name in FAMILIES.items()}
        by_family = {name: runs for name, runs in by_family.items() if runs}
        print(f"\n### {size.upper()}, {tokens:,} tokens\n")
        print("\n".join(study_table(by_family)))
        print("\n".join(["", *layer_table(by_family)]))
        write_pictures(results, size, by_family)
    check = [r for r in finished if (r["size"], r["tokens"]) == CHECK]
    if check:
        print("\n### Learning rates\n")
        print("\n".join(rate_table(check)))


def groups(runs: list[Result]) -> Iterator[tuple[tuple[str, int], list[Result]]]:
    def kind(result: Result) -> tuple[str, int]:
        return result["size"], result["tokens"]

    for key, group in itertools.groupby(sorted(runs, key=kind), key=kind):
        yield key, list(group)


def study_table(by_family: dict[str, list[Result]]) -> Iterator[str]:
    yield f"| | {' | '.join(by_family)} |"
    yield "|---|" + "---:|" * len(by_family)
    for title, (key, factor, digits) in ROWS.items():
        cells = [spread([factor * r["metrics"][key] for r in runs], digits) for runs in by_family.values()]
        yield f"| {title} | {' | '.join(cells)} |"
    gaps = [token_gap(by_family["Transformer"], runs) for runs in by_family.values()]
    yield f"| tokens for the same loss, x the Transformer's | {' | '.join(gaps)} |"
    norms = [spread([max(second_half(r, "train/grad_norm")) for r in runs], 1) for runs in by_family.values()]
    yield f"| largest gradient norm in the second half | {' | '.join(norms)} |"
    yield f"| seeds | {' | '.join(str(len(runs)) for runs in by_family.values())} |"
    yield f"| parameters | {' | '.join(format(runs[0]['parameters'], ',') for runs in by_family.values())} |"


def second_half(result: Result, key: str) -> list[float]:
    values = result["curves"][key][1]
    return values[len(values) // 2 :]


def spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def token_gap(base: list[Result], runs: list[Result]) -> str:
    """Return the ratio of tokens at which the better of two mean curves has the worse one's last loss.

    The learning rate is still high there, so the gap is less than what a run of that length would show.
    """
    ours, theirs = curve(runs), curve(base)
    if ours[1][-1] <= theirs[1][-1]:
        return f"{np.interp(-theirs[1][-1], -ours[1], ours[0]) / theirs[0][-1]:.2f}"
    return f"{ours[0][-1] / np.interp(-ours[1][-1], -theirs[1], theirs[0]):.2f}"


def curve(runs: list[Result]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and mean validation losses, each the least so far."""
    steps, values = np.array([r["curves"]["val/loss"] for r in runs]).mean(axis=0)
    return steps, np.minimum.accumulate(values)


def layer_table(by_family: dict[str, list[Result]]) -> Iterator[str]:
    """Yield a table of means over seeds, by layer."""
    yield "| layer | model | lambda: first, last | least | row sum | entries below 0 | head's RMS | least RMS |"
    yield "|---:|---|---:|---:|---:|---:|---:|---:|"
    depth = sum(key.startswith("heads/row_sum/") for key in next(iter(by_family.values()))[0]["metrics"])
    for layer, (name, runs) in itertools.product(range(depth), by_family.items()):
        lambdas = [r["curves"][f"lambda/blocks.{layer}.attn"][1] for r in runs if r["family"] != "transformer"]
        first, last = ([values[index] for values in lambdas] for index in (0, -1))
        ends = f"{statistics.mean(first):.2f}, {statistics.mean(last):.2f}" if lambdas else ""
        least = f"{min(map(min, lambdas)):.2f}" if lambdas else ""
        means = {
            key: statistics.mean(r["metrics"][f"heads/{key}/{layer}"] for r in runs)
            for key in ("row_sum", "row_sum_std", "negative", "rms", "rms_min")
        }
        sums = f"{means['row_sum']:.2f} ± {means['row_sum_std']:.2f}"
        rms = f"{means['rms']:.2f} | {means['rms_min']:.3f}"
        yield f"| {layer} | {name} | {ends} | {least} | {sums} | {100 * means['negative']:.0f}% | {rms} |"


def rate_table(check: list[Result]) -> Iterator[str]:
    rates = sorted({r["lr"] for r in check})
    yield f"| validation loss | {' | '.join(f'lr {lr:g}' for lr in rates)} |"
    yield "|---|" + "---:|" * len(rates)
    for family, name in FAMILIES.items():
        losses = {r["lr"]: r["metrics"]["nll"] for r in check if r["family"] == family}
        yield f"| {name} | {' | '.join(f'{losses[lr]:.3f}' if lr in losses else '' for lr in rates)} |"


def write_pictures(results: Path, size: str, by_family: dict[str, list[Result]]) -> None:
    losses = {name: [Curve(*r["curves"]["val/loss"]) for r in runs] for name, runs in by_family.items()}
    needles = {
        f"{length} tokens, {pair}": {
            name: [r["metrics"][f"needle/{pair}/{length}"] for r in runs] for name, runs in by_family.items()
        }
        for pair, length in itertools.product(("1x1", "4x2"), (128, 256))
    }
    (results / f"language-{size}-loss.png").write_bytes(
        figures.png(figures.run_curves({f"validation loss, {size}": losses}))
    )
    (results / f"language-{size}-needles.png").write_bytes(figures.png(figures.metric_bars(needles)))
    lambdas = {
        f"{name}.{key.removeprefix('lambda/blocks.')}": Curve(*values)
        for name, runs in by_family.items()
        for key, values in runs[0]["curves"].items()
        if key.startswith("lambda/")
    }
    if lambdas:
        (results / f"language-{size}-lambda.png").write_bytes(figures.png(figures.lambda_curves(lambdas)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=("data", "train", "report"))
    parser.add_argument("--output", type=Path, required=True, help="where runs are")
    parser.add_argument("--results", type=Path, help="report: where language.md's numbers and pictures go")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", default=["1m"])
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", nargs="+", type=float, default=[LR])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.part == "data":
        data(args.output)
    elif args.part == "train":
        grid = itertools.product(args.sizes, args.seeds, args.lr, args.families)
        runs = [Run(family, size, args.tokens, seed, lr) for size, seed, lr, family in grid]
        train(args.output, runs, args.threads)
    else:
        report(args.output, args.results)


if __name__ == "__main__":
    main()
