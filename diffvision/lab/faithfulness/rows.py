"""Rows of documents that a model answers questions about or sums up, from files of three layouts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diffvision.data.rows import read_rows as rows_of
from diffvision.data.text.tokenizers import check_text

Kind = Literal["summary", "qa"]


@dataclass(frozen=True)
class Row:
    """A document, and what is asked of a model about it.

    Attributes:
        id: unique among the rows.
        kind: "summary", or "qa" for a question.
        document: what the output must follow from.
        question: of "qa".
        answers: of "qa", each of them right; may be empty.
        reference: another's summary, or None.
        dataset: a name of LongBench's, whose prompts a file may have.
        cut: where a document that is too long is cut: its "end", or its "middle".
    """

    id: str
    kind: Kind
    document: str
    question: str | None = None
    answers: tuple[str, ...] = ()
    reference: str | None = None
    dataset: str | None = None
    cut: Literal["end", "middle"] = "end"

    @property
    def truth(self) -> str:
        """The reference or the answers, as a judge reads them; empty where there are none."""
        return json.dumps(self.answers, ensure_ascii=False) if self.kind == "qa" else self.reference or ""


def read_rows(sources: Sequence[str | Path], *, count: int | None = None, seed: int = 0) -> list[Row]:
    """Read the rows of files, each row in one of the layouts of `LAYOUTS`.

    Args:
        sources: files that `diffvision.data.rows` reads. A row without an id has the file's name and its number.
        count: how many rows are drawn; None for all.
        seed: of the draw; the rows stay in the files' order.

    Raises:
        FileNotFoundError; ValueError: a damaged file, a row of no layout, two rows of one id, no rows.
    """
    rows = [row for source in sources for row in _read(Path(source))]
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, sources))}: give files of rows, such as .jsonl")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ValueError(
                f"two rows of the data have the id {row.id!r}: give each another (one without has its "
                "file's name and its number)"
            )
        seen.add(row.id)
    if count is None or count >= len(rows):
        return rows
    return [rows[index] for index in sorted(random.Random(f"rows {seed}").sample(range(len(rows)), count))]


def _read(path: Path) -> list[Row]:
    return [_row(record, path, number) for number, record in rows_of(path)]


def _row(record: Any, path: Path, number: int | str) -> Row:
    where = f"row {number} of {path}"
    fields = set(record) if isinstance(record, dict) else set()
    for wanted, read in LAYOUTS.items():
        if wanted <= fields:
            try:
                row = read(record, f"{path.stem}-{number}")
                for text in (row.id, row.document, row.question or "", row.reference or "", *row.answers):
                    check_text(text)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{where}: {error}") from error
            if not row.document.strip():
                raise ValueError(f"{where} has an empty document: leave the row out")
            return row
    layouts = ", or ".join("{" + ", ".join(sorted(wanted)) + ", ...}" for wanted in LAYOUTS)
    raise ValueError(f"{where} has the fields {', '.join(sorted(fields)) or 'of no object'}: write {layouts}")


def _ours(record: Mapping[str, Any], id: str) -> Row:
    kind = record["task"]
    if kind not in ("summary", "qa"):
        raise ValueError(f"task is {kind!r}: write summary or qa")
    answers = tuple(_text({"answers": each}, "answers") for each in _list(record, "answers"))
    question = _question(record) if kind == "qa" else None
    reference = None if record.get("reference") is None else _text(record, "reference")
    return Row(_id(record, "id", id), kind, _text(record, "document"), question, answers, reference)


def _long_bench(record: Mapping[str, Any], id: str) -> Row:
    """Return a row of LongBench, whose summaries have no input."""
    answers = tuple(_text({"answers": each}, "answers") for each in _list(record, "answers"))
    question = _text(record, "input")
    shared: dict[str, Any] = {"dataset": _text(record, "dataset"), "cut": "middle"}
    row_id, document = _id(record, "_id", id), _text(record, "context")
    if question.strip():
        return Row(row_id, "qa", document, question, answers, **shared)
    return Row(row_id, "summary", document, reference=answers[0] if answers else None, **shared)


def _lookback_question(record: Mapping[str, Any], id: str) -> Row:
    """Return a question of Lookback Lens: a passage with the answer between two without, as its code takes them."""
    passages = {True: [], False: []}  # type: dict[bool, list[str]]
    for passage in _list(record, "ctxs"):
        if not isinstance(passage, dict) or "hasanswer" not in passage:
            raise ValueError(f"ctxs has {passage!r:.80}: write passages with text and hasanswer")
        passages[bool(passage["hasanswer"])].append(_text(passage, "text"))
    if not passages[True] or len(passages[False]) < 2:
        raise ValueError(
            f"ctxs has {len(passages[True])} passages with the answer and {len(passages[False])} without: one and two "
            "are needed; leave the row out"
        )
    question = _question(record)
    question = question[:1].upper() + question[1:] + ("" if question.endswith("?") else "?")
    answers = tuple(_text({"answers": each}, "answers") for each in _list(record, "answers"))
    document = "\n".join([passages[False][0], passages[True][0], passages[False][1]])
    return Row(_id(record, "id", id), "qa", document, question, answers)


def _lookback_summary(record: Mapping[str, Any], id: str) -> Row:
    return Row(_id(record, "id", id), "summary", _text(record, "document"), reference=_text(record, "summary"))


LAYOUTS: dict[frozenset[str], Callable[[Mapping[str, Any], str], Row]] = {
    frozenset({"task", "document"}): _ours,
    frozenset({"input", "context", "answers", "dataset"}): _long_bench,
    frozenset({"question", "answers", "ctxs"}): _lookback_question,
    frozenset({"document", "summary"}): _lookback_summary,
}
"""The fields that distinguish a layout, and what reads it: ours, LongBench's (github.com/THUDM/LongBench), and the two
of Lookback Lens (github.com/voidism/Lookback-Lens)."""


def _text(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record.get(name), str):
        raise ValueError(f"{name} is {record.get(name)!r:.80}: write a text")
    return record[name]


def _question(record: Mapping[str, Any]) -> str:
    question = _text(record, "question")
    if not question.strip():
        raise ValueError("question is empty: write one")
    return question


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name) or []
    if not isinstance(value, list):
        raise ValueError(f"{name} is {value!r:.80}: write a list")
    return value


def _id(record: Mapping[str, Any], name: str, default: str) -> str:
    value = record.get(name, default)
    if not isinstance(value, str | int):
        raise ValueError(f"{name} is {value!r:.80}: write a text or a number")
    return str(value)
