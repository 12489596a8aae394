"""The demo: small models with and without differential attention, trained by one recipe and compared, in minutes."""

import sys
from functools import partial
from pathlib import Path

from diffvision.plugins import entry_points, load


def demo(output: str = "runs/demo", seeds: int = 1, language: bool = False, lesson: bool = False) -> None:
    """Train a CLIP and a DiffCLIP on real digits, evaluate both, print a table and write report.html.

    A demo that was stopped resumes with the same command, and runs that are finished are not trained again.

    Args:
        output: directory for the data, the runs and the report.
        seeds: repeat with this many seeds, and report means and spreads.
        language: train a Transformer and its differential V1 and V2 on text instead, and write language.html.
        lesson: train both, and a DiffCLIP with DiffCLIP's lambda_init of 0.8, where few captions name the colours, too.
            Without this the report's lesson shows numbers that ship with the package.

    Raises:
        ValueError: seeds below 1; the lesson together with language; or the directory holds another demo's runs.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    if lesson and language:
        raise ValueError("lesson is about images: leave out --lesson or --language")
    try:
        if language:
            load("diffvision.demos", "language")(Path(output), seeds)
        else:
            from diffvision.demo.images import images

            has_lesson = lesson or "lesson" in entry_points("diffvision.demos")
            section = partial(load("diffvision.demos", "lesson"), train=lesson) if has_lesson else None
            images(Path(output), seeds, section)
    except (KeyboardInterrupt, SystemExit):
        print(f"stopped: the same command resumes what is in {output}", file=sys.stderr)
        raise
