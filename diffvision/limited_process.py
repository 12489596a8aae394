"""A function of a program file, called in a child process whose time and memory the system limits.

For what strangers write and no check can bound, such as templates. One child answers all calls, and another one takes
its place after it was ended. This file is also the child's main program, and so needs nothing but the standard library.
"""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_MEMORY = 1 << 30  # bytes of the child's address space; macOS does not limit it
_MAX_REPLY = 1 << 26  # bytes


class LimitExceeded(ValueError):
    """A call takes more time or memory than it may have; the message goes on from "it"."""


class Failed(ValueError):
    """The function raised an exception, whose class is the message."""


class LimitedProcess:
    """The function `answer` of a program, from plain values to plain values, with limits for each call.

    Args:
        program: a Python file that imports nothing of this package.
        seconds: of the processor's time, for a call.
    """

    def __init__(self, program: Path, seconds: float = 5.0) -> None:
        self._program, self.seconds = program, seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def __call__(self, request: Any) -> Any:
        """Return what the function returns.

        Raises:
            LimitExceeded: it takes too much time or memory, or ends its process.
            Failed: it raises an exception.
        """
        with self._lock:
            child = self._get_child()
            try:
                line = self._ask(child, json.dumps(request).encode() + b"\n")
            except BaseException:  # such as KeyboardInterrupt: the next call must not get this one's reply
                self._end(child)
                raise
            if not line.endswith(b"\n"):
                raise LimitExceeded(self._describe_end(self._end(child)))
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        if "value" not in reply:
            raise LimitExceeded(f"takes more than {_MEMORY >> 20:,} MiB of memory")
        return reply["value"]

    def _get_child(self) -> "subprocess.Popen[bytes]":
        # A fork has its parent's child, whose pipes it must not use.
        if self._child is None or self._owner != os.getpid():
            words = [sys.executable, "-P", __file__, str(self._program), str(self.seconds)]
            self._owner = os.getpid()
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return self._child

    def _ask(self, child: "subprocess.Popen[bytes]", line: bytes) -> bytes:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
        except BrokenPipeError:
            return b""
        return child.stdout.readline()

    def _end(self, child: "subprocess.Popen[bytes]") -> int:
        self._child = None
        child.kill()
        child.communicate()
        return child.returncode

    def _describe_end(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"takes more than {self.seconds:g} s"
        return f"ends its process ({signal.Signals(-status).name if status < 0 else f'status {status}'})"


def _serve(program: str, seconds: float) -> None:
    """Answer each line of standard input, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the function prints is no reply
    answer = runpy.run_path(program)["answer"]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process, also within a function in C
        try:
            reply = json.dumps({"value": answer(json.loads(line))}).encode()
        except MemoryError:
            reply = b"{}"
        except Exception as error:
            reply = json.dumps({"error": type(error).__name__}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write((reply if len(reply) <= _MAX_REPLY else b"{}") + b"\n")
        replies.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))
