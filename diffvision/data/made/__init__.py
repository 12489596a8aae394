"""The table of all that `diffvision data make` writes; the modules here are of datasets that anyone can make again."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MADE", "Dataset", "missing_data"]


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
_EMOJI = (
    "the FOLDER of `npm install --ignore-scripts --prefix FOLDER emoji-datasource-google emoji-datasource-twitter "
    "openmoji` (openmoji may be left out)"
)
_PUBLISHED = frozenset({"source", "images"})
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
    "text": Dataset("diffvision.lab.datasets.text:make_text", frozenset({"source"}), _TEXT),
    "recall": Dataset("diffvision.data.made.recall:make_recall", frozenset({"documents", "words", "seed"})),
    "arithmetic": Dataset(
        "diffvision.lab.datasets.arithmetic:make_arithmetic",
        frozenset({"documents", "steps", "distractors", "highest", "evaluated", "seed"}),
    ),
    "emoji": Dataset("diffvision.lab.datasets.emoji:make_emoji", frozenset({"source", "seed"}), _EMOJI),
    "openclipart": Dataset(
        "diffvision.lab.datasets.openclipart:make_openclipart",
        frozenset({"source", "seed"}),
        "/ after `apt-get install openclipart-svg openclipart-png`, or the folder where `dpkg-deb -x` unpacked both",
    ),
    "tuxpaint": Dataset(
        "diffvision.lab.datasets.tuxpaint:make_tuxpaint",
        frozenset({"source"}),
        "/ after `apt-get install tuxpaint-stamps-default`, or the folder where `dpkg-deb -x` unpacked it",
    ),
    "folder": Dataset("diffvision.data.make:pack_folder", _PACKED | {"split"}, _IMAGES),
    "evaluation": Dataset("diffvision.data.make:pack_evaluation", _PACKED | {"templates"}, _IMAGES),
    "mmvp": Dataset(
        "diffvision.data.published.mmvp:make_mmvp",
        _PUBLISHED,
        "the folder with Questions.csv (hf download MMVP/MMVP_VLM --repo-type dataset --local-dir FOLDER)",
    ),
    "sugarcrepe": Dataset(
        "diffvision.data.published.sugarcrepe:make_sugarcrepe",
        _PUBLISHED,
        "the repository RAIVNLab/sugar-crepe on GitHub, with --images FOLDER of COCO's val2017",
    ),
    "aro": Dataset(
        "diffvision.data.published.aro:make_aro",
        _PUBLISHED,
        "the folder that VG_Relation and VG_Attribution of mertyg/vision-language-models-are-bows download",
    ),
    "winoground": Dataset(
        "diffvision.data.published.winoground:make_winoground",
        _PUBLISHED,
        "a folder (ask for access, then: hf download facebook/winoground --repo-type dataset --local-dir FOLDER)",
    ),
    "ohd-caps": Dataset(
        "diffvision.data.published.ohd_caps:make_ohd_caps",
        _PUBLISHED,
        "the repository Yufang-Liu/clip_hallucination on GitHub, with --images FOLDER of COCO, Flickr30k and NoCaps",
    ),
    "pope": Dataset(
        "diffvision.data.published.pope:make_pope",
        _PUBLISHED,
        "the repository RUCAIBox/POPE on GitHub, with --images FOLDER of COCO's val2014",
    ),
}


def missing_data(name: str, path: str) -> FileNotFoundError:
    """Return the error for data that do not exist, with the command that makes those of a recipe."""
    folder, *inner = Path(path).parts
    remedy = ""
    if folder == "data" and inner and inner[0] in MADE and not MADE[inner[0]].source:
        remedy = f": make it with diffvision data make {inner[0]} data/{inner[0]}"
    return FileNotFoundError(f"{name} is {path!r}: there is no such file or folder{remedy}")
