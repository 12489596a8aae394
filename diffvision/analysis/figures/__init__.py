"""Figures of training runs, lambda, attention and language evaluations; each function returns a matplotlib Figure.

A notebook shows it as a picture; `figure.savefig("curves.png")` writes a file (.png, .pdf, .svg), and `png(figure)`
returns a PNG file's bytes. A model has one colour in all figures, see `colours_of`. Reading and computing of the data
is not here.
"""

from diffvision.analysis.figures.image_attention import (
    ImageAttention,
    Retrieved,
    attention_panels,
    difference_of_maps,
    retrieved_images,
)
from diffvision.analysis.figures.style import COLOURS, colours_of, png
from diffvision.analysis.figures.training_runs import lambda_curves, metric_bars, run_curves, run_overview

__all__ = [
    "COLOURS",
    "ImageAttention",
    "Retrieved",
    "attention_panels",
    "colours_of",
    "difference_of_maps",
    "lambda_curves",
    "metric_bars",
    "png",
    "retrieved_images",
    "run_curves",
    "run_overview",
]
