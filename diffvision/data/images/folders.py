"""Evaluation data in CLIP_benchmark's layout: every sample once, in order, none left over.

    FOLDER/
        classnames.txt  zeroshot_classification_templates.txt     for classification; templates hold {c}
        dataset_type.txt                                          "retrieval" where samples have captions
        test/nshards.txt  test/0.tar  ...                         and other splits beside it

A folder called `composition`, or with that word in dataset_type.txt, has for each image its right caption and then
wrong ones. Pictures that are in no such layout (`data.pictures`) are evaluated where they lie, as a `PictureFolder`.
"""

import os
import re
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from diffvision.data.images.picture_set import Pictures, PictureSet
from diffvision.data.images.pictures import TORCHVISION, class_prompts, find_pictures, is_pictures, splits
from diffvision.data.images.samples import (
    CaptionMember,
    ImageLabel,
    ImageMember,
    Retrieval,
    SampleKind,
    Tokenizer,
    Transform,
)
from diffvision.data.shards.loader import BatchReader, Request, as_is
from diffvision.data.shards.order import Order, SequentialOrder
from diffvision.data.shards.report import Limits, Report, Tally
from diffvision.data.shards.sources import decoded
from diffvision.data.shards.storage import ShardSet
from diffvision.data.shards.watchdog import STALL_TIMEOUT, Pulse, watched

TASKS = ("zero_shot", "retrieval", "composition")
TEMPLATES = ("a photo of a {c}.",)
"""Of pictures in a folder for each class, which come with no templates."""
_MAX_DEPTH = 3
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


class EvaluationFolder:
    """One evaluation data set.

    Attributes:
        name: the one given, else the folder's, or its parent's where the folder is called after its task.
        task: "zero_shot", "retrieval" or "composition": what its samples are for.
        classnames, templates: lines of the text files; empty where there are none.
        splits: the splits it has, such as ["test", "train"].
        transform, tokenizer: what `bound` gave; defaults for `batches`.

    Raises:
        ValueError: no split with shards there, or a kind of data set that is not known.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.splits = _splits(self.path)
        if not self.splits:
            raise ValueError(f"{path} is no evaluation folder: no split such as test/ with nshards.txt and 0.tar")
        kind = " ".join(lines_of(self.path / "dataset_type.txt")).lower() or "classification"
        if kind not in ("classification", "retrieval", "composition"):
            raise ValueError(
                f"{self.path}/dataset_type.txt says {kind!r}: only classification, retrieval and composition are read"
            )
        absolute = Path(os.path.abspath(self.path))  # a link keeps the name that the user gave it
        if kind == "classification":
            self.task = "zero_shot"
        else:
            self.task = "composition" if "composition" in (kind, absolute.name) else "retrieval"
        self.name = name or (absolute.parent.name if absolute.name in TASKS else absolute.name)
        self.classnames = lines_of(self.path / "classnames.txt")
        self.templates = lines_of(self.path / "zeroshot_classification_templates.txt")
        self.transform: Transform | None = None
        self.tokenizer: Tokenizer | None = None

    def __repr__(self) -> str:
        return f"EvaluationFolder({str(self.path)!r}, task={self.task!r})"

    def bound(self, transform: Transform | None, tokenizer: Tokenizer | None = None) -> "EvaluationFolder":
        """The same folder with a model's preprocessing."""
        folder = copy(self)
        folder.transform, folder.tokenizer = transform, tokenizer
        return folder

    def batches(
        self,
        transform: Transform | None = None,
        *,
        split: str = "test",
        batch_size: int = 64,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        limits: Limits | None = None,
    ) -> "EvaluationLoader":
        """`ImageLabelBatch`es of a zero_shot folder, `RetrievalBatch`es of the others."""
        if split not in self.splits:
            raise ValueError(f"{self.path} has no split {split!r}: it has {', '.join(self.splits)}")
        transform = transform or self.transform
        if transform is None:
            raise ValueError(f"no transform for the images of {self.path}: give one, or use bound()")
        return EvaluationLoader(
            self.samples(split), self.kind(transform), batch_size, num_workers, rank, world_size, limits
        )

    def kind(self, transform: Transform) -> SampleKind:
        """What is made of its samples."""
        image = ImageMember(transform)
        return ImageLabel(image) if self.task == "zero_shot" else Retrieval(image, CaptionMember())

    def samples(self, split: str) -> "ShardSet | PictureSet":
        """The samples of a split."""
        return ShardSet(self.path / split)

    def files(self, split: str) -> Path:
        """The file or folder whose content decides what a split is."""
        return self.path / split


