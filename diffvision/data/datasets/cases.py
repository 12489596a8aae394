"""Cases of published sets: how their files are read and their images found, and how they become evaluation folders.

Nothing is written before all questions are read and all images are found and decoded.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path, PurePosixPath
from typing import Any

from diffvision.data.images.decode import decode_image, is_blank, open_image
from diffvision.data.images.pack_images import SUFFIXES
from diffvision.data.images.samples import MAX_KIND
from diffvision.data.rows import read_rows as rows_of
from diffvision.data.shards.sample import BadSample, BadSource
from diffvision.data.shards.writer import Sample, refuse_existing, write_about, write_evaluation_split
from diffvision.progress import track

_PER_SHARD = 1000  # samples are in memory until their shard is written


@dataclass(frozen=True)
class Case:
    """A sample to write.

    Attributes:
        images: files or encoded bytes, by the name of the member without its suffix ("" where there is one image).
        captions: by the name of their member.
        facts: its JSON; its kind becomes part of the names of metrics.
    """

    images: Mapping[str, Path | bytes]
    captions: Mapping[str, Sequence[str]]
    facts: Mapping[str, Any]

    @property
    def fault(self) -> str:
        """Why it cannot be used; "" if it can."""
        captions = [one_line(caption) for of_member in self.captions.values() for caption in of_member]
        if any(map(is_blank, captions)):
            return "with a blank caption"
        return "whose captions are the same" if len(set(captions)) == 1 else ""

    def members(self) -> dict[str, str | bytes]:
        """Return the members of its sample."""
        members: dict[str, str | bytes] = {}
        for name, image in self.images.items():
            data = _read_image(image)
            suffix = SUFFIXES[open_image(data).format or ""]
            members[f"{name}.{suffix}" if name else suffix] = data
        for name, captions in self.captions.items():
            members[name] = "\n".join(map(one_line, captions))
        kind = one_line(self.facts["kind"]).replace("/", "-")[:MAX_KIND].strip()
        return {**members, "json": json.dumps({**self.facts, "kind": kind}, ensure_ascii=False)}


def pair(images: Sequence[Path | bytes], captions: Sequence[str], **facts: object) -> Case:
    """Return a case with two images and two captions, caption i of image i."""
    texts = {f"{side}.txt": [caption] for side, caption in enumerate(captions)}
    return Case({str(side): image for side, image in enumerate(images)}, texts, facts)


def one_line(text: str) -> str:
    """Return a text in one line, because a member has a caption in each line."""
    return " ".join(text.split())


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

    An image is looked for in a folder and in those in it, by its path and then by another one.

    Args:
        folder: where to look.
        remedy: what to do if images are missing.
        other: returns the other path of an image; its file name by default.
    """

    def __init__(
        self, folder: Path, remedy: str, other: Callable[[PurePosixPath], str] = lambda path: path.name
    ) -> None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: {remedy}")
        self._folders = [folder, *(child for child in sorted(folder.iterdir()) if child.is_dir())]
        self._remedy, self._other = remedy, other
        self._found: dict[str, Path | None] = {}

    def __call__(self, name: str) -> Path:
        """Return the path of an image; one that is missing is remembered.

        Raises:
            ValueError: the name is a path that leads out of the folder, or two folders have other images of that name.
        """
        if name not in self._found:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a path inside {self._folders[0]}: correct the row")
            names = (path, self._other(path))
            first, *inside = ([folder / one for one in names] for folder in self._folders)
            found = [place for place in first if place.is_file()][:1]
            found = found or [place for places in inside for place in places if place.is_file()]
            if other := next((place for place in found[1:] if not cmp(place, found[0], shallow=False)), None):
                raise ValueError(f"{name} must be one image, got {found[0]} and {other}: give the folder of one")
            self._found[name] = found[0] if found else None
        return self._found[name] or self._folders[0] / name

    def check(self) -> None:
        """Raise ValueError if images are missing: how many, the first, and what to do."""
        if missing := [name for name, path in self._found.items() if path is None]:
            raise ValueError(
                f"{len(missing):,} of {len(self._found):,} images are not in {self._folders[0]}, first {missing[0]}: "
                f"{self._remedy}"
            )


def write_cases(directory: str | Path, task: str, cases: Sequence[Case], images: Images, **about: str) -> str:
    """Write an evaluation folder named after its task, with a split `test`, and about.json; return what was written.

    Cases without information are left out: a caption is blank, or all captions are the same.

    Args:
        directory: the folder to write it in.
        task: of all samples.
        cases: the samples, in order.
        images: the finder of the images of all cases.
        about: source and licence of the set and its images.

    Raises:
        ValueError: an image is missing or damaged, no case can be used, or the folder has shards already; nothing is
            written.
    """
    folder = Path(directory, task, "test")
    refuse_existing(folder)
    images.check()
    _decode_all(image for case in cases for image in case.images.values())
    usable = [case for case in cases if not case.fault]
    faults = Counter(case.fault for case in cases if case.fault)
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in faults.items())
    if not usable:
        raise BadSource(f"no row of the set can be used for {task} ({left_out})")
    write_evaluation_split(folder, _samples(track(usable, f"writing {task}")), _PER_SHARD, dataset_type=[task])
    write_about(directory, samples={task: len(usable)}, left_out={task: faults} if faults else {}, **about)
    written = f"{len(usable):,} samples in {task}"
    return f"{written}\nleft out of {task}: {left_out}" if faults else written


def _decode_all(images: Iterable[Path | bytes]) -> None:
    """Decode each image once; raise ValueError at the first that cannot be decoded."""
    for image in track(list(dict.fromkeys(images)), "checking images"):
        try:
            decode_image(_read_image(image))
        except BadSample as reason:
            name = image if isinstance(image, Path) else "an image in the table"
            raise ValueError(f"{name}: {reason}; get the set's images again") from None


def _samples(cases: Iterable[Case]) -> Iterator[Sample]:
    for number, case in enumerate(cases):
        yield {"__key__": f"{number:06d}", **case.members()}


def _read_image(image: Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
