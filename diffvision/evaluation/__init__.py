"""A model and a folder of images -> {metric: value}; serves training and the command line alike."""

from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import EVALUATIONS, evaluate, run

__all__ = ["EVALUATIONS", "Options", "evaluate", "run"]
