"""Captions in JSON: COCO's own files, Karpathy's `dataset_coco.json` and `dataset_flickr30k.json`, and ShareGPT4V's.

COCO's and ShareGPT4V's files have one split each; Karpathy's have all of them, with five captions an image.
"""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from diffvision.data.images.decode import is_caption
from diffvision.data.images.image_set import Captions, ImageCollection, ImageFiles, Parts
from diffvision.data.images.image_tables import check_path
from diffvision.files import decoded

_NAMES_TRIED = 100  # images that are looked for, to find their folder
_KARPATHY = {"val": "validation", "restval": "train"}
"""Our names of his splits. `restval` is what he left over of COCO's val2014; everyone trains on it."""


def read_caption_file(table: Path) -> Parts:
    """Return {split: reads its images} of a file of captions; only Karpathy's have other splits than "".

    Args:
        table: the file. Its images are looked for in the folders that are usual for it.

    Raises:
        ValueError: it is neither COCO's nor Karpathy's nor ShareGPT4V's.
    """
    text = decoded(table.read_bytes(), table)
    try:
        content = json.loads(text)
        if isinstance(content, list):
            splits = {"": _read_conversations(content)}
        else:
            splits = {"": _read_coco(content)} if "annotations" in content else _read_karpathy(content)
        if not any(splits.values()):
            raise ValueError("no images")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{table} must have captions as COCO, Karpathy or ShareGPT4V, got another JSON "
            f"({type(error).__name__} {error}): write a .csv of image and caption"
        ) from None
    return {split: partial(_collect, table, split, captions) for split, captions in splits.items()}


def _read_coco(content: Any) -> dict[Any, Captions]:
    """Return {file name: captions} of `images`, and `annotations` with a caption of one of them each."""
    names = {image["id"]: image["file_name"] for image in content["images"]}
    captions: dict[Any, list[str]] = {name: [] for name in names.values()}
    for annotation in content["annotations"]:
        captions[names[annotation["image_id"]]].append(annotation["caption"])
    return {name: _check_captions(of_image) for name, of_image in captions.items()}


def _read_conversations(content: list[Any]) -> dict[Any, Captions]:
    """Return {path: captions} of ShareGPT4V's rows, each an image with one answer, which is its caption on one line."""
    captions: dict[Any, Captions] = {}
    for number, row in enumerate(content):
        try:
            (answer,) = (turn["value"] for turn in row["conversations"] if turn["from"] in ("gpt", "assistant"))
            captions[row["image"]] = (*captions.get(row["image"], ()), " ".join(answer.split()))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"row {number} must have an image and one answer") from None
    return captions


def _read_karpathy(content: Any) -> dict[str, dict[Any, Captions]]:
    """Return {split: {path: captions}}."""
    splits: dict[str, dict[Any, Captions]] = {}
    for image in content["images"]:
        name = "/".join(image[part] for part in ("filepath", "filename") if image.get(part))
        split = _KARPATHY.get(image["split"], image["split"])
        if not isinstance(split, str) or not split:
            raise ValueError(f"{name} is of the split {split!r}")
        captions = _check_captions([sentence["raw"] for sentence in image["sentences"]])
        of_split = splits.setdefault(split, {})
        of_split[name] = of_split.get(name, ()) + captions
    return splits


def _check_captions(captions: list[Any]) -> Captions:
    """Return captions as they are, for a run resumes on the same ones alone; none where one of them is not a text."""
    return tuple(captions) if is_caption(captions) else ()


def _collect(table: Path, split: str, captions: dict[Any, Captions]) -> ImageCollection:
    folder = _find_folder(table, [name for name in islice(captions, _NAMES_TRIED) if isinstance(name, str)])
    resolved = folder.resolve()
    names = [check_path(resolved, name, f"{table}, image {number}") for number, name in enumerate(captions)]
    source = f"{table}, split {split}" if split else str(table)
    return ImageCollection(source, names, ImageFiles(folder, names), captions=list(captions.values()))


def _find_folder(table: Path, names: list[str]) -> Path:
    """Return the folder that the paths in a table are relative to: one near it that has some of them.

    COCO's captions are in `annotations`, and its images in `train2017` next to that; Karpathy's files do not say where
    the images are.
    """
    root = table.parent
    near = [root, *sorted(root.glob("*/")), *sorted(root.glob("*/*/"))]
    near += [root.parent, root.parent / "images", *sorted(root.parent.glob("*20[0-9][0-9]/"))]
    for folder in near:
        if any((folder / name).is_file() for name in names):
            return folder
    raise ValueError(f"{table}: its images, such as {names[:1]}, must be in {root}, or in a folder in or next to it")
