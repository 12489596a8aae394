"""`diffvision inspect`: what a model attends to and how its heads differ, as pictures and one page."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.inspection.command import inspect, inspect_models
    from diffvision.inspection.subjects import Subject

__all__ = ["Subject", "inspect", "inspect_models"]

__getattr__, __dir__ = lazy_names(__name__, {"Subject": "subjects", "inspect": "command", "inspect_models": "command"})
