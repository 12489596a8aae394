"""The time of `diffvision data check` over many small shards: 1 against 2 workers, unchanged, and after a kill.

    python scripts/benchmarks/bench_check.py [--shards 1000] [--each 8] [--output docs/benchmarks/data.json]

Shards have JPEGs of 256 pixels with caption and JSON, as img2dataset writes them. The numbers of workers take turns.
Times are without imports; CPU times are the sum over the process and its workers.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from bench_images import write_jpegs
from diffvision.data.check import check_shards
from diffvision.data.shards.writer import write_tar


def write(directory: Path, shards: int, each: int) -> None:
    images = write_jpegs(256, each)
    directory.mkdir(parents=True)
    for shard in range(shards):
        samples = [
            {"__key__": f"{shard:05d}{row:04d}", "jpg": image, "txt": f"picture {row}", "json": '{"status": "success"}'}
            for row, image in enumerate(images)
        ]
        write_tar(directory / f"{shard:05d}.tar", samples)


def cpu_seconds() -> float:
    """Return those of this process and of its workers that ended."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(directory: Path, workers: int, *, recheck: bool = False) -> dict[str, Any]:
    """Return seconds, CPU seconds, and how many results were noted before, of one check."""
    before, started = cpu_seconds(), time.perf_counter()
    results = check_shards(directory, workers, recheck=recheck)
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - before
    assert all(result.ok for result in results)
    noted = sum(result.noted for result in results)
    return {"workers": workers, "seconds": round(seconds, 1), "cpu seconds": round(cpu, 1), "noted": noted}


def noted(directory: Path) -> int:
    return len(list((directory / ".index").glob("*.check")))


def after_a_kill(directory: Path, shards: int) -> dict[str, Any]:
    """Return what a check finds noted that follows one which was killed half-way."""
    for note in (directory / ".index").glob("*.check"):
        note.unlink()
    command = [sys.executable, "-m", "diffvision", "data", "check", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while noted(directory) < shards // 2 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    return measure(directory, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--each", type=int, default=8, help="images in a shard")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help='a JSON file, in which "check" is replaced')
    arguments = parser.parse_args()
    report = machine.environment("cpu") | {"shards": arguments.shards, "images in a shard": arguments.each}
    report["load at the start"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "shards")
        write(directory, arguments.shards, arguments.each)
        rounds = [measure(directory, n, recheck=True) for _ in range(arguments.rounds) for n in (1, 2)]
        report["rounds"] = rounds
        for workers in (1, 2):
            times = [one["seconds"] for one in rounds if one["workers"] == workers]
            report[f"seconds with {workers}"] = statistics.median(times)
        report["unchanged"] = measure(directory, 2)
        report["after a kill half-way"] = after_a_kill(directory, arguments.shards)
    report["load at the end"] = os.getloadavg()[0]
    print(json.dumps(report, indent=1))
    if arguments.output is not None:
        whole = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(whole | {"check": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
