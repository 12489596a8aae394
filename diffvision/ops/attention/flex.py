"""torch's FlexAttention: a compiled kernel that takes values of another size than keys, and any mask, by blocks.

If each map has its keys (V1), there is one call per map: a single call over stacked maps would need the values
copied, since queries of one key head read one value head. Where they share their key (V2) the maps are stacked as
heads, a view of the queries: one call reads keys and values once.

Source: torch.nn.attention.flex_attention, read and run in torch 2.15; arXiv 2412.05496.
"""

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from diffvision.ops.attention.difference import compute_maps, subtract
from diffvision.ops.attention.document_masks import Documents
from diffvision.ops.attention.kernels import compute_capability, has_little_shared_memory
from diffvision.ops.attention.problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# FlexAttention compiles again for each dtype, head count, size and kind of mask, and dynamo gives up after 8 of them
# (an error under fullgraph=True, never a slow path). A process that trains one model and evaluates others meets more.
RECOMPILE_LIMIT = 64

# Of a key and a value together. The kernels choose their tiles by D and the card alone: wider heads would not fit
# Hopper's 227 KiB of shared memory (forward float32 k and v in three stages, 288 KiB), nor in float32 the 99 KiB of
# small cards. Counted, not measured.
MAX_SIZES, MAX_SIZES_SMALL = 256, 128

Mask = Tensor | Documents | None
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def limit(problem: Problem) -> str | None:
    """Return why this backend cannot take the problem, or None."""
    p = problem
    if p.device not in ("cpu", "cuda"):
        return f"FlexAttention is used on cpu and cuda here, not on {p.device}"
    if p.dropout > 0:
        return f"dropout {p.dropout} was asked for and FlexAttention has none; pass 0"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype}: FlexAttention takes float32, float16 and bfloat16"
    if p.device == "cpu" and p.grad:
        return "gradients are needed and FlexAttention has no backward on a CPU; use torch.no_grad()"
    if p.device == "cpu" and torch.compiler.is_compiling():
        # Inductor's C++ template (torch 2.15) reads the tensor behind a view, and cannot fuse the subtraction after it.
        return "inside torch.compile or torch.export FlexAttention is unreliable on a CPU; call it outside"
    if p.device == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        # With AVX2 alone torch 2.15's kernel reads memory that was never written: other numbers at each call.
        return f"CPU capability {torch.backends.cpu.get_cpu_capability()}: FlexAttention needs AVX512"
    if p.device == "cuda" and min(p.head_dim, p.value_dim) < 16:
        return f"head size {p.head_dim} and value size {p.value_dim}: FlexAttention needs at least 16 on CUDA"
    is_tight = p.dtype == torch.float32 and has_little_shared_memory(compute_capability())
    largest = MAX_SIZES_SMALL if is_tight else MAX_SIZES
    if p.device == "cuda" and p.head_dim + p.value_dim > largest:
        return f"head size {p.head_dim} and value size {p.value_dim}: FlexAttention is used up to {largest} together"
    if 0 in (p.batch, p.queries, p.keys):
        return f"batch {p.batch}, {p.queries} queries, {p.keys} keys: FlexAttention takes no empty tensor"
    return None


def diff_attention(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, causal: bool, mask: Mask, scale: float, dropout: float
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked and within `limit`."""
    if not q.is_cuda:  # on a CPU it refuses whatever requires gradients, even where none are recorded
        q, k, v = q.detach(), k.detach(), v.detach()
    blocks = _block_mask(q, k, causal=causal, mask=mask, maps_a_head=2 if k.shape[2] == 1 else 1)
    first, second = compute_maps(lambda q, k: _attend(q, k, v, blocks, scale), q, k)
    return subtract(first, second, lam, q.dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, documents: Documents) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.softmax_attention`, already checked and within `limit`."""
    return _attend(q, k, v, _document_blocks(documents.numbers, causal=causal), q.shape[3] ** -0.5)


@torch.compiler.assume_constant_result
def can_compile() -> bool:
    """Return whether torch.compile finds Triton and a C compiler."""
    is_known = torch.version.hip is None and compute_capability() >= 80
    return is_known and importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("gcc", "clang")))


