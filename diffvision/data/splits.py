"""Which split of a dataset a file belongs to, from its name and those of its folders.

The rule is that of Hugging Face `datasets`, which need not be installed. Where `datasets` would leave files out or put
one into two splits, it is an error here.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Our name of a split -> the words for it in names of files and folders."""

_SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words}
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]")
_NUMBERED = re.compile(r"data/(.+)-\d{5}-of-\d{5}[^/]*\.[^/]*")  # on the Hub, where a split may have any name


def splits_in(*names: str) -> set[str]:
    """Return the splits in names of folders, or of files without their last suffix."""
    words = {word for name in names for word in _BETWEEN_WORDS.split(name.lower())}
    return {_SPLIT_OF[word] for word in words & _SPLIT_OF.keys()}


def file_split(name: str) -> set[str]:
    """Return the splits in a file's own name: `cat-train-000.tar.gz` is in train."""
    return splits_in(name.rpartition(".")[0])


def named_splits(names: Iterable[str], where: Any) -> dict[str, str]:
    """Return {our name of a split: its name there}; a name without a split stays as it is.

    Raises:
        ValueError: two names are of one split, or one name is of two.
    """
    splits: dict[str, str] = {}
    for name in names:
        split = _one_split(splits_in(name), name, where) or name
        if split in splits:
            raise ValueError(f"{where} has two {split} splits, {splits[split]} and {name}: give it only one of them")
        splits[split] = name
    return _order(splits)


def by_split(files: Iterable[str], where: Any) -> dict[str, list[str]]:
    """Return {split: files}, or nothing where no name has a split.

    Args:
        files: paths, relative to the dataset's folder.
        where: the folder, for errors.

    Raises:
        ValueError: only some of the names have a split, or one name has two.
    """
    paths = sorted(files)
    hub = {path: match[1] for path in paths if (match := _NUMBERED.fullmatch(path))}
    splits: dict[str, list[str]] = {}
    if hub:
        for split, name in named_splits(dict.fromkeys(hub.values()), where).items():
            splits[split] = [path for path, its_name in hub.items() if its_name == name]
    else:
        by_folder = {path: splits_in(*PurePosixPath(path).parts[:-1]) for path in paths}
        found = by_folder if any(by_folder.values()) else {path: file_split(PurePosixPath(path).name) for path in paths}
        for path in paths:
            if of := _one_split(found[path], path, where):
                splits.setdefault(of, []).append(path)
    in_splits = {path for of_split in splits.values() for path in of_split}
    if splits and (others := [path for path in paths if path not in in_splits]):
        example = next(iter(splits.values()))[0]
        raise ValueError(
            f"{where}: {example} is in a split and {others[0]} is not: rename or move it, or give one file"
        )
    return _order(splits)


def _one_split(splits: set[str], name: str, where: Any) -> str | None:
    if len(splits) > 1:
        raise ValueError(f"{where}: {name} may be of {' or '.join(sorted(splits))}: rename it for its split")
    return next(iter(splits), None)


def _order(splits: dict[str, Any]) -> dict[str, Any]:
    return {split: splits[split] for split in [*SPLITS, *splits] if split in splits}
