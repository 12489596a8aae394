"""Evaluation data in CLIP_benchmark's layout: every sample once, in order, none left over.

    FOLDER/
        classnames.txt  zeroshot_classification_templates.txt     for classification; templates hold {c}
        dataset_type.txt                                          one of KINDS; "retrieval" for captions
        test/nshards.txt  test/0.tar  ...                         and other splits next to it

A folder called `composition`, or with that word in dataset_type.txt, has for each image its right caption and then
wrong ones. One with `pairs` there has two images and two captions a sample (0.png, 1.png, 0.txt, 1.txt; caption i is of
image i), one with `objects` an image and {"present": [...], "absent": [...]} in a member json. Samples of composition
and pairs may have {"kind": "swapped colours"} in such a member.

Images in another layout (`image_sources`) are evaluated in place, as an `ImageEvaluationFolder`; the two text files for
classification may lie in their folder, too: with `classnames.txt` it is found in a folder of several.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from diffvision.data.images.image_set import ImageCollection, ImageSet
from diffvision.data.images.image_sources import (
    ARCHIVE,
    NAMED_TABLES,
    ImageSource,
    is_image_source,
    is_shard_source,
    name_classes,
    open_source,
)
from diffvision.data.images.samples import (
    CaptionMember,
    Composition,
    ImageLabel,
    ImageMember,
    ImageObjects,
    ImagePair,
    Retrieval,
    Transform,
)
from diffvision.data.images.shard_images import read_shards
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.remote import is_remote
from diffvision.data.shards.report import Limits
from diffvision.data.shards.sample import SampleKind
from diffvision.data.shards.sources import find_shards, is_shard, list_splits
from diffvision.data.shards.storage import ShardSet
from diffvision.data.splits import splits_in
from diffvision.files import decoded

TASKS = ("zero_shot", "retrieval", "composition", "pairs", "objects")
KINDS = ("classification", *TASKS[1:])
"""What dataset_type.txt may say; without that file, a folder is for classification."""
TEMPLATES = ("a photo of a {c}.",)
"""Of images in a folder for each class, which come with no templates."""
_MAX_DEPTH = 3
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


class EvaluationFolder:
    """One evaluation dataset.

    Attributes:
        name: as given, else that of the folder, or of its parent where the folder is called after its task.
        task: one of TASKS: what its samples are for.
        classnames, templates: lines of the text files; empty where there are none.
        own_names: of the classes in prompts, where they are not `classnames`.
        splits: the splits it has, such as ["test", "train"].
        stand_in: the split that "test" is, of data without one of that name.

    Raises:
        ValueError: no split with shards, or an unknown kind of dataset.
    """

    task: str
    name: str
    splits: list[str]
    classnames: list[str]
    own_names: list[str]
    stand_in: str | None = None

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self._set_path(path)
        self.splits = _splits(self.path)
        if not self.splits:
            raise ValueError(f"{path} is no evaluation folder: no split such as test/ with nshards.txt and 0.tar")
        kind = " ".join(read_lines(self.path / "dataset_type.txt")).lower() or "classification"
        if kind not in KINDS:
            raise ValueError(f"{self.path}/dataset_type.txt says {kind!r}: only {', '.join(KINDS)} are read")
        absolute = Path(os.path.abspath(self.path))  # a link keeps the name that the user gave it
        self.task = "zero_shot" if kind == "classification" else kind
        if kind == "retrieval" and absolute.name == "composition":
            self.task = "composition"
        self.name = name or (absolute.parent.name if absolute.name in TASKS else absolute.name)
        self.classnames, self.own_names = list(self.own_names), []

    def _set_path(self, path: str | Path) -> None:
        """Set the path, and read the text files there."""
        self.path = Path(path)
        self.own_names = read_lines(self.path / "classnames.txt")
        self.templates = read_lines(self.path / "zeroshot_classification_templates.txt")

    def __repr__(self) -> str:
        return f"EvaluationFolder({str(self.path)!r}, task={self.task!r})"

    def batches(
        self,
        transform: Transform,
        *,
        split: str = "test",
        batch_size: int = 64,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        limits: Limits | None = None,
    ) -> "EvaluationLoader":
        """Return `ImageLabelBatch`es of a zero_shot folder, `RetrievalBatch`es of the others."""
        self.check_split(split)
        return EvaluationLoader(
            self.samples(split), self.kind(transform), batch_size, num_workers, rank, world_size, limits
        )

    def check_split(self, split: str) -> None:
        """Raise a ValueError where there is no such split."""
        if split not in self.splits:
            raise ValueError(f"{self.path} has no split {split!r} to evaluate on: it has {', '.join(self.splits)}")

    def kind(self, transform: Transform) -> SampleKind:
        """Return how a sample becomes a row of a batch: which members are read for the folder's task, and as what."""
        image, caption = ImageMember(transform), CaptionMember()
        kinds: dict[str, SampleKind] = {
            "zero_shot": ImageLabel(image),
            "retrieval": Retrieval(image, caption),
            "composition": Composition(image, caption),
            "pairs": ImagePair(transform),
            "objects": ImageObjects(image),
        }
        return kinds[self.task]

    def samples(self, split: str) -> ShardSet | ImageSet:
        """Return the samples of a split."""
        return ShardSet(self.path / split)

    def files(self, split: str) -> list[Path]:
        """Return the files and folders whose content decides what a split is."""
        return [self.path / split]


