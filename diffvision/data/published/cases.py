"""Cases of published sets: how their files are read and their images found, and how they become evaluation folders.

Nothing is written before all questions are read and all images are found and decoded.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from diffvision.data.images.decode import decode_image, open_image
from diffvision.data.images.packing import SUFFIXES
from diffvision.data.shards.sample import BadSample
from diffvision.data.shards.sources import decoded
from diffvision.data.shards.writer import (
    Sample,
    refuse_existing,
    write_about,
    write_evaluation_split,
    write_lines,
)
from diffvision.progress import track

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""
_PER_SHARD = 1000  # samples are in memory until their shard is written
_TYPES = {str: "a text", int: "a whole number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Case:
    """A sample to write.

    Attributes:
        images: files or encoded bytes, by the name of the member without its suffix ("" where there is one image).
        texts: the other members.
        box: what is cropped from the image before all else; a crop is written as PNG, which loses nothing.
    """

    images: Mapping[str, Path | bytes]
    texts: Mapping[str, str]
    box: Box | None = None


@dataclass(frozen=True)
class Folder:
    """An evaluation folder to write: its name, its task, its samples, and prompts where the task has some."""

    name: str
    task: str
    cases: Sequence[Case]
    templates: Sequence[str] = ()


def composition(image: Path, captions: Sequence[str], kind: str = "", box: Box | None = None) -> Case:
    """Return a case with one image, its right caption and then wrong ones, and its kind where it has one."""
    texts = {"txt": "\n".join(map(one_line, captions))}
    return Case({"": image}, {**texts, "json": _json(kind=kind)} if kind else texts, box)


def pair(images: Sequence[Path | bytes], captions: Sequence[str], **facts: object) -> Case:
    """Return a case with two images and two captions, caption i of image i, and facts such as its kind."""
    texts = {f"{side}.txt": one_line(caption) for side, caption in enumerate(captions)}
    return Case({str(side): image for side, image in enumerate(images)}, {**texts, "json": _json(**facts)})


def objects(image: Path, present: Sequence[str], absent: Sequence[str]) -> Case:
    """Return a case with one image, objects that are in it, and as many that are not, each asked against one."""
    return Case({"": image}, {"json": _json(present=list(present), absent=list(absent))})


def one_line(text: str) -> str:
    """Return a text in one line, for captions are the lines of a member; a tokenizer reads the same words."""
    return " ".join(text.split())


def _json(**facts: object) -> str:
    return json.dumps(facts, ensure_ascii=False)


def folder_of(source: str | Path, *names: str) -> Path:
    """Return the first of these folders in the source that exists, else the source.

    Raises:
        ValueError: the source is not a folder.
    """
    source = Path(source)
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}: give the one that holds the set's files")
    return next((source / name for name in names if (source / name).is_dir()), source)


def file_in(folder: Path, name: str, layout: str) -> Path:
    """Return a file of a folder; raise ValueError with the layout that is expected where it is not there."""
    if not (folder / name).is_file():
        raise ValueError(f"{folder} has no {name}: {layout}")
    return folder / name


def read_rows(path: Path, **fields: type) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, of JSON lines, or of a JSON object whose values are objects, in order.

    Args:
        path: the file.
        fields: the fields that each must have, and their types.

    Raises:
        ValueError: the file is not JSON, or an object has no such field.
    """
    text = decoded(path.read_bytes(), path)
    try:
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            content = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): get the file again") from None
    if isinstance(content, dict):
        nested = all(isinstance(value, dict) for value in content.values())
        content = list(content.values()) if nested else [content]
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path} has no rows: get the file again")
    for number, row in enumerate(content, start=1):
        for field, kind in fields.items():
            expected = (int, float) if kind is float else kind
            if not isinstance(row, dict) or not isinstance(row.get(field), expected) or row[field] in ("", [], {}):
                raise ValueError(f"{path}, row {number}, has no {field} that is {_TYPES[kind]}: is it the set's file?")
    return content


def texts_in(values: list[Any], path: Path, number: int) -> list[str]:
    """Return the texts of a list in a row; raise ValueError where one is no text or blank."""
    if not all(isinstance(value, str) and value.strip() for value in values):
        raise ValueError(f"{path}, row {number}, has a caption that is not a text: get the file again")
    return values


