"""A model and a folder of images -> {metric: value}; used by training and the command line."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.evaluation.options import Options
    from diffvision.evaluation.suite import EVALUATIONS, evaluate

__all__ = ["EVALUATIONS", "Options", "evaluate"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "EVALUATIONS": "suite",
            "Options": "options",
            "evaluate": "suite",
        },
    )
