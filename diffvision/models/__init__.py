"""Our models under the names that timm and OpenCLIP know; importing registers them."""

from diffvision.models import clip, vision

__all__ = ["clip", "vision"]
