"""The kernel, compiled by the machine's C compiler and kept in the user's cache folder.

It is compiled when `tune`, `doctor` or the backend's name asks for it. Nothing of Python or torch is included, so that
it takes a second: tensors are passed as addresses, and the matrix product is the one in torch's library. A cached
kernel is run only from a folder that no other user can change, and only if it is byte for byte what was compiled;
whatever else has its name is replaced.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from diffvision import files

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = ("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
# Of what torch itself uses of this processor.
INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
SECONDS = 60.0
SCRATCH = ".kernel-"  # begins the names of folders to compile in
DIGEST_BYTES = 32  # of a file's sha256, at its end
MAX_BYTES = 2**24


class Kernel:
    """The loaded functions.

    Attributes:
        forward: takes the address of a `Call`, and writes the output.
        backward: the same, and writes the gradients.
        sgemm: the address of torch's BLAS matrix product, which the kernel calls through a `Call`.
    """

    def __init__(self, library: Path, sgemm: ctypes.c_void_p) -> None:
        functions = ctypes.CDLL(str(library))
        self.forward, self.backward = functions.diff_attention_forward, functions.diff_attention_backward
        self.forward.restype = self.backward.restype = None
        self.sgemm = sgemm


def kernel() -> Kernel:
    """Return the kernel, where `reason_against` has nothing against it."""
    found = _find_kernel()
    assert isinstance(found, Kernel), found
    return found


@torch.compiler.assume_constant_result  # files are not to be traced
def reason_against() -> str:
    """Return why there is no kernel on this machine; "" if there is one, which is compiled if the cache lacks it."""
    found = _find_kernel()
    return found if isinstance(found, str) else ""


@cache
def _find_kernel() -> Kernel | str:
    """Return the kernel, or why there is none; what failed once in a process is not tried again."""
    if sys.platform != "linux":
        return f"its kernel is compiled on Linux only, this is {sys.platform}"
    if (found := torch.backends.cpu.get_cpu_capability()) not in INSTRUCTIONS:
        return f"its kernel is for processors with AVX2 or AVX512, torch found {found}"
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        sgemm = ctypes.cast(torchs.sgemm_, ctypes.c_void_p)
    except (OSError, AttributeError):
        return f"torch {torch.__version__} has no matrix product that can be called (sgemm_)"
    try:
        folder = _folder()
        return (_load_cached(folder / _name(), sgemm) if folder else None) or _compile(folder, sgemm)
    except (OSError, AttributeError) as error:  # the loader's message names the file
        return f"its kernel cannot be compiled or loaded: {error}"


def _load_cached(path: Path, sgemm: ctypes.c_void_p) -> Kernel | None:
    """Load the kernel from a trusted folder; return None unless the file is this user's and as it was written."""
    try:
        # Without waiting for the other end of a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            content = file.read(MAX_BYTES)
        if content[-DIGEST_BYTES:] != hashlib.sha256(content[:-DIGEST_BYTES]).digest():
            return None
        return Kernel(path, sgemm)
    except OSError:  # it may have been compiled for a newer system that has the same home folder
        return None


def _compile(folder: Path | None, sgemm: ctypes.c_void_p) -> Kernel | str:
    """Compile the kernel, load it, and keep it in a trusted folder that can be written."""
    if isinstance(compiler := _compiler(), str):
        return compiler
    if folder and not os.access(folder, os.W_OK):
        folder = None
    with _scratch(folder) as scratch:
        library = scratch / _name()
        command = [*compiler, *_flags(), str(SOURCE), "-o", str(library), "-lm"]
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"its kernel cannot be compiled: {compiler[0]} took more than {SECONDS:.0f} s"
        if ended.returncode:
            first = (ended.stderr.strip().splitlines() or ["no message"])[0]
            return f"its kernel cannot be compiled by {compiler[0]}: {first}"
        library.chmod(0o700)
        # The loader ignores what follows the library, and so one file has both: nothing can replace only one of them.
        with library.open("r+b") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        loaded = Kernel(library, sgemm)  # a file that does not load is not kept
        if folder:
            kept = folder / library.name
            with suppress(OSError):
                if kept.is_dir() and not kept.is_symlink():
                    shutil.rmtree(kept)
                os.replace(library, kept)  # whole or not at all, whoever compiles at the same time
        return loaded


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Create a temporary folder within the cache's, where those of killed processes are removed, or in the system's."""
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)
        return
    files.sweep(folder, SCRATCH)
    with files.scratch(folder, SCRATCH, mode=0o700) as scratch_folder:
        yield scratch_folder


def _compiler() -> list[str] | str:
    """Return the command of the C compiler, or why there is none."""
    setting = os.environ.get("CC", "")
    try:
        named = shlex.split(setting)
    except ValueError as error:
        return f"the variable CC is {setting!r} ({error}): correct or unset it"
    if named:
        return named if shutil.which(named[0]) else f"the variable CC names {named[0]!r}, which is not there"
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else "no C compiler was found: install gcc or clang, or name one in the variable CC"


def _folder() -> Path | None:
    """Return the cache's folder, made if need be; None if another user can change it, or it cannot be made."""
    folder = Path(os.path.realpath(files.user_cache("kernels").parent), "kernels")
    places = [*reversed(folder.parents), folder]
    try:
        for place in places:
            place.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            return None
        # Refuse a path if another user can write to a folder on it, and so replace what it contains (not if sticky).
        others_enter = True
        for status in map(Path.stat, places):
            others_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in (0, os.getuid()) or (others_enter and others_write):
                return None
            others_enter = others_enter and bool(status.st_mode & 0o011)
    except OSError:
        return None
    return folder


def _name() -> str:
    """Return the file's name, another one for every source, set of instructions and version of torch."""
    parts = (SOURCE.read_bytes(), repr(_flags()).encode(), torch.__version__.encode())
    return f"attention-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *INSTRUCTIONS[torch.backends.cpu.get_cpu_capability()])
