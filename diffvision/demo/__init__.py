"""The demo: small models with and without differential attention, trained by one recipe and compared, in minutes."""

from pathlib import Path


def demo(output: str = "runs/demo", seeds: int = 1, language: bool = False) -> None:
    """Train a CLIP and a DiffCLIP on real digits, evaluate both, print a table and write report.html.

    Args:
        output: directory for the data, the runs and the report.
        seeds: repeat with this many seeds, and report means and spreads.
        language: train a Transformer and its differential V1 and V2 on text instead, and write language.html.

    Raises:
        ValueError: seeds below 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    if language:
        from diffvision.demo.text import text

        text(Path(output), seeds)
    else:
        from diffvision.demo.images import images

        images(Path(output), seeds)
