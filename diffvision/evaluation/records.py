"""Rows of an evaluation in a JSONL file: written as they are computed, and read again by a run that resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_KEYS = ("id", "of", "settings")


class Records:
    """Rows by id, each appended to a file once; without a file they are kept in memory alone.

    A line that a killed process did not finish is removed, and its row is computed again.

    Args:
        path: the file, made with its folder if it does not exist; None keeps nothing.
        settings: what all rows depend on besides their own input, such as a digest of the model: a file of others is
            refused.

    Raises:
        ValueError: the file has lines of another kind, rows of other settings, or one id twice with different content.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, fingerprint(settings)
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            _drop_unfinished(path)
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                if line.strip():
                    self._read(line, number)

    def get(self, id: str, of: str) -> Row | None:
        """Return a row that is there already, or None.

        Args:
            id: of the row.
            of: the fingerprint of its input.

        Raises:
            ValueError: the row is there, and its input was another.
        """
        row = self._rows.get(id)
        if row is not None and row["of"] != of:
            raise ValueError(
                f"row {id!r} of {self.path} is of other input than row {id!r} of the data: remove the file, or give "
                "another output"
            )
        return row

    def add(self, rows: Sequence[tuple[str, str, Row]]) -> None:
        """Add rows as (id, fingerprint of the input, content), all of them in one write."""
        whole = [{"id": id, "of": of, "settings": self.settings, **content} for id, of, content in rows]
        self._rows |= {row["id"]: row for row in whole}
        if self.path is None or not whole:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in whole))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            id, _, settings = (row[key] for key in _KEYS)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {self.path} is no row of an evaluation ({error}): remove the file, or give another "
                "output"
            ) from error
        if settings != self.settings:
            raise ValueError(
                f"line {number} of {self.path} is of another model or other settings: remove the file, or give another "
                "output"
            )
        if self._rows.setdefault(id, row) != row:
            raise ValueError(f"line {number} of {self.path} has row {id!r} again, with other content: remove the file")


def fingerprint(content: Any) -> str:
    """Return 16 hexadecimal digits that plain values have, in whatever order their keys are."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _drop_unfinished(path: Path) -> None:
    """Cut a file after its last whole line."""
    with path.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
