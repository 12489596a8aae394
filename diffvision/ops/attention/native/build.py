"""The kernel, compiled by the machine's C compiler and kept in the user's cache folder.

It is compiled when `tune`, `doctor` or the backend's name asks for it. Nothing of Python or torch is included, so that
it takes a second: tensors are passed as addresses, and the matrix product is the one in torch's library.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
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
SECONDS = 60.0


class Kernel:
    """The loaded functions.

    Attributes:
        forward: takes the address of a `Call`, and writes the output.
        backward: the same, and writes the gradients.
        product: the address of the matrix product that a `Call` names.
    """

    def __init__(self, library: Path, product: ctypes.c_void_p) -> None:
        functions = ctypes.CDLL(str(library))
        self.forward, self.backward = functions.diff_attention_forward, functions.diff_attention_backward
        self.forward.restype = self.backward.restype = None
        self.product = product


def kernel() -> Kernel:
    """Return the kernel, where `reason_against` has nothing against it."""
    found = _found()
    assert isinstance(found, Kernel), found
    return found


@torch.compiler.assume_constant_result  # files are not to be traced
def reason_against() -> str:
    """Return why there is no kernel on this machine; "" if there is one, which is compiled if the cache lacks it."""
    found = _found()
    return found if isinstance(found, str) else ""


@cache
def _found() -> Kernel | str:
    """Return the kernel, or why there is none; what failed once in a process is not tried again."""
    if sys.platform != "linux":
        return f"its kernel is compiled on Linux only, this is {sys.platform}"
    if (found := torch.backends.cpu.get_cpu_capability()) not in INSTRUCTIONS:
        return f"its kernel is for processors with AVX2 or AVX512, torch found {found}"
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        product = ctypes.cast(torchs.sgemm_, ctypes.c_void_p)
    except (OSError, AttributeError):
        return f"torch {torch.__version__} has no matrix product that can be called (sgemm_)"
    try:
        path = _folder() / _name()
        if _is_private(path.parent) and _is_private(path):
            return Kernel(path, product)
        return _compiled(path, product)
    except OSError as error:  # the loader's message names the file
        return f"its kernel cannot be compiled or loaded: {error}"


def _compiled(path: Path, product: ctypes.c_void_p) -> Kernel | str:
    """Compile the kernel, load it, and keep it at a path that nobody else may write."""
    if isinstance(compiler := _compiler(), str):
        return compiler
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = _is_private(path.parent) and os.access(path.parent, os.W_OK)
    except OSError:
        kept = False
    with tempfile.TemporaryDirectory(prefix=".kernel-", dir=path.parent if kept else None) as folder:
        made = Path(folder, path.name)
        command = [*compiler, *_flags(), str(SOURCE), "-o", str(made), "-lm"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"its kernel cannot be compiled: {compiler[0]} took more than {SECONDS:.0f} s"
        if ended.returncode:
            first = (ended.stderr.strip().splitlines() or ["no message"])[0]
            return f"its kernel cannot be compiled by {compiler[0]}: {first}"
        made.chmod(0o700)
        loaded = Kernel(made, product)  # a file that does not load is not kept
        if kept:
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path)  # whole or not at all, whoever compiles at the same time
        return loaded


def _compiler() -> list[str] | str:
    """Return the command of the C compiler, or why there is none."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named if shutil.which(named[0]) else f"the variable CC names {named[0]!r}, which is not there"
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else "no C compiler was found: install gcc or clang, or name one in the variable CC"


def _is_private(path: Path) -> bool:
    """Return whether a file or folder is there that nobody else may write: what is in it is to be run."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _folder() -> Path:
    return Path(platformdirs.user_cache_dir("diffvision"), "kernels")


def _name() -> str:
    """Return the file's name, another one for every source, set of instructions and version of torch."""
    parts = (SOURCE.read_bytes(), repr(_flags()).encode(), torch.__version__.encode())
    return f"attention-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *INSTRUCTIONS[torch.backends.cpu.get_cpu_capability()])
