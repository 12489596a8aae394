"""The demo: small models with and without differential attention, trained by one recipe and compared, in minutes."""

import sys
from pathlib import Path


def demo(output: str = "runs/demo", seeds: int = 1) -> None:
    """Train a CLIP and a DiffCLIP on real digits, compare them, and write report.html.

    A demo that was stopped resumes with the same command, and runs that are finished are not trained again.

    Args:
        output: directory for the data, the runs and the report.
        seeds: repeat with this many seeds, and report means and standard deviations.

    Raises:
        ValueError: seeds below 1, or the directory holds another demo's runs.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    from diffvision.demo.image_demo import images

    try:
        images(Path(output), seeds)
    except (KeyboardInterrupt, SystemExit):
        print(f"stopped: the same command resumes what is in {output}", file=sys.stderr)
        raise
