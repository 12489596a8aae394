"""torch's FlexAttention: a compiled kernel that takes values of another size than keys, and any mask, by blocks.

If each map has its keys (V1), there is one call per map: a single call over stacked maps would need the values
copied, since queries of one key head read one value head. Where they share their key (V2) the maps are stacked as
heads, a view of the queries: one call reads keys and values once.

Inside a graph of torch.compile, FlashAttention-4's kernel computes what it is known to take (`_takes_flash`): it cannot
be called there itself. That path was read in torch 2.15 and FlashAttention-4 4.0.0b36, and never run.

Source: torch.nn.attention.flex_attention, read and run in torch 2.15; arXiv 2412.05496.
"""

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakIdKeyDictionary

from diffvision.ops.attention.difference import compute_maps, subtract
from diffvision.ops.attention.document_masks import Documents, first_tokens
from diffvision.ops.attention.kernels import compute_capability
from diffvision.ops.attention.problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 128  # FlexAttention's default block of queries and of keys
FLASH_BLOCK = 256  # of queries: FlashAttention-4 computes two tiles of 128 a block on Blackwell

# FlexAttention compiles again for each dtype, head count, size and kind of mask, and dynamo gives up after 8 of them
# (an error under fullgraph=True, never a slow path). A process that trains one model and evaluates others meets more.
RECOMPILE_LIMIT = 64

