"""Members of a sample -> documents: texts, or the reason why one cannot be used. Token ids are in `tokens`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffvision.data.shards.index import MEMBER_TYPES
from diffvision.data.shards.sample import BadSample, Members, SampleId, SampleSource, check_key


@dataclass(kw_only=True)
class DocumentAccount:
    """What became of the documents of a source.

    Attributes:
        documents: the number used, without `empty` ones and those `skipped`, by reason.
        examples: for each reason the first few, as "shard: key".
    """

    documents: int = 0
    empty: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Skipped documents, whatever the reason."""
        return sum(self.skipped.values())

    @property
    def seen(self) -> int:
        """All documents that were read."""
        return self.documents + self.empty + self.bad

    def skip(self, reason: str, where: str) -> None:
        """Count a document that cannot be used; `where` is "shard: key"."""
        self.add(DocumentAccount(skipped={reason: 1}, examples={reason: [where]}))

    def add(self, other: "DocumentAccount") -> None:
        """Count the documents of another account, too."""
        self.documents += other.documents
        self.empty += other.empty
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
            self.examples[reason] = [*self.examples.get(reason, []), *other.examples.get(reason, [])][:3]

    def summary(self) -> str:
        """Return a line of counts, and one for each reason."""
        lines = [f"{self._used()}, {self.empty:,} empty, {self.bad:,} skipped"]
        for reason, count in sorted(self.skipped.items(), key=lambda entry: -entry[1]):
            lines.append(f"  {count:,} x {reason}: {', '.join(self.examples.get(reason, []))}")
        return "\n".join(lines)

    def _used(self) -> str:
        return f"{self.documents:,} documents"


class TextMember:
    """Reads the documents of a sample.

    Args:
        key: "txt": the member is one document; "json:FIELD": the text in a field of it is; "jsonl:FIELD": each line of
            it is a JSON object with a document in that field. Members may have longer names, such as "page.txt".

    Attributes:
        lines: whether a sample has a document in each line.

    Raises:
        ValueError: another type of member, or a field missing or too many.
    """

    whole_types: tuple[str, ...] = ("txt",)  # of members that are documents without a field

    def __init__(self, key: str = "txt") -> None:
        self.key = key
        self._member, _, self._field = key.partition(":")
        check_key(self._member, ("json", "jsonl") if self._field else self.whole_types)
        self.lines = self._member.rpartition(".")[2] == "jsonl"

    def documents(self, members: Members) -> Iterator[str | BadSample]:
        """Yield each document, or why it cannot be used; an empty one is an empty text."""
        if (data := members.get(self._member)) is None:
            yield BadSample(f"missing text member {self._member!r}")
        elif len(data) > MEMBER_TYPES["jsonl" if self.lines else "txt"]:
            yield BadSample("document too large")
        else:
            for part in [line for line in data.split(b"\n") if line.strip()] if self.lines else [data]:
                try:
                    yield self._document(part.decode("utf-8-sig"))
                except UnicodeError:
                    yield BadSample("text not UTF-8")
                except BadSample as reason:
                    yield reason

    def _document(self, text: str) -> str:
        """Return the document in a text: all of it, or the text in its JSON field."""
        if not self._field:
            return text
        record = read_json(text)
        document = record.get(self._field) if isinstance(record, dict) else None
        if not isinstance(document, str):
            raise BadSample(f"no text in JSON field {self._field!r}")
        document.encode()  # JSON can write half of a surrogate pair
        return document


class RowMember(TextMember):
    """Reads rows of a sample, each the text of a JSON object: key "json" for one row, "jsonl" for one in each line."""

    whole_types = ("json", "jsonl")

    def __init__(self, key: str = "json") -> None:
        super().__init__(key)


class JsonLines(SampleSource):
    """Lines of a .jsonl file as samples of one member `json`, in one shard.

    Args:
        path: the file; its empty lines are skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it has no rows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        offset, rows = 0, []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows.append((number, offset, len(line)))
                offset += len(line)
        if not rows:
            raise ValueError(f"{path} has no rows: it needs a JSON object in each line")
        self._rows = np.array(rows, dtype=np.int64)
        self.counts = np.array([len(rows)], dtype=np.int64)

    def members(self, sample: SampleId) -> Members:
        """Return one line as the member `json`."""
        _, start, size = self._rows[sample[1]].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            return {"json": file.read(min(size, MEMBER_TYPES["txt"] + 1))}

    def describe(self, sample: SampleId) -> str:
        """Return "file: line N" of a sample, for reports."""
        return f"{self.path.name}: line {self._rows[sample[1], 0]}"


def read_json(text: str) -> Any:
    """Return what a text of JSON holds; raise BadSample where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadSample("damaged JSON") from None


def check_document(data: bytes, member_type: str) -> None:
    """Raise BadSample if a text member is not what its type says, or empty."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadSample("text not UTF-8") from None
    if not text.strip():
        raise BadSample("empty document")
    kind = member_type.rpartition(".")[2]
    if kind == "json":
        read_json(text)
    if kind == "jsonl":
        for line in filter(str.strip, text.split("\n")):
            read_json(line)
