"""From tensors to launches: the kernel, its blocks and its arguments, without reading a tensor's values.

A `Launch` is data, so the test that compiles every configuration for every card without a GPU reads what a call runs.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diffvision.ops.attention.shared_memory import HOPPER
from diffvision.ops.attention.triton import rows, streaming
from diffvision.ops.attention.triton.tiles import FULL_MASK, KEY_MASK, NO_MASK

LOG2E = 1.4426950408889634


class Sequences(NamedTuple):
    """Packed sequences: q [1, H, 2, T, D] holds sequence i in rows cu_q[i] to cu_q[i + 1], k and v in those of cu_k."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


class Inputs(NamedTuple):
    """Checked tensors: q [B, H, 2, M, D], k [B, Hk, P, N, D], v [B, Hk, N, V], lam [B, H, M, 1], mask [B, H, M, N].

    `shared` is the bytes of shared memory that a program may use, `hopper` whether the card is of Hopper's kind.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    shared: int
    hopper: bool
    packed: Sequences | None = None


class Tiles(NamedTuple):
    """Block sizes along queries and keys, and how a program is run."""

    m: int
    n: int
    warps: int
    stages: int


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: dict[str, Any]
    tiles: Tiles

    def run(self) -> None:
        if self.programs:
            self.kernel[(self.programs,)](**self.arguments, **self.options())

    def options(self) -> dict[str, Any]:
        """Return the options of a launch; fused multiply-add is triton's default, and from 3.9 a warning if unset."""
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages, "enable_fp_fusion": True}


def run(launches: list[Launch], device: torch.device) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else _silence():
        for launch in launches:
            launch.run()


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the interpreter's numpy, which warns of overflows and NaN where a GPU does not.

    They occur in masked pairs, which are dropped afterwards, or come from the caller's tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def block(size: int) -> int:
    """Return the tile that holds `size` rows or columns: a power of two of at least 16, the smallest in a product.

    It decides rather than computes, because torch.compile takes minutes to trace arithmetic with a symbolic size.
    """
    tile = 16
    while tile < size:
        tile *= 2
    return tile


def forward_rows(x: Inputs, out: Tensor, lse: Tensor | None) -> list[Launch]:
    tiles = _tiles(x, rows_forward_tiles(_longest(x)[1], x.q.element_size(), x.hopper))
    arguments = _inputs(x, tiles) | _get_strides("out", out, "bhm", x) | _lse(lse, x)
    return [Launch(rows.forward, _grid(x, tiles, arguments), arguments | {"SAVE": lse is not None}, tiles)]


def forward_streaming(x: Inputs, out: Tensor, o2: Tensor | None, lse: Tensor | None) -> list[Launch]:
    tiles = _tiles(x, streaming_forward_tiles(x.v.shape[3], x.q.element_size(), x.hopper))
    arguments = _inputs(x, tiles) | _get_strides("out", out, "bhm", x) | _lse(lse, x)
    arguments |= {"o2": out if o2 is None else o2, "SAVE": lse is not None}
    return [Launch(streaming.forward, _grid(x, tiles, arguments), arguments, tiles)]


def backward_rows(x: Inputs, grad: Tensor, lse: Tensor, deltas: Tensor, grads: tuple[Tensor, ...]) -> list[Launch]:
    """Return the launches that write grads = (dq, dk, dv), and D2 into deltas[:, :, 1]."""
    dq, dk, dv = grads
    n, d, v, size = _longest(x)[1], x.q.shape[4], x.v.shape[3], x.q.element_size()
    tensors = _get_strides("grad", grad, "bhm", x) | _get_strides("dq", dq, "bhpm", x)
    tensors |= _get_strides("dk", dk, "bhpn", x) | _get_strides("dv", dv, "bhn", x) | _lse(lse, x)
    tensors |= {"d2_rows": deltas[:, :, 1], "grad_scale": x.scale, "H": x.k.shape[1]}
    tiles = _tiles(x, rows_backward_tiles(n, d, v, size, x.shared))
    programs = _sequences(x) * x.k.shape[1]
    return [
        Launch(rows.backward, programs, _inputs(x, tiles) | tensors | parts, tiles)
        for parts in rows_passes(n, d, v, x.k.shape[2], size)
    ]


