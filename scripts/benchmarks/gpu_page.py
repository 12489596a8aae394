"""Fills docs/benchmarks/gpu.md from docs/benchmarks/gpu_PART.json, the results of `scripts/gpu_check.sh` on a GPU.

    python scripts/benchmarks/gpu_page.py [OUT]

copies the files of OUT there first, except those of a CPU. A part without a file is "not measured" on the page.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PARTS = ("tests", "steps", "fits")
ABSENT = "Not measured."
COMMANDS = """## Measure

Each command takes at most nine minutes and writes one JSON. A second `steps` resumes the first.

```bash
scripts/gpu_check.sh tests runs/gpu     # layers under autocast, then all GPU tests
scripts/gpu_check.sh steps runs/gpu     # step time and peak memory of models
scripts/gpu_check.sh fits runs/gpu      # short trainings: compile, flash, FSDP2, resume
python scripts/benchmarks/gpu_page.py runs/gpu
```

The last command fills this page. Where flash-attn or a second GPU is missing the JSON says "cannot" with the reason.

A study is prepared for 40 minutes of a GPU: CLIP, DiffCLIP and DiffCLIP-V2 with ten times the parameters of
[those on emoji](../results/clip.md), two seeds each. It resumes if stopped.

```bash
python scripts/studies/clip_large.py data --source data/emoji   # what `diffvision data make emoji` wrote
python scripts/studies/clip_large.py tune
python scripts/studies/clip_large.py train
python scripts/studies/clip_large.py report
```"""


def read(folder: Path) -> dict[str, dict[str, Any]]:
    files = {part: folder / f"gpu_{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(report: dict[str, Any]) -> str:
    gpus = report["gpu"] if isinstance(report["gpu"], list) else [report["gpu"]]
    packages = ", ".join(
        f"{name} {report['versions'][name]}" for name in ("torch", "triton") if report["versions"][name]
    )
    return f"{len(gpus)} x {gpus[0]}; {packages}; diffvision {report['commit'][:12]}."


def tests(report: dict[str, Any]) -> str:
    found = report["tests"]
    if found is None:
        return "pytest wrote no report."
    rows = [[name, str(found[name])] for name in ("passed", "failed", "skipped")]
    parts = [table(["GPU tests", "number"], rows)]
    if found["failures"]:
        parts.append(
            "Failed:\n\n" + "\n".join(f"- `{n.rpartition('.')[2]}`: {why}" for n, why in found["failures"].items())
        )
    return "\n\n".join(parts)


def steps(report: dict[str, Any]) -> str:
    parts = ["A step is forward, backward and AdamW in bfloat16 autocast. Peak memory is all that torch allocated."]
    for name, setting in report["benchmarks"]["steps"]["settings"].items():
        rows = []
        for title, one in setting["models"].items():
            numbers = ["failed", "–", "–"]
            if "failed" not in one:
                numbers = [f"{one['median_ms']:.1f}", f"{one['rate']:,.0f}", f"{one['peak_bytes'] / 2**30:.1f}"]
            rows.append([title, *numbers])
        parts += [f"### {name}", table(["model", "ms ↓", f"{setting['items']}/s ↑", "GiB ↓"], rows)]
    return "\n\n".join(parts)


def fits(report: dict[str, Any]) -> str:
    rows = []
    for name, one in report["benchmarks"]["fits"].items():
        status = one.get("cannot") or one.get("exit_status", "equal" if one.get("bit_equal") else "differs")
        rows.append([name, str(status), f"{one['last_loss']:.3f}" if "last_loss" in one else "–"])
    return table(["training", "exit status", "last loss"], rows)


SECTIONS = {
    "tests": ("Tests", tests),
    "steps": ("Step time and memory", steps),
    "fits": ("Short trainings", fits),
}


def page(reports: dict[str, dict[str, Any]]) -> str:
    """Return the page of what was measured."""
    if reports:
        first = "Step time, memory and correctness on a GPU, as measured by `scripts/gpu_check.sh`."
    else:
        first = "**Nothing here has been measured**: no GPU has been available to us. One command measures a section."
    parts = ["# On a GPU", first]
    for part, (title, describe) in SECTIONS.items():
        parts.append(f"## {title}")
        if part not in reports:
            parts.append(ABSENT)
            continue
        report = reports[part]
        parts.append(f"{machine(report)} All numbers: [gpu_{part}.json](gpu_{part}.json).")
        try:
            parts.append(describe(report))
        except (KeyError, IndexError):
            status = ", ".join(f"{name}: exit status {one['exit_status']}" for name, one in report["parts"].items())
            parts.append(f"It left no result ({status}).")
    return "\n\n".join([*parts, COMMANDS]) + "\n"


def main() -> None:
    if len(sys.argv) > 1:
        files = list(Path(sys.argv[1]).glob("gpu_*.json"))
        if on_cpu := [str(file) for file in files if json.loads(file.read_text())["gpu"] in ("none", [])]:
            sys.exit(f"{', '.join(on_cpu)}: measured without a GPU, so not for the page")
        for file in files:
            shutil.copy(file, FOLDER)
    (FOLDER / "gpu.md").write_text(page(read(FOLDER)))


if __name__ == "__main__":
    main()