class ImageEvaluationFolder(EvaluationFolder):
    """Images evaluated in place: zero-shot of those with labels, retrieval of those with captions.

    A source without splits is all one, "test"; a split for validation counts as "test" where there is none.

    Args:
        source, columns, classnames: as `image_sources.find_images` takes them.
        name: in metrics; by default the source's.
        task: "zero_shot" or "retrieval", of images that have labels and captions; by default "zero_shot".

    Raises:
        ValueError: no images, or none with what the task needs.
    """

    def __init__(
        self,
        source: str | Path,
        name: str | None = None,
        *,
        task: str | None = None,
        columns: dict[str, str] | None = None,
        classnames: Sequence[str] = (),
    ) -> None:
        location = str(source)
        self._set_path(location)
        self._source, self._numbered = self._open(location, task, columns), classnames
        self._splits: dict[str, str | None] = {split: split for split in self._source.splits} or {"test": None}
        if "test" not in self._splits and "validation" in self._splits:
            self._splits["test"] = self._splits.pop("validation")
            self.stand_in = "validation"
        self.splits = sorted(self._splits)
        first = "test" if "test" in self._splits else self.splits[0]
        images = self._source.images(self._splits[first], classnames)
        kinds = {"zero_shot": images.labels, "retrieval": images.captions}
        having = [kind for kind, values in kinds.items() if values is not None]
        self.task = task or having[0]
        if self.task not in having:
            raise ValueError(
                f"{location} cannot be used for {self.task!r}, only for {' and '.join(having)}: give another folder"
            )
        self._images = {first: self._by_image(images)}
        self.name = name or self._own_name(location)
        self.classnames = name_classes(images.classnames)
        if self.classnames and not self.templates:
            self.templates = list(TEMPLATES)

    def _open(self, location: str, task: str | None, columns: dict[str, str] | None) -> ImageSource:
        reads: Any = {"zero_shot": "labels", "retrieval": "captions"}.get(task or "")
        return open_source(location, columns, reads)

    def _own_name(self, location: str) -> str:
        return Path(os.path.abspath(location)).stem

    def samples(self, split: str) -> ImageSet:
        """Return the samples of a split."""
        return ImageSet(self.images(split))

    def files(self, split: str) -> list[Path]:
        """Return the files and folders whose content decides what a split is."""
        is_table = self.path.is_file() and self.path.suffix.lower() != ARCHIVE  # its images lie beside it
        return [self.path.parent if is_table else self.path]

    def images(self, split: str) -> ImageCollection:
        """Return the images of a split.

        Raises:
            ValueError: there is no such split; as `image_sources.find_images`.
        """
        self.check_split(split)
        if split not in self._images:
            self._images[split] = self._by_image(self._source.images(self._splits[split], self._numbered))
        return self._images[split]

    def _by_image(self, images: ImageCollection) -> ImageCollection:
        """Return images with what the task reads of them, each once."""
        if self.task == "zero_shot":
            return replace(images, captions=None).by_image()
        return replace(images, labels=None, classnames=()).by_image()


class ShardEvaluationFolder(ImageEvaluationFolder):
    """Shards in any layout that training reads, evaluated in place: `dataset_type.txt` is not needed.

    Captions are for retrieval, in which samples of the same image, byte by byte, are one; class numbers are for
    zero-shot classification where there are no captions or a classnames.txt names the classes.

    Raises:
        ValueError: no shards, or samples with neither captions nor class numbers.
    """

    def _open(self, location: str, task: str | None, columns: dict[str, str] | None) -> ImageSource:
        splits: dict[str, Any] = list_splits(location) or {"": location}
        self._shards = {split or "test": find_shards(shards) for split, shards in splits.items()}
        self.own_names = []
        return ImageSource(location, {split: partial(self._read, location, split, task) for split in splits})

    def _read(self, location: str, split: str, task: str | None) -> ImageCollection:
        source = f"{location}, split {split}" if split else location
        shards = ShardSet(self._shards[split or "test"])
        images = read_shards(source, shards, packed_names(location))
        is_labelled = images.labels is not None and bool(images.classnames or images.captions is None)
        if task in ("zero_shot", "retrieval"):
            is_labelled = task == "zero_shot"
        return replace(images, captions=None) if is_labelled else replace(images, labels=None, classnames=())

    def _own_name(self, location: str) -> str:
        absolute = Path(os.path.abspath(location))
        return (absolute.parent if is_shard(absolute.name) else absolute).name

    def files(self, split: str) -> list[Path]:
        """Return the files whose content decides what a split is."""
        shards = self._shards.get(split) or self._shards["validation"]
        return [Path(shard.location) for shard in shards]


