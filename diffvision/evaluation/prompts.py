"""Class names and templates: from the options, the folder, or ImageNet (all of its classes, or some).

ImageNet's lists are in `imagenet`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diffvision.data.images.decode import MAX_CAPTION
from diffvision.data.images.folders import TEMPLATES, EvaluationFolder, in_order, read_lines
from diffvision.evaluation.imagenet import (
    LIKE_WNID,
    imagenet_names,
    imagenet_numbers,
    imagenet_templates,
    imagenet_wnids,
    is_imagenet,
    variant_numbers,
)
from diffvision.evaluation.options import Options

PLACE = "{c}"
"""The class name's place in a template, as CLIP_benchmark writes it."""
IMAGENET = "imagenet"
"""What stands for ImageNet's 1000 class names, or its 80 templates, where a file is expected."""


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


def imagenet(name: str = "imagenet") -> Prompts:
    """Return ImageNet's prompts: the class names and 80 templates that OpenCLIP carries.

    Args:
        name: "imagenet", "imagenet-v2", "imagenet-sketch" (all 1000 classes), "imagenet-a" or "imagenet-r" (200 each,
            in the order of the 1000, the indexes from timm). Dashes, underscores and case do not matter.

    Raises:
        ValueError: another name.
    """
    names, indices = imagenet_names(), variant_numbers(name)
    return Prompts(names if indices is None else [names[index] for index in indices], imagenet_templates(), indices)


def prompts_of(folder: EvaluationFolder, options: Options = Options()) -> Prompts:  # noqa: B008  frozen
    """Return the class names and templates of a folder's zero-shot classifier.

    Names and templates that are given come first, then the folder's. Classes named by ImageNet's wnids get OpenCLIP's
    names and, unless other templates are given, its 80 templates. A folder named after a variant of ImageNet gets
    whatever it lacks of these. A variant's folder may name its 200 classes or all 1000: in the second case the
    classifier is restricted to the variant's, as its published numbers are.

    Raises:
        ValueError: names or templates are missing, or are not as many as the classes; wnids that are not ImageNet's.
    """
    names, templates = _class_names(folder, options), _templates(folder, options)
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


def check_prompts(planned: Iterable[tuple[EvaluationFolder, Sequence[str]]], options: Options) -> list[str]:
    """Return a line on the prompts of each zero-shot classification, and warn of class names that are numbers.

    Args:
        planned: folders with the names of their evaluations.
        options: class names and templates in place of the folders'.

    Raises:
        ValueError: a folder's classes make no prompts; see `prompts_of`.
    """
    lines = []
    for folder in [folder for folder, names in planned if "zero_shot" in names]:
        prompts = prompts_of(folder, options)
        texts, count = prompts.texts()[0], len(prompts.templates)
        usual = TEMPLATES[0].replace(PLACE, prompts.classnames[0])
        example = usual if usual in texts else texts[0]
        if all(name.isdecimal() for name in prompts.classnames):
            warnings.warn(
                f"{folder.name!r} names its classes by numbers, so prompts are {example!r}: give --classnames imagenet "
                "or FILE, or classnames.txt in it",
                stacklevel=2,
            )
        templates = f"{count} template{'s' if count > 1 else ''}"
        lines.append(f"zero_shot/{folder.name}: {len(prompts.classnames):,} classes, {templates}, e.g. {example!r}")
    return lines


def read_templates(options: Options) -> list[str]:
    """Return the templates that are given: one, those of a file, "imagenet" for its 80, or a list."""
    given = options.templates or []
    if not isinstance(given, str):
        return list(given)
    if PLACE in given:
        return [given]
    return imagenet_templates() if given == IMAGENET else _lines(given, "templates", f"one with {PLACE}, ")


def _templates(folder: EvaluationFolder, options: Options) -> list[str]:
    """Return the templates for a folder's classes; none where it has none and none are given."""
    if given := read_templates(options):
        return given
    own = list(folder.templates or [])
    from_imagenet = options.classnames == IMAGENET or imagenet_numbers(folder.classnames or []) is not None
    return imagenet_templates() if from_imagenet and own in ([], list(TEMPLATES)) else own


def _class_names(folder: EvaluationFolder, options: Options) -> list[str]:
    """Return a name for each of a folder's classes; none where it names none and none are given."""
    classes, given = list(folder.classnames or []), options.classnames
    if given == IMAGENET:
        if classes and _numbers(classes) is None:
            raise ValueError(
                f"classnames is imagenet, but {folder.name!r} has the class {classes[0]!r}, neither a number nor a "
                "wnid: leave it out"
            )
        # The names of a variant depend on its labels.
        if not classes and is_imagenet(folder.name):
            return []
        return _name_classes(classes, imagenet_names(), IMAGENET, folder)
    if isinstance(given, str):
        return _name_classes(classes, _lines(given, "classnames"), given, folder)
    if given:
        return _name_classes(classes, list(given), "classnames", folder)
    if folder.own_names:
        return _name_classes(classes, list(folder.own_names), "its classnames.txt", folder)
    if (numbers := imagenet_numbers(classes)) is not None:
        names = imagenet_names()
        return [names[number] for number in numbers]
    if any(LIKE_WNID.match(name) for name in classes):
        unknown = next(name for name in classes if name not in imagenet_wnids())
        raise ValueError(
            f"{folder.name!r} has class {unknown!r}, not one of ImageNet's 1,000: give --classnames FILE, or "
            "classnames.txt in it, with a name per line"
        )
    return classes


def _name_classes(classes: list[str], names: list[str], of: str, folder: EvaluationFolder) -> list[str]:
    """Return the name of each class: in order where there are as many, else by the class's number or wnid."""
    if not classes:
        return names
    if len(classes) == len(names) and not (of == IMAGENET and imagenet_numbers(classes)):
        return in_order(classes, names)
    numbers = _numbers(classes)
    if numbers is None or max(numbers) >= len(names):
        raise ValueError(
            f"{of} has {len(names):,} names, and {folder.name!r} has {len(classes):,} classes: give each a name"
        )
    return [names[number] for number in numbers]


def _numbers(classes: list[str]) -> list[int] | None:
    """Return the number of each class, where all are named by numbers or by ImageNet's wnids."""
    return [int(name) for name in classes] if all(map(str.isdecimal, classes)) else imagenet_numbers(classes)


def _lines(file: str, setting: str, other: str = "") -> list[str]:
    """Return the lines of the file that a setting names."""
    if lines := read_lines(Path(file)):
        return lines
    raise ValueError(f"{setting} is {file!r}, not a text file: give {other}{IMAGENET}, or a file with one per line")


def local_labels(labels: Tensor, prompts: Prompts, dataset: str) -> Tensor:
    """Return labels as positions in `prompts.classnames`.

    Those of a subset of ImageNet may be numbered within the subset (0..199, as CLIP_benchmark's folders) or as the 1000
    classes are (0..999): a label of 200 or more means the latter.

    Raises:
        ValueError: a label outside of the classes.
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
