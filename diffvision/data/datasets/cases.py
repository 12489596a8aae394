"""Cases of published sets: how their files are read and their images found, and how they become evaluation folders.

Nothing is written before all questions are read and all images are found and decoded.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path, PurePosixPath
from typing import Any

from diffvision.data.images.decode import decode_image, is_blank, open_image
from diffvision.data.images.pack_images import SUFFIXES
from diffvision.data.images.samples import MAX_KIND
from diffvision.data.rows import read_rows as rows_of
from diffvision.data.shards.sample import BadSample, BadSource
from diffvision.data.shards.writer import (
    Sample,
    refuse_existing,
    write_about,
    write_evaluation_split,
)
from diffvision.progress import track

_PER_SHARD = 1000  # samples are in memory until their shard is written


@dataclass(frozen=True)
class Case:
    """A sample to write.

    Attributes:
        images: files or encoded bytes, by the name of the member without its suffix ("" where there is one image).
        texts: the other members.
    """

    images: Mapping[str, Path | bytes]
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Folder:
    """An evaluation folder to write.

    Attributes:
        name: of the folder.
        task: of its samples.
        cases: its samples.
        templates: prompts, where the task has some.
        left_out: how many of the set's rows are left out, by reason.
    """

    name: str
    task: str
    cases: Sequence[Case]
    templates: Sequence[str] = ()
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)


def composition(image: Path, captions: Sequence[str], kind: str) -> Case:
    """Return a case with one image, its right caption and then wrong ones, and its kind."""
    return Case({"": image}, {"txt": "\n".join(map(one_line, captions)), "json": _json(kind=_kind(kind))})


def pair(images: Sequence[Path | bytes], captions: Sequence[str], kind: str, **facts: object) -> Case:
    """Return a case with two images and two captions, caption i of image i, its kind, and other facts."""
    texts = {f"{side}.txt": one_line(caption) for side, caption in enumerate(captions)}
    return Case(
        {str(side): image for side, image in enumerate(images)}, {**texts, "json": _json(kind=_kind(kind), **facts)}
    )


def objects(image: Path, present: Sequence[str], absent: Sequence[str]) -> Case:
    """Return a case with one image, objects that are in it, and as many that are not, each asked against one."""
    return Case({"": image}, {"json": _json(present=list(present), absent=list(absent))})


def one_line(text: str) -> str:
    """Return a text in one line, for captions are the lines of a member; a tokenizer reads the same words."""
    return " ".join(text.split())


def _kind(text: str) -> str:
    """Return a kind as the names of metrics can have it: in one line, without slashes, not too long."""
    return one_line(text).replace("/", "-")[:MAX_KIND].strip()


def _json(**facts: object) -> str:
    return json.dumps(facts, ensure_ascii=False)


def folder_of(source: str | Path, *names: str) -> Path:
    """Return the first of these folders in the source that exists, else the source.

    Raises:
        BadSource: the source is not a folder.
    """
    source = Path(source)
    if not source.is_dir():
        raise BadSource(f"there is no folder {source}: give the one that holds the set's files")
    return next((source / name for name in names if (source / name).is_dir()), source)


def file_in(folder: Path, name: str, layout: str) -> Path:
    """Return a file of a folder; raise BadSource with the layout that is expected where it is not there."""
    if not (folder / name).is_file():
        raise BadSource(f"{folder} has no {name}: {layout}")
    return folder / name


def read_rows(path: Path, **fields: type) -> list[dict[str, Any]]:
    """Return the objects of a file that `diffvision.data.rows` reads, in order; each must have the fields.

    Raises:
        ValueError: the file cannot be read or is empty, or an object has no such field, or an empty one.
    """
    rows = [row for _, row in rows_of(path)]
    if not rows:
        raise ValueError(f"{path} has no rows: get the file again")
    for number, row in enumerate(rows, start=1):
        for field, kind in fields.items():
            if not isinstance(row, dict) or not isinstance(row.get(field), kind) or not row[field]:
                raise ValueError(f"{field} in row {number} of {path} must be a {kind.__name__}: is it the set's file?")
    return rows


class Images:
    """Finds images by the names that a set's files give them, and remembers those that are missing.

    An image is looked for in the folders and in the folders in them, by its path and then by another one.

    Args:
        folders: where to look, the first one first.
        remedy: what to do if images are missing.
        other: returns the other path of an image; its file name by default.
    """

    def __init__(
        self, folders: Iterable[Path], remedy: str, other: Callable[[PurePosixPath], str] = lambda path: path.name
    ) -> None:
        given = list(folders)
        if missing := [folder for folder in given if not folder.is_dir()]:
            raise ValueError(f"there is no folder {missing[0]}: {remedy}")
        self._inside = [child for folder in given for child in sorted(folder.iterdir()) if child.is_dir()]
        self.folders, self._remedy, self._other = given, remedy, other
        self._known: dict[str, Path | None] = {}

    def __call__(self, name: str) -> Path:
        """Return the path of an image; one that is missing is remembered.

        Raises:
            ValueError: the name is a path that leads out of the folder, or two folders have other images of that name.
        """
        if name not in self._known:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a path inside {self.folders[0]}: correct the row")
            named: list[PurePosixPath | str] = [path, self._other(path)]
            found = [folder / one for one in named for folder in self.folders if (folder / one).is_file()]
            if not found:
                found = [folder / one for one in named for folder in self._inside if (folder / one).is_file()]
                if other := next((one for one in found[1:] if not cmp(one, found[0], shallow=False)), None):
                    raise ValueError(f"{name} must be one image, got {found[0]} and {other}: give the folder of one")
            self._known[name] = found[0] if found else None
        return self._known[name] or self.folders[0] / name

    def check(self) -> None:
        """Raise ValueError if images are missing: how many, the first, and what to do."""
        if missing := [name for name, path in self._known.items() if path is None]:
            raise ValueError(
                f"{len(missing):,} of {len(self._known):,} images are not in {self.folders[0]}, first {missing[0]}: "
                f"{self._remedy}"
            )


def write_folders(
    directory: str | Path, folders: Sequence[Folder], images: Images, *, source: str, licence: str
) -> str:
    """Write evaluation folders with a split `test`, and about.json; return what was written and what was left out.

    Left out are samples that say nothing: a caption is blank, or all captions are the same.

    Args:
        directory: what is to hold the folders.
        folders: in this order.
        images: the finder of the images of all cases.
        source: of the set, for about.json.
        licence: of the set and its images.

    Raises:
        ValueError: an image is missing or damaged, nothing is left of a folder, or one has shards already; nothing is
            written.
    """
    directory = Path(directory)
    for folder in folders:
        refuse_existing(directory / folder.name / "test")
    images.check()
    _decode_all([image for folder in folders for case in folder.cases for image in case.images.values()])
    folders = [_drop_faulty(folder) for folder in folders]
    for folder in folders:
        samples = _samples(track(folder.cases, f"writing {folder.name}"))
        texts = {"dataset_type": [folder.task], "templates": folder.templates}
        write_evaluation_split(directory / folder.name / "test", samples, _PER_SHARD, **texts)
    counts = {folder.name: len(folder.cases) for folder in folders}
    left_out = {folder.name: folder.left_out for folder in folders if folder.left_out}
    write_about(directory, source, licence, samples=counts, left_out=left_out)
    written = ", ".join(f"{count:,} samples in {name}" for name, count in counts.items())
    return "\n".join([written, *(f"left out of {name}: {_list_counts(counts)}" for name, counts in left_out.items())])


def _drop_faulty(folder: Folder) -> Folder:
    """Return a folder without the cases that say nothing; raise BadSource if there are no others."""
    faults = [_find_fault(case) for case in folder.cases]
    kept = [case for case, fault in zip(folder.cases, faults, strict=True) if not fault]
    left_out = folder.left_out | Counter(filter(None, faults))
    if not kept:
        raise BadSource(f"no row of the set can be used for {folder.name} ({_list_counts(left_out) or 'it has none'})")
    return replace(folder, cases=kept, left_out=left_out)


def _find_fault(case: Case) -> str:
    """Return why a case says nothing; "" where it says something."""
    captions = [line for name, text in case.texts.items() if name.endswith("txt") for line in text.split("\n")]
    if any(map(is_blank, captions)):
        return "with a blank caption"
    if captions and len(set(captions)) == 1:
        return "whose captions are the same"
    return ""


def _list_counts(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())


def _decode_all(images: Sequence[Path | bytes]) -> None:
    """Decode each image once; raise ValueError at the first that cannot be."""
    for image in track(list(dict.fromkeys(images)), "checking images"):
        try:
            decode_image(_read_image(image))
        except BadSample as reason:
            name = image if isinstance(image, Path) else "an image in the table"
            raise ValueError(f"{name}: {reason}; get the set's images again") from None


def _samples(cases: Iterable[Case]) -> Iterator[Sample]:
    """Yield one sample for a shard per case."""
    for number, case in enumerate(cases):
        members: dict[str, str | bytes] = {"__key__": f"{number:06d}"}
        for name, image in case.images.items():
            data = _read_image(image)
            suffix = SUFFIXES[open_image(data).format or ""]
            members[f"{name}.{suffix}" if name else suffix] = data
        yield {**members, **case.texts}


def _read_image(image: Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
