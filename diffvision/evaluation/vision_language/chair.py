"""CHAIR (Rohrbach et al. 2018, arXiv 1809.02156): objects that a caption names and the image does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from diffvision.evaluation.per_sample import Metrics, PerSample, count_each
from diffvision.words import words

_IRREGULAR = {
    "person": ("people", "persons"),
    "mouse": ("mice", "mouses"),
    "goose": ("geese",),
    "foot": ("feet",),
    "tooth": ("teeth",),
    "ox": ("oxen",),
    "cactus": ("cacti", "cactuses"),
    "die": ("dice",),
    "dwarf": ("dwarves", "dwarfs"),
    "wharf": ("wharves", "wharfs"),
    "stomach": ("stomachs",),
    "quiz": ("quizzes",),
}
_ENDINGS = {"child": "children", "man": "men", "knife": "knives", "wife": "wives", "life": "lives", "half": "halves",
            "calf": "calves", "leaf": "leaves", "loaf": "loaves", "thief": "thieves", "wolf": "wolves", "elf": "elves",
            "scarf": "scarves", "hoof": "hooves"}  # fmt: skip
"""Of whole words and of compounds: bookshelf, grandchild."""
_REGULAR = {"human", "ottoman", "shaman", "talisman", "caiman", "doberman", "german", "roman"}
"""Words that end like one of `_ENDINGS` and have an s."""
_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal", "cub")
_MERGED = {
    **{f"{young} {animal}": animal for animal in _ANIMALS for young in ("baby", "adult")},
    **{f"passenger {vehicle}": vehicle for vehicle in ("jet", "train")},
    "toilet seat": "toilet",
    "bow tie": "tie",
    "home plate": "",
    "train track": "",
}
"""CHAIR's two words that are one object or "", none, though one of them alone is another: baby is person."""


class ObjectNames:
    """The objects that captions are searched for, with their synonyms.

    Args:
        lines: an object each, its synonyms after it, separated by commas, as in CHAIR's `synonyms.txt`:
            "person, girl, boy". Their plurals are found by rule.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        objects = [[_text(name) for name in line.split(",")] for line in lines if line.strip()]
        self._objects = {name: names[0] for names in objects for name in names}
        self._objects = {two: self._objects.get(one, "") for two, one in _MERGED.items()} | self._objects
        for name, known in [*self._objects.items()]:
            for plural in _plurals(name):
                self._objects.setdefault(plural, known)
        self._longest = max((name.count(" ") + 1 for name in self._objects), default=0)

    @classmethod
    def read(cls, path: str | Path) -> ObjectNames:
        """Read the names from a file."""
        return cls(Path(path).read_text(encoding="utf-8").splitlines())

    def find(self, caption: str) -> list[str]:
        """Return the objects that a caption names, in its order, each as often as it is named."""
        words, found, start = _text(caption).split(), [], 0
        if "toilet" in words:  # CHAIR: the seat of a toilet is no chair
            words = [word for word in words if word != "seat"]
        while start < len(words):
            ends = range(min(len(words), start + self._longest), start, -1)
            end = next((end for end in ends if " ".join(words[start:end]) in self._objects), None)
            if end is not None:
                found.append(self._objects[" ".join(words[start:end])])
            start = start + 1 if end is None else end
        return [*filter(None, found)]


def chair(captions: Sequence[str], objects: Sequence[Collection[str]], names: ObjectNames) -> Metrics:
    """Return chair_i, chair_s, recall, and how many objects and words a caption has.

    chair_i is the share of named objects that are not in the image, each as often as it is named, and NaN if captions
    name none; chair_s the share of captions with such an object; recall the share of the images' objects that are
    named, as in lmms-eval. Short captions have a low CHAIR, so compare it at a similar `objects` and recall.

    Args:
        captions: what a model wrote, N.
        objects: the objects of each image, N.
        names: of all objects.

    Raises:
        ValueError: an image's object is not one of the names.
    """
    named = [names.find(caption) for caption in captions]
    truth = []
    for number, present in enumerate(objects, start=1):
        truth.append({found for one in present for found in names.find(one)})
        if unknown := [one for one in present if not names.find(one)]:
            raise ValueError(f"image {number} has the object {unknown[0]!r}, which is not in the synonyms: add it")
    wrong = [[one for one in found if one not in present] for found, present in zip(named, truth, strict=True)]
    hits = [len(present.intersection(found)) for found, present in zip(named, truth, strict=True)]
    units, counts = torch.arange(len(captions)), torch.tensor([len(found) for found in named])
    wrong_counts, present_counts = (torch.tensor([float(len(one)) for one in lists]) for lists in (wrong, truth))
    return {
        "chair_i": PerSample(wrong_counts, units, weights=counts, ratio=True) if counts.any() else math.nan,
        "chair_s": count_each(wrong_counts > 0),
        "recall": PerSample(torch.tensor(hits).double(), units, weights=present_counts)
        if present_counts.any()
        else math.nan,
        "objects": count_each(counts.double()),
        "words": count_each(torch.tensor([float(len(caption.split())) for caption in captions])),
    }


def _text(text: str) -> str:
    """Return the words of a text, with spaces between them."""
    return " ".join(words(text))


def _plurals(name: str) -> Sequence[str]:
    """Return the plural of a name, and where there are two, both."""
    head, of, rest = name.partition(" of ")
    first, space, noun = head.rpartition(" ")
    return [f"{first}{space}{plural}{of}{rest}" for plural in _noun_plurals(noun)]


def _noun_plurals(noun: str) -> Sequence[str]:
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    ending = next((one for one in _ENDINGS if noun.endswith(one)), None)
    if ending is not None and noun not in _REGULAR:
        return [f"{noun.removesuffix(ending)}{_ENDINGS[ending]}"]
    if re.search("[^aeiou]y$", noun):
        return [f"{noun.removesuffix('y')}ies"]
    if re.search("([sxz]|ch|sh)$", noun):
        return [f"{noun}es"]
    return [f"{noun}s", f"{noun}es"] if re.search("[^aeiou]o$", noun) else [f"{noun}s"]
