"""The image demo's report.html: what differential attention is, the results, pictures, and what to do next.

Every sentence about a result is made from the numbers: nothing is called higher whose interval includes zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diffvision.analysis import figures
from diffvision.analysis.html_page import Code, Part, Picture, Row, Section, Text, html_page
from diffvision.demo.pictures import ModelExamples
from diffvision.demo.run_tables import (
    Rows,
    Run,
    by_model,
    duration,
    lambda_pictures,
    last_checkpoint,
    results,
    speed_rows,
    values_of,
    verdict,
)

PARTS = ("digit", "ink", "paper")


_IMAGES, _TEXTS = "retrieval/digits/image_retrieval_recall", "retrieval/digits/text_retrieval_recall"
GROUPS: dict[str, Rows] = {
    "Zero-shot: which of ten digits is it?": {"top-1": ("zero_shot/digits/acc1", 100, 1)},
    "Retrieval: which image does a caption mean?": {
        **{f"image R@{k}": (f"{_IMAGES}@{k}", 100, 1) for k in (1, 5)},
        **{f"text R@{k}": (f"{_TEXTS}@{k}", 100, 1) for k in (1, 5)},
    },
    "Composition: which of two colours is the ink's?": {"right": ("composition/digits/acc", 100, 1)},
    "The first image retrieved has the right": {part: (f"colours/{part}", 100, 1) for part in PARTS},
}
JUDGED: Rows = {
    "zero-shot top-1": ("zero_shot/digits/acc1", 100, 1),
    "image R@1": (f"{_IMAGES}@1", 100, 1),
    "text R@1": (f"{_TEXTS}@1", 100, 1),
    "composition": ("composition/digits/acc", 100, 1),
}


def page(runs: Sequence[Run], content: Mapping[str, ModelExamples], directory: Path) -> str:
    """Return the report of the image demo as one HTML page.

    Args:
        runs: of a plain model, then of differential ones, each with the same seeds.
        content: by model, what the page shows of the first seed's run.
        directory: where the runs are, for the commands at the end.
    """
    models = by_model(runs)
    plain, differential = list(models)[:2]
    first, seeds = models[plain][0], len(models[plain])
    lead = (
        f"{plain} and {differential}, about {first.parameters / 1e6:.1f} million parameters each, trained by one "
        f"recipe on handwritten digits in colours and their captions, each in {duration(models)} on this machine, "
        f"with {seeds} {'seeds' if seeds > 1 else 'seed'}. They are tested on digits that they never saw. At this size "
        "plain CLIP usually wins: this page shows how to compare models, not which one is better."
    )
    sections = [
        _explain(content[differential], models[differential][0]),
        Section("Results", [Text(verdict(values_of(models), plain, differential, JUDGED)), *_table(models)]),
        _draw_retrieved(content),
        _attention({name: content[name] for name in (plain, differential)}),
        _training(models),
        _next(directory, plain, differential),
    ]
    return html_page("CLIP with and without differential attention", lead, sections, "Written by `diffvision demo`.")


def _table(models: Mapping[str, Sequence[Run]]) -> list[Part]:
    note = (
        "Zero-shot names the digits in sentences that training never saw. Retrieval has one image for each digit, ink "
        "and paper, so one image is right and the others differ in one thing or more. Chance is 10% for zero-shot, "
        "50% for composition."
    )
    return [results(models, GROUPS, speed_rows(models), note=note)]


def _explain(examples: ModelExamples, run: Run) -> Section:
    lam = 0.0 if examples.lam is None else examples.lam
    row = examples.attention[1]
    figure = figures.difference_of_maps(row, lam)
    text = (
        "Attention is a map: for each patch of an image it says how much of every other patch is read, and sums to "
        "100%. Differential attention has two such maps, and subtracts the second, multiplied by λ, from the first. "
        "What both maps have in common is weakened, and what only the first has stands out; entries may be negative. "
        "λ is learned in each layer."
    )
    caption = (
        f"A test image, and where {run.model} looks on it: the class token's row in the image tower's last layer, "
        f"mean over heads. λ is {lam:.2f} there. Dark is zero, bright is high, blue is below zero."
    )
    alt = f"An image of a {row.label}, map 1, minus {lam:.2f} times map 2, equals their difference."
    return Section("Differential attention", [Text(text), Picture(figure, alt, caption, most=1.7)])


def _draw_retrieved(content: Mapping[str, ModelExamples]) -> Section:
    pictures: list[Part] = []
    for index, one in enumerate(next(iter(content.values())).retrieved):
        rows = {name: examples.retrieved[index] for name, examples in content.items()}
        ranks = ", ".join(f"{name}: {_rank(row.is_right)}" for name, row in rows.items())
        alt = f"The first {len(one.images)} images for “{one.caption}”. The right one is, for {ranks}."
        pictures.append(Picture(figures.retrieved_images(rows), alt))
    text = (
        "The test images that each model ranks first for a caption, with the first seed. One image is right: it has "
        "the digit, the ink and the paper of the caption, and a green frame."
    )
    return Section("What a caption retrieves", [Text(text), Row(pictures)])


def _rank(is_right: Sequence[bool]) -> str:
    return f"number {list(is_right).index(True) + 1}" if any(is_right) else "not among them"


def _attention(content: Mapping[str, ModelExamples]) -> Section:
    figure = figures.attention_panels({name: examples.attention for name, examples in content.items()})
    grid = "×".join(map(str, next(iter(content.values())).attention[0].maps.shape[-2:]))
    caption = (
        f"The class token's row in the last layer, mean over heads, {grid} patches, interpolated over the image. Maps "
        "share a scale: dark is zero, bright is high, blue is below zero."
    )
    alt = f"Four digits with the attention of {' and of '.join(content)}."
    return Section("Where they look", [Picture(figure, alt, caption, most=1.4)])


def _training(models: Mapping[str, Sequence[Run]]) -> Section:
    metrics = {"loss": "train/loss", "zero-shot top-1": "zero_shot/digits/acc1"}
    pictures: list[Part] = []
    for title, key in metrics.items():
        curves = {name: [run.curves[key] for run in same_model] for name, same_model in models.items()}
        pictures.append(Picture(figures.run_curves({title: curves}), f"{title} over the steps, for each model"))
    text = Text("One recipe, the same steps and the same order of samples.")
    return Section("Training", [text, Row(pictures), *lambda_pictures(models)])


def _next(directory: Path, plain: str, differential: str) -> Section:
    text = "Compare the two runs with intervals, look inside of one, or train the same models on your pictures."
    commands = (
        f"diffvision compare {directory / plain / 'seed0'} {directory / differential / 'seed0'} --output compared.html",
        f"diffvision inspect {last_checkpoint(directory / differential / 'seed0')} --output inside",
        f"diffvision fit --config configs/clip/debug.yaml --model.init_args.model {differential} "
        "--data.init_args.train YOUR/FOLDER",
    )
    return Section("Next", [Text(text), *map(Code, commands)])