# The kernels choose their blocks by D and the compute capability alone. Wide values would not fit Hopper's 227 KiB of
# shared memory at D 128: forward float32 k and v in three stages, 288 KiB; backward half precision k, v and three
# stages of q and do, 240 KiB. Cards with 99 KiB have no room for float32 at D 128 even with values of 128: q, two
# stages of k and v, 128 KiB. Counted, not measured.
WIDE = {"fwd_BLOCK_N": 32, "fwd_num_stages": 2}
WIDE_SMALL = WIDE | {"fwd_BLOCK_M": 32}
WIDE_HALF = WIDE | {
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1,
}

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
    if 0 in (p.batch, p.queries, p.keys):
        return f"batch {p.batch}, {p.queries} queries, {p.keys} keys: FlexAttention takes no empty tensor"
    return None


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    *,
    causal: bool,
    mask: Mask,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.diff_attention`, already checked and within `limit`."""
    if not q.is_cuda:  # on a CPU it refuses whatever requires gradients, even where none are recorded
        q, k, v = q.detach(), k.detach(), v.detach()
    kernel: dict[str, Any] | None
    if _takes_flash(q, v, mask):
        blocks, kernel = _flash_blocks(q, k) if causal else None, {"BACKEND": "FLASH"}
    else:
        blocks = _block_mask(q, k, causal=causal, mask=mask, maps_a_head=2 if k.shape[2] == 1 else 1)
        kernel = _kernel_options(q, v)
    first, second = compute_maps(lambda q, k: _attend(q, k, v, blocks, scale, kernel), q, k)
    return subtract(first, second, lam, q.dtype)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, documents: Documents) -> Tensor:
    """Arguments, shapes and result as `diffvision.ops.softmax_attention`, already checked and within `limit`."""
    return _attend(q, k, v, _document_blocks(documents.numbers, causal=causal), None, _kernel_options(q, v))


@torch.compiler.assume_constant_result
def can_compile() -> bool:
    """Return whether torch.compile finds Triton, a C compiler and a card whose shared memory was counted."""
    is_known = torch.version.hip is None and compute_capability() >= 80
    return is_known and importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("gcc", "clang")))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask | None,
    scale: float | None,
    kernel: dict[str, Any] | None,
) -> Tensor:
    """Call FlexAttention, compiled, outside of autocast."""
    options = {
        "block_mask": blocks,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": kernel,
    }
    with torch.autocast(q.device.type, enabled=False):  # it would cast float32 queries, keys and values down
        if torch.compiler.is_compiling():
            return cast(Callable[..., Tensor], flex_attention)(q, k, v, **options)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return _compile(q.device.type)(q, k, v, **options)


def _takes_flash(q: Tensor, v: Tensor, mask: Mask) -> bool:
    """Return whether FlashAttention-4 computes the call: of one size, without a mask but the causal, in a graph.

    Its tests skip the backward of values wider than keys. One query goes to the decoding kernel.
    """
    return (
        torch.compiler.is_compiling()
        and q.is_cuda
        and mask is None
        and q.dtype != torch.float32
        and q.shape[4] == v.shape[3] <= 128
        and q.shape[4] % 8 == 0
        and q.shape[3] > 1
        and not torch.are_deterministic_algorithms_enabled()
        and _has_flash()
    )


@torch.compiler.assume_constant_result
def _has_flash() -> bool:
    if torch.__version__ < "2.15" or not 90 <= compute_capability() < 120:
        return False
    try:
        importlib.import_module("flash_attn.cute")
    except (ImportError, OSError, RuntimeError, AttributeError):  # not installed, or without its compiler
        return False
    return True


def _flash_blocks(q: Tensor, k: Tensor) -> BlockMask:
    """Return the causal mask with blocks that FlashAttention-4 takes, and without a tensor to read in it."""
    return _build(q.shape[3], k.shape[3], q.device, causal=True, block=FLASH_BLOCK, offset=k.shape[3] - q.shape[3])


def _kernel_options(q: Tensor, v: Tensor) -> dict[str, Any] | None:
    """Return smaller tiles where FlexAttention's own would exceed the shared memory."""
    width = q.shape[-1] + v.shape[3]
    if not q.is_cuda or width <= 128:
        return None
    if q.dtype == torch.float32 and shared_memory(q.device) < 128:
        return WIDE_SMALL
    if width <= 256:
        return None
    return WIDE if q.dtype == torch.float32 else WIDE_HALF


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Return the KiB that a program may use on a device."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024


@cache
def _compile(device: str) -> Callable[..., Tensor]:
    # Inductor's C++ for a mask read from a tensor does not compile with symbolic lengths (torch 2.15): static on a CPU.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def _block_mask(q: Tensor, k: Tensor, *, causal: bool, mask: Mask, maps_a_head: int) -> BlockMask | None:
    """Return the mask as FlexAttention takes it, or None where every query sees every key."""
    queries, keys = q.shape[3], k.shape[3]
    if isinstance(mask, Documents):
        return _document_blocks(mask.numbers, causal=causal)
    if mask is not None:
        return _build(queries, keys, q.device, causal=causal, mask=mask, maps_a_head=maps_a_head)
    if not causal or queries == 1:  # one query, aligned to the last key, sees them all
        return None
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):  # a cache would keep symbolic or fake tensors
        return _build(queries, keys, q.device, causal=True)
    return _causal_blocks(queries, keys, q.device)


@lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # a cached inference tensor would break training later
        return _build(queries, keys, device, causal=True)


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
    rising = first_tokens(numbers).cumsum(1, dtype=torch.int32)
    return _build(numbers.shape[1], numbers.shape[1], numbers.device, causal=causal, mask=rising)


def _build(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool,
    mask: Tensor | None = None,
    maps_a_head: int = 1,
    block: int = BLOCK,
    offset: int | None = None,
) -> BlockMask:
    """Find the blocks of keys that a block of queries sees in part or as a whole, without another [M, N] tensor.

    A block counts as seen where each mask allows a pair; `mask_mod` then decides for each pair. A mask [B, N] holds
    numbers that rise from document to document.
    """
    q_blocks, k_blocks = -(-queries // block), -(-keys // BLOCK)
    seen = torch.ones(1, 1, q_blocks, k_blocks, dtype=torch.bool, device=device)
    # A last block that reaches past the queries counts as partial, as in torch's `create_block_mask`.
    whole = seen & (torch.arange(1, q_blocks + 1, device=device)[:, None] * block <= queries)
    if causal:
        below, inside = _causal_coverage(queries, keys, block, device)
        seen, whole = seen & below, whole & inside
    if mask is not None:
        some, every = _mask_coverage(mask, queries, keys)
        seen, whole = seen & some, whole & every
        seen, whole = (t.repeat_interleave(maps_a_head, dim=1) if t.shape[1] > 1 else t for t in (seen, whole))
    return BlockMask.from_kv_blocks(
        *_order_blocks(seen & ~whole),
        *_order_blocks(whole),
        BLOCK_SIZE=(block, BLOCK),
        mask_mod=_mask_mod(queries, keys, device, causal=causal, mask=mask, maps_a_head=maps_a_head, offset=offset),
        seq_lengths=(queries, keys),
    )


def _causal_coverage(queries: int, keys: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which blocks a causal mask touches, and which it allows whole."""
    first = torch.arange(-(-queries // block), device=device)[:, None] * block  # [q blocks, 1]
    start = torch.arange(-(-keys // BLOCK), device=device)[None] * BLOCK  # [1, k blocks]
    last = (first + block - 1).clamp(max=queries - 1)
    seen = start <= last + keys - queries
    whole = start + BLOCK - 1 <= first + keys - queries
    return seen[None, None], whole[None, None]


def _mask_coverage(mask: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return two [b, h, 1 or q blocks, k blocks]: whether a block allows any pair, and all. Sizes of 1 stay."""
    if mask.dim() == 2:
        tiles = F.pad(mask, (0, -keys % BLOCK), value=2**31 - 1).unflatten(1, (-1, BLOCK))[:, None]
        first, last = tiles[..., :1], tiles[..., -1:].mT
        return (first <= last) & (first <= last).mT, (first == last) & (first == last).mT
    if mask.shape[3] == 1:
        mask = mask.expand(-1, -1, -1, keys)
    mask = F.pad(mask, (0, -keys % BLOCK, 0, 0 if mask.shape[2] == 1 else -queries % BLOCK))
    tiles = mask.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, 1 if mask.shape[2] == 1 else BLOCK))
    return tiles.any(5).any(3), tiles.all(5).all(3)


def _order_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of [.., k blocks] are true, and the indices with the true ones first, in order."""
    count = blocks.sum(-1, dtype=torch.int32)
    return count, blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32).contiguous()


def _mask_mod(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool,
    mask: Tensor | None,
    maps_a_head: int,
    offset: int | None = None,
) -> MaskMod:
    """Return whether query i of head h sees key j; the offset is a tensor, so that one kernel serves all lengths."""
    shift = torch.full((), keys - queries, dtype=torch.int32, device=device) if offset is None else offset

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