def find_folders(path: str | Path, task: str | None = None) -> list[EvaluationFolder]:
    """Return the evaluation folder at a path, or those up to three levels under it, by name; else the images there.

    Images are in shards or in another layout (`ShardEvaluationFolder`, `ImageEvaluationFolder`).

    `NAME=PATH` gives the folder a name for its metrics.

    Args:
        path: of evaluation folders, shards or images.
        task: "zero_shot" or "retrieval", where images have labels and captions; by default "zero_shot" of those.

    Raises:
        ValueError: there are none, or no such path; several for one name.
    """
    name, location = None, str(path)
    if not Path(location).exists() and (match := _NAMED.fullmatch(location)):
        name, location = match[1], match[2]
    is_shards = is_shard(location) and not is_remote(location)
    if not location.strip() or not (is_shards or Path(location).exists()):
        raise ValueError(f"there is no {location!r}: give an evaluation folder, or a folder that holds some")
    folders = list(_walk(Path(location), _MAX_DEPTH))
    if not folders and (is_shard_source(location) or is_image_source(location)):
        return [_open_images(location, name, task)]
    if not folders:
        raise ValueError(
            f"{location} must be a folder, a .tar, a .zip or a table of images ({', '.join(NAMED_TABLES)})"
        )
    if name is not None:
        tasks = [folder.task for folder in folders]
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"{path} is a name for {len(folders)} evaluation folders: give each a name, or none")
        return [type(folder)(folder.path, name) for folder in folders]
    return folders


def _open_images(source: str, name: str | None, task: str | None) -> ImageEvaluationFolder:
    """Return images for a task if they have what it needs, else for what they have."""
    kind = ShardEvaluationFolder if is_shard_source(source) else ImageEvaluationFolder
    if task in ("zero_shot", "retrieval"):
        with suppress(ValueError):
            return kind(source, name, task=task)
    return kind(source, name)


def in_order(classes: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return as many names as classes in their order: the first name is the first class's, or the lowest number's."""
    if not all(map(str.isdecimal, classes)):
        return list(names)
    numbers = sorted(map(int, classes))
    return [names[numbers.index(int(one))] for one in classes]


def _walk(path: Path, depth: int) -> Iterator[EvaluationFolder]:
    """Yield the evaluation folders in a folder, at most `depth` levels down."""
    if _splits(path):
        yield EvaluationFolder(path)
    elif depth < _MAX_DEPTH and (path / "classnames.txt").is_file() and is_image_source(str(path)):
        yield ImageEvaluationFolder(path)
    elif depth and path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _walk(child, depth - 1)


def _splits(path: Path) -> list[str]:
    """Return the subfolders with nshards.txt; where a folder has the layout's text files, those with 0.tar."""
    if not path.is_dir():
        return []
    names = [p.parent.name for p in path.glob("*/nshards.txt")]
    if not names and any((path / name).is_file() for name in ("classnames.txt", "dataset_type.txt")):
        names = [p.parent.name for p in path.glob("*/0.tar")]
        names = names if "test" in names else []  # else they are shards of any layout
    return sorted(names)


def packed_names(source: Any) -> tuple[str, ...]:
    """Return the class names that `packing.pack` writes next to shards, or in folders of splits; else none."""
    if not isinstance(source, str | Path):
        return ()
    inside = [path for path in sorted(Path(source).glob("*/classnames.txt")) if splits_in(path.parent.name)]
    return tuple(next(filter(None, map(read_lines, [Path(source, "classnames.txt"), *inside])), []))


def read_lines(path: Path) -> list[str]:
    """Return stripped lines, as CLIP_benchmark reads them; none where the file does not exist.

    A blank line keeps its position, for classes are numbered by line, and only a newline ends a line.

    Raises:
        ValueError: the file is not UTF-8.
    """
    if not path.is_file():
        return []
    return [line.strip() for line in StringIO(decoded(path.read_bytes(), path), newline=None)]
