"""The image demo: a CLIP and a DiffCLIP are trained by one recipe on real digits, evaluated, and compared.

It runs `diffvision data make digits`, then `diffvision fit` with configs/clip/debug.yaml for each model and seed, then
the functions of `diffvision evaluate`.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from diffvision.analysis import figures
from diffvision.analysis.maps import patch_maps
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.data.make import make
from diffvision.demo.report import Run, as_text, comparison, html_page, of_model, train
from diffvision.evaluation.output import write_bytes
from diffvision.evaluation.suite import evaluate

MODELS = ("CLIP-debug", "DiffCLIP-debug")

# title -> metric's key on the digits, shown in percent
COLUMNS = {
    "zero-shot top-1": "zero_shot/digits/acc1",
    "image R@1": "retrieval/digits/image_retrieval_recall@1",
    "image R@5": "retrieval/digits/image_retrieval_recall@5",
    "image R@10": "retrieval/digits/image_retrieval_recall@10",
    "text R@1": "retrieval/digits/text_retrieval_recall@1",
    "text R@5": "retrieval/digits/text_retrieval_recall@5",
    "text R@10": "retrieval/digits/text_retrieval_recall@10",
    "composition": "composition/digits/acc",
}


def images(directory: Path, seeds: int) -> None:
    """Train CLIP-debug and DiffCLIP-debug with one recipe, evaluate both, print a table and write report.html.

    Args:
        directory: for the shards, the runs and the report.
        seeds: repeat with this many seeds, and report means and spreads.
    """
    console, start = Console(), time.perf_counter()
    data = directory / "digits"
    if not (data / "train" / "manifest.json").exists():
        console.rule(f"Making digits in {data}")
        make("digits", str(data))
    runs = []
    for seed in range(seeds):
        for model in MODELS:
            console.rule(f"{model}, seed {seed}")
            runs.append(_train_and_evaluate(model, seed, data, directory))
    console.print(table(runs))
    report = directory / "report.html"
    write_bytes(report, page(runs).encode())
    console.print(f"report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def _train_and_evaluate(model: str, seed: int, data: Path, directory: Path) -> Run:
    """Train a model with one seed, evaluate it on every folder of the data, and, for seed 0, draw its attention."""
    folders = [f"--data.init_args.train={data / 'train'}", f"--data.init_args.evaluations=[{data / 'zero_shot'}]"]
    trained = train("clip/debug.yaml", model, seed, directory, *folders)
    module = trained.module
    metrics: dict[str, float] = {}
    for folder in find_folders(data):
        metrics |= evaluate(
            module.model, folder, transform=module.eval_transform, tokenizer=module.tokenizer, batch_size=256
        )
    test_images = EvaluationFolder(data / "zero_shot")
    pictures = [] if seed else _pictures(module.model, module.eval_transform, test_images)
    return trained.run(model, seed, "samples", metrics, pictures)


@torch.no_grad()
def _pictures(model: Any, transform: Callable[..., Any], folder: EvaluationFolder, count: int = 4) -> list:
    """Return the attention of the image tower's last layer on some test images, averaged over its heads."""
    model.eval()
    batch = next(iter(folder.batches(transform, batch_size=128)))
    indices = [int((batch["label"] == digit).nonzero()[0]) for digit in (2, 3, 5, 7)[:count]]
    rows = []
    for index in indices:
        image = batch["image"][index]
        maps = list(patch_maps(model, image).values())[-1].mean(0)
        low, high = image.min(), image.max()
        pixels = ((image - low) / (high - low)).permute(1, 2, 0)
        rows.append(figures.ImageAttention(pixels.numpy(), maps.numpy(), folder.classnames[int(batch["label"][index])]))
    return rows


def table(runs: Sequence[Run]) -> Table:
    """Return the table that the demo prints: metrics of both models."""
    rows = {title: (key, 100.0, 1) for title, key in COLUMNS.items()}
    return comparison(runs, {m: m for m in MODELS}, rows, title="Real digits, unseen in training", unit="samples")


def page(runs: Sequence[Run]) -> str:
    """Return the report as one HTML page with its pictures embedded."""
    metrics = {"loss": "train/loss", "zero-shot top-1": "zero_shot/digits/acc1", "logit scale": "train/logit_scale"}
    by_model = {model: of_model(runs, model) for model in MODELS}
    curves = {
        title: {model: [run.curves[key] for run in same_model] for model, same_model in by_model.items()}
        for title, key in metrics.items()
    }
    bars = {
        title: {model: [run.metrics[key] for run in same_model] for model, same_model in by_model.items()}
        for title, key in COLUMNS.items()
    }
    first = by_model["DiffCLIP-debug"][0]
    lambdas = {key.removeprefix("lambda/"): c for key, c in first.curves.items() if key.startswith("lambda/")}
    sections = [
        ("Evaluation", "Digits, and templates for zero-shot, that training never saw.", figures.metric_bars(bars)),
        ("Training", "The same recipe, steps and order of samples for both.", figures.run_curves(curves)),
        ("Lambda, layer by layer", f"{first.model}, seed {first.seed}.", figures.lambda_curves(lambdas)),
    ]
    for model, same_model in by_model.items():
        text = "Where the class token of the last layer looks, mean over heads."
        sections.append((f"Attention of {model}", text, figures.attention_panels(same_model[0].shown)))
    return html_page("CLIP and DiffCLIP on real digits", as_text(table(runs)), sections)
