"""What the benchmarks share: ways timed in turns, peak memory, the machine in words, and the files of a result.

Method. All ways take turns within each round, another one first each time; a way's ratio is the median over rounds of
its time divided by the baseline's in the same round, so that a noisy machine disturbs all alike. Each timing repeats
the call until it lasts about 20 ms or more, and CUDA is synchronised before and after it. A way is called at least
twice before it is timed, so that nothing is compiled or chosen while the clock runs.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

LEAST_SECONDS = 0.02
LEAST_ROUNDS = 3
PACKAGES = ("torch", "triton", "timm", "open_clip_torch", "transformers", "flash-attn", "numpy")


class Way(NamedTuple):
    """One way to compute the same thing.

    `call` is None where the way cannot, and `cannot` says why. Ways of one group share a column of the table, which
    shows the fastest. `role` is "plain" (the fastest of these is the baseline), "peer", "ours", "other", or "rate" for
    what measures the device and is in no table.
    """

    group: str
    role: str
    call: Callable[[], Any] | None
    kernel: str = ""
    cannot: str = ""
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around the timed loop, not around each call

    @property
    def name(self) -> str:
        return f"{self.group}: {self.kernel}" if self.kernel else self.group


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(way: Way, repeats: int, device: str) -> float:
    """Seconds a call, the mean over `repeats` calls."""
    assert way.call is not None
    with way.context():
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            way.call()
        synchronize(device)
    return (time.perf_counter() - start) / repeats


def _warm(way: Way, device: str, least: float, peak: Callable[[Way], int] | None, own: dict[str, Any]) -> None:
    """Calls a way for the first times: adds its peak memory, and how often to call it for one timing."""
    _seconds(way, 1, device)
    start = time.perf_counter()
    if peak is not None:
        own["peak_bytes"] = peak(way)
    # Recording memory slows a call down a little; one that takes far longer than need be is not called once more.
    slow = peak is not None and time.perf_counter() - start > 10 * max(least, LEAST_SECONDS)
    own["repeats"] = 1 if slow else _repeats(way, device, least)


def _repeats(way: Way, device: str, least: float) -> int:
    """How often to call a way so that one timing lasts at least `least` seconds."""
    first = _seconds(way, 1, device)
    if first >= least:
        return 1
    return max(1, math.ceil(least / _seconds(way, math.ceil(least / first), device)))


def _failure(error: BaseException) -> dict[str, Any]:
    lines = str(error).strip().splitlines()
    return {"failed": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}


def in_turns(
    ways: list[Way],
    device: str,
    rounds: int,
    *,
    seconds: float = math.inf,
    least: float = LEAST_SECONDS,
    peak: Callable[[Way], int] | None = None,
) -> dict[str, dict[str, Any]]:
    """Times the ways in turns.

    Args:
        ways: what to time; one that cannot, or fails, is recorded with its reason and disturbs no other.
        rounds: of all ways; fewer (but no fewer than 3) once `seconds` have passed.
        peak: measures a way's peak memory in bytes, once, before the rounds.

    Returns:
        a way's name -> {"times_ms": [...], "repeats", "group", "kernel", "role", "peak_bytes"}, or with "cannot" or
        "failed" and the reason in place of the times.
    """
    found: dict[str, dict[str, Any]] = {}
    running: list[Way] = []
    for way in ways:
        found[way.name] = own = {"group": way.group, "kernel": way.kernel, "role": way.role}
        if way.call is None:
            own["cannot"] = way.cannot
            continue
        try:
            _warm(way, device, least, peak, own)
        except Exception as error:  # whatever a kernel may raise is a result, not the end of the benchmark
            own.update(_failure(error))
            _forget(device)
            continue
        own["times_ms"] = []
        running.append(way)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        first = turn % max(1, len(running))
        for way in running[first:] + running[:first]:
            own = found[way.name]
            try:
                own["times_ms"].append(1e3 * _seconds(way, own["repeats"], device))
            except Exception as error:
                own.update(_failure(error))
        running = [way for way in running if "failed" not in found[way.name]]
    return {
        name: {k: v for k, v in own.items() if k != "times_ms" or "failed" not in own} for name, own in found.items()
    }


def _forget(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def add_ratios(found: dict[str, dict[str, Any]]) -> str | None:
    """Adds median, quartiles and the ratio to the baseline to each way that was timed.

    Returns:
        the baseline's name: the way of role "plain" with the least median; None if all of those failed.
    """
    timed = {name: own for name, own in found.items() if own.get("times_ms")}
    for own in timed.values():
        own["median_ms"] = statistics.median(own["times_ms"])
        own["quartiles_ms"] = _quartiles(own["times_ms"])
    plain = [name for name, own in timed.items() if own["role"] == "plain"]
    if not plain:
        return None
    baseline = min(plain, key=lambda name: timed[name]["median_ms"])
    for own in timed.values():
        ratios = ratios_to(own, timed[baseline])
        own["ratio"], own["ratio_quartiles"] = statistics.median(ratios), _quartiles(ratios)
    return baseline


def ratios_to(own: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The ratio of two ways' times in each round that both finished."""
    return [a / b for a, b in zip(own["times_ms"], other["times_ms"], strict=False)]


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def fastest(found: dict[str, dict[str, Any]], group: str | None = None, role: str | None = None) -> dict | None:
    """The fastest way of a group or role that was timed, or None."""
    timed = [
        own
        for own in found.values()
        if "median_ms" in own and group in (None, own["group"]) and role in (None, own["role"])
    ]
    return min(timed, key=lambda own: own["median_ms"], default=None)


