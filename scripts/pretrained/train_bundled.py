"""Train the small weights in diffvision/weights/, and write their cards and docs/results/bundled.csv.

    python scripts/pretrained/train_bundled.py runs/bundled [--seeds 3] [--processes 2]

Both models of a pair are trained by one recipe of configs/ with the seeds 0, 1, ... The package has the last checkpoint
of seed 0, whatever it scores. Finished runs in the folder are not trained again.
"""

import argparse
import concurrent.futures
import csv
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "diffvision" / "weights"
RESULTS = ROOT / "docs" / "results" / "bundled.csv"
MERGES = ROOT / "diffvision" / "models" / "nano_merges.txt.gz"
WINDOW = 128  # tokens that the language models are trained on at a time
COLUMNS = ("model", "parameters", "data", "metric", "value", "low", "high", "seeds", "mean", "mean_low", "mean_high")


class Pair(NamedTuple):
    """Two models of one recipe, the differential one second."""

    models: tuple[str, str]
    recipe: str
    data: str  # of `diffvision data make`, and the tag
    arguments: tuple[str, ...]  # of `diffvision fit`
    evaluated: str  # the folder of the data
    tasks: str | None
    metrics: tuple[str, ...]
    source: str

    @property
    def command(self) -> str:
        return "evaluate-language" if self.data == "stdlib" else "evaluate"


DIGITS = (
    "coloured handwritten digits: scikit-learn's copy of UCI's Optical Recognition of Handwritten Digits (CC BY 4.0)"
)
PAIRS = (
    Pair(
        ("plain_vit_debug", "diff_vit_debug"),
        "vision/debug.yaml",
        "digits",
        ("--data.train={data}/train", "--data.evaluation={data}/zero_shot"),
        "zero_shot",
        "classification",
        ("classification/digits/acc1",),
        DIGITS,
    ),
    Pair(
        ("CLIP-nano", "DiffCLIP-nano"),
        "clip/debug.yaml",
        "digits",
        ("--data.train={data}/train", "--data.evaluations=[{data}/zero_shot]"),
        "",
        None,
        (
            "zero_shot/digits/acc1",
            "retrieval/digits/image_retrieval_recall@1",
            "retrieval/digits/text_retrieval_recall@1",
            "composition/digits/acc",
        ),
        DIGITS,
    ),
    Pair(
        ("transformer-nano", "diffv2-nano"),
        "language/debug.yaml",
        "stdlib",
        (
            "--data.train={data}/train",
            "--data.evaluation={data}/validation",
            "--model.tokenizer={data}/tokenizer.json",
            "--trainer.max_steps=1000",
            "--trainer.val_check_interval=1000",
        ),
        "validation",
        "perplexity",
        ("perplexity/perplexity", "perplexity/bits_per_byte"),
        f"the source of CPython's standard library (PSF-2.0), Python {sys.version.split()[0]}",
    ),
)


def write_merges(vocabulary: int = 640) -> None:
    """Write byte-pair merges of the training captions of the digits, as OpenCLIP's SimpleTokenizer reads them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from diffvision.data.datasets import digits

    templates = [*digits.DIGIT_ONLY, *digits.WITH_COLOURS]
    captions = [digits.caption(one, *facts) for one in templates for facts in digits.combinations()]
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"), "removed", invert=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        end_of_word_suffix="</w>",
        initial_alphabet=as_bytes.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"][: vocabulary - 514]
    lines = ["#version: 0.2", *(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)]
    MERGES.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def make_data(work: Path) -> None:
    """Write the datasets and the tokenizer of the language models, unless they are there."""
    if not MERGES.is_file():
        write_merges()
    for name in ("digits", "stdlib"):
        if not (work / name).is_dir():
            diffvision("data", "make", name, str(work / name))
    if not (tokenizer := work / "stdlib" / "tokenizer.json").is_file():
        diffvision("data", "tokenizer", str(work / "stdlib" / "train"), str(tokenizer), "--vocab_size", "768")


def diffvision(*words: str, log: Path | None = None) -> None:
    """Run a command of the package on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "diffvision", *words]
    if log is None:
        subprocess.run(command, check=True, env=environment)
        return
    with log.open("w") as file:
        subprocess.run(command, check=True, env=environment, stdout=file, stderr=subprocess.STDOUT)


def train(pair: Pair, model: str, seed: int, work: Path) -> None:
    """Train a model, unless its run is finished."""
    run = work / f"{model}-{seed}"
    if (run / "finished").is_file():
        return
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    given = [argument.format(data=work / pair.data) for argument in pair.arguments]
    logger = f"--trainer.logger.save_dir={run}"
    words = ["fit", "--config", pair.recipe, f"--model.model={model}", f"--seed_everything={seed}", logger, *given]
    diffvision(*words, log=run / "log.txt")
    (run / "finished").touch()
    print(f"trained {run.name}", flush=True)


def last_checkpoint(work: Path, model: str, seed: int) -> Path:
    """Return the last checkpoint of a run."""
    return next((work / f"{model}-{seed}").glob("**/checkpoints/final.ckpt"))


def bundle(pair: Pair, model: str, work: Path) -> None:
    """Write the weights of seed 0 into the package."""
    import torch
    from safetensors.torch import save_file

    from diffvision import open_model
    from diffvision.models import language
    from diffvision.models.architecture import metadata

    opened = open_model(last_checkpoint(work, model, 0))
    target = WEIGHTS / f"{model}.{pair.data}"
    WEIGHTS.mkdir(exist_ok=True)
    if opened.is_language:
        module: Any = opened.module
        language.save(module.to(torch.float32), target, work / "stdlib" / "tokenizer.json", origin=origin(pair, model))
        return
    state = {name: tensor.detach().clone().contiguous() for name, tensor in opened.module.state_dict().items()}
    about = metadata(opened.module)
    save_file(state, f"{target}.safetensors", metadata=about)


