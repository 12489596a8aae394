"""ImageNet's classes: WordNet ids ("n01440764") in their order from timm, names and prompt templates from OpenCLIP.

How a folder's classes become prompts is in `prompts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

WNID = re.compile(r"n\d{8}")
"""A noun of WordNet, after which ImageNet's folders are named."""
LIKE_WNID = re.compile(r"n\d{8}(?!\d)", re.IGNORECASE)
"""How a name begins that has a wnid in it: Stanford Dogs' "n02085620-Chihuahua", or one in capitals."""

# Variants of ImageNet -> the list in timm's data of those of the 1000 classes that the variant has.
_VARIANTS = {
    "imagenet": None,
    "imagenet1k": None,
    "imagenetv2": None,
    "imagenetsketch": None,
    "imageneta": "imagenet_a_indices.txt",
    "imagenetr": "imagenet_r_indices.txt",
}


@cache
def imagenet_wnids(subset: str = "imagenet-1k") -> dict[str, int]:
    """Return {wnid: class number}, by default of the 1000 classes; `subset` as timm's `ImageNetInfo` takes it."""
    from timm.data import ImageNetInfo

    return {wnid: number for number, wnid in enumerate(ImageNetInfo(subset).label_names())}


def imagenet_names() -> list[str]:
    """Return OpenCLIP's names of the 1000 classes: "tench", "goldfish", ..."""
    import open_clip

    return list(open_clip.IMAGENET_CLASSNAMES)


def imagenet_templates() -> list[str]:
    """Return OpenCLIP's 80 templates, with {c} where the class name belongs."""
    import open_clip

    return [make("{c}") for make in open_clip.OPENAI_IMAGENET_TEMPLATES]


def imagenet_numbers(classes: Sequence[str]) -> list[int] | None:
    """Return which of the 1000 classes these are; None unless all are named by wnids of them."""
    if not classes or not all(WNID.fullmatch(name) for name in classes):
        return None
    known = imagenet_wnids()
    return [known[name] for name in classes] if known.keys() >= set(classes) else None


def is_imagenet(dataset: str) -> bool:
    """Return whether a dataset of this name has ImageNet's classes, or a known subset of them."""
    return _plain(dataset) in _VARIANTS


def variant_numbers(dataset: str) -> list[int] | None:
    """Return the indices of ImageNet's 1000 classes that a variant such as "imagenet-a" has; None if it has all.

    Raises:
        ValueError: no variant has this name.
    """
    if not is_imagenet(dataset):
        raise ValueError(
            f"{dataset!r} is unknown: choose imagenet, imagenet-v2, imagenet-sketch, imagenet-a or imagenet-r"
        )
    file = _VARIANTS[_plain(dataset)]
    if file is None:
        return None
    return [int(line) for line in (resources.files("timm.data") / "_info" / file).read_text().split()]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("wds/").removeprefix("wds_"))
