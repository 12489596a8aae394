"""`diffvision inspect`: what a model attends to and how its heads differ, as pictures and one page."""

from diffvision.inspection.command import inspect, inspect_models

__all__ = ["inspect", "inspect_models"]
