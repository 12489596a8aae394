"""The language demo: a Transformer and its differential V1 and V2 are trained by one recipe, evaluated, and compared.

It runs `diffvision data make stdlib` and `recall`, `data tokenizer`, then `diffvision fit` with
configs/language/recall.yaml for each model and seed, then the functions of `evaluate-language` and `generate`.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from diffvision.analysis.maps import open_layers
from diffvision.data.make import make, tokenizer
from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer
from diffvision.demo.report import Run, comparison, of_model
from diffvision.demo.runs import claim, prepare, trained
from diffvision.evaluation.language.documents import read_texts, tokenised
from diffvision.evaluation.language.needle import needle_samples
from diffvision.evaluation.language.suite import evaluate_language
from diffvision.evaluation.language.tasks import Work
from diffvision.evaluation.output import write_bytes
from diffvision.lab.demo.text_page import page
from diffvision.lab.language.options import LabOptions
from diffvision.models.language.generation import generate
from diffvision.opening import Model

RECIPE = "language/recall.yaml"
MODELS = {"transformer-debug": "Transformer", "diff-debug": "V1", "diffv2-debug": "V2"}
STEPS = 1200
PROMPT = "def main("
OPTIONS = LabOptions(
    tokens=32_768,
    window=256,
    form="synthetic",
    lengths=(64, 128),
    needles=("1x1", "2x1", "4x2"),
    samples=20,
    batch_size=16,
)

# title -> (metric's key, factor, decimals)
ROWS = {
    "validation loss, nats a token": ("perplexity/nll", 1, 3),
    "largest attention logit": ("outliers/attention_logits/top_1", 1, 1),
    "median attention logit": ("outliers/attention_logits/median", 1, 2),
    "largest hidden state": ("outliers/hidden_states/top_1", 1, 1),
    "median hidden state": ("outliers/hidden_states/median", 1, 2),
    "1 needle, % found": ("needle/1x1/accuracy", 100, 0),
    "2 needles, 1 asked for, % found": ("needle/2x1/accuracy", 100, 0),
    "4 needles, 2 asked for, % found": ("needle/4x2/accuracy", 100, 0),
}


def text(directory: Path, seeds: int) -> None:
    """Train a Transformer, V1 and V2 on text mixed with needles, evaluate them, print a table and write language.html.

    Args:
        directory: for the data, the runs and the report.
        seeds: repeat with this many seeds, and report means and spreads.
    """
    console, start = Console(), time.perf_counter()
    console.print(
        f"{', '.join(MODELS)} are trained on text and compared. Models of this size say nothing about larger ones: the "
        "demo shows how to compare models, not which one is better.",
        highlight=False,
    )
    contents = ["stdlib", "recall", "tokenizer.json", *(f"{model}-[0-9]*" for model in MODELS)]
    claim(directory, "language", RECIPE, contents, steps=STEPS)
    _prepare_data(directory, console)
    planned = [(model, seed) for seed in range(seeds) for model in MODELS]
    measure = partial(measured, directory=directory)
    runs = trained(RECIPE, planned, directory, *_arguments(directory), unit="tokens", measure=measure)
    console.print(table(runs))
    for run in runs[: len(MODELS)]:
        console.print(f"[bold]{MODELS[run.model]} writes:[/bold]")
        console.print(run.shown["writes"], markup=False, highlight=False)
    report = directory / "language.html"
    by_title = {title: of_model(runs, model) for model, title in MODELS.items()}
    write_bytes(report, page(by_title, directory).encode())
    console.print(f"report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def _prepare_data(directory: Path, console: Console) -> None:
    """Make the text and its tokenizer if they do not exist yet."""
    file = directory / "tokenizer.json"
    if not file.exists():
        console.rule(f"Making text in {directory}")
        for name in ("stdlib", "recall"):
            prepare(directory / name, partial(make, name))
        tokenizer([str(directory / "stdlib/train"), str(directory / "recall")], str(file), vocab_size=4096)


def measured(module: Any, model: str, seed: int, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return a trained model's metrics on text that training did not see, a sample that it writes, and attention."""
    text_tokenizer = load_tokenizer(directory / "tokenizer.json")
    documents, num_bytes = tokenised(read_texts([directory / "stdlib" / "validation"]), text_tokenizer, OPTIONS.tokens)
    length = module.model.config.max_length
    opened = Model(MODELS[model], "language", module.model, tokenizer=text_tokenizer, max_length=length)
    metrics = evaluate_language(Work(opened, OPTIONS, documents, num_bytes), ["perplexity", "needle", "outliers"])
    shown = {"writes": _sample(module.model, text_tokenizer), **attention_on_needle(module.model, text_tokenizer)}
    return metrics, shown


def _arguments(directory: Path) -> list[str]:
    """Return the arguments of `diffvision fit` that all models share."""
    return [
        f"--model.init_args.tokenizer={directory / 'tokenizer.json'}",
        f"--data.init_args.train=[{directory / 'stdlib/train'},{directory / 'recall'}]",
        f"--data.init_args.evaluation={directory / 'stdlib/validation'}",
        f"--trainer.max_steps={STEPS}",
        f"--trainer.val_check_interval={STEPS // 4}",
        "--trainer.limit_val_batches=4",
    ]


def _sample(model: Any, text_tokenizer: Tokenizer) -> str:
    """Return `PROMPT` and the model's continuation of it."""
    generator = torch.Generator(model.head_weight.device).manual_seed(0)
    (tokens,) = generate(
        model,
        [text_tokenizer.encode(PROMPT)],
        max_new_tokens=60,
        temperature=0.7,
        stop={text_tokenizer.eos_id},
        vocab_size=text_tokenizer.vocab_size,
        generator=generator,
    )
    return PROMPT + text_tokenizer.decode(tokens)


@torch.no_grad()
def attention_on_needle(model: Any, text_tokenizer: Tokenizer) -> dict[str, Any]:
    """Return where the last layer looks when the next token is a number that the text states.

    Returns:
        `words` of the tokens; `answer`, [start, stop) of the needle in them; `reads`, {kind of map: the last token's
        row, mean over heads}. The kinds are "map 1", "map 2" and "difference", or "attention".
    """
    (sample,) = needle_samples(text_tokenizer, length=72, depth=0.25, needles=2, samples=1, form="synthetic")
    tokens = sample.tokens[: sample.answers[0][0]]
    words = [str(text_tokenizer.decode([token])).replace("\n", "↵") for token in tokens]
    *_, last = open_layers(model, {"tokens": torch.tensor([tokens], device=model.head_weight.device)})
    reads = {kind: maps.mean(0)[-1].tolist() for kind, maps in last.by_kind().items()}
    return {"words": words, "answer": list(sample.needle), "reads": reads}


def table(runs: Sequence[Run]) -> Table:
    """Return the table that the demo prints: metrics of all models."""
    return comparison(runs, MODELS, ROWS, title="Python's library, unseen files; needles among words", unit="tokens")