def backward_streaming(
    x: Inputs, grad: Tensor, out: Tensor, o2: Tensor, lse: Tensor, deltas: Tensor, grads: tuple[Tensor, ...]
) -> list[Launch]:
    """Return the launches that write grads = (dq, dk, dv), and (D1, D2) into deltas [B, H, 2, M]."""
    dq, dk, dv = grads
    d, v, size = x.q.shape[4], x.v.shape[3], x.q.element_size()
    given = _get_strides("grad", grad, "bhm", x) | _lse(lse, x)
    sums = Tiles(32, 16, 4, 1)
    both = _inputs(x, sums)
    names = ("lam", "cu_q", "H", "M", "V", "BLOCK_V", "BLOCK_M", "VARLEN", "lam_b", "lam_h", "lam_m")
    arguments = {name: both[name] for name in names} | given | _get_strides("out", out, "bhm", x)
    arguments |= {"o2": o2, "result": deltas}
    del arguments["lse"]
    launches = [Launch(streaming.delta, _grid(x, sums, arguments), arguments, sums)]

    given |= {"deltas": deltas, "grad_scale": x.scale}
    for parts in streaming_passes(d, v, x.k.shape[2], size):
        tiles = _tiles(x, streaming_keys_tiles(size, x.shared, _mask(x.mask)[1]))
        arguments = (
            _inputs(x, tiles) | given | _get_strides("dk", dk, "bhpn", x) | _get_strides("dv", dv, "bhn", x) | parts
        )
        arguments |= {"H": x.k.shape[1], "blocks": triton.cdiv(_longest(x)[1], tiles.n)}
        programs = arguments["blocks"] * _sequences(x) * x.k.shape[1]
        launches.append(Launch(streaming.backward_keys, programs, arguments, tiles))

    tiles = _tiles(x, streaming_queries_tiles(d, v, size, x.shared))
    arguments = _inputs(x, tiles) | given | _get_strides("dq", dq, "bhpm", x)
    launches.append(Launch(streaming.backward_queries, _grid(x, tiles, arguments), arguments, tiles))
    return launches


# --- block sizes -----------------------------------------------------------------------------------------------------
# Chosen so that little spills and a program's tiles fit its shared memory (tests/ops/test_triton_compiles.py compiles
# every one). Half types run on tensor cores. Hopper and B200 read a product's operands from shared memory; cards with
# less of it hold them in registers, so their tiles are smaller. There each warp of most kernels takes 16 rows of a
# tile: 8 warps would compute 64 rows twice. B200 spills with Hopper's forward tiles, but hardly with the small ones.
# float32 is multiplied exactly (IEEE), by plain arithmetic whose operands are held in registers, so its tiles are small
# on every card.


TOGETHER, APART = [{"KEYS": True, "VALUES": True}], [{"KEYS": True, "VALUES": False}, {"KEYS": False, "VALUES": True}]


