"""CHAIR (Rohrbach et al. 2018, arXiv 1809.02156): objects that a caption names and the image does not have."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from diffvision.evaluation.samples import Metrics, PerSample, each
from diffvision.words import words

_PLURALS = {"child": "children", "person": "people", "mouse": "mice", "goose": "geese", "foot": "feet", "ox": "oxen"}
_ENDINGS = (("man", "men"), ("y", "ies"), ("fe", "ves"), ("f", "ves"), ("", "s"), ("", "es"))
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
            "person, girl, boy". Plurals are found by rule.
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
            raise ValueError(f"image {number} has the object {unknown[0]!r}, no object's name: add it to the synonyms")
    wrong = [[one for one in found if one not in present] for found, present in zip(named, truth, strict=True)]
    hits = [len(present.intersection(found)) for found, present in zip(named, truth, strict=True)]
    units, counts = torch.arange(len(captions)), torch.tensor([len(found) for found in named])
    wrong_counts, present_counts = (torch.tensor([float(len(one)) for one in lists]) for lists in (wrong, truth))
    return {
        "chair_i": PerSample(wrong_counts, units, weights=counts, ratio=True) if counts.any() else math.nan,
        "chair_s": each(wrong_counts > 0),
        "recall": PerSample(torch.tensor(hits).double(), units, weights=present_counts)
        if present_counts.any()
        else math.nan,
        "objects": each(counts.double()),
        "words": each(torch.tensor([float(len(caption.split())) for caption in captions])),
    }


def _text(text: str) -> str:
    """Return the words of a text, with spaces between them."""
    return " ".join(words(text))


def _plurals(name: str) -> Iterator[str]:
    """Yield what may be the plural of a name; most of it is no word, and found nowhere."""
    first, space, last = name.rpartition(" ")
    if last in _PLURALS:
        yield f"{first}{space}{_PLURALS[last]}"
    for end, plural in _ENDINGS:
        if name.endswith(end):
            yield f"{name.removesuffix(end)}{plural}"
