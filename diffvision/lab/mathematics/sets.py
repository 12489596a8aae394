"""Mathematical questions with their answers, from the files of published sets as they are, and from your own.

A layout is recognised by the keys of a file's first row. Files are read by `diffvision.data.rows`: .jsonl, .json, both
also as .gz, and .parquet. A folder, such as MATH's, stands for all such files in it.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from diffvision.data.rows import SUFFIXES, read_rows
from diffvision.data.text.tokenizers import check_text
from diffvision.lab.mathematics.answers import after_hashes, as_fraction, boxed
from diffvision.lab.mathematics.errors import check

Row = dict[str, Any]


class Question(NamedTuple):
    """A question with its answer.

    Attributes:
        id: the file and the row's number.
        set: the name of the layout: a key of `LAYOUTS`.
        text: the question.
        answer: the right one.
        solution: with its steps, for demonstrations; the answer where the set has none.
        steps: of the solution, where the set says it.
        distractors: sentences that do not matter, of `diffvision data make arithmetic`.
    """

    id: str
    set: str
    text: str
    answer: str
    solution: str
    steps: int | None = None
    distractors: int | None = None


class _Read(NamedTuple):
    text: str
    answer: Any
    solution: str | None = None
    steps: int | None = None
    distractors: int | None = None


class Layout(NamedTuple):
    """How a set writes its rows.

    Attributes:
        keys: that each of its rows has.
        read: returns what a row says.
        is_number: whether all its answers are numbers.
        also: what a first row must be besides having the keys.
    """

    keys: frozenset[str]
    read: Callable[[Row], _Read]
    is_number: bool = False
    also: Callable[[Row], bool] = lambda row: True


def _arithmetic(row: Row) -> _Read:
    return _Read(row["prompt"], row["answer"], row["response"], row["steps"], row["distractors"])


def _tabmwp(row: Row) -> _Read:
    title = f' regarding "{row["table_title"]}"' if row.get("table_title") else ""
    choices = f" Please select from the following options: {row['choices']}" if row.get("choices") else ""
    text = f"Read the following table{title} and answer a question:\n{row['table']}\n{row['question']}{choices}"
    return _Read(text, row["answer"], row.get("solution"))


def _svamp(row: Row) -> _Read:
    body = row["Body"].strip()
    text = f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {row['Question'].strip()}"
    return _Read(text, _whole(row["Answer"]), None, _operations(row.get("Equation")))


def _asdiv(row: Row) -> _Read:
    # "9 (apples)": the unit is no part of the answer.
    answer = re.sub(r"\s*\([^()]*\)", "", str(row["answer"]))
    return _Read(f"{row['body'].strip()} {row['question'].strip()}", answer, None, _operations(row["formula"]))


def _mawps(row: Row) -> _Read:
    return _Read(row["input"], _whole(row["target"]))


def _carp(row: Row) -> _Read:
    return _Read(row["content"], row["answer"], row["steps"])


def _math(row: Row) -> _Read:
    return _Read(row["problem"], boxed(row["solution"]), row["solution"])


def _gsm8k(row: Row) -> _Read:
    answer = str(row["answer"])
    # Steps are what a calculator was asked for: <<16-3=13>>.
    steps = answer.count("<<") or len(answer.partition("####")[0].strip().split("\n"))
    return _Read(row["question"], after_hashes(answer), re.sub(r"<<.*?>>", "", answer), steps)


def _plain(row: Row) -> _Read:
    answer = row["answer"]  # in a file of them one may be as GSM8K's
    return _gsm8k(row) if isinstance(answer, str) and "####" in answer else _Read(row["question"], answer)


def _response(row: Row) -> _Read:
    response = str(row["response"])
    return _Read(row["prompt"], after_hashes(response) or boxed(response), response)


LAYOUTS: dict[str, Layout] = {
    "arithmetic": Layout(frozenset({"prompt", "response", "answer", "steps", "distractors"}), _arithmetic, True),
    "tabmwp": Layout(frozenset({"question", "choices", "answer", "table"}), _tabmwp),
    "svamp": Layout(frozenset({"Body", "Question", "Answer"}), _svamp, True),
    "asdiv": Layout(frozenset({"body", "question", "answer", "formula"}), _asdiv),
    "mawps": Layout(frozenset({"input", "target"}), _mawps, True),
    "carp": Layout(frozenset({"content", "answer", "steps"}), _carp),
    "math": Layout(frozenset({"problem", "solution"}), _math),
    "college_math": Layout(
        frozenset({"question", "answer", "question_number"}), lambda row: _Read(row["question"], row["answer"])
    ),
    "gsm8k": Layout(frozenset({"question", "answer"}), _gsm8k, True, lambda row: "####" in str(row["answer"])),
    "questions": Layout(frozenset({"question", "answer"}), _plain),
    "responses": Layout(frozenset({"prompt", "response"}), _response),
}
"""The layouts by name, in the order in which they are tried: the paper's eight sets, ours, and two plain ones."""


