"""The flash-attn packages: FlashAttention-3 (Hopper), FlashAttention-4 (Hopper, Blackwell), flash-attn 2 (Ampere on).

Each call takes the first of the installed ones that suits the GPU, the head size, determinism and torch.compile.

flash-attn 2 requires queries, keys and values of one size. FlashAttention-4 accepts others, but its tests skip their
backward, or grouped heads there. For these two V1's wide values are computed as in `sdpa`: queries and keys are
widened with zeros (one call per map), or the values are cut into pieces (one call per piece and map, as unilm's
multihead_flashdiff_2.py does). Where both come to the same matrix work, widening computes half as many exponentials and
is chosen up to size 128; above it the values are cut, since the kernels above 128 hold smaller blocks and their
backward is less tested.
FlashAttention-3 takes keys up to 64 with values up to 256, which its tests run both ways: one call per map, no copies.
Its forward then runs the kernel for values of 256, its backward the one for the larger size.
Where the maps share their key (V2) they are stacked as heads: one call.

Source: Dao-AILab/flash-attention: flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (2.8.3.post2),
hopper/flash_attn_interface.py and hopper/flash_api.cpp (3.0.0 at 0251105a), flash_attn/cute/interface.py (4.0.0b36).
None of these packages was run with this file: tests check calls against their signatures and replace the computation.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops.attention.difference import compute_maps, subtract, widen
from diffvision.ops.attention.kernels import compute_capability
from diffvision.ops.attention.problem import Problem

DTYPES = (torch.float16, torch.bfloat16)
KERNELS = (32, 64, 96, 128, 192, 256)  # the head sizes that kernels are made for; one in between costs the next
INSTALL = (
    "`pip install 'diffvision[flash-attn]' --no-build-isolation` builds flash-attn 2 (from Ampere on; it needs nvcc), "
    "`pip install 'diffvision[flash]'` installs FlashAttention-4 (Hopper and Blackwell), FlashAttention-3 (Hopper) is "
    "built from the folder hopper of Dao-AILab/flash-attention"
)


class Package(NamedTuple):
    """A package that may be installed."""

    name: str
    module: str
    majors: range  # the compute capabilities that it is used on
    largest: int  # head size
    traceable: bool  # by torch.compile
    equal_sizes: bool = True  # of keys and values; if False, keys up to 64 go with values up to `largest`
    largest_deterministic: int = 256  # head size of a backward that adds in a fixed order


class Library(NamedTuple):
    """An installed package, and the functions of it that are used here."""

    package: Package
    attend: Callable[..., Tensor | tuple[Tensor, ...]]  # q, k, v [B, N, H, D], softmax_scale, causal
    attend_varlen: Callable[..., Tensor | tuple[Tensor, ...]]  # q, k, v [T, H, D], cu_seqlens_q, ...


# In order of preference. FlashAttention-4 has larger sizes, but its tests skip their backward; it is no registered
# operator, and its backward on 12.x is neither deterministic nor seen to compile.
PACKAGES = (
    Package("FlashAttention-3", "flash_attn_interface", range(9, 10), 256, True, False, 192),
    Package("FlashAttention-4", "flash_attn.cute", range(9, 12), 128, False),
    Package("flash-attn 2", "flash_attn", range(8, 100), 256, True),
)

_found: dict[str, tuple[Library, ...]] = {}


def find_libraries() -> tuple[Library, ...] | str:
    """Import the installed packages that suit the GPU, once; return them by preference, or why there is none."""
    answer = _search()
    return _found.get(answer, answer)


@torch.compiler.assume_constant_result  # imports are not to be traced; a constant may only be text
def _search() -> str:
    return _search_once()


@cache
def _search_once() -> str:
    """Return the names of the packages, which are then a key of `_found`, or why there is none."""
    capability = compute_capability() if torch.cuda.is_available() else None
    if capability is not None and capability < 80:
        return f"compute capability {capability / 10}: flash-attn needs 8.0 or more"
    libraries, problems = [], []
    for package in PACKAGES:
        if capability is not None and capability // 10 not in package.majors:
            problems.append(f"{package.name} is not used on compute capability {capability / 10}")
            continue
        functions = _import_functions(package.module)
        if isinstance(functions, str):
            problems.append(functions)
        else:
            libraries.append(Library(package, *functions))
    if not libraries:
        return "; ".join([*problems, INSTALL])
    names = ", ".join(library.package.name for library in libraries)
    _found[names] = tuple(libraries)
    return names


def _import_functions(module: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | str:
    """Return `flash_attn_func` and `flash_attn_varlen_func` of a module, or why there are none."""
    try:
        spec = importlib.util.find_spec(module)
        # FlashAttention-4 makes `flash_attn` a namespace package, a folder without a file: that is no flash-attn 2.
        if spec is None or spec.origin is None:
            return f"{module} is not installed"
        if module == "flash_attn_interface" and (left_out := _left_out()):
            return f"{module} was built with {left_out[0]}"
        loaded = importlib.import_module(module)
        return loaded.flash_attn_func, loaded.flash_attn_varlen_func
    except ModuleNotFoundError as error:
        return f"{module} is not installed" if error.name in ("flash_attn", module) else f"{module} needs {error.name}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, or another package
        return f"{module} is installed but cannot be used ({error})"


def _left_out() -> list[str]:
    """Return the flags of FlashAttention-3's build that leave out a kernel of ours, some of which it does not check."""
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    needed = ("BACKWARD", "VARLEN", "HDIM64", "HDIMDIFF64", "HDIM128", "HDIM256")
    return [name for name, is_set in flags.items() if is_set and name.rpartition("DISABLE_")[2] in needed]


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    p = problem
    if p.device != "cuda":
        return f"flash-attn runs on cuda, not on {p.device}"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype}: flash-attn takes float16 and bfloat16; cast, or use autocast"
    if p.dropout > 0:
        return f"dropout {p.dropout}: it would be drawn for each piece of the values, not for each map; pass 0"
    if p.masked:
        return "flash-attn takes no mask but Documents"
    if 0 in (p.batch, p.queries, p.keys):
        return f"batch {p.batch}, {p.queries} queries, {p.keys} keys: flash-attn takes no empty tensor"
    libraries = find_libraries()
    if isinstance(libraries, str):
        return libraries
    reasons = [_refuse(library.package, p.head_dim) for library in libraries]
    return None if None in reasons else "; ".join(filter(None, reasons))


