"""`diffvision inspect`: what a model attends to and how its heads differ, as pictures and one page.

Maps, numbers and figures for other uses are in `diffvision.analysis`.
"""

from diffvision.inspection.command import inspect, inspect_models

__all__ = ["inspect", "inspect_models"]
