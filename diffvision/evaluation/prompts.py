"""Class names and templates: the folder's, or ImageNet's from OpenCLIP, for all classes or for a variant's subset."""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from diffvision.data.images.decode import MAX_CAPTION
from diffvision.data.images.folders import EvaluationFolder

PLACE = "{c}"
"""The class name's place in a template, as CLIP_benchmark writes it."""

# Variants of ImageNet -> the list in timm's data of those of the 1000 classes that the variant has.
_SUBSETS = {
    "imagenet": None,
    "imagenet1k": None,
    "imagenetv2": None,
    "imagenetsketch": None,
    "imageneta": "imagenet_a_indices.txt",
    "imagenetr": "imagenet_r_indices.txt",
}


class Prompts(NamedTuple):
    """Class names and templates, from which a zero-shot classifier is made."""

    classnames: list[str]
    templates: list[str]  # with PLACE where the class name comes
    indices: list[int] | None  # of the classes among ImageNet's 1000, where the dataset is a subset of them

    def texts(self) -> list[list[str]]:
        """Return the texts of each class: every {c} of a template becomes the class name, and the rest stays.

        Raises:
            ValueError: a template without {c}; a text that is longer than any caption may be.
        """
        for template in self.templates:
            if PLACE not in template:
                raise ValueError(f"the template {_start(template)} has no {PLACE}, the place of the class name: add it")
            longest = max(self.classnames, key=len, default="")
            length = len(template) + template.count(PLACE) * (len(longest) - len(PLACE))
            if length > MAX_CAPTION:
                raise ValueError(
                    f"the template {_start(template)} and the class name {_start(longest)} make a text of {length:,} "
                    f"characters: shorten them to {MAX_CAPTION:,} or fewer"
                )
        return [[template.replace(PLACE, name) for template in self.templates] for name in self.classnames]


def _start(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def imagenet(name: str = "imagenet", templates: Literal["openai", "simple"] = "openai") -> Prompts:
    """Return ImageNet's prompts: its class names and the 80 ("openai") or 7 ("simple") templates that OpenCLIP carries.

    Args:
        name: "imagenet", "imagenet-v2", "imagenet-sketch" (all 1000 classes), "imagenet-a" or "imagenet-r" (200 each,
            in the order of the 1000, the indexes from timm). Dashes, underscores and case do not matter.
        templates: which list.

    Raises:
        ValueError: another name.
    """
    import open_clip

    if not is_imagenet(name):
        raise ValueError(
            f"{name!r} is no variant of ImageNet known here: imagenet, imagenet-v2, imagenet-sketch, imagenet-a, "
            "imagenet-r"
        )
    names = list(open_clip.IMAGENET_CLASSNAMES)
    makers = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
    texts = [make(PLACE) for make in makers[templates]]
    file = _SUBSETS[_plain(name)]
    if file is None:
        return Prompts(names, texts, None)
    indices = [int(line) for line in (resources.files("timm.data") / "_info" / file).read_text().split()]
    return Prompts([names[index] for index in indices], texts, indices)


def is_imagenet(name: str) -> bool:
    """Return whether a dataset of this name has ImageNet's classes, or a known subset of them."""
    return _plain(name) in _SUBSETS


def prompts_of(folder: EvaluationFolder) -> Prompts:
    """Return a folder's class names and templates, completed by ImageNet's where its name is of a variant of it.

    A subset's folder may name its 200 classes or all 1000: in the second case the classifier is restricted to the
    subset, as its published numbers are.

    Raises:
        ValueError: names or templates are missing, and the folder is not a variant of ImageNet.
    """
    names, templates = list(folder.classnames or []), list(folder.templates or [])
    if not is_imagenet(folder.name):
        for what, file in ((names, "classnames.txt"), (templates, "zeroshot_classification_templates.txt")):
            if not what:
                raise ValueError(f"evaluation folder {folder.name!r} has no {file}: zero-shot classification needs it")
        return Prompts(names, templates, None)
    known = imagenet(folder.name)
    templates = templates or known.templates
    if not names:
        return Prompts(known.classnames, templates, known.indices)
    if known.indices is not None and len(names) == 1000:
        names = [names[index] for index in known.indices]
    return Prompts(names, templates, known.indices if len(names) == len(known.classnames) else None)


def local_labels(labels: Tensor, prompts: Prompts, dataset: str) -> Tensor:
    """Return labels as positions in `prompts.classnames`.

    Those of a subset of ImageNet may be numbered within the subset (0..199, as CLIP_benchmark's folders) or as the 1000
    classes are (0..999): a label of 200 or more means the latter.

    Raises:
        ValueError: a label that is no class.
    """
    count, given = len(prompts.classnames), labels
    if prompts.indices is not None and labels.max() >= count:
        positions = torch.full((1000,), -1)
        positions[torch.tensor(prompts.indices)] = torch.arange(count)
        labels = torch.where(labels < 1000, positions[labels.clamp(max=999)], -1)
    wrong = (labels < 0) | (labels >= count)
    if wrong.any():
        which = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"dataset {dataset!r}: sample {which} has the label {int(given[which])}, outside its {count} classes: "
            "classnames.txt needs a line a class, in the order of the labels"
        )
    return labels


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("wds/").removeprefix("wds_"))
