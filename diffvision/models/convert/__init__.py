"""Weights of our models in other libraries' layouts, and back: one file a layout, and `convert` for files of them."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.models.convert.command import convert
    from diffvision.models.convert.layouts import LAYOUTS, recognise

__all__ = ["LAYOUTS", "convert", "recognise"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"LAYOUTS": "layouts", "convert": "command", "recognise": "layouts"})
