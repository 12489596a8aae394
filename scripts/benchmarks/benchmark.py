"""What the benchmarks share: ways timed in turns, peak memory, training steps, and the files of a result.

`machine.py` describes the machine and `benchmark_picture.py` draws.

All ways take turns within each round, another one first each time; a way's ratio is the median over rounds of its time
divided by the baseline's in the same round, so that a noisy machine disturbs all alike. Each timing repeats the call
until it lasts about 20 ms or more, and CUDA is synchronised before and after it. A way is called at least twice before
it is timed, so that nothing is compiled or chosen while the clock runs.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Settings = dict[str, Callable[[], None]]
LEAST_SECONDS = 0.02
LEAST_ROUNDS = 3


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
    # Entered around the timed loop, not around each call.
    context: Callable[[], AbstractContextManager] = nullcontext

    @property
    def name(self) -> str:
        return f"{self.group}: {self.kernel}" if self.kernel else self.group


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(way: Way, repeats: int, device: str) -> float:
    """Return the seconds of a call, the mean over `repeats` calls."""
    assert way.call is not None
    with way.context():
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            way.call()
        synchronize(device)
    return (time.perf_counter() - start) / repeats


def _warm(way: Way, device: str, least: float, peak: Callable[[Way], int] | None, result: dict[str, Any]) -> None:
    """Call a way for the first times; add its peak memory, and how often to call it for one timing."""
    _seconds(way, 1, device)
    start = time.perf_counter()
    if peak is not None:
        result["peak_bytes"] = peak(way)
    # Recording memory slows a call down a little; one that takes far longer than need be is not called once more.
    slow = peak is not None and time.perf_counter() - start > 10 * max(least, LEAST_SECONDS)
    result["repeats"] = 1 if slow else _repeats(way, device, least)


def _repeats(way: Way, device: str, least: float) -> int:
    """Return how often to call a way so that one timing lasts at least `least` seconds."""
    first = _seconds(way, 1, device)
    if first >= least:
        return 1
    return max(1, math.ceil(least / _seconds(way, math.ceil(least / first), device)))


def _failure(error: BaseException) -> dict[str, Any]:
    lines = str(error).strip().splitlines()
    return {"failed": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}


def peak_memory(call: Callable[[], Any], device: str) -> int:
    """Return the peak bytes that a call holds beyond what was held before it.

    Exact for what goes through torch's allocator: on CUDA its result counter, elsewhere the running sum over the
    allocations and frees in the profiler's record. What a library allocates for itself is not in it.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # It would complain of the absent GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = peak = 0
    for event in sorted(_memory_events(profile), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def _memory_events(profile: Any) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return (event for event in events if event["name"] == "[memory]")


def in_turns(
    ways: list[Way],
    device: str,
    rounds: int,
    *,
    seconds: float = math.inf,
    least: float = LEAST_SECONDS,
    peak: Callable[[Way], int] | None = None,
) -> dict[str, dict[str, Any]]:
    """Time the ways in turns.

    Args:
        ways: what to time; one that cannot, or fails, is recorded with its reason and disturbs no other.
        rounds: of all ways; fewer (but no fewer than 3) once `seconds` have passed.
        peak: measures a way's peak memory in bytes, once, before the rounds.

    Returns:
        a way's name -> {"times_ms": [...], "repeats", "group", "kernel", "role", "peak_bytes"}, or with "cannot" or
        "failed" and the reason in place of the times.
    """
    results: dict[str, dict[str, Any]] = {}
    running: list[Way] = []
    for way in ways:
        results[way.name] = result = {"group": way.group, "kernel": way.kernel, "role": way.role}
        if way.call is None:
            result["cannot"] = way.cannot
            continue
        try:
            _warm(way, device, least, peak, result)
        # Whatever a kernel may raise is a result, not the end of the benchmark.
        except Exception as error:
            result.update(_failure(error))
            _forget(device)
            continue
        result["times_ms"] = []
        running.append(way)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        first = turn % max(1, len(running))
        for way in running[first:] + running[:first]:
            result = results[way.name]
            try:
                result["times_ms"].append(1e3 * _seconds(way, result["repeats"], device))
            except Exception as error:
                result.update(_failure(error))
        running = [way for way in running if "failed" not in results[way.name]]
    for result in results.values():
        if "failed" in result:
            result.pop("times_ms", None)
    return results


def _forget(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def add_ratios(results: dict[str, dict[str, Any]]) -> str | None:
    """Add median, quartiles and the ratio to the baseline to each way that was timed.

    Returns:
        the baseline's name: the way of role "plain" with the least median; None if all of those failed.
    """
    timed = {name: result for name, result in results.items() if result.get("times_ms")}
    for result in timed.values():
        result["median_ms"] = statistics.median(result["times_ms"])
        result["quartiles_ms"] = _quartiles(result["times_ms"])
    plain = [name for name, result in timed.items() if result["role"] == "plain"]
    if not plain:
        return None
    baseline = min(plain, key=lambda name: timed[name]["median_ms"])
    for result in timed.values():
        ratios = ratios_to(result, timed[baseline])
        result["ratio"], result["ratio_quartiles"] = statistics.median(ratios), _quartiles(ratios)
    return baseline


def ratios_to(result: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Return the ratio of two ways' times in each round that both finished."""
    return [a / b for a, b in zip(result["times_ms"], other["times_ms"], strict=False)]


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def fastest(results: dict[str, dict[str, Any]], group: str | None = None, role: str | None = None) -> dict | None:
    """Return the fastest way of a group or role that was timed, or None."""
    timed = [
        result
        for result in results.values()
        if "median_ms" in result and group in (None, result["group"]) and role in (None, result["role"])
    ]
    return min(timed, key=lambda result: result["median_ms"], default=None)


def matrix_product(device: str, dtype: torch.dtype) -> tuple[Way, float]:
    """Return one big matrix product, which measures the device's rate, and its number of operations."""
    size = 8192 if device.startswith("cuda") else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Way("matrix product", "rate", lambda: a @ b), 2.0 * size**3


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that the benchmarks share."""
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
    """Return the arguments with their defaults filled in, and set the threads."""
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
    # For `timeout` and the like: what is measured by then is still drawn and written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return args


@contextmanager
def progress(total: int, minutes: float) -> Iterator[Callable[[str], bool]]:
    """Show how far a long run is. Yields a function to call with the name of what comes next; False: out of time."""
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


def write(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Write NAME.json, replaced in one step: a run that is stopped leaves a whole file."""
    scratch = folder / f".{name}.json"
    scratch.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    scratch.replace(folder / f"{name}.json")


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def remarks(report: dict[str, Any], passes: list[tuple[str, dict[str, dict[str, Any]]]]) -> list[str]:
    """Return the page's last parts: why there are dashes, with the rows of each reason, and what was not reached."""
    rows: dict[str, list[str]] = {}
    for row, results in passes:
        for name, result in results.items():
            if reason := result.get("cannot") or result.get("failed"):
                where = rows.setdefault(f"`{name}` {'cannot' if 'cannot' in result else 'failed'}: {reason}", [])
                where += [row] if row not in where else []
    parts = (
        ["## Dashes", "\n".join(f"- {reason} ({', '.join(where)})" for reason, where in rows.items())] if rows else []
    )
    if report["left_out"]:
        parts.append(f"Not reached in the time given: {'; '.join(report['left_out'])}.")
    return parts


def measure_all(args: argparse.Namespace, name: str, report: dict[str, Any], settings: Settings) -> None:
    """Measure the settings in order, and write NAME.json after each.

    Args:
        report: has "left_out", which lists the titles of settings that were not reached in the time given.
        settings: title -> a function that measures it and adds what it measured to the report.
    """
    report["left_out"] = list(settings)
    with progress(len(settings), args.minutes) as following:
        for title, measure in settings.items():
            if not following(title):
                break
            measure()
            report["left_out"].remove(title)
            write(args.output, name, report)


def autocast(args: argparse.Namespace) -> Callable[[], AbstractContextManager]:
    if args.dtype == torch.float32:
        return nullcontext
    return partial(torch.autocast, args.device.partition(":")[0], args.dtype)


def training_step(model: nn.Module, loss: Callable[[], Tensor], args: argparse.Namespace) -> Callable[[], None]:
    """Return one training step of a model with AdamW, as a function without arguments."""
    cast = autocast(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device.startswith("cuda"))

    def step() -> None:
        with cast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
