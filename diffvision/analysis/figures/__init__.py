"""Figures of training runs, lambda and attention; each function returns a matplotlib Figure.

A notebook shows it as a picture; `figure.savefig("curves.png")` writes a file (.png, .pdf, .svg), and `png(figure)`
returns a PNG file's bytes. A model has one colour in all figures, see `colours_of`. Reading and computing of the data
is not here.
"""

from diffvision.analysis.figures.image_attention import ImageAttention, attention_panels
from diffvision.analysis.figures.style import COLOURS, colours_of, png
from diffvision.analysis.figures.training_runs import lambda_curves, run_curves

__all__ = [
    "COLOURS",
    "ImageAttention",
    "attention_panels",
    "colours_of",
    "lambda_curves",
    "png",
    "run_curves",
]