def peak_memory(call: Callable[[], Any], device: str) -> int:
    """Peak bytes that a call holds beyond what was held before it.

    Exact for what goes through torch's allocator: on CUDA its own counter, elsewhere the running sum over the
    allocations and frees in the profiler's record. What a library allocates for itself is not in it.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains of the absent GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def matrix_product(device: str, dtype: torch.dtype) -> tuple[Way, float]:
    """One big matrix product, and its multiplications and additions: the device's rate, timed in turns too."""
    size = 8192 if device.startswith("cuda") else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Way("matrix product", "rate", lambda: a @ b), 2.0 * size**3


def reading(device: str) -> tuple[Way, float]:
    """A sum over a large array, and the bytes that it reads."""
    size = 1 << (30 if device.startswith("cuda") else 26)
    array = torch.ones(size, device=device, dtype=torch.float32)
    return Way("sum", "rate", array.sum), 4.0 * size


def environment(device: str) -> dict[str, Any]:
    """The machine, the versions and the command, for whoever reads the numbers later."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "hardware": hardware(device),
        "versions": {**versions, "torch": torch.__version__, "diffvision": commit()},
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def command(given: list[str]) -> str:
    """The command to repeat a run, without the folder that it wrote to."""
    words = iter(given[1:])
    kept = [word for word in words if not (word == "--output" and next(words, None)) and "--output=" not in word]
    return shlex.join(["python", f"scripts/benchmarks/{Path(given[0]).name}", *kept])


def hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The code that was measured: git's commit, "+ changes" behind it where files differ from it. Where a copy of the
    code has no git folder, the variable DIFFVISION_COMMIT may tell it."""
    folder = str(Path(__file__).resolve().parent)
    found = _output("git", "-C", folder, "rev-parse", "HEAD")
    if found is None:
        return os.environ.get("DIFFVISION_COMMIT", "unknown")
    changed = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{found} + changes" if changed else found


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe_machine(report: dict[str, Any]) -> str:
    own, versions = report["hardware"], report["versions"]
    where = f"{own['gpu']}, driver {own['driver']}" if "gpu" in own else f"{own['cpu']}, {own['threads']} thread(s)"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "timm") if versions[name])
    return f"{where}; {packages}; diffvision {versions['diffvision']}; {report['date'][:10]}\n\n`{report['command']}`"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that the benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on CUDA by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, help="15 by default; 7 with --quick")
    parser.add_argument("--quick", action="store_true", help="few shapes and rounds: minutes on two CPU cores")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing new after so many")
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR")
    return parser


def parse(parser: argparse.ArgumentParser, given: list[str] | None = None) -> argparse.Namespace:
    """Arguments with their defaults filled in; sets the threads."""
    args = parser.parse_args(given)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU: choose --device cpu")
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        parser.error(f"torch has no dtype {dtype!r}")
    args.dtype = getattr(torch, dtype)
    args.rounds = args.rounds or (7 if args.quick else 15)
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    # `timeout` and the like: what is measured by then is still drawn and written
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return args


@contextmanager
def progress(total: int, minutes: float) -> Iterator[Callable[[str], bool]]:
    """Shows how far a long run is. Yields a function to call with the name of what comes next; False: out of time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    start, done = time.monotonic(), 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def following(name: str) -> bool:
            nonlocal done
            bar.update(task, completed=done, description=name)
            done += 1
            if not console.is_terminal:
                print(f"[{done}/{total}, {time.monotonic() - start:.0f} s] {name}", file=sys.stderr, flush=True)
            return time.monotonic() - start < 60 * minutes

        yield following
        bar.update(task, completed=total, description="done")


def write(folder: Path, name: str, report: dict[str, Any], markdown: str) -> None:
    """NAME.json and NAME.md, each replaced in one step: a run that is stopped leaves whole files."""
    for ending, text in (("json", json.dumps(report, indent=1, allow_nan=False)), ("md", markdown)):
        scratch = folder / f".{name}.{ending}"
        scratch.write_text(text + "\n")
        scratch.replace(folder / f"{name}.{ending}")


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def reasons(passes: list[tuple[str, dict[str, dict[str, Any]]]]) -> str:
    """Why there are dashes: a line for each way and reason, with the rows that it is true of."""
    rows: dict[str, list[str]] = {}
    for row, found in passes:
        for name, own in found.items():
            if reason := own.get("cannot") or own.get("failed"):
                own_rows = rows.setdefault(f"`{name}` {'cannot' if 'cannot' in own else 'failed'}: {reason}", [])
                own_rows += [row] if row not in own_rows else []
    return "\n".join(f"- {reason} ({', '.join(where)})" for reason, where in rows.items())
