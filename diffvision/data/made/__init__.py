"""Datasets that anyone can make again: the table of `diffvision data make`, and a module for each."""

from dataclasses import dataclass

__all__ = ["MADE", "Dataset"]


@dataclass(frozen=True)
class Dataset:
    """A dataset that `diffvision data make` writes.

    Attributes:
        function: module:name of a function that takes the directory and the settings, and returns what it wrote, to
            be printed (None: nothing more to say).
        settings: the settings of `data make` that it takes.
        source: what --source must name, and how to get it in one line; empty where none is needed.
    """

    function: str
    settings: frozenset[str] = frozenset()
    source: str = ""


_PACKED = frozenset({"source", "captions", "columns", "per_shard", "num_workers"})
_IMAGES = "such as a folder of images"
_FASHION = (
    "the folder of Fashion-MNIST's files: torchvision's ROOT after datasets.FashionMNIST(ROOT, download=True), or "
    "/usr/share/datasets/fashion-mnist after `apt-get install dataset-fashion-mnist`"
)

MADE: dict[str, Dataset] = {
    "digits": Dataset("diffvision.data.made.digits:make_digits", frozenset({"copies", "seed"})),
    "digit-scenes": Dataset("diffvision.data.made.digit_scenes:make_digit_scenes", frozenset({"copies", "seed"})),
    "fashion": Dataset("diffvision.data.made.fashion:make_fashion", frozenset({"source", "seed"}), _FASHION),
    "fashion-scenes": Dataset(
        "diffvision.data.made.fashion_scenes:make_fashion_scenes",
        frozenset({"source", "scenes", "evaluated", "seed"}),
        _FASHION,
    ),
    "stdlib": Dataset("diffvision.data.made.corpus:make_stdlib"),
    "recall": Dataset("diffvision.data.made.recall:make_recall", frozenset({"documents", "words", "seed"})),
    "folder": Dataset("diffvision.data.make:pack_folder", _PACKED | {"split"}, _IMAGES),
    "evaluation": Dataset("diffvision.data.make:pack_evaluation", _PACKED | {"templates"}, _IMAGES),
}
