"""The flash-attn package: FlashAttention-4 (`flash_attn.cute`, Hopper and later) or flash-attn 2; variable lengths too.

Both want queries, keys and values of one size here. flash-attn 2 requires it. FlashAttention-4's kernels for Hopper
accept others, but its tests never run values wider than keys; its backward then refuses grouped heads, and by count
needs more shared memory than there is. V1's wide values are therefore computed as in `sdpa`: queries and keys are
widened with zeros (one call per map), or the values are cut into pieces (one call per piece and map, as unilm's
multihead_flashdiff_2.py does). Where both come to the same matrix work, widening computes half as many exponentials and
is chosen up to size 128; above it the values are cut, since the kernels above 128 hold smaller blocks and their
backward is less tested.
Where the maps share their key (V2) they are stacked as heads: one call.

Source: Dao-AILab/flash-attention, flash_attn_interface.py and csrc/flash_attn/flash_api.cpp (2.8.4), and
flash_attn/cute/interface.py (4.0.0b36). Neither was run by the author of this file: tests stand in for both.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffvision.ops.attention.difference import subtract
from diffvision.ops.attention.problem import Problem

DTYPES = (torch.float16, torch.bfloat16)
KERNELS = (32, 64, 96, 128, 192, 256)  # the head sizes that kernels are made for; one in between costs the next
INSTALL = (
    "`pip install 'diffvision[flash-attn]' --no-build-isolation` builds flash-attn 2 (from Ampere on; it needs nvcc), "
    "`pip install 'diffvision[flash]'` installs FlashAttention-4 (from Hopper on)"
)


class Library(NamedTuple):
    """The functions of an installed package that are used here."""

    name: str
    attend: Callable[..., Tensor | tuple[Tensor, ...]]  # q, k, v [B, N, H, D], softmax_scale, causal
    attend_varlen: Callable[..., Tensor | tuple[Tensor, ...]]  # q, k, v [T, H, D], cu_seqlens_q, ...
    largest: int  # head size
    traceable: bool  # by torch.compile


_libraries: dict[str, Library] = {}


def find_library() -> Library | str:
    """Import the installed package that suits the GPU, once; return it, or the reason why there is none."""
    answer = _search()
    return _libraries.get(answer, answer)


@torch.compiler.assume_constant_result  # imports are not to be traced; a constant may only be text
def _search() -> str:
    return _search_once()


@cache
def _search_once() -> str:
    """Return the name of the package, which is then in `_libraries`, or why there is none."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is not None and capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: flash-attn needs 8.0 or more"
    problems = []
    if capability is None or capability >= (9, 0):
        functions = _import_functions("flash_attn.cute")
        if not isinstance(functions, str):
            # Larger sizes exist, but the package's tests skip their backward; it is no registered operator.
            return _keep(Library("FlashAttention-4", *functions, largest=128, traceable=False))
        problems.append(functions)
    functions = _import_functions("flash_attn")
    if not isinstance(functions, str):
        return _keep(Library("flash-attn 2", *functions, largest=256, traceable=True))
    return "; ".join([*problems, functions, INSTALL])


def _keep(library: Library) -> str:
    _libraries[library.name] = library
    return library.name


def _import_functions(module: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | str:
    """Return `flash_attn_func` and `flash_attn_varlen_func` of a module, or why there are none."""
    try:
        spec = importlib.util.find_spec(module)
        # FlashAttention-4 makes `flash_attn` a namespace package, a folder without a file: that is no flash-attn 2.
        if spec is None or spec.origin is None:
            return f"{module} is not installed"
        loaded = importlib.import_module(module)
        return loaded.flash_attn_func, loaded.flash_attn_varlen_func
    except ModuleNotFoundError as error:
        return f"{module} is not installed" if error.name in ("flash_attn", module) else f"{module} needs {error.name}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, or another package
        return f"{module} is installed but cannot be used ({error})"


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
        return "flash-attn takes no mask; pack the tokens that count and call diff_attention_varlen"
    if 0 in (p.batch, p.queries, p.keys):
        return f"batch {p.batch}, {p.queries} queries, {p.keys} keys: flash-attn takes no empty tensor"
    library = find_library()
    if isinstance(library, str):
        return library
    if p.head_dim > library.largest:
        return f"head size {p.head_dim}: {library.name} is used up to {library.largest}"
    if not library.traceable and torch.compiler.is_compiling():
        return f"{library.name} is no registered operator, so torch.compile cannot trace it; call it outside"
    return None


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked and within `limit`."""
    # Queries before the first key have no keys: zeros, whatever the library's backward computes for such rows.
    blind = max(q.shape[3] - k.shape[3], 0) if causal else 0
    if blind:
        lam = lam.expand(*q.shape[:2], q.shape[3], 1)[:, :, blind:]
        q = q[:, :, :, blind:]

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # [B, H, N, D] -> [B, N, H, D], the memory order of projections: views, no copies.
        settings = {"softmax_scale": scale, "causal": causal, **_determinism()}
        out = _library().attend(*(t.transpose(1, 2) for t in (q, k, v)), **settings)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    first, second = _two_maps(call, q, k, v, scale)
    out = subtract(first, second, lam, q.dtype)
    return F.pad(out, (0, 0, blind, 0)) if blind else out


def diff_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention_varlen`, already checked and within `limit`."""

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = _library().attend_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=scale,
            causal=causal,
            **_determinism(),
        )
        return out[0] if isinstance(out, tuple) else out

    first, second = _two_maps(call, q, k, v, scale)
    return subtract(first, second, lam, q.dtype)


def _determinism() -> dict[str, bool]:
    """Return what lets the library's backward add in a fixed order, where torch's operations have to."""
    return {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}


def _two_maps(
    call: Callable[[Tensor, Tensor, Tensor, float], Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return each map's output by as few calls as the sizes allow. Heads are axis 1, the maps of q and k axis 2."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    pieces, size = plan(head_dim, value_dim, _library().largest)
    width = -(-value_dim // pieces)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        q, k = _widen(q, size), _widen(k, size)
        outs = [call(q, k, _widen(piece, size), scale)[..., : piece.shape[-1]] for piece in v.split(width, dim=-1)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    if k.shape[2] == 1:  # a head's two maps become adjacent heads, which read the same key/value head
        both = attend(q.flatten(1, 2), k[:, :, 0]).unflatten(1, (-1, 2))
        return both[:, :, 0], both[:, :, 1]
    return attend(q[:, :, 0], k[:, :, 0]), attend(q[:, :, 1], k[:, :, 1])


def plan(head_dim: int, value_dim: int, largest: int) -> tuple[int, int]:
    """Return into how many pieces the values are cut, and the size that queries, keys and pieces are widened to.

    It is the plan of the least matrix work; among equals a size of at most 128, then the fewest calls.
    """
    choices = []
    for pieces in range(1, -(-value_dim // 8) + 1):
        size = -(-max(head_dim, -(-value_dim // pieces)) // 8) * 8  # both libraries want multiples of 8
        if size <= largest:
            kernel = next(k for k in KERNELS if k >= size)
            choices.append((pieces * kernel, kernel > 128, pieces, size))
    return min(choices)[2:]


def _widen(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


def _library() -> Library:
    library = find_library()
    assert isinstance(library, Library), library  # `limit` was called before
    return library