class PictureFolder(EvaluationFolder):
    """Pictures evaluated where they lie: zero-shot of those with labels, retrieval of those with captions.

    A source without splits is all one, "test"; a split for validation counts as "test" where there is none.

    Args:
        source, table, columns, classnames: as `pictures.find_pictures` takes them.
        name: in metrics; by default the source's.
        task: "zero_shot" or "retrieval", of pictures that have labels and captions; by default "zero_shot".

    Raises:
        ValueError: no pictures there; without what the task needs.
    """

    def __init__(
        self,
        source: str | Path,
        name: str | None = None,
        *,
        task: str | None = None,
        table: str | Path | None = None,
        columns: dict[str, str] | None = None,
        classnames: Sequence[str] = (),
    ) -> None:
        location = str(source)
        self._find = partial(find_pictures, location, table=table, columns=columns, classnames=classnames)
        given = {} if table is not None else splits(location)
        self._splits: dict[str, str | None] = {split: split for split in given} or {"test": None}
        if "test" not in given and "validation" in given:
            self._splits["test"] = self._splits.pop("validation")
        self.splits = sorted(self._splits)
        pictures = self._find(self._splits[self.splits[0]])
        kinds = {"zero_shot": pictures.labels, "retrieval": pictures.captions}
        self.task = task or next(kind for kind, values in kinds.items() if values is not None)
        if self.task not in kinds or kinds[self.task] is None:
            having = " and ".join(kind for kind, values in kinds.items() if values is not None)
            raise ValueError(f"{location} cannot be used for {self.task!r}: its captions or labels are for {having}")
        dataset, _, root = location.removeprefix(TORCHVISION).partition(":")
        self.path = Path(root) if location.startswith(TORCHVISION) else Path(location)
        self.name = name or (dataset if location.startswith(TORCHVISION) else Path(os.path.abspath(self.path)).stem)
        self.classnames = class_prompts(pictures.classnames)
        self.templates = list(TEMPLATES) if self.classnames else []
        self.transform, self.tokenizer = None, None

    def samples(self, split: str) -> PictureSet:
        return PictureSet(self.pictures(split))

    def files(self, split: str) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def pictures(self, split: str) -> Pictures:
        """The pictures of a split."""
        return self._find(self._splits[split])


class EvaluationLoader:
    """Batches of a set of shards in order, each sample exactly once over all ranks; the last batch may be smaller.

    Rank r of w has the r-th of w contiguous parts, so putting the ranks' results one after another keeps the order.
    Bad samples are left out and counted in `report`, which is of this rank's part.
    """

    def __init__(
        self,
        shards: ShardSet | PictureSet,
        kind: SampleKind,
        batch_size: int = 64,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        limits: Limits | None = None,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it counts the samples of a batch, 1 or more")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: it counts processes, 0 to read in this one")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
        self.batch_size, self.limits = batch_size, limits or Limits()
        self.stall_timeout, self._pulse = stall_timeout, Pulse()
        start, stop = (len(shards) * r // world_size for r in (rank, rank + 1))
        firsts = range(start, stop, batch_size)
        self._requests = [Request(0, first, min(first + batch_size, stop)) for first in firsts]
        self._samples = stop - start
        self._beside, self._num_workers = shards.beside, num_workers
        self.report = self.new_report()
        order = partial(_sequential, shards.counts)
        self._reader = BatchReader(shards, kind, order, limits=self.limits, pulse=self._pulse)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        self.report = self.new_report()
        for batch, tally in self.tallied(range(len(self))):
            self.report.add(tally, self.limits)
            if batch is not None:
                yield batch

    def tallied(self, numbers: Sequence[int]) -> Iterator[tuple[Any, Tally]]:
        """Batches by their numbers: each (None where no sample is good) with what became of its samples."""
        loader = DataLoader(
            self._reader,
            batch_size=None,
            sampler=[self._requests[number] for number in numbers],
            num_workers=min(self._num_workers, len(numbers)),
            collate_fn=as_is,
            generator=torch.Generator(),  # or it would draw from the process's own, and change the training around it
        )
        yield from watched(loader, self._pulse, self.stall_timeout)

    def new_report(self) -> Report:
        """One of nothing yet."""
        return Report(self._samples, beside=self._beside)


def find_folders(path: str | Path) -> list[EvaluationFolder]:
    """The path itself, or the evaluation folders up to three levels under it, by name; else the pictures there.

    `NAME=PATH` gives the one that is there a name for its metrics.

    Raises:
        ValueError: there are none, or no such path; several for one name.
    """
    name, location = None, str(path)
    if not Path(location).exists() and (match := _NAMED.fullmatch(location)):
        name, location = match[1], match[2]
    if not Path(location).exists() and not location.startswith(TORCHVISION):
        raise ValueError(f"there is no {location}: give an evaluation folder, or a folder that holds some")
    folders = list(_found(Path(location), _MAX_DEPTH))
    if not folders and is_pictures(location):
        try:
            return [PictureFolder(location, name)]
        except ValueError as error:
            raise ValueError(
                f"no evaluation folder at or under {location} (one has a split such as test/ with nshards.txt), and "
                f"no pictures that can be used: {error}"
            ) from None
    if not folders:
        raise ValueError(f"no evaluation folder at or under {location}: one has a split such as test/ with nshards.txt")
    if name is not None:
        tasks = [folder.task for folder in folders]
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"{path} is a name for {len(folders)} evaluation folders: give each a name, or none")
        return [EvaluationFolder(folder.path, name) for folder in folders]
    return folders


def _found(path: Path, depth: int) -> Iterator[EvaluationFolder]:
    if _splits(path):
        yield EvaluationFolder(path)
    elif depth and path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _found(child, depth - 1)


def _splits(path: Path) -> list[str]:
    """Subfolders with nshards.txt; those with 0.tar also count where the folder has one of the layout's text files."""
    if not path.is_dir():
        return []
    told = [p.parent.name for p in path.glob("*/nshards.txt")]
    if not told and any((path / name).is_file() for name in ("classnames.txt", "dataset_type.txt")):
        told = [p.parent.name for p in path.glob("*/0.tar")]
    return sorted(told)


def lines_of(path: Path) -> list[str]:
    """Stripped lines, as CLIP_benchmark reads them; none where there is no such file.

    A blank one keeps its place, for classes are numbered by line, and no other character than a newline ends one.

    Raises:
        ValueError: the file is not UTF-8.
    """
    if not path.is_file():
        return []
    return [line.strip() for line in StringIO(decoded(path.read_bytes(), path), newline=None)]


def _sequential(counts: Any, epoch: int) -> Order:
    return SequentialOrder(counts)
