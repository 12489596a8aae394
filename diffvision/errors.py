"""One-line messages for mistyped commands, settings and names, with the nearest known name ("did you mean ...?")."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

_LITERAL = "typing.Literal["
_MIN_RATIO = 0.6  # less similar names are not suggested
_PATH = re.compile(r"[\w./][\w./ -]*")  # neither a URL, a pattern, NAME=PATH nor a list
# The parts of jsonargparse's messages that are read; all others stay as they are.
_KEY = re.compile(r'Parser key "([^"]+)":')
_VALUE = re.compile(r"(?:Got|Given) value: (.*)")
NAMED = re.compile(r"--[\w.-]+|(?<=['\"])[\w.-]+(?=['\"])")
"""An option or another name in a message."""


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
    names = {other.lower(): other for other in known}
    return [names[near] for near in get_close_matches(name.lower(), names, count, min_ratio)]


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


class Problem(NamedTuple):
    """What a parser's message says: the setting it is about, one line, the refused value, and the possible ones."""

    setting: str
    text: str
    value: str = ""
    choices: Sequence[str] = ()


def read_message(message: str) -> Problem:
    """Return what a message of jsonargparse says.

    It may nest those of the types and classes that were tried for a value, each indented under its own: the deepest
    lines are the reasons. A reason that names what it is about, such as an unknown option, is left without the value.
    """
    setting = ".".join(key for key in dict.fromkeys(_KEY.findall(message)) if key != "config")
    lines = [line for line in _folded(message) if not line.endswith(":")] or [message]
    depth = max(map(_indentation, lines))
    reasons = list(dict.fromkeys(_KEY.sub("", line).strip(" -") for line in lines if _indentation(line) == depth))
    expected = [reason.removeprefix("Expected ") for reason in reasons if reason.startswith("Expected ")]
    kinds = [kind.partition(". Got value: ")[0].removeprefix("an ").removeprefix("a ") for kind in expected]
    found = _VALUE.search(message)
    if found and len(kinds) == len(reasons):
        literals = [value for kind in kinds if kind.startswith(_LITERAL) for value in _values(kind)]
        *most, last = dict.fromkeys(value for kind in kinds for value in _values(kind))
        must = " or ".join([*filter(None, [", ".join(most)]), last])
        return Problem(setting, f"{setting} must be {must}, got {found[1]!r}", found[1], literals)
    text = f"{setting}: {'; '.join(reasons)}" if setting else "; ".join(reasons)
    if found is None or NAMED.search(text) or "are required" in text:  # whose value is a class with all its settings
        return Problem(setting, text)
    return Problem(setting, f"{text}, got {found[1]!r}", found[1])


def _folded(message: str) -> list[str]:
    """Return the lines of a message, each with those that continue it."""
    lines: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if lines and not lines[-1].endswith(":") and _indentation(line) > _indentation(lines[-1]) and "- " not in line:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" -"))


def _values(kind: str) -> list[str]:
    """Return the values of a type as a user writes them."""
    if kind.startswith(_LITERAL):
        return kind.removeprefix(_LITERAL).removesuffix("]").replace("'", "").split(", ")
    name = re.sub(r"^<class '(?:.*\.)?(\w+)'>$", r"\1", kind.partition(": ")[0])
    return {"NoneType": ["null"], "bool": ["true", "false"]}.get(name, [name])
