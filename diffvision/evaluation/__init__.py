"""A model and a folder of images -> {metric: value}; serves training and the command line alike."""

from typing import Any

from diffvision.evaluation.options import Options
from diffvision.evaluation.suite import EVALUATIONS, evaluate, run

__all__ = ["EVALUATIONS", "FeatureExtractor", "Options", "evaluate", "run"]


def __getattr__(name: str) -> Any:
    """Return `FeatureExtractor`, imported when it is asked for: evaluations during training do without scikit-learn."""
    if name != "FeatureExtractor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffvision.evaluation.extractor import FeatureExtractor

    return FeatureExtractor
