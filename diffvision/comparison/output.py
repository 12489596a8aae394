"""The files that a comparison writes: a page, JSON or CSV, by the ending of each name."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from diffvision.comparison.page import page
from diffvision.comparison.result import Comparison
from diffvision.evaluation.output import check_folder, write_bytes, write_json
from diffvision.tables import plain

ENDINGS = (".html", ".json", ".csv")


def check_outputs(outputs: Sequence[str]) -> None:
    """Raise a ValueError, before any work, for a file that could not be written."""
    for name in outputs:
        path = Path(name)
        if path.suffix not in ENDINGS:
            raise ValueError(f"output is {name}: end it in {', '.join(ENDINGS)}, which decides what is written")
        if path.is_dir():
            raise ValueError(f"output is {name}, which is a folder: name a file")
        check_folder(path.parent)


def write_outputs(comparison: Comparison, outputs: Sequence[str]) -> None:
    """Write each file as a whole, and print its name."""
    for name in outputs:
        path = Path(name)
        if path.suffix == ".json":
            write_json(path, plain(comparison.to_dict()))  # NaN is null
        else:
            text = page(comparison) if path.suffix == ".html" else _csv(comparison)
            write_bytes(path, text.encode())
        print(f"written: {path}")


def _csv(comparison: Comparison) -> str:
    rows = comparison.csv_rows()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