def _refuse(package: Package, head_dim: int) -> str | None:
    """Return why a package cannot take a head size here, or None."""
    if not package.traceable and torch.compiler.is_compiling():
        return f"{package.name} is no registered operator, so torch.compile cannot trace it; call it outside"
    if head_dim > (largest := _largest(package)):
        kind = " deterministically" if torch.are_deterministic_algorithms_enabled() else ""
        return f"head size {head_dim}: {package.name} is used up to {largest}{kind}"
    return None


def _largest(package: Package) -> int:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return min(package.largest, package.largest_deterministic) if is_deterministic else package.largest


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked and within `limit`."""
    # Queries before the first key have no keys: zeros, whatever the library's backward computes for such rows.
    blind = max(q.shape[3] - k.shape[3], 0) if causal else 0
    if blind:
        lam = lam.expand(*q.shape[:2], q.shape[3], 1)[:, :, blind:]
        q = q[:, :, :, blind:]

    library = _library(q.shape[-1])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [B, H, N, D] -> [B, N, H, D], the memory order of projections: views, no copies.
        settings = {"softmax_scale": scale, "causal": causal, **_determinism()}
        out = library.attend(*(t.transpose(1, 2) for t in (q, k, v)), **settings)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    first, second = _two_maps(library.package, call, q, k, v)
    out = subtract(first, second, lam, q.dtype)
    return F.pad(out, (0, 0, blind, 0)) if blind else out


def diff_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, ends: Tensor, length: int, *, causal: bool, scale: float
) -> Tensor:
    """Arguments, shapes and result as in `varlen`, already checked and within `limit`."""
    library = _library(q.shape[-1])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}
        out = library.attend_varlen(q, k, v, **documents, softmax_scale=scale, causal=causal, **_determinism())
        return out[0] if isinstance(out, tuple) else out

    first, second = _two_maps(library.package, call, q, k, v)
    return subtract(first, second, lam, q.dtype)


def _determinism() -> dict[str, bool]:
    """Return what lets the library's backward add in a fixed order, where torch's operations have to."""
    return {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}


def _two_maps(
    package: Package, call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each map's output by as few calls as the sizes allow. Heads are axis 1, the maps of q and k axis 2."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    pieces, size, value_size = plan(head_dim, value_dim, _largest(package), package.equal_sizes)
    width = -(-value_dim // pieces)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        q, k = widen(q, size), widen(k, size)
        outs = [call(q, k, widen(p, value_size))[..., : p.shape[-1]] for p in v.split(width, dim=-1)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    return compute_maps(attend, q, k)


def plan(head_dim: int, value_dim: int, largest: int, equal_sizes: bool = True) -> tuple[int, int, int]:
    """Return into how many pieces the values are cut, and the sizes that queries and keys, and pieces are widened to.

    With equal sizes it is the plan of the least matrix work; among equals a size of at most 128, then the fewest calls.
    """
    if not equal_sizes and head_dim <= 64:
        pieces = -(-value_dim // largest)
        return pieces, _multiple_of_8(head_dim), _multiple_of_8(-(-value_dim // pieces))
    choices = []
    for pieces in range(1, -(-value_dim // 8) + 1):
        size = _multiple_of_8(max(head_dim, -(-value_dim // pieces)))
        if size <= largest:
            kernel = next(k for k in KERNELS if k >= size)
            choices.append((pieces * kernel, kernel > 128, pieces, size))
    _, _, pieces, size = min(choices)
    return pieces, size, size


def _multiple_of_8(size: int) -> int:
    return -(-size // 8) * 8  # what all libraries want


def _library(head_dim: int) -> Library:
    """Return the first installed FlashAttention that takes this head size."""
    libraries = find_libraries()
    assert not isinstance(libraries, str), libraries  # `limit` was called before
    for library in libraries:
        if _refuse(library.package, head_dim) is None:
            return library
    raise ValueError(f"{_refuse(libraries[0].package, head_dim)}; use backend='sdpa'")
