"""Conversion of weights between our layouts and those of other libraries: one module per layout, and `convert`."""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.models.convert.command import convert
    from diffvision.models.convert.layouts import LAYOUTS, recognise

__all__ = ["LAYOUTS", "convert", "recognise"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"LAYOUTS": "layouts", "convert": "command", "recognise": "layouts"})