def origin(pair: Pair, model: str) -> str:
    """Return what weights were made of, for a card."""
    return f"{model} by configs/{pair.recipe}, seed 0, trained on {pair.source}."


def measure(pair: Pair, checkpoint: Path, work: Path) -> dict[str, float]:
    """Return the metrics that `diffvision evaluate` or `diffvision evaluate-language` prints, with intervals."""
    from diffvision.data.images.folders import find_folders
    from diffvision.evaluation import suite
    from diffvision.evaluation.features import Features
    from diffvision.evaluation.intervals import with_intervals
    from diffvision.evaluation.language.evaluate_language_command import run
    from diffvision.evaluation.language.language_options import LanguageOptions
    from diffvision.evaluation.options import InferenceSettings, Options
    from diffvision.opening import open_model

    data = str(work / pair.data / pair.evaluated)
    if pair.command == "evaluate-language":
        options = LanguageOptions(window=WINDOW)
        results = run(str(checkpoint), tasks=pair.tasks or "", data=data, device="cpu", options=options)
        return next(iter(results.values()))
    opened = open_model(checkpoint).for_images()
    features = Features(opened.module, opened.transform, opened.tokenizer, InferenceSettings(64, 0, "cpu", "fp32"))
    metrics: dict[str, float] = {}
    for folder, names in suite.plan(find_folders(data), None if pair.tasks is None else [pair.tasks], Options()):
        metrics |= with_intervals(suite.measure(features, folder, names, Options()))
    return metrics


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean over seeds and its 95% interval by Student's t."""
    from scipy.stats import t

    mean = statistics.mean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def rows_of(pair: Pair, model: str, seeds: int, work: Path) -> list[dict[str, Any]]:
    """Return a model's rows of the table."""
    from diffvision import open_model

    checkpoints = [last_checkpoint(work, model, seed) for seed in range(seeds)]
    parameters = sum(parameter.numel() for parameter in open_model(checkpoints[0]).module.parameters())
    first, *others = (measure(pair, checkpoint, work) for checkpoint in checkpoints)
    rows = []
    for metric in pair.metrics:
        found = [first[metric], first.get(f"{metric}_low", ""), first.get(f"{metric}_high", "")]
        spread: Any = ("", "", "")
        if others:
            mean, low, high = mean_interval([first[metric], *(one[metric] for one in others)])
            spread = (mean, low, min(high, 1.0)) if f"{metric}_low" in first else (mean, low, high)  # a share
        numbers = [f"{value:.4f}" if isinstance(value, float) else value for value in (*found, *spread)]
        values = (f"{model}.{pair.data}", parameters, pair.data, metric, *numbers[:3], seeds, *numbers[3:])
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write_card(pair: Pair, model: str, rows: list[dict[str, Any]]) -> None:
    """Write a model's card, with both models' numbers."""
    spec = f"{model}.{pair.data}"
    is_language = pair.command == "evaluate-language"
    evaluated = f"--data {f'data/{pair.data}/{pair.evaluated}'.rstrip('/')}"
    evaluated += f" --tasks {pair.tasks}" if pair.tasks else ""
    evaluated += f" --options.window {WINDOW}" if is_language else ""
    given = " ".join(argument.format(data=f"data/{pair.data}") for argument in pair.arguments)
    tokenizer = f"diffvision data tokenizer data/{pair.data}/train data/{pair.data}/tokenizer.json --vocab_size 768\n"
    commands = (
        f"diffvision data make {pair.data} data/{pair.data}\n{tokenizer if is_language else ''}"
        f"diffvision fit --config {pair.recipe} --model.model={model} --seed_everything=0 {given}\n"
        f"diffvision {pair.command} {spec} {evaluated}\n"
    )
    parameters = next(row["parameters"] for row in rows if row["model"] == spec)
    other = next(row["model"] for row in rows if row["model"] != spec)
    lines = [f"# {spec}", "", "Small weights for trying the package and for its tests, not for use.", ""]
    lines += [
        f"- {int(parameters):,} parameters. `{other}` was trained by the same recipe.",
        f"- Data: {pair.source}.",
        "- Licence of the weights: Apache-2.0, as the package.",
        "- Last checkpoint of seed 0.",
        "",
    ]
    lines += ["```bash", commands.strip(), "```", ""]
    lines += [f"| model | metric | this seed, 95% CI | mean of {rows[0]['seeds']} seeds, 95% CI |", "|---|---|---|---|"]
    for row in rows:
        own = f"{row['value']}" + (f" [{row['low']}, {row['high']}]" if row["low"] != "" else "")
        mean = f"{row['mean']} [{row['mean_low']}, {row['mean_high']}]" if row["mean"] != "" else row["value"]
        lines.append(f"| `{row['model']}` | {row['metric']} | {own} | {mean} |")
    lines += ["", "Intervals of one seed are over samples, those of the mean over seeds (Student's t)."]
    file = WEIGHTS / spec / "README.md" if is_language else WEIGHTS / f"{spec}.md"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Train what is missing, and write the weights, the cards and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for data and runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    work = args.work.resolve()
    make_data(work)
    planned = [(pair, model, seed, work) for seed in range(args.seeds) for pair in PAIRS for model in pair.models]
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(lambda one: train(*one), planned))
    table = []
    for pair in PAIRS:
        for model in pair.models:
            bundle(pair, model, work)
    for pair in PAIRS:
        rows = [row for model in pair.models for row in rows_of(pair, model, args.seeds, work)]
        for model in pair.models:
            write_card(pair, model, rows)
        table += rows
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
