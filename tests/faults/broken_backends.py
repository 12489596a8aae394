"""Backends that are broken, each in its way, for a process that adds them to the table."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

from diffvision.ops.attention import BACKENDS, reference


def _backend(change, **more):
    def diff_attention(*tensors, **settings):
        return change(reference.diff_attention(*tensors, **settings))

    return SimpleNamespace(limit=lambda problem: None, diff_attention=diff_attention, **more)


def _crash(out):
    os.abort()


def _raise(out):
    raise RuntimeError("unspecified launch failure\nCompile with device assertions")


def _hang(out):
    time.sleep(600)


_calls = []


def _compile(out):
    if not _calls:
        time.sleep(10)  # as a compiler in the first call
    _calls.append(1)
    return out


def _hang_later(out):
    if _calls:
        time.sleep(600)
    _calls.append(1)
    return out


def _orphan(out):
    subprocess.Popen(["sleep", "60"])  # which holds the pipes open
    os.abort()


def _kill(out):
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory is short


def _talk(out):
    os.write(1, b"a library says something\n")
    return out


def _nan(out):
    out = out.clone()
    out[..., -1, 0] = float("nan")
    return out


BROKEN = {
    "wrong": _backend(lambda out: out * 1.0001),
    "wrong_backward": _backend(
        lambda out: out.detach() * 1.001 + 1.001 * (out - 1.0 * out.detach()) - 0.001 * out.detach()
    ),
    "crashing": _backend(_crash),
    "raising": _backend(_raise),
    "hanging": _backend(_hang),
    "hanging_later": _backend(_hang_later),
    "compiling": _backend(_compile),
    "nan": _backend(_nan),
    "orphaned": _backend(_orphan),
    "killed": _backend(_kill),
    "talking": _backend(_talk),
}


def register():
    """Add them to the table."""
    BACKENDS.update(BROKEN)
