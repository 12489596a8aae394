"""Question files: JSON lines as POPE has them, with labels, objects or answers to score by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from diffvision.evaluation.records import fingerprint

SUFFIXES = (".json", ".jsonl")
OBJECTS = "objects.txt"


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a file.

    Attributes:
        path: the file; its stem is the set's name.
        task: "pope" where every label is yes or no, "chair" where rows have `objects`, otherwise "vqa".
        rows: {"question_id", "image": a name or a list, "text", "label": a text or a list, or "objects": a list}, with
            "kind" and "held_out" where a set has them.
        images: the folder of the images.
    """

    path: Path
    task: str
    rows: Sequence[Mapping[str, Any]]
    images: Path

    @property
    def name(self) -> str:
        """The set's name in metrics."""
        return self.path.stem

    def image_paths(self, row: Mapping[str, Any]) -> list[Path]:
        """Return the paths of a row's images."""
        return [self.images / name for name in _as_list(row["image"])]

    def fingerprints(self) -> list[str]:
        """Return a digest of each question: its text and its images' bytes."""
        known: dict[Path, str] = {}
        for path in (path for row in self.rows for path in self.image_paths(row)):
            known[path] = known.get(path) or sha256(path.read_bytes()).hexdigest()
        return [fingerprint([row["text"], *map(known.get, self.image_paths(row))]) for row in self.rows]


def read_sets(
    data: Sequence[str], images: str | None = None, tasks: Sequence[str] | None = None, *, has_images: bool = True
) -> list[QuestionSet]:
    """Return the question sets of files and folders.

    Args:
        data: files, or folders whose files with questions are read.
        images: the folder of the images; None for `images` next to a file, or the file's own folder.
        tasks: only sets of these.
        has_images: whether the images must be there.

    Raises:
        ValueError: a row that is no question, an id twice, two files of one name, or no set of a task.
        FileNotFoundError: an image is missing.
    """
    sets: dict[str, QuestionSet] = {}
    for path in _files(data):
        beside = path.parent / "images"
        one = _read_set(path, Path(images) if images else beside if beside.is_dir() else path.parent)
        if tasks and one.task not in tasks:
            continue
        if one.name in sets:
            raise ValueError(f"{path} and {sets[one.name].path} have the name {one.name!r}: rename one of them")
        missing = (image for row in one.rows for image in one.image_paths(row) if not image.is_file())
        if has_images and (image := next(missing, None)):
            raise FileNotFoundError(f"no image {image}, of {path.name}: give the folder of the images as --images")
        sets[one.name] = one
    for task in tasks or ():
        if task not in {one.task for one in sets.values()}:
            raise ValueError(f"no questions of {task} in {', '.join(data)}: give a file of them as --data")
    return [*sets.values()]


def accepted(row: Mapping[str, Any]) -> list[str]:
    """Return the right answers of a row."""
    return [str(one) for one in _as_list(row["label"])]


def _files(data: Sequence[str]) -> Iterator[Path]:
    """Yield the files themselves, and the files with questions in folders."""
    for path in map(Path, data):
        if path.is_file():
            yield path
            continue
        files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES and _has_questions(file)]
        if not files:
            raise ValueError(f"{path} has no question files: give JSON lines with question_id, image and text")
        yield from files


def _has_questions(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return '"question_id"' in file.readline(100_000)


def _read_set(path: Path, images: Path) -> QuestionSet:
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            id, _, text = str(row["question_id"]), row["image"], row["text"]
            known = row["objects"] if "objects" in row else row["label"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no question ({error!r}): write question_id, image, text, and label or "
                "objects"
            ) from error
        if not isinstance(text, str) or not isinstance(known, str | int | float | list):
            raise ValueError(f"line {number} of {path} has a text or label of another kind: write strings")
        if id in rows:
            raise ValueError(f"line {number} of {path} has question_id {id} again: give each question its own")
        rows[id] = row
    if not rows:
        raise ValueError(f"{path} is empty: write a question a line")
    has_objects = {"objects" in row for row in rows.values()}
    if len(has_objects) > 1:
        raise ValueError(f"{path} has rows with objects and rows without: write them to two files")
    words = set() if True in has_objects else {one.lower() for row in rows.values() for one in accepted(row)}
    task = "chair" if not words else "pope" if words <= {"yes", "no"} else "vqa"
    return QuestionSet(path, task, [*rows.values()], images)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
