"""The lesson of the image demo: a large lambda learns colours late where few captions name them."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import diffvision
from diffvision.demo.images import COLUMNS, MODELS, train_on_digits
from diffvision.demo.report import Run, by_model

LESSON_MODEL = "DiffCLIP-debug"
"""DiffCLIP's lambda_init of 0.8."""
DIGIT_ONLY, EPOCHS = 0.85, 6
"""What differs from the demo's recipe: the share of captions that name the digit only, and the epochs."""


def lesson(directory: Path, seeds: int) -> dict[str, Any]:
    """Train the demo's models and `LESSON_MODEL` in a folder, and return what lesson.json holds."""
    Console().rule("The lesson: few captions name the colours")
    models = (*MODELS, LESSON_MODEL)
    return lesson_of(train_on_digits(models, seeds, directory, DIGIT_ONLY, f"--trainer.max_epochs={EPOCHS}"))


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
