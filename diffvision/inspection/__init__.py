"""`diffvision inspect`: what a model attends to and how its heads differ, as pictures and one page.

Maps, numbers and figures for other uses are in `diffvision.analysis`.
"""

from diffvision.inspection.command import inspect, inspect_models
from diffvision.inspection.subjects import Subject

__all__ = ["Subject", "inspect", "inspect_models"]
