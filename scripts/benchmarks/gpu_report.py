"""Merges what the parts of `gpu_check.sh` left in a folder into one JSON: `gpu_report.py FOLDER JSON`.

FOLDER holds `parts.tsv` (name, exit status, seconds), `tests.xml` (pytest's JUnit report), `attention-*.json`,
`models-*.json`, and a log a part. A part that left nothing is told by its exit status and the end of its log.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "timm", "open_clip_torch", "transformers", "flash-attn")
TAIL = 2000  # characters of a failed part's log
TIMED_OUT = (124, 137, 143)


def tests(path: Path) -> dict[str, Any] | None:
    """Counts, and the names and first lines of what failed; None if pytest wrote no report."""
    if not path.exists():
        return None
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "skips": {}}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        broken = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if broken is not None:
            found["failed"] += 1
            found["failures"][name] = (broken.get("message") or "").partition("\n")[0][:300]
        elif skipped is not None:
            found["skipped"] += 1
            reason = skipped.get("message") or ""
            found["skips"][reason] = found["skips"].get(reason, 0) + 1
        else:
            found["passed"] += 1
    return found


def parts(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, status, seconds = line.split("\t")
        own: dict[str, Any] = {"exit_status": int(status), "seconds": int(seconds)}
        if own["exit_status"]:
            own["timed_out"] = own["exit_status"] in TIMED_OUT
            log = folder / f"{name}.log"
            text = log.read_text(errors="replace")[-TAIL:] if log.exists() else ""
            own["log_end"] = text.replace(str(folder), "").replace(f"{os.getcwd()}/", "")
        found[name] = own
    return found


def gpu() -> list[str] | str:
    """A line a GPU: name, memory and driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DIFFVISION_COMMIT", "unknown")


def merge(folder: Path) -> dict[str, Any]:
    benchmarks = {}
    for path in sorted(folder.glob("*.json")):
        benchmarks[path.stem] = json.loads(path.read_text())
    return {
        "gpu": gpu(),
        "commit": commit(),
        "versions": {package: version(package) for package in PACKAGES},
        "parts": parts(folder),
        "tests": tests(folder / "tests.xml"),
        "benchmarks": benchmarks,
    }


if __name__ == "__main__":
    merged = merge(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(merged, indent=1) + "\n")
