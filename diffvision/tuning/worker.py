"""The separate process in which a backend runs first: `try_backend` starts it, and outlives whatever it does.

    python -m diffvision.tuning.worker BACKEND < cases.json

It prints a line of JSON for each case when it begins and when it has been compared with the formula and timed.
"""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple, cast

import torch

from diffvision.ops.attention import BACKENDS, Problem
from diffvision.tuning.cases import Case
from diffvision.tuning.proof import mistake
from diffvision.tuning.timing import seconds_of
from diffvision.tuning.ways import calls_of

STUCK = 180.0  # seconds of one case, after which a backend hangs


class Tried(NamedTuple):
    """What a backend did in its process.

    Attributes:
        seconds: index of a case -> seconds of a call, of those that it computed as the formula does.
        cannot: index of a case -> why not: memory did not suffice, or torch.compile does not take it.
        excluded: why it is never to be chosen; None if nothing is against it.
    """

    seconds: dict[int, float]
    cannot: dict[int, str]
    excluded: str | None = None


def try_backend(
    backend: str, cases: Sequence[Case], until: float, advance: Callable[[int], None] = lambda _: None
) -> Tried:
    """Run a backend in a separate process on all cases, compare it with the formula there, and time it.

    Args:
        backend: its name.
        cases: those that it says it can compute.
        until: the value of `time.perf_counter` at which the process is stopped.
        advance: is called with 1 when a case is done.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "diffvision.tuning.worker", backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors: list[str | None] = []
    lines: queue.Queue[str | None] = queue.Queue()
    for pipe, target in ((process.stdout, lines.put), (process.stderr, errors.append)):
        threading.Thread(target=_read, args=(cast(IO[str], pipe), target), daemon=True).start()
    try:
        with cast(IO[str], process.stdin) as pipe:
            json.dump({"threads": torch.get_num_threads(), "cases": [_plain(case) for case in cases]}, pipe)
    except BrokenPipeError:
        pass  # it ended at once, which its exit status says
    seconds: dict[int, float] = {}
    cannot: dict[int, str] = {}
    current, began = None, time.perf_counter()
    try:
        while True:
            stuck = began + STUCK
            try:
                line = lines.get(timeout=max(0.0, min(until, stuck) - time.perf_counter()))
            except queue.Empty:
                if time.perf_counter() < stuck:
                    return Tried(seconds, cannot)
                where = "while it started" if current is None else f"at {_words(cases[current].problem)}"
                return Tried(seconds, cannot, f"it did not end within {STUCK:.0f} s {where}")
            if line is None:
                break
            news = json.loads(line)
            current, began = news["case"], time.perf_counter()
            if "begun" in news:
                continue
            advance(1)
            if "wrong" in news:
                return Tried(seconds, cannot, news["wrong"])
            if "cannot" in news:
                cannot[current] = news["cannot"]
            else:
                seconds[current] = news["seconds"]
    finally:
        process.kill()
        status = process.wait()
    if len(seconds) + len(cannot) == len(cases):
        return Tried(seconds, cannot)
    where = "when it started" if current is None else f"at {_words(cases[current].problem)}"
    last = next((text.strip() for text in reversed(errors) if text and text.strip()), "")
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Tried(seconds, cannot, f"its process ended {where} with {how}{f': {last}' if last else ''}")


def _read(pipe: IO[str], target: Callable[[Any], None]) -> None:
    for line in pipe:
        target(line)
    target(None)


def _plain(case: Case) -> dict[str, Any]:
    problem = case.problem._asdict() | {"dtype": str(case.problem.dtype).removeprefix("torch.")}
    return case._asdict() | {"problem": problem}


def _case(plain: dict[str, Any]) -> Case:
    problem = plain["problem"]
    return Case(**{**plain, "problem": Problem(**{**problem, "dtype": getattr(torch, problem["dtype"])})})


def _words(problem: Problem) -> str:
    """Return a problem in a few words."""
    length = f"{problem.queries} queries, {problem.keys} keys"
    kind = [word for word in ("causal", "masked", "packed") if getattr(problem, word)]
    extra = f", {', '.join(kind)}" if kind else ""
    backward = "forward and backward" if problem.grad else "forward"
    return f"{problem.batch} x {problem.heads} heads of {problem.head_dim}, {length}{extra}, {backward}"


def run(backend: str, cases: Sequence[Case], say: Callable[[dict[str, Any]], None]) -> None:
    """Compare a backend with the formula on cases, and time it."""
    for index, case in enumerate(cases):
        say({"case": index, "begun": True})
        try:
            wrong = mistake(backend, case.problem, compiled=case.compiled, seed=index)
            if wrong is None:
                call = calls_of(case, [backend])[backend]
                call()
                say({"case": index, "seconds": seconds_of(call, case.problem.device)})
                continue
        except torch.OutOfMemoryError as error:
            say({"case": index, "cannot": f"{error}".splitlines()[0]})
            torch.cuda.empty_cache()
            continue
        except Exception as error:  # whatever a kernel may raise is the result
            lines = str(error).strip().splitlines()
            wrong = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
            if case.compiled:  # the compiler may not take what is right without it
                say({"case": index, "cannot": wrong})
                continue
        say({"case": index, "wrong": f"{wrong} ({_words(case.problem)})"})
        return


def main() -> None:
    """Read the cases from standard input, and print a line of JSON for each."""
    given = json.load(sys.stdin)
    torch.set_num_threads(given["threads"])
    [backend] = sys.argv[1:]
    assert backend in BACKENDS, backend
    out = sys.stdout
    sys.stdout = sys.stderr  # what a kernel may print is no line of ours

    def say(news: dict[str, Any]) -> None:
        print(json.dumps(news), file=out, flush=True)

    run(backend, [_case(one) for one in given["cases"]], say)


if __name__ == "__main__":
    main()
