"""One-line messages for mistyped commands, settings and names, with the nearest known name ("did you mean ...?")."""

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from heapq import nlargest
from importlib import import_module
from pathlib import Path
from typing import Any

_LITERAL, _CLASS = "typing.Literal[", "dot import path"
_MIN_RATIO = 0.6  # default of difflib.get_close_matches: less similar names are not suggested
_PATH = re.compile(r"[\w./][\w./ -]*")  # neither a URL, a pattern, NAME=PATH nor a list
# The three forms of jsonargparse's messages that are read; all others stay as they are.
_PLACE = re.compile(r"""(?:Parser|Problem with given) (key|class_path) ["']([^"']+)["']:""")
_EXPECTED = re.compile(r"Expected an? (?!path but)(.+?)(?:\. Got value: .*)?$", re.MULTILINE)
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |option ')(-*[\w.-]+)", re.IGNORECASE)


class Mistake(ValueError):
    """The command line itself is wrong: an unknown option, or a value of another type. The exit status is 2."""


def nearest(name: str, known: Iterable[str], count: int = 1, min_ratio: float = 0.0) -> list[str]:
    """Return the known names that are most similar to a name, the most similar first.

    Args:
        name: the unknown name.
        known: all known names.
        count: the largest number of names to return.
        min_ratio: leave out names that are less similar, from 0 (nothing in common) to 1 (equal up to case).
    """
    matcher = SequenceMatcher(b=name.lower())

    def likeness(other: str) -> float:
        matcher.set_seq1(other.lower())
        return matcher.ratio()

    return [other for other in nlargest(count, known, likeness) if likeness(other) >= min_ratio]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for a name that ends alike, such as model.optimizer.lr for lr, or the nearest one.

    It is "" if none is similar.
    """
    every = list(known)
    names = [other for other in every if _last_part(other) == _last_part(name)]
    names = names or nearest(name, every, min_ratio=_MIN_RATIO)
    return f"; did you mean {names[0]}?" if names else ""


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("--")


def see_help(text: str, program: str) -> str:
    """Return a message followed by the command that prints help."""
    return f"{text}{' See' if text.endswith('?') else '; see'} {program} --help"


def is_missing(path: str) -> bool:
    """Return whether a text can only be the path of a file or folder, and nothing is there."""
    return _PATH.fullmatch(path) is not None and not Path(path).exists()


def one_line(message: str, options: Callable[[], Iterable[str]], classes: Callable[[str], Iterable[str]]) -> str:
    """Return a message of jsonargparse as one line: the setting, what it must be, what it got, and the nearest name.

    Args:
        message: it may nest the messages of the types and classes that were tried for a value.
        options: returns those of the parser.
        classes: returns the names of the classes that a setting takes.
    """
    keys: list[str] = []
    owner, inner = "", message
    while place := _PLACE.search(inner):
        inner = _inside(inner, place)
        if place[1] == "key":
            keys += [place[2]] * (place[2] not in ("config", *keys))
        owner = "" if place[1] == "key" else place[2]
    setting = ".".join(keys)
    where = f"{setting}: " if setting else ""
    if unknown := _UNKNOWN.search(inner):
        name = unknown[1].strip("-")
        if owner:
            module, _, cls = owner.rpartition(".")
            return f"{where}{cls} takes no {name}{did_you_mean(name, settings_of(getattr(import_module(module), cls)))}"
        near = did_you_mean(unknown[1], [option for option in options() if option != unknown[1]])
        return f"{where}{' '.join(inner.split())}{near}"
    kinds = dict.fromkeys(_EXPECTED.findall(inner))
    got = re.findall(r"(?:Got|Given) value: (.*)", inner)
    if kinds.keys() <= {"<class 'NoneType'>"} or not got:  # the fault is another
        return where + " ".join(inner.split())
    literals = [value for kind in kinds if kind.startswith(_LITERAL) for value in _values(kind)]
    missing = next((kind.partition(": ")[2] for kind in kinds if kind.startswith(_CLASS)), got[-1])
    near = did_you_mean(missing.rpartition(".")[2], [*literals, *classes(setting)])
    *values, last = dict.fromkeys(value for kind in kinds for value in _values(kind))
    return f"{setting} must be {' or '.join([*filter(None, [', '.join(values)]), last])}, got {got[-1]!r}{near}"


def _inside(message: str, place: re.Match[str]) -> str:
    """Return the lines of a message that belong to a place in it: those that are indented further."""
    start = message.rfind("\n", 0, place.start()) + 1
    depth = len(message[start : place.start()].replace("- ", "  "))
    first, *rest = message[place.end() :].split("\n")
    until = (number for number, line in enumerate(rest) if line.strip() and len(line) - len(line.lstrip()) <= depth)
    return "\n".join([first, *rest[: next(until, None) if start else None]])


def settings_of(cls: type[Any]) -> list[str]:
    """Return the settings of a class, those of dataclasses among them as in `optimizer.lr`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    return list(parser.get_defaults().keys())


def _values(expected: str) -> list[str]:
    """Return the values of a type as a user writes them."""
    if expected.startswith(_LITERAL):
        return expected.removeprefix(_LITERAL).removesuffix("]").replace("'", "").split(", ")
    if expected.startswith(_CLASS):
        return ["the name of a class"]
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", expected)
    return {"NoneType": ["null"], "bool": ["true", "false"]}.get(name, [name])
