"""The folder that an inspection writes: complete or not at all, and never over other files.

Its content is made in `inspection_page` and `mean_numbers`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffvision.evaluation.output_files import check_folder, write_bytes, write_json

_MARK = "diffvision inspect"  # in statistics.json: the folder is from this command, which may replace it


def check_output(folder: Path) -> None:
    """Raise a ValueError if files cannot be written to the folder, or it has files of anything but an inspection."""
    check_folder(folder)
    if folder.resolve() == Path.cwd():
        raise ValueError(f"output is {folder}, the current folder, which would be replaced: name a folder in it")
    if folder.is_dir() and (
        others := sorted({file.name for file in folder.iterdir()} - set(_list_earlier_files(folder)))
    ):
        raise ValueError(
            f"output is {folder}, which holds something else ({', '.join(others[:3])}): name a new folder, or one of "
            "an earlier inspection"
        )


def _list_earlier_files(folder: Path) -> list[str]:
    """Return the files that an earlier inspection wrote to the folder."""
    try:
        content = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
        names = {*content["files"], "statistics.json"} if content["made_by"] == _MARK else set()
        return sorted(file.name for file in folder.iterdir() if file.name in names)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def write(folder: Path, files: Mapping[str, bytes], models: Mapping[str, Any]) -> None:
    """Write all files, or none: they are written next to an earlier inspection's folder, and then replace it."""
    folder = folder.resolve()  # if the folder is a link, its target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = _list_earlier_files(folder) if folder.is_dir() else []
    with tempfile.TemporaryDirectory(prefix=".inspecting-", dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        for name, content in files.items():
            write_bytes(new / name, content)
        write_json(new / "statistics.json", {"made_by": _MARK, "files": sorted(files), "models": models})
        for name in old:
            (folder / name).unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()
        new.rename(folder)