def rows_limit(d: int, v: int, maps: int, size: int, shared: int, *, backward: bool) -> int:
    """Return the longest row of keys that the whole-row kernels take at these sizes (`size` bytes an element).

    A row's forward fits every card's shared memory. If its backward does not, training streams.
    """
    longest = 256 if block(d) <= 64 else 128  # beyond, keys and values of D 128 crowd out everything else
    longest = min(longest, _accumulators(longest, size) // max(maps * block(d), block(v)))
    while backward and longest and _rows_backward_bytes(longest, d, v, maps, size, shared) > shared:
        longest //= 2
    return longest


def _rows_backward_bytes(n: int, d: int, v: int, maps: int, size: int, shared: int) -> int:
    """Return an upper bound of the shared memory of `rows.backward`.

    It holds values, keys in two layouts (float32: in one), and of a step's queries their rows, gradients, three sums
    and both maps' weights.
    """
    m, layouts = rows_backward_tiles(n, d, v, size, shared).m, 1 if size == 4 else 2
    n, d, v = block(n), block(d), block(v)
    return size * (n * (layouts * maps * d + v) + m * (2 * d + v) + (layouts - 1) * 2 * n * m) + 12 * m


def rows_passes(n: int, d: int, v: int, maps: int, size: int) -> list[dict[str, bool]]:
    """Return one pass where dk and dv of all keys fit the registers together, else one for dq, dk and one for dv."""
    return TOGETHER if block(n) * (maps * block(d) + block(v)) <= _accumulators(block(n), size) else APART


def streaming_passes(d: int, v: int, maps: int, size: int) -> list[dict[str, bool]]:
    """Return the passes over a block of keys as `rows_passes` does; float32's blocks are small enough for one."""
    return TOGETHER if size == 4 or 128 * (maps * block(d) + block(v)) <= _accumulators(128, size) else APART


def _accumulators(n: int, size: int) -> int:
    """Return how many float32 accumulators a program over n keys has: half of its registers; scores take the rest."""
    if size == 4:
        return 8192
    return 128 * 32 * (4 if n <= 64 else 8)


def rows_forward_tiles(n: int, size: int, hopper: bool) -> Tiles:
    n = block(n)
    if size == 4:
        return Tiles(16, n, 8, 1)
    return Tiles(64 if hopper else 32, n, 8 if n > 64 else 4, 1)


def rows_backward_tiles(n: int, d: int, v: int, size: int, shared: int) -> Tiles:
    """Return the whole-row backward's tiles for n keys and head sizes d and v, within the shared memory."""
    n = block(n)
    if size == 4:
        return Tiles(16, n, 16 if n > 32 else 8, 1)
    warps = 8 if n > 64 else 4
    if shared < HOPPER:
        return Tiles(16, n, warps, 1)
    # Keys and values of all rows fill the shared memory where D is large: no second stage then.
    stages = 1 if n > 64 and block(d) > 64 else 2
    return Tiles(32 if n <= 128 and block(v) <= 128 else 16, n, warps, stages)


def streaming_forward_tiles(v: int, size: int, hopper: bool) -> Tiles:
    if size == 4:
        return Tiles(32 if block(v) <= 128 else 16, 32, 8, 1)
    if hopper:
        return Tiles(128, 64, 8, 3 if block(v) <= 128 else 2)
    return Tiles(64, 64, 4 if block(v) <= 64 else 8, 2)


def streaming_keys_tiles(size: int, shared: int, mask: int) -> Tiles:
    if size == 4:
        return Tiles(16, 32, 8, 1)
    if shared < HOPPER:  # any mask is read without running ahead, so a second stage would add spills alone
        return Tiles(16, 64, 4, 1 if mask == FULL_MASK else 2)
    return Tiles(32, 128, 8, 2)


def streaming_queries_tiles(d: int, v: int, size: int, shared: int) -> Tiles:
    if size == 4:
        return Tiles(16, 32, 8, 1)
    if shared < HOPPER:
        return Tiles(64, 32, 4, 2 if block(d) <= 64 else 1)
    return Tiles(128, 64 if block(d) <= 64 and block(v) <= 128 else 32, 8, 2)


def _tiles(x: Inputs, tiles: Tiles) -> Tiles:
    """Return the GPU's tiles, or larger ones in the interpreter, where only the number of steps costs time."""
    return tiles if x.q.device.type != "cpu" else Tiles(64, max(64, tiles.n), 1, 1)


# --- arguments -------------------------------------------------------------------------------------------------------


def _sequences(x: Inputs) -> int:
    return x.q.shape[0] if x.packed is None else x.packed.cu_q.shape[0] - 1


def _longest(x: Inputs) -> tuple[int, int]:
    return (x.q.shape[3], x.k.shape[3]) if x.packed is None else (x.packed.longest_q, x.packed.longest_k)


def _grid(x: Inputs, tiles: Tiles, arguments: dict[str, Any]) -> int:
    """Count the programs of a kernel over blocks of queries of every head, and set its argument `blocks`."""
    arguments["blocks"] = triton.cdiv(_longest(x)[0], tiles.m)
    return arguments["blocks"] * _sequences(x) * x.q.shape[1]


def _get_strides(name: str, tensor: Tensor, axes: str, x: Inputs) -> dict[str, Any]:
    """Return a tensor and its strides as a kernel's arguments (q, q_b, q_h, ...); an axis without a letter is last."""
    strides = dict(zip(axes, tensor.stride(), strict=False))
    # Packed sequences share one batch row; the kernel finds theirs by cu_q and cu_k.
    if x.packed is not None:
        strides["b"] = 0
    return {name: tensor} | {f"{name}_{axis}": stride for axis, stride in strides.items()}


def _lse(lse: Tensor | None, x: Inputs) -> dict[str, Any]:
    if lse is None:
        return {"lse": None, "lse_b": 0, "lse_h": 0, "lse_p": 0}
    return _get_strides("lse", lse, "bhp", x)


def _mask(mask: Tensor | None) -> tuple[dict[str, Any], int]:
    if mask is None:
        return {"mask": None, "mask_b": 0, "mask_h": 0, "mask_m": 0, "mask_n": 0}, NO_MASK
    strides = dict(zip(("mask_b", "mask_h", "mask_m", "mask_n"), mask.stride(), strict=True))
    every_query_alike = mask.stride(2) == 0 or mask.shape[2] == 1
    return {"mask": mask.view(torch.uint8)} | strides, KEY_MASK if every_query_alike else FULL_MASK


def _inputs(x: Inputs, tiles: Tiles) -> dict[str, Any]:
    """Return the arguments of every kernel that describe the inputs."""
    mask, kind = _mask(x.mask)
    m, n = _longest(x)
    d, v = x.q.shape[4], x.v.shape[3]
    return (
        _get_strides("q", x.q, "bhpm", x)
        | _get_strides("k", x.k, "bhpn", x)
        | _get_strides("v", x.v, "bhn", x)
        | _get_strides("lam", x.lam, "bhm", x)
        | mask
        | {
            "cu_q": None if x.packed is None else x.packed.cu_q,
            "cu_k": None if x.packed is None else x.packed.cu_k,
            "scale": x.scale * LOG2E,
            "H": x.q.shape[1],
            "G": x.q.shape[1] // x.k.shape[1],
            "M": m,
            "N": n,
            "D": d,
            "V": v,
            "BLOCK_D": block(d),
            "BLOCK_V": block(v),
            "BLOCK_M": tiles.m,
            "BLOCK_N": tiles.n,
            "CAUSAL": x.causal,
            "MASK": kind,
            "SHARED": x.k.shape[2] == 1,
            "VARLEN": x.packed is not None,
            "PRECISION": "ieee",
        }
    )
