"""`diffvision inspect`: what a model attends to and how its heads differ, as pictures and one page.

Maps, numbers and figures for other uses are in `diffvision.analysis`.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.inspection.inspect_command import inspect
    from diffvision.inspection.inspecting import inspect_models

__all__ = ["inspect", "inspect_models"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"inspect": "inspect_command", "inspect_models": "inspecting"})
