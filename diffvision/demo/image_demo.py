"""The image demo: a CLIP and a DiffCLIP are trained by one recipe on real digits, evaluated, and compared.

It runs `diffvision data make digits`, then the runs of a study with configs/clip/debug.yaml, then the functions of
`diffvision evaluate`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table
from torch import Tensor

from diffvision.data.datasets.digits import DIGIT_ONLY_FRACTION, combinations, make_digits
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.demo.demo_page import page
from diffvision.demo.pictures import ModelExamples, collect_examples
from diffvision.demo.run_tables import Run, by_model, comparison, last_checkpoint
from diffvision.demo.runs import evaluated, prepare, study_of
from diffvision.evaluation.features import Features
from diffvision.evaluation.options import InferenceSettings
from diffvision.evaluation.output_files import write_bytes
from diffvision.evaluation.suite import evaluate
from diffvision.opening import Model, open_model
from diffvision.study import Run as Planned

RECIPE = "clip/debug.yaml"
MODELS = ("CLIP-debug", "DiffCLIP-debug-0.2")
PARTS = ("digit", "ink", "paper")
"""Of a caption; the metrics `colours/...` say which of them the retrieved image has right."""

# title -> metric's key on the digits, shown in percent
COLUMNS = {
    "zero-shot top-1": "zero_shot/digits/acc1",
    "image R@1": "retrieval/digits/image_retrieval_recall@1",
    "image R@5": "retrieval/digits/image_retrieval_recall@5",
    "text R@1": "retrieval/digits/text_retrieval_recall@1",
    "text R@5": "retrieval/digits/text_retrieval_recall@5",
    "composition": "composition/digits/acc",
    "retrieved image: digit right": "colours/digit",
    "retrieved image: ink right": "colours/ink",
    "retrieved image: paper right": "colours/paper",
}


def images(directory: Path, seeds: int) -> None:
    """Train `MODELS` with one recipe, evaluate them, print a table and write report.html.

    What an earlier call has finished in the directory is not computed again.

    Args:
        directory: for the shards, the runs and the report.
        seeds: repeat with this many seeds, and report means and spreads.
    """
    console, start = Console(), time.perf_counter()
    console.print(
        f"{' and '.join(MODELS)} are trained on handwritten digits and compared. At this size plain CLIP usually wins: "
        "the demo shows how to compare models, not which one is better.",
        highlight=False,
    )
    runs = train_on_digits(MODELS, seeds, directory, DIGIT_ONLY_FRACTION)
    console.print(table(runs))
    report = directory / "report.html"
    examples = {model: examples_of(of_model[0], directory / "digits") for model, of_model in by_model(runs).items()}
    write_bytes(report, page(runs, examples, directory).encode())
    console.print(f"report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def train_on_digits(
    models: Sequence[str], seeds: int, directory: Path, digit_only: float, *arguments: str
) -> list[Run]:
    """Train models on digits, and return their runs.

    Args:
        models: names.
        seeds: how many runs each model has.
        directory: for the shards and the runs.
        digit_only: the share of captions that name the digit alone.
        arguments: further arguments of `diffvision fit`.
    """
    study = study_of(RECIPE, directory, arguments)
    study.claim(digit_only=digit_only)
    data = directory / "digits"
    if not data.exists():
        Console().rule(f"Making digits in {data}")
        prepare(data, partial(make_digits, digit_only=digit_only))
    folders = [f"--data.init_args.train={data / 'train'}", f"--data.init_args.evaluations=[{data / 'zero_shot'}]"]
    planned = [Planned(model, seed) for seed in range(seeds) for model in models]
    study = replace(study, settings=[*folders, *arguments])
    study.train(planned)
    return [evaluated(study, run, partial(evaluate_on_digits, data=data)) for run in planned]


def evaluate_on_digits(model: Model, data: Path) -> dict[str, float]:
    """Return a trained model's metrics on every folder of the data."""
    module, transform, tokenizer = model.module, model.transform, model.tokenizer
    assert transform is not None
    assert tokenizer is not None
    metrics: dict[str, float] = {}
    for folder in find_folders(data):
        metrics |= evaluate(module, folder, transform=transform, tokenizer=tokenizer, batch_size=256)
    features = Features(module, transform, tokenizer, InferenceSettings(batch_size=256))
    pairs = features.pairs(EvaluationFolder(data / "retrieval"), "test")
    return metrics | parts_right(pairs.images, pairs.texts)


def examples_of(run: Run, data: Path) -> ModelExamples:
    """Return what the report shows of a run's trained model."""
    model = open_model(last_checkpoint(run.folder))
    assert model.transform is not None
    assert model.tokenizer is not None
    return collect_examples(model.module, model.transform, model.tokenizer, data)


def parts_right(images: Tensor, texts: Tensor) -> dict[str, float]:
    """Return how often the image that a caption retrieves has the right digit, the right ink and the right paper.

    Args:
        images: unit features of the images of the digits' `retrieval` folder.
        texts: unit features of their captions.
    """
    facts = combinations()
    retrieved = [facts[index] for index in (texts @ images.T).argmax(1).tolist()]
    pairs = list(zip(retrieved, facts, strict=True))
    return {f"colours/{part}": mean(got[i] == asked[i] for got, asked in pairs) for i, part in enumerate(PARTS)}


def table(runs: Sequence[Run]) -> Table:
    """Return the table that the demo prints: metrics of all models."""
    rows = {title: (key, 100.0, 1) for title, key in COLUMNS.items()}
    return comparison(runs, rows, title="Real digits, unseen in training")
