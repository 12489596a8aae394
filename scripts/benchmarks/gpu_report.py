"""Merges what a part of `gpu_check.sh` left in a folder into one JSON: `gpu_report.py FOLDER JSON`.

FOLDER holds `parts.tsv` (name of a command, exit status, seconds), `tests.xml` (pytest's JUnit report), the JSON files
of benchmarks, and a log of each command. Of one that left nothing it has the exit status and the end of its log. What
tests skip, as those of flash-attn where it is not installed, is under "cannot" with the number of tests.
"""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from machine import commit, output, versions

# Characters of a failed part's log.
TAIL = 2000
TIMED_OUT = (124, 137, 143)


def read_tests(path: Path) -> dict[str, Any] | None:
    """Return counts, and the names and first lines of what failed; None if pytest wrote no report."""
    if not path.exists():
        return None
    summary: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "cannot": {}}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        broken = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if broken is not None:
            summary["failed"] += 1
            summary["failures"][name] = (broken.get("message") or "").partition("\n")[0][:300]
        elif skipped is not None:
            summary["skipped"] += 1
            reason = skipped.get("message") or ""
            summary["cannot"][reason] = summary["cannot"].get(reason, 0) + 1
        else:
            summary["passed"] += 1
    return summary


def read_parts(folder: Path) -> dict[str, dict[str, Any]]:
    parts = {}
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, status, seconds = line.split("\t")
        part: dict[str, Any] = {"exit_status": int(status), "seconds": int(seconds)}
        if part["exit_status"]:
            part["timed_out"] = part["exit_status"] in TIMED_OUT
            log = folder / f"{name}.log"
            text = log.read_text(errors="replace")[-TAIL:] if log.exists() else ""
            part["log_end"] = text.replace(str(folder), "").replace(f"{os.getcwd()}/", "")
        parts[name] = part
    return parts


def gpu() -> list[str] | str:
    """Return name, memory and driver of each GPU."""
    lines = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return "none" if lines is None else lines.splitlines()


def merge(folder: Path) -> dict[str, Any]:
    benchmarks = {}
    for path in sorted(folder.glob("*.json")):
        benchmarks[path.stem] = json.loads(path.read_text())
    return {
        "gpu": gpu(),
        "commit": commit(),
        "versions": versions(),
        "parts": read_parts(folder),
        "tests": read_tests(folder / "tests.xml"),
        "benchmarks": benchmarks,
    }


if __name__ == "__main__":
    merged = merge(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(merged, indent=1) + "\n")