def _attend(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None, scale: float) -> Tensor:
    """Call FlexAttention, compiled, outside of autocast."""
    options: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    with torch.autocast(q.device.type, enabled=False):  # it would cast float32 queries, keys and values down
        if torch.compiler.is_compiling():
            return cast(Callable[..., Tensor], flex_attention)(q, k, v, **options)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return _compile(q.device.type)(q, k, v, **options)


@cache
def _compile(device: str) -> Callable[..., Tensor]:
    # Inductor's C++ for a mask read from a tensor does not compile with symbolic lengths (torch 2.15): static on a CPU.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def _block_mask(q: Tensor, k: Tensor, *, causal: bool, mask: Mask, maps_a_head: int) -> BlockMask | None:
    """Return the mask as FlexAttention takes it, or None where every query sees every key."""
    queries, keys = q.shape[3], k.shape[3]
    if isinstance(mask, Documents):
        return _document_blocks(mask.numbers, causal=causal)
    if mask is None and (not causal or queries == 1):  # one query, aligned to the last key, sees them all
        return None
    if mask is None:
        if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
            return _build_causal(queries, keys, q.device)
        return _causal_blocks(queries, keys, q.device)
    batch, heads = mask.shape[:2]
    may_attend = _mask_mod(queries, keys, q.device, causal=causal, mask=mask, maps_a_head=maps_a_head)
    return create_block_mask(may_attend, batch, heads * maps_a_head if heads > 1 else 1, queries, keys, q.device)


@lru_cache(maxsize=8)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return the block mask of a causal call, which all layers share."""
    with torch.inference_mode(False):  # a cached inference tensor would break training later
        return _build_causal(queries, keys, device)


def _build_causal(queries: int, keys: int, device: torch.device) -> BlockMask:
    may_attend = _mask_mod(queries, keys, device, causal=True, mask=None, maps_a_head=1)
    return create_block_mask(may_attend, 1, 1, queries, keys, device)


# numbers of a batch's documents -> their version and whether causal, and the block mask, which all layers share
_documents = WeakIdKeyDictionary()


def _document_blocks(numbers: Tensor, *, causal: bool) -> BlockMask:
    """Return the block mask of packed documents, cached for this tensor of document numbers."""
    if torch.compiler.is_compiling() or isinstance(numbers, FakeTensor) or numbers.is_inference():
        return _build_documents(numbers, causal)
    state = (numbers._version, causal)
    if _documents.get(numbers, (None,))[0] != state:
        with torch.inference_mode(False):  # a cached inference tensor would break training later
            _documents[numbers] = (state, _build_documents(numbers, causal))
    return _documents[numbers][1]


def _build_documents(numbers: Tensor, causal: bool) -> BlockMask:
    batch, length = numbers.shape
    # A copy: the mask would keep the numbers, and with them its own place in the cache.
    may_attend = _mask_mod(length, length, numbers.device, causal=causal, mask=numbers.clone(), maps_a_head=1)
    return create_block_mask(may_attend, batch, 1, length, length, numbers.device)


def _mask_mod(
    queries: int, keys: int, device: torch.device, *, causal: bool, mask: Tensor | None, maps_a_head: int
) -> MaskMod:
    """Return whether query i of head h sees key j; the offset is a tensor, so that one kernel serves all lengths.

    A mask is [b, h, m, n], with axes of size 1, or the numbers [B, N] of documents.
    """
    shift = torch.full((), keys - queries, dtype=torch.int32, device=device)

    def aligned_to_the_last_key(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + shift

    if mask is None:
        return aligned_to_the_last_key
    table, steps = mask, [int(size > 1) for size in mask.shape]  # axes of size 1 are read at 0

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if table.dim() == 2:
            return table[b, i] == table[b, j]
        return table[b * steps[0], (h // maps_a_head) * steps[1], i * steps[2], j * steps[3]]

    def both(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return may_attend(b, h, i, j) & aligned_to_the_last_key(b, h, i, j)

    return both if causal else may_attend
