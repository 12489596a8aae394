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
_EMOJI = (
    "the FOLDER of `npm install --ignore-scripts --prefix FOLDER emoji-datasource-google emoji-datasource-twitter "
    "openmoji` (openmoji may be left out)"
)

MADE: dict[str, Dataset] = {
    "digits": Dataset("diffvision.data.made.digits:make_digits", frozenset({"copies", "seed"})),
    "digit-scenes": Dataset("diffvision.data.made.scenes:make_scenes", frozenset({"copies", "seed"})),
    "stdlib": Dataset("diffvision.data.made.corpus:make_stdlib"),
    "recall": Dataset("diffvision.data.made.recall:make_recall", frozenset({"documents", "words", "seed"})),
    "emoji": Dataset("diffvision.data.made.emoji:make_emoji", frozenset({"source", "seed"}), _EMOJI),
    "openclipart": Dataset(
        "diffvision.data.made.openclipart:make_openclipart",
        frozenset({"source", "seed"}),
        "/ after `apt-get install openclipart-svg openclipart-png`, or the folder where `dpkg-deb -x` unpacked both",
    ),
    "tuxpaint": Dataset(
        "diffvision.data.made.tuxpaint:make_tuxpaint",
        frozenset({"source"}),
        "/ after `apt-get install tuxpaint-stamps-default`, or the folder where `dpkg-deb -x` unpacked it",
    ),
    "folder": Dataset("diffvision.data.make:pack_folder", _PACKED | {"split"}, _IMAGES),
    "evaluation": Dataset("diffvision.data.make:pack_evaluation", _PACKED | {"templates"}, _IMAGES),
}
