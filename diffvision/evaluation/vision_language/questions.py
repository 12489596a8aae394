"""Question files: JSON lines as POPE has them, with labels, objects or answers to score by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from diffvision.data.rows import read_rows
from diffvision.evaluation.per_sample import fingerprint


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a file.

    Attributes:
        path: the file; its stem is the set's name.
        task: "pope" where each row's one label is yes or no, "chair" where rows have `objects`, otherwise "vqa".
        rows: {"question_id", "image": a name or a list, "text", "label": what `read_labels` reads, or "objects": a
            list}, with "kind" and "held_out" where a set has them.
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
        return [self.images / name for name in as_list(row["image"])]

    def compute_digests(self) -> list[str]:
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
        ValueError: a row that is not a question, an id twice, two files of one name, or no set of a task.
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
            raise FileNotFoundError(f"{image} of {path.name} does not exist: set --images to the folder of the images")
        sets[one.name] = one
    if absent := {*(tasks or ())} - {one.task for one in sets.values()}:
        raise ValueError(f"no questions of task {min(absent)} in {', '.join(data)}: add a file of them to --data")
    return [*sets.values()]


def as_list(value: Any) -> list[Any]:
    """Return a value that may stand alone as a list."""
    return value if isinstance(value, list) else [value]


def read_labels(row: Mapping[str, Any]) -> list[str]:
    """Return the right answers of a row's "label": a text, a whole number, {"answer": one of them}, or a list of these.

    The last is VQAv2's form.

    Raises:
        TypeError: it is of another kind, or an empty list.
    """
    labels = [one.get("answer") if isinstance(one, Mapping) else one for one in as_list(row["label"])]
    whole = [int(one) if isinstance(one, float) and one.is_integer() else one for one in labels]
    if not whole or not all(isinstance(one, str | int) and not isinstance(one, bool) for one in whole):
        raise TypeError('label must be a text, a whole number, {"answer": ...} or a list of these')
    return [str(one) for one in whole]


def _files(data: Sequence[str]) -> Iterator[Path]:
    """Yield the files themselves, and the files with questions in folders."""
    for path in map(Path, data):
        files = [file for file in sorted(path.glob("*.json*")) if _has_questions(file)] if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no question files: rows must have question_id, image and text")
        yield from files


def _has_questions(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"question_id"' in file.readline(100_000)


def _read_set(path: Path, images: Path) -> QuestionSet:
    rows: dict[str, dict[str, Any]] = {}
    labels: set[str] = set()
    for number, row in read_rows(path):
        try:
            id, known = str(row["question_id"]), row["objects"] if "objects" in row else read_labels(row)
            if not isinstance(known, list):
                raise TypeError("objects must be a list")
            if not all(isinstance(one, str) for one in [row["text"], *as_list(row["image"]), *known]):
                raise TypeError("texts, images and objects must be strings")
            lowered = {one.lower() for one in known}
            labels |= {"objects"} if "objects" in row else lowered if len(lowered) == 1 else {"several"}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is not a question ({error!r}): it must have question_id, image, text, and "
                "label or objects"
            ) from error
        if id in rows:
            raise ValueError(f"line {number} of {path} has question_id {id} again: question_id must be unique")
        rows[id] = row
    if not rows or any("objects" in row for row in rows.values()) != all("objects" in row for row in rows.values()):
        raise ValueError(f"{path} is empty, or has rows with and without objects: write those to two files")
    task = "chair" if "objects" in next(iter(rows.values())) else "pope" if labels <= {"yes", "no"} else "vqa"
    return QuestionSet(path, task, [*rows.values()], images)
