"""The separate process in which a backend runs first: `try_backend` starts it, and outlives whatever it does.

    python -m diffvision.tuning.worker BACKEND < cases.json

It prints a line of JSON for each case when it begins and when it has been compared with the formula and timed.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

import diffvision
from diffvision.ops.attention import BACKENDS, Problem, tuned
from diffvision.tuning.cases import Case
from diffvision.tuning.proof import find_mistake
from diffvision.tuning.timing import seconds_of
from diffvision.tuning.ways import calls_of

START = 300.0  # seconds until the process is ready: it imports torch
COMPILE = 600.0  # seconds of a case's first call, which may compile kernels, after which a backend hangs
STUCK = 120.0  # seconds of the rest of a case
GRACE = 20.0  # seconds that a case may take which began when the time was nearly up
POLL = 0.5
# The last two are a launch whose tiles exceed the GPU's shared memory or registers, in Triton's and CUDA's words.
NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "out of resource", "too many resources")


class Tried(NamedTuple):
    """What a backend did in its process.

    Attributes:
        seconds: index of a case -> seconds of a call, of those that it computed as the formula does; infinity where
            it had no memory, or the compiler did not take it.
        excluded: why it is never to be chosen; None if nothing is against it.
    """

    seconds: dict[int, float]
    excluded: str | None = None


def try_backend(
    backend: str, cases: Sequence[Case], seconds: float, advance: Callable[[int], None] = lambda _: None
) -> Tried:
    """Run a backend in a separate process on all cases, compare it with the formula there, and time it.

    Args:
        backend: its name.
        cases: those that it says it can compute.
        seconds: after which no case begins, counted from when the process is ready.
        advance: is called with 1 when a case is done.

    Raises:
        ChildProcessError: the process does not even start, or takes minutes to; that is no fault of the backend.
    """
    folder = str(Path(diffvision.__file__).parent.parent)  # the same code as here, whatever is installed
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "diffvision.tuning.worker", backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # so that whatever it starts ends with it
    )
    errors: list[str] = []
    lines: queue.Queue[str] = queue.Queue()
    readers = [
        threading.Thread(target=_read, args=(cast(IO[str], pipe), target), daemon=True)
        for pipe, target in ((process.stdout, lines.put), (process.stderr, errors.append))
    ]
    for reader in readers:
        reader.start()
    try:
        with suppress(BrokenPipeError):  # it ended at once, which its exit status says
            given = cast(IO[str], process.stdin)  # it stays open: its end is this process's
            given.write(json.dumps({"threads": torch.get_num_threads(), "cases": list(map(_plain, cases))}) + "\n")
            given.flush()
        heard = _heard(readers[0], lines, cases, seconds, advance)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    if isinstance(heard, Tried):
        return heard
    readers[1].join(timeout=1.0)
    last = next((text.strip() for text in reversed(errors) if text.strip()), "")
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    if heard.current is None:
        raise ChildProcessError(f"the process that tries backends ended when it started, with {how}: {last}")
    case = cases[heard.current]
    if status == -signal.SIGKILL or is_excused(last, case):  # the system kills where memory is short
        return Tried(heard.seconds | {heard.current: math.inf})
    at = _words(case.problem)
    return Tried(heard.seconds, f"its process ended at {at} with {how}{f': {last}' if last else ''}")


class _Ended(NamedTuple):
    """What was heard of a process that ended before its cases did; `current` is the case that it was at."""

    seconds: dict[int, float]
    current: int | None


def _heard(
    reader: threading.Thread,
    lines: "queue.Queue[str]",
    cases: Sequence[Case],
    limit: float,
    advance: Callable[[int], None],
) -> Tried | _Ended:
    """Listen to the child until it has tried every case, is stuck, or ends."""
    seconds: dict[int, float] = {}
    current: int | None = None
    is_compiled = False  # the current case's kernels
    waited, until = 0.0, float("inf")  # waits are counted: a clock runs while both processes are suspended
    while True:
        ended = not reader.is_alive()  # asked first: what it read before is in the queue
        try:
            line = lines.get(timeout=POLL)
        except queue.Empty:
            if ended:
                return _Ended(seconds, current)
            waited += POLL
            if current is None:
                if waited > START:
                    raise ChildProcessError(
                        f"the process that tries backends was not ready within {START:.0f} s: try again"
                    ) from None
                continue
            longest = STUCK if is_compiled else COMPILE
            if waited > longest and not cases[current].compiled:
                return Tried(seconds, f"it did not end within {longest:.0f} s at {_words(cases[current].problem)}")
            if time.perf_counter() > until + GRACE or waited > longest:
                return Tried(seconds)
            continue
        news, now, waited = json.loads(line), time.perf_counter(), 0.0
        if "ready" in news:
            until = now + limit
        elif "begun" in news:
            current, is_compiled = news["case"], False
            if now > until:
                return Tried(seconds)
        elif "compiled" in news:
            is_compiled = True
        else:
            advance(1)
            if "wrong" in news:
                return Tried(seconds, news["wrong"])
            seconds[news["case"]] = news.get("seconds", math.inf)
            if news["case"] == len(cases) - 1:
                return Tried(seconds)


def _read(pipe: IO[str], target: Callable[[str], None]) -> None:
    for line in pipe:
        target(line)


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
        message = ""
        try:
            if not case.compiled:  # on a GPU the call returns when it has compiled kernels and launched them
                calls_of(case, [backend])[backend]()
                say({"case": index, "compiled": True})
            wrong = find_mistake(backend, case.problem, compiled=case.compiled, seed=index)
            if wrong is None:
                call = calls_of(case, [backend])[backend]
                call()
                say({"case": index, "seconds": seconds_of(call, case.problem.device)})
                continue
        except Exception as error:  # whatever a kernel may raise is the result
            message = str(error)
            wrong = f"{type(error).__name__}: {(message.strip().splitlines() or [''])[0]}"[:300]
        if is_excused(message, case):
            say({"case": index, "cannot": wrong})
            continue
        say({"case": index, "wrong": f"{wrong} ({_words(case.problem)})"})
        return


def is_excused(message: str, case: Case) -> bool:
    """Return whether a failure says nothing against a backend: memory is short, or it may be the compiler's fault."""
    return case.compiled or any(text in message for text in NO_MEMORY)


def main() -> None:
    """Read the cases from standard input, and print a line of JSON for each."""
    [backend] = sys.argv[1:]
    assert backend in BACKENDS, backend
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no line of ours
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(given["threads"])
    for device in tuned.DEVICES:  # packed sequences that are taken one by one are taken by the rule
        tuned.use(device, None)

    def say(news: dict[str, Any]) -> None:
        print(json.dumps(news), file=out, flush=True)

    say({"ready": True})
    run(backend, [_case(one) for one in given["cases"]], say)


def _end_with_parent() -> None:
    sys.stdin.read()  # until it is closed
    os._exit(1)


if __name__ == "__main__":
    main()