def read_questions(sources: Sequence[str | Path], *, count: int | None = None, seed: int = 0) -> list[Question]:
    """Return the questions of files in any of the layouts.

    Args:
        sources: files, or folders of them.
        count: how many are drawn of each source, in its order; None for all.
        seed: of what is drawn.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a file is given twice, also as a .gz, or a folder has no such files; a file is not UTF-8, has no
            rows or another layout; a row lacks a key of its file's layout, or an answer that can be read.
    """
    files = [_files(Path(source)) for source in sources]
    seen: dict[str, Path] = {}
    for file in itertools.chain(*files):
        content = str(file.resolve()).removesuffix(".gz")
        if content in seen:
            raise ValueError(f"{file} is given twice, also by {seen[content]}: give each file once")
        seen[content] = file
    questions: list[Question] = []
    for of_source in files:
        read = [question for file in of_source for question in _questions(file)]
        if count is not None and count < len(read):
            read = [read[number] for number in sorted(random.Random(seed).sample(range(len(read)), count))]
        questions += read
    return questions


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    files = sorted(
        path for path in source.rglob("*") if path.name.lower().endswith(SUFFIXES) and path.name != "about.json"
    )
    if not files:
        raise ValueError(f"{source} has no {', '.join(SUFFIXES)} files: give questions with their answers")
    return files


def _questions(path: Path) -> Iterator[Question]:
    name = None
    for number, row in read_rows(path):
        where = f"{path}:{number}"
        if not isinstance(row, dict):
            raise ValueError(f'{where} is {row!r:.60}, no object: write {{"question": ..., "answer": ...}}')
        name = name or _layout(row, where)
        yield _question(name, row, where)
    if name is None:
        raise ValueError(f"{path} has no rows: give questions with their answers")


def _question(name: str, row: Row, where: str) -> Question:
    layout = LAYOUTS[name]
    if missing := sorted(layout.keys - row.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}, which the file's first rows ({name}) have: add it")
    try:
        read = layout.read(row)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{where} has values of other types than the first rows ({name}): use one type a key"
        ) from error
    for name_of, value, kinds in (
        ("question", read.text, str),
        ("answer", read.answer, (str, int, float, NoneType)),
        ("solution", read.solution, (str, NoneType)),
        ("number of steps", read.steps, (int, NoneType)),
        ("number of distractors", read.distractors, (int, NoneType)),
    ):
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or (name_of == "question" and not str(value).strip())
        ):
            raise ValueError(f"{where} has {value!r:.60} for its {name_of}, which rows of {name} do not: correct it")
    try:
        check_text(f"{read.text}{read.solution or ''}")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    answer = "" if read.answer is None else _text(read.answer)
    if not answer or (layout.is_number and as_fraction(answer) is None):
        content = row.get("solution", row.get("answer", row.get("response", read.answer)))
        raise ValueError(
            f"{where} has an answer that cannot be read, {str(content)[-60:]!r}: {name} ends with "
            f"{_describe_layouts(name)}; correct the row, or leave it out"
        )
    solution = read.solution if read.solution is not None else answer
    if name == "arithmetic":
        try:
            check(solution)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; correct the row, or leave it out") from None
    return Question(where, name, str(read.text).strip(), answer, solution.strip(), read.steps, read.distractors)


def _text(answer: str | float) -> str:
    """Return an answer as text, a number in digits alone; empty for one that is not finite."""
    if not isinstance(answer, float):
        return str(answer).strip()
    return format(Decimal(repr(answer)), "f") if math.isfinite(answer) else ""


def _describe_layouts(name: str) -> str:
    wanted = {"math": "\\boxed{ANSWER}", "gsm8k": "#### NUMBER", "responses": "#### ANSWER or \\boxed{ANSWER}"}
    return wanted.get(name, "a number" if LAYOUTS[name].is_number else "an answer that is not empty")


def _layout(row: Row, where: str) -> str:
    """Return the name of the first known layout that a file's first row has."""
    for name, layout in LAYOUTS.items():
        if layout.keys <= row.keys() and layout.also(row):
            return name
    known = "; ".join(f"{name}: {', '.join(sorted(layout.keys))}" for name, layout in LAYOUTS.items())
    raise ValueError(f"{where} has the keys {', '.join(map(str, row))}, of no known layout: use one of {known}")


def _whole(value: Any) -> Any:
    """Return a number without the fraction that it does not have: 43 of 43.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _operations(formula: Any) -> int | None:
    """Return the number of operations in a formula such as ( 290.0 / 2.0 ) or 7+2=9; None if there is none."""
    left = str(formula or "").partition("=")[0]
    return len(re.findall(r"(?<=[\d.)])\s*[-+*/x×÷]", left)) or None
