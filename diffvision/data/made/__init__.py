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
_TEXT = (
    "a folder of unpacked packages (`apt-get download dict-gcide wordnet-base python3.11-doc linux-doc-6.1 && for d in "
    "*.deb; do dpkg-deb -x $d packages; done`), or names of installed ones, such as gcide,python-doc,stdlib"
)

MADE: dict[str, Dataset] = {
    "digits": Dataset("diffvision.data.made.digits:make_digits", frozenset({"copies", "seed"})),
    "digit-scenes": Dataset("diffvision.data.made.scenes:make_scenes", frozenset({"copies", "seed"})),
    "stdlib": Dataset("diffvision.data.made.corpus:make_stdlib"),
    "text": Dataset("diffvision.data.made.text:make_text", frozenset({"source"}), _TEXT),
    "recall": Dataset("diffvision.data.made.recall:make_recall", frozenset({"documents", "words", "seed"})),
    "folder": Dataset("diffvision.data.make:pack_folder", _PACKED | {"split"}, _IMAGES),
    "evaluation": Dataset("diffvision.data.make:pack_evaluation", _PACKED | {"templates"}, _IMAGES),
}
