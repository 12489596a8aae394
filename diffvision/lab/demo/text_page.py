"""The language demo's language.html: what differential attention is on a text, the results, curves and samples.

Every sentence about a result is made from the numbers: nothing is called higher or lower whose interval includes zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from diffvision.analysis import figures
from diffvision.analysis.figures import language as panels
from diffvision.analysis.figures.mosaics import text_strips
from diffvision.analysis.page import Code, Folded, Part, Picture, Row, Section, Text, html_page
from diffvision.demo.report import (
    Rows,
    Run,
    duration,
    lambda_pictures,
    last_checkpoint,
    next_commands,
    results,
    speed_rows,
    values_of,
    verdict,
)
from diffvision.lab.language import figures as lab_figures

GROUPS: dict[str, Rows] = {
    "Python's library, files that training never saw": {"loss, nats a token": ("perplexity/nll", 1, 3)},
    "Needles: the numbers that a text states are asked for": {
        "1 needle": ("needle/1x1/accuracy", 100, 0),
        "2 needles, 1 asked for": ("needle/2x1/accuracy", 100, 0),
        "4 needles, 2 asked for": ("needle/4x2/accuracy", 100, 0),
    },
    "Attention logits": {
        "largest": ("outliers/attention_logits/top_1", 1, 1),
        "median": ("outliers/attention_logits/median", 1, 2),
    },
    "Hidden states": {
        "largest": ("outliers/hidden_states/top_1", 1, 1),
        "median": ("outliers/hidden_states/median", 1, 2),
    },
}
JUDGED: Rows = {"loss": ("perplexity/nll", 1, 3), "4 needles": ("needle/4x2/accuracy", 100, 0)}
NEEDLES = ("1x1", "2x1", "4x2")


def page(models: Mapping[str, Sequence[Run]], directory: Path) -> str:
    """Return the report of the language demo as one HTML page.

    Args:
        models: {title: runs}, the plain Transformer first, each with the same seeds. `shown` of the first run has
            `writes`, a text that the model wrote, and what `attention_on_needle` returns.
        directory: where the runs are, for the commands at the end.
    """
    plain, *others = models
    first = {name: runs[0] for name, runs in models.items()}
    seeds = len(models[plain])
    lead = (
        f"A Transformer and two with differential attention, {' and '.join(others)}, about "
        f"{first[plain].parameters / 1e6:.2g} million parameters each, trained by one recipe on Python's library and "
        f"on texts that state numbers and ask for them, each in {duration(models)} on this machine, with "
        f"{seeds} {'seeds' if seeds > 1 else 'seed'}. Models of this size say nothing about larger ones: this page "
        "shows how to compare models, not which one is better."
    )
    note = "Needles are numbers stated among other words; the attention logits are before the softmax."
    judged = dict.fromkeys(verdict(values_of(models), plain, other, JUDGED) for other in others)
    table = results(models, GROUPS, speed_rows(models, "tokens"), note=note)
    sections = [
        _explain(first),
        Section("Results", [*map(Text, judged), table]),
        _needles(first),
        _outliers(first),
        _training(models),
        Section(
            "What they write", [Folded(name, [Code(run.shown["writes"], copied=False)]) for name, run in first.items()]
        ),
        next_commands(
            "Look inside of a model, or train one on your texts.",
            f"diffvision inspect {last_checkpoint(directory / f'{first[others[0]].model}-0')} "
            f"--tokenizer {directory / 'tokenizer.json'} --output inside",
            "diffvision fit --config configs/language/recall.yaml --data.init_args.train YOUR/FOLDER",
        ),
    ]
    title = "A Transformer with and without differential attention"
    return html_page(title, lead, sections, "Written by `diffvision demo --language`.")


def _explain(first: Mapping[str, Run]) -> Section:
    shown = next(iter(first.values())).shown
    reads = {
        name: {kind: np.asarray(values) for kind, values in run.shown["reads"].items()} for name, run in first.items()
    }
    text = (
        "Attention is a map: for each token of a text it says how much of every earlier token is read, and sums to "
        "100%. Differential attention has two such maps, and subtracts the second, multiplied by λ, from the first. "
        "What both maps have in common is weakened, and what only the first has stands out; entries may be negative. "
        "V1 learns λ in each layer; V2 computes it for each token and head."
    )
    caption = (
        "What the last token of a text attends to in the last layer, mean over heads, where the next token is the "
        "number that the text asks for; it is marked. Dark is zero, bright is high, blue is below zero."
    )
    figure = text_strips(shown["words"], reads, tuple(shown["answer"]))
    alt = f"The attention of {', '.join(first)} over the tokens of a text, with its maps and their difference."
    return Section("Differential attention", [Text(text), Picture(figure, alt, caption)])


def _of_task(first: Mapping[str, Run], prefix: str) -> dict[str, dict[str, float]]:
    return {
        name: {key.removeprefix(prefix): value for key, value in run.metrics.items() if key.startswith(prefix)}
        for name, run in first.items()
    }


def _needles(first: Mapping[str, Run]) -> Section:
    metrics = _of_task(first, "needle/")
    pictures: list[Part] = []
    for pair in NEEDLES:
        of_pair = {
            name: {key: value for key, value in of_model.items() if key.startswith(f"{pair}/")}
            for name, of_model in metrics.items()
        }
        alt = f"{pair} needles: " + ", ".join(
            f"{name} {100 * m[f'{pair}/accuracy']:.0f}%" for name, m in of_pair.items()
        )
        pictures.append(Picture(panels.needle_maps(of_pair), alt))
    text = (
        "The share of numbers that are answered rightly, by the length of the text and the depth of the answer in it."
    )
    return Section("Needles", [Text(f"{text} First seed."), Row(pictures, least=17)])


def _outliers(first: Mapping[str, Run]) -> Section:
    metrics = _of_task(first, "outliers/")
    pictures: list[Part] = []
    for kind, title in {"attention_logits": "attention logits", "hidden_states": "hidden states"}.items():
        of_kind = {
            name: {key: value for key, value in of_model.items() if key.startswith(f"{kind}/")}
            for name, of_model in metrics.items()
        }
        pictures.append(
            Picture(lab_figures.outlier_bars(of_kind), f"The largest {title} of each model and their median.")
        )
    text = "The largest absolute values, on a logarithmic scale: large ones make low precision harder. First seed."
    return Section("Outliers", [Text(text), Row(pictures)])


def _training(models: Mapping[str, Sequence[Run]]) -> Section:
    pictures: list[Part] = []
    for title, key in {"training loss": "train/loss", "validation loss": "val/loss"}.items():
        curves = {name: [run.curves[key] for run in runs] for name, runs in models.items()}
        pictures.append(Picture(figures.run_curves({title: curves}), f"{title} over the steps, for each model"))
    text = Text("One recipe, the same steps and the same order of sequences.")
    return Section("Training", [text, Row(pictures), *lambda_pictures(models)])
