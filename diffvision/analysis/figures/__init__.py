"""Figures of training runs, lambda, attention and language evaluations; each function returns a matplotlib Figure.

`png` returns one as a PNG file's bytes. Reading and computing of the data is not here.
"""

from diffvision.analysis.figures.images import ImageAttention, attention_panels
from diffvision.analysis.figures.runs import lambda_curves, metric_bars, run_curves, run_overview
from diffvision.analysis.figures.style import COLOURS, png

__all__ = [
    "COLOURS",
    "ImageAttention",
    "attention_panels",
    "lambda_curves",
    "metric_bars",
    "png",
    "run_curves",
    "run_overview",
]
