"""Comparison of trained models: evaluations with intervals of their differences, costs, curves and lambda."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.comparison.compare_command import compare
    from diffvision.comparison.result import Comparison

__all__ = ["Comparison", "compare"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"Comparison": "result", "compare": "compare_command"})