class Images:
    """Finds images by the names that a set's files give them, and remembers those that are missing.

    An image is looked for by its path in the folders and in the folders in them, then there by its file name.

    Args:
        folders: where to look, the first one first.
        remedy: what to do if images are missing.
    """

    def __init__(self, folders: Iterable[Path], remedy: str) -> None:
        self.folders = list(folders)
        if missing := [folder for folder in self.folders if not folder.is_dir()]:
            raise ValueError(f"there is no folder {missing[0]}: {remedy}")
        self._remedy = remedy
        self._inside = [
            *self.folders,
            *(child for folder in self.folders for child in sorted(folder.iterdir()) if _is_folder(child)),
        ]
        self._known: dict[str, Path] = {}
        self._missing: list[str] = []

    def __call__(self, name: str) -> Path:
        """Return the path of an image; one that is missing is remembered.

        Raises:
            ValueError: the name is a path that leads out of the folder.
        """
        if name not in self._known:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a path inside {self.folders[0]}: correct the row")
            candidates = [folder / part for part in (path, path.name) for folder in self._inside]
            existing = next((candidate for candidate in candidates if candidate.is_file()), None)
            if existing is None:
                self._missing.append(name)
            self._known[name] = existing or self.folders[0] / path
        return self._known[name]

    def check(self) -> None:
        """Raise ValueError if images are missing: how many, the first, and what to do."""
        if self._missing:
            raise ValueError(
                f"{len(self._missing):,} of {len(self._known):,} images are not in "
                f"{' or '.join(map(str, self.folders))}, first {self._missing[0]}: {self._remedy}"
            )


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def write_folders(
    directory: str | Path, folders: Sequence[Folder], images: Images, *, source: str, licence: str, **facts: object
) -> str:
    """Write evaluation folders with a split `test`, and about.json; return what was written.

    Args:
        directory: what is to hold the folders.
        folders: in this order.
        images: the finder of the images of all cases.
        source: of the set, for about.json.
        licence: of the set and its images.
        facts: what else about.json says, such as counts of what was left out.

    Raises:
        ValueError: an image is missing or damaged, or a folder has shards already; nothing is written.
    """
    directory = Path(directory)
    for folder in folders:
        refuse_existing(directory / folder.name / "test")
    images.check()
    _decode_all([image for folder in folders for case in folder.cases for image in case.images.values()])
    for folder in folders:
        target = directory / folder.name
        cases = track(folder.cases, f"writing {folder.name}")
        write_evaluation_split(target / "test", _samples(cases), _PER_SHARD)
        write_lines(target / "dataset_type.txt", [folder.task])
        if folder.templates:
            write_lines(target / "zeroshot_classification_templates.txt", folder.templates)
    samples = {folder.name: len(folder.cases) for folder in folders}
    write_about(directory, source, licence, samples=samples, **facts)
    return ", ".join(f"{count:,} samples in {name}" for name, count in samples.items())


def _decode_all(images: Sequence[Path | bytes]) -> None:
    """Decode each image once; raise ValueError at the first that cannot be."""
    for image in track(list(dict.fromkeys(images)), "checking images"):
        try:
            decode_image(_data(image))
        except BadSample as reason:
            name = image if isinstance(image, Path) else "an image in the table"
            raise ValueError(f"{name}: {reason}; get the set's images again") from None


def _samples(cases: Iterable[Case]) -> Iterator[Sample]:
    for number, case in enumerate(cases):
        members: dict[str, str | bytes] = {"__key__": f"{number:06d}"}
        for name, image in case.images.items():
            data = _data(image) if case.box is None else _cropped(_data(image), case.box)
            suffix = SUFFIXES[open_image(data).format or ""]
            members[f"{name}.{suffix}" if name else suffix] = data
        yield {**members, **case.texts}


def _data(image: Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()


def _cropped(data: bytes, box: Box) -> bytes:
    """Return a box of an image as PNG; what lies outside of the image is black, as where PIL crops."""
    png = BytesIO()
    decode_image(data).crop(box).save(png, "PNG", compress_level=1)
    return png.getvalue()
