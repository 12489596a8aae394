"""Backends timed in turns, until the order is certain."""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy import stats

LEAST_SECONDS = 0.02  # of one timing
LEAST_ROUNDS, MOST_ROUNDS = 5, 60
EQUAL = math.log(1.02)  # a difference that is not worth more rounds
CONFIDENCE = 0.99  # of each look; there are several

Call = Callable[[], Any]


class Timed:
    """The times of ways to compute the same, in rounds.

    Attributes:
        seconds: way -> seconds of a call in each round.
        running: the ways that are not certainly slower than another.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {way: [] for way in ways}
        self.running = list(ways)

    def median(self, way: str) -> float:
        """Return the median of a way's seconds."""
        return statistics.median(self.seconds[way])

    @property
    def leader(self) -> str:
        """The way with the least median, of those that are not certainly slower than another."""
        return min(self.running, key=self.median)

    def difference(self, way: str, other: str) -> tuple[float, float]:
        """Return the mean over rounds of the log ratio of two ways' times, and half the width of its interval."""
        logs = [math.log(a / b) for a, b in zip(self.seconds[way], self.seconds[other], strict=False)]
        if len(logs) < 2:
            return logs[0] if logs else 0.0, math.inf
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        return statistics.mean(logs), float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(logs) - 1)) * error

    def is_slower(self, way: str, other: str) -> bool:
        """Return whether a way is certainly slower than another."""
        mean, width = self.difference(way, other)
        return mean - width > 0


def in_turns(calls: dict[str, Call], device: str, until: float) -> Timed:
    """Time calls in turns, another one first each round, and leave out those that are certainly slower.

    It ends when one is left, when those that are left differ by less than 2%, after 60 rounds, or when the time is up.

    Args:
        calls: name -> what to time; it has been called before.
        device: "cpu" or "cuda".
        until: the value of `time.perf_counter` after which no round begins.
    """
    timed = Timed(list(calls))
    repeats = {name: _repeats(call, device) for name, call in calls.items()}
    for turn in range(MOST_ROUNDS):
        if time.perf_counter() > until and turn:
            break
        first = turn % len(timed.running)
        for name in timed.running[first:] + timed.running[:first]:
            timed.seconds[name].append(seconds_of(calls[name], device, repeats[name]))
        if turn + 1 < LEAST_ROUNDS:
            continue
        leader = timed.leader
        timed.running = [name for name in timed.running if not timed.is_slower(name, leader)]
        others = [timed.difference(name, leader) for name in timed.running if name != leader]
        if all(abs(mean) + width < EQUAL for mean, width in others):
            break
    return timed


def seconds_of(call: Call, device: str, repeats: int = 1) -> float:
    """Return the seconds of a call, the mean over as many as `repeats`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def _repeats(call: Call, device: str) -> int:
    """Return how often to call so that one timing lasts about `LEAST_SECONDS`."""
    first = seconds_of(call, device)
    return max(1, math.ceil(LEAST_SECONDS / first)) if first < LEAST_SECONDS else 1


def peak_memory(call: Call, device: str) -> int:
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
