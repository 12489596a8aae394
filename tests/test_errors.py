"""Every error that a user can cause says what is wrong and what to do, in a first line of at most 120 characters.

The rules are checked in the source, since values that are filled in do not count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import diffvision

PACKAGE = Path(diffvision.__file__).parent
KINDS = {"ValueError", "TypeError", "OSError", "FileNotFoundError", "RuntimeError", "Mistake", "BadSource"}
MOST = 120
REMEDY = re.compile(
    r"\b(add|adapt|ask|build|call|check|choose|compare|convert|copy|correct|create|cut|decode|delete|download|draw|end|"
    r"evaluate|exclude|expected|export|fetch|fix|free|generate|get|give|install|keep|leave|list|load|lower|make|measure|"
    r"merge|move|must|name|need|needs|open|pack|pass|pip|point|put|raise|read|remove|rename|repair|replace|report|"
    r"restore|resume|run|save|see|set|shorten|split|start|take|takes|train|try|unlock|unpack|untie|upgrade|use|wait|"
    r"change|tokenise|yield|write)\b"
)


REASONS = {
    "{} or null",
    "got {}",
    "a path leads out of it",
    "{} bytes {}, {} {}",
    "{} in it is a link to another directory",
    "compute yielded more units than it was called with",
    "{} has {} elements, and {} bytes follow",
    "{} has {} elements, and a file may have {} in all",
    "{} has {} dimensions, and tensors have at most {}",
    "a token has {} characters, and may have {}",
    "{} is {}",
    "two values of {}",
    "the sidecar unpacks to {} bytes",
    "a machine and reasons are texts",
    "{} for {}, which has {}",
    "texts, images and objects are strings",
    "{}; got q {}, k {}, v {}",
    "{} is not YAML{}",
    "has other bytes than were saved",
    "is not a checkpoint with an optimizer's state",
    "holds more than tensors and plain values, or is none",
}
"""Texts that a caller completes with a remedy, or that name a mistake in a program."""


class Error(NamedTuple):
    """A `raise` statement with a text, in which {} stands for values."""

    place: str
    text: str


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _errors() -> Iterator[Error]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = _template(node.exc.args[0])
                if text is not None and ast.unparse(node.exc.func) in KINDS:
                    yield Error(f"{path.relative_to(PACKAGE)}:{node.lineno}", text)


@pytest.fixture(scope="module")
def errors():
    found = list(_errors())
    assert len(found) > 500
    return found


def test_the_first_line_has_at_most_120_characters(errors):
    long = [error for error in errors if len(error.text.splitlines()[0].replace("{}", "")) > MOST]
    assert not long, "\n".join(map(str, long))


def test_the_first_line_says_what_to_do(errors):
    """A message may end with a value that is a remedy or another error; reasons that a caller completes are short."""
    silent = [
        error
        for error in errors
        if not REMEDY.search(error.text.splitlines()[0])
        and not re.search(r"(: |; |\()\{\}\)?(\{\})*$", error.text.splitlines()[0])
        and error.text not in REASONS
        and not error.text.startswith(("it ", "its ", "not a file", "no images"))
    ]
    assert not silent, "\n".join(map(str, silent))
