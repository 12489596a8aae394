"""The table of the datasets that `diffvision data make` writes, and a module for each; none downloads anything."""

import inspect
from pathlib import Path

from diffvision.plugins import entry_points
from diffvision.signatures import read_signature

__all__ = ["DATASETS", "datasets", "missing_data"]

GROUP = "datasets"

DATASETS = {
    "digits": "diffvision.data.datasets.digits:make_digits",
    "fashion": "diffvision.data.datasets.fashion:make_fashion",
    "fashion-scenes": "diffvision.data.datasets.fashion_scenes:make_fashion_scenes",
    "scenes-vqa": "diffvision.data.datasets.scenes_vqa:make_scenes_vqa",
    "arithmetic": "diffvision.data.datasets.arithmetic:make_arithmetic",
    "recall": "diffvision.data.datasets.recall:make_recall",
    "stdlib": "diffvision.data.datasets.stdlib:make_stdlib",
    "folder": "diffvision.data.images.packing:make_folder",
    "llava": "diffvision.data.llava:make_llava",
    "evaluation": "diffvision.data.images.packing:make_evaluation",
    "mmvp": "diffvision.data.datasets.mmvp:make_mmvp",
    "sugarcrepe": "diffvision.data.datasets.sugarcrepe:make_sugarcrepe",
    "winoground": "diffvision.data.datasets.winoground:make_winoground",
    "pope": "diffvision.data.datasets.pope:make_pope",
}
"""name -> module:function. The function takes the directory to write and the dataset's options, which are the options
of `diffvision data make NAME`, and returns what it wrote as a text or None. Its docstring is the help."""


def datasets() -> dict[str, str]:
    """Return `DATASETS`, followed by the datasets of other packages: the entry points of `GROUP`."""
    return {**DATASETS, **{name: entry.value for name, entry in entry_points(GROUP).items() if name not in DATASETS}}


def missing_data(name: str, path: str) -> FileNotFoundError:
    """Return the error for data that do not exist, with the command that makes those of a recipe."""
    folder, *inner = Path(path).parts
    remedy = ""
    if folder == "data" and inner and (function := datasets().get(inner[0])):
        _, *options = read_signature(function)[0].parameters.values()
        if Path(folder, inner[0]).is_dir():
            remedy = ": the comment at the recipe's head has the commands that write it"
        elif all(option.default is not inspect.Parameter.empty for option in options):
            remedy = f": make it with diffvision data make {inner[0]} data/{inner[0]}"
    return FileNotFoundError(f"{name} is {path!r}: there is no such file or folder{remedy}")
