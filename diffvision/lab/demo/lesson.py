"""The lesson of the image demo: a large lambda learns colours late where few captions name them."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

import diffvision
from diffvision.analysis import figures
from diffvision.analysis.page import Picture, Section, Text
from diffvision.demo.images import COLUMNS, MODELS, PARTS, train_on_digits
from diffvision.demo.report import Run, by_model, verdict
from diffvision.evaluation.output import write_json

LESSON_MODEL = "DiffCLIP-debug"
"""DiffCLIP's lambda_init of 0.8."""
LESSON = Path(__file__).with_name("lesson.json")
"""Metrics of the demo's models and `LESSON_MODEL`, made before."""
DIGIT_ONLY, EPOCHS = 0.85, 6
"""What differs from the demo's recipe: the share of captions that name the digit only, and the epochs."""


def lesson(directory: Path, seeds: int, *, train: bool) -> Section:
    """Return the lesson's section of the report.

    Args:
        directory: of the demo.
        seeds: how many runs each model has.
        train: train the demo's models and `LESSON_MODEL` in `directory`/lesson, and write lesson.json; if not, show the
            numbers that ship with the package.
    """
    if not train:
        return section_of(json.loads(LESSON.read_text()))
    Console().rule("The lesson: few captions name the colours")
    models = (*MODELS, LESSON_MODEL)
    runs = train_on_digits(models, seeds, directory / "lesson", DIGIT_ONLY, f"--trainer.max_epochs={EPOCHS}")
    content = lesson_of(runs)
    write_json(directory / "lesson.json", content)
    return section_of(content)


def lesson_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Return how a lesson was made, and for each model its metrics, a value for each seed."""
    seeds = len({run.seed for run in runs})
    made = {
        "command": f"diffvision demo --lesson --seeds {seeds}",
        "captions that name the colours": f"{1 - DIGIT_ONLY:.0%}",
        "epochs": EPOCHS,
        "seeds": seeds,
        "date": date.today().isoformat(),
        "versions": f"diffvision {diffvision.__version__}, torch {torch.__version__}",
    }
    models = {
        model: {key: [run.metrics[key] for run in of_model] for key in COLUMNS.values()}
        for model, of_model in by_model(runs).items()
    }
    return {"made": made, "models": models}


def section_of(lesson: Mapping[str, Any]) -> Section:
    """Return the section on a lesson, as `lesson_of` returns one."""
    models: Mapping[str, Mapping[str, Sequence[float]]] = lesson["models"]
    bars = {part: {name: values[f"colours/{part}"] for name, values in models.items()} for part in PARTS}
    seeds = max(len(values) for parts in bars.values() for values in parts.values())
    made = {key: f"`{value}`" if key == "command" else value for key, value in lesson["made"].items()}
    facts = [f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in made.items()]
    source = "From other runs than those above; " + "; ".join(facts)
    source += ". `diffvision demo --lesson` trains these models here and draws the figure again."
    plain, *_, largest = models
    text = (
        f"DiffCLIP starts λ near 0.8 (lambda_init), as {largest} does; the differential model above starts it near "
        "0.2. Rows of the difference sum to 1 − λ. So what all patches share, as the colours of ink and paper are, "
        "passes multiplied by 1 − λ, a fifth at 0.8, while what differs from patch to patch, as the digit's shape "
        "does, passes whole. Does a model then learn colours in time, where training is short and few captions name "
        "them? The figure asks the first image that a caption retrieves for its digit, its ink and its paper."
    )
    answer = verdict(models, plain, largest, {part: (f"colours/{part}", 100, 1) for part in PARTS})
    words = "; ".join(
        f"{name}: " + ", ".join(f"{part} {100 * mean(values[f'colours/{part}']):.0f}%" for part in PARTS)
        for name, values in models.items()
    )
    over = f"Mean of {seeds} seeds, a dot for each. " if seeds > 1 else ""
    picture = Picture(figures.metric_bars(bars), f"Share of captions answered rightly. {words}.", over + source)
    return Section("What λ does to colours", [Text(text), picture, Text(answer)])
