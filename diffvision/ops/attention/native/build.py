"""The kernel, compiled by the machine's C compiler and kept in the user's cache folder.

It is compiled when `tune` or the backend's name asks for it. Nothing of Python or torch is included, so that it takes a
second: tensors are passed as addresses, and the matrix product is the one in torch's library.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import platformdirs
import torch

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
# Of what torch itself uses of this processor.
INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
SECONDS = 120.0


class Kernel:
    """The loaded functions.

    Attributes:
        forward: takes the address of a `Call`, and writes the output.
        backward: the same, and writes the gradients.
        product: the address of the matrix product that a `Call` names.
    """

    def __init__(self, library: Path) -> None:
        functions = ctypes.CDLL(str(library))
        self.forward, self.backward = functions.diff_attention_forward, functions.diff_attention_backward
        self.forward.restype = self.backward.restype = None
        self.product = ctypes.cast(_blas().sgemm_, ctypes.c_void_p)


@torch.compiler.assume_constant_result  # files are not to be traced
def reason_against() -> str:
    """Return why there can be no kernel on this machine; "" if nothing is known against it. Nothing is compiled."""
    return _reason_against()


@cache
def _reason_against() -> str:
    if sys.platform != "linux":
        return f"its kernel is compiled on Linux only, this is {sys.platform}"
    if torch.backends.cpu.get_cpu_capability() not in INSTRUCTIONS:
        return (
            f"its kernel is for processors with AVX2 or AVX512, torch found {torch.backends.cpu.get_cpu_capability()}"
        )
    try:
        _blas().sgemm_  # noqa: B018
    except (OSError, AttributeError):
        return f"torch {torch.__version__} has no matrix product that can be called (sgemm_)"
    if _compiler() is None and not _is_there():
        return "no C compiler was found: install gcc or clang, or name one in the variable CC"
    return ""


@cache
def kernel() -> Kernel:
    """Return the kernel, compiled if the cache does not have it.

    Raises:
        RuntimeError: it cannot be compiled or loaded.
    """
    path = _folder() / _name()
    if _is_there():
        return _load(path)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    is_kept = _is_private(path.parent) and os.access(path.parent, os.W_OK)
    with tempfile.TemporaryDirectory(prefix=".kernel-", dir=path.parent if is_kept else None) as folder:
        made = Path(folder, path.name)
        _compile(made)
        if is_kept:
            os.replace(made, path)  # whole or not at all, whoever compiles at the same time
        return _load(path if is_kept else made)


def _load(path: Path) -> Kernel:
    try:
        return Kernel(path)
    except OSError as error:
        raise RuntimeError(
            f"the kernel {path} cannot be loaded: {error}; remove it to have it compiled anew"
        ) from error


def _compile(path: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise RuntimeError(_reason_against())
    command = [compiler, *_flags(), str(SOURCE), "-o", str(path), "-lm"]
    try:
        subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True)
        path.chmod(0o700)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"the attention kernel cannot be compiled by {compiler}: {lines[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"the attention kernel cannot be compiled by {compiler}: {error}") from error


def _is_private(path: Path) -> bool:
    """Return whether a file or folder is there that nobody else may write: what is in it is to be run."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_there() -> bool:
    """Return whether the cache has a kernel that nobody else may have written."""
    path = _folder() / _name()
    return _is_private(path.parent) and _is_private(path)


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("diffvision"), "kernels")


@cache
def _name() -> str:
    """Return the file's name, another one for every source, set of instructions and version of torch."""
    parts = (SOURCE.read_bytes(), repr(_flags()).encode(), torch.__version__.encode())
    return f"attention-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *INSTRUCTIONS[torch.backends.cpu.get_cpu_capability()])


@cache
def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)


@cache
def _blas() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
