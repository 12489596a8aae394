"""Which kernel torch's attention takes for each kind of call of ours on this card, and how many bytes the call keeps.

    python scripts/benchmarks/sdpa_kernels.py [--stub] [--output FILE]

adds this card's compute capability to FILE (docs/benchmarks/sdpa_kernels.json, where others stay) and prints its table.
`calls` are those of models, with the peak of what forward and backward ask of torch's allocator (arguments not
counted), and beside it the bytes of one attention map of all heads. `sweep` counts the kernels of all combinations of
sizes, lengths, masks, grouped heads, dtypes and gradients, and lists those of more than 256 tokens that would keep
their maps.

The kernel is what `torch._fused_sdp_choice` (for packed documents, torch's varlen function) answers in the place of
each call. With --stub the card may be a stub that computes nothing: cuDNN's calls are then not made, and their bytes
are null.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from diffvision.ops import Documents, diff_attention, document_ends, softmax_attention
from machine import commit

KERNELS = {0: "MATH", 1: "FLASH", 2: "EFFICIENT", 3: "CUDNN", -1: "none"}
LONG = 256  # tokens; up to so many a kernel may keep its maps
FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "sdpa_kernels.json"


class Call(NamedTuple):
    """A call of `diff_attention`, or of plain attention where there is no second map."""

    queries: int
    keys: int
    head_dim: int
    value_dim: int
    heads: int = 6
    kv_heads: int = 6
    maps: int = 2  # 1: plain attention
    key_maps: int = 2
    mask: str = ""  # "keys" [1, 1, 1, N], "pairs" [1, 1, M, N], or "documents" of 256 tokens each without a mask
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    grad: bool = True


def plain(*sizes: int, **settings: Any) -> Call:
    return Call(*sizes, maps=1, key_maps=1, **settings)


CALLS = {
    "ViT, V1": Call(197, 197, 64, 128),
    "ViT, V2": Call(197, 197, 64, 64, key_maps=1),
    "ViT, plain": plain(197, 197, 64, 64),
    "ViT, V1, D 32": Call(197, 197, 32, 64),
    "ViT, V1, D 80": Call(257, 257, 80, 160),
    "ViT, V1, float32": Call(197, 197, 64, 128, dtype=torch.float32),
    "ViT, V1, padded keys": Call(1024, 1024, 64, 128, mask="keys"),
    "text, V1": Call(77, 77, 64, 128, causal=True),
    "language, V1": Call(2048, 2048, 128, 256, causal=True),
    "language, V2": Call(2048, 2048, 128, 128, key_maps=1, causal=True),
    "language, plain": plain(2048, 2048, 128, 128, causal=True),
    "grouped, V1": Call(2048, 2048, 64, 128, kv_heads=2, causal=True),
    "grouped, V2": Call(2048, 2048, 64, 64, kv_heads=2, key_maps=1, causal=True),
    "packed documents, V1": Call(2048, 2048, 64, 128, mask="documents", causal=True),
    "packed documents, V2, grouped": Call(2048, 2048, 64, 64, kv_heads=2, key_maps=1, mask="documents", causal=True),
    "packed documents, plain, grouped": plain(2048, 2048, 64, 64, kv_heads=2, mask="documents", causal=True),
    "documents, V1": Call(2048, 2048, 64, 128, mask="pairs", causal=True),
    "documents, V2, grouped": Call(2048, 2048, 64, 64, kv_heads=2, key_maps=1, mask="pairs", causal=True),
    "documents, plain, grouped": plain(2048, 2048, 64, 64, kv_heads=2, mask="pairs", causal=True),
    "packed documents, V1, 8,192 tokens": Call(8192, 8192, 64, 128, mask="documents", causal=True),
    "documents, V1, 8,192 tokens": Call(8192, 8192, 64, 128, mask="pairs", causal=True),
    "D 12, mask": Call(1024, 1024, 12, 12, key_maps=1, mask="pairs"),
    "D 20, V 40, mask": Call(1024, 1024, 20, 40, mask="pairs"),
    "cross, V1": Call(256, 1024, 64, 128),
    "one query, V2": Call(1, 1024, 64, 64, key_maps=1),
    "evaluation, V1": Call(1024, 1024, 64, 128, grad=False),
    "evaluation, mask": Call(1024, 1024, 64, 128, mask="pairs", grad=False),
    "decoding, V1": Call(1, 2048, 64, 128, grad=False),
    "decoding, V2, grouped": Call(1, 2048, 64, 64, kv_heads=2, key_maps=1, grad=False),
    "decoding, mask": Call(1, 2048, 128, 256, mask="keys", grad=False),
    "prompt behind a cache": Call(512, 2048, 64, 128, causal=True, grad=False),
}


def sweep() -> Iterator[Call]:
    """Yield the combinations, of sizes that no model of ours has too."""
    sizes = [(d, d * factor) for d in (8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128) for factor in (1, 2)]
    lengths = ((257, 257), (512, 512), (577, 577), (704, 704), (1, 1000), (300, 1000))
    settings = itertools.product(("", "keys", "pairs"), (False, True), (6, 2), (1, 2), (True, False))
    for (mask, causal, kv_heads, maps, grad), dtype in itertools.product(
        list(settings), (torch.bfloat16, torch.float16, torch.float32)
    ):
        for (head_dim, value_dim), (queries, keys) in itertools.product(sizes, lengths):
            yield Call(queries, keys, head_dim, value_dim, 6, kv_heads, maps, maps, mask, causal, dtype, grad)


def arguments(call: Call) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return what a layer hands on, in the memory order of its projections."""

    def projected(heads: int, length: int, size: int, maps: int = 1) -> torch.Tensor:
        made = torch.empty(1, length, heads, maps, size, dtype=call.dtype, device="cuda")
        made = made.permute(0, 2, 3, 1, 4)
        return (made if maps == 2 or call.maps == 2 else made.squeeze(2)).requires_grad_(call.grad)

    q = projected(call.heads, call.queries, call.head_dim, call.maps)
    k = projected(call.kv_heads, call.keys, call.head_dim, call.key_maps)
    v = projected(call.kv_heads, call.keys, call.value_dim)
    v = v.squeeze(2) if v.dim() == 5 else v
    if call.mask == "documents":
        numbers = (torch.arange(call.keys) // 256)[None]
        return (q, k, v), {"mask": Documents(numbers.cuda(), document_ends(numbers).cuda()), "causal": call.causal}
    shape = (1, 1, call.queries if call.mask == "pairs" else 1, call.keys)
    mask = torch.ones(shape, dtype=torch.bool, device="cuda") if call.mask else None
    return (q, k, v), {"mask": mask, "causal": call.causal}


def attend(call: Call) -> Callable[..., torch.Tensor]:
    if call.maps == 1:
        return softmax_attention
    lam = torch.full((1,), 0.5, device="cuda")
    backend = "varlen" if call.mask == "documents" else "sdpa"
    return lambda *tensors, **settings: diff_attention(*tensors, lam, backend=backend, **settings)


@contextmanager
def answered(found: Counter[str]) -> Iterator[None]:
    """Count the kernel of each call of torch's attention in the context, without running it."""
    before, before_varlen = F.scaled_dot_product_attention, varlen.varlen_attn

    def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
        found[KERNELS[torch._fused_sdp_choice(q, k, v, **settings)]] += 1
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @wraps(before_varlen)  # its arguments are looked at
    def answer_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any, **_: Any) -> torch.Tensor:
        backend = varlen._select_backend(q, k, v, *lengths[:3], [-1, 0])
        found[f"{KERNELS[backend]} varlen"] += 1
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    F.scaled_dot_product_attention, varlen.varlen_attn = answer, answer_varlen
    try:
        yield
    finally:
        F.scaled_dot_product_attention, varlen.varlen_attn = before, before_varlen


def kernels_of(call: Call) -> list[str]:
    tensors, settings = arguments(call)
    found: Counter[str] = Counter()
    with answered(found):
        attend(call)(*tensors, **settings)
    return sorted(found)


def bytes_of(call: Call) -> int:
    """Return the peak of forward and backward beyond the arguments, and what their gradients take."""
    tensors, settings = arguments(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = attend(call)(*tensors, **settings)
    if call.grad:
        with torch.autograd.set_multithreading_enabled(False):  # frees in the same order each time
            torch.autograd.grad(out, tensors, torch.empty_like(out))
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def measure(stub: bool) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    for name, call in CALLS.items():
        kernels = kernels_of(call)
        skipped = stub and "CUDNN" in kernels
        map_bytes = call.heads * call.queries * call.keys * call.dtype.itemsize
        calls[name] = {
            "kernel": ", ".join(kernels),
            "bytes": None if skipped else bytes_of(call),
            "bytes_of_a_map": map_bytes,
        }
    counts: Counter[str] = Counter()
    quadratic = []
    for call in sweep():
        kernels = kernels_of(call)
        counts[", ".join(kernels)] += 1
        if "MATH" in kernels and call.keys > LONG:
            quadratic.append([str(value) for value in call])
    return {
        "torch": torch.__version__,
        "diffvision": commit(),
        "stub": stub,
        "calls": calls,
        "sweep": {"kernels": dict(sorted(counts.items())), "quadratic": quadratic},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", action="store_true", help="the card computes nothing: do not run cuDNN's calls")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: run it on a machine with one")
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    report[capability] = measure(args.stub)
    ordered = dict(sorted(report.items(), key=lambda item: float(item[0])))
    args.output.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    for name, row in report[capability]["calls"].items():
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 2**20:.1f}"
        print(f"{name:36}{row['kernel']:12}{size:>8} MiB, a map {row['bytes_of_a_map'] / 2**20:.1f}")
    print(
        capability, report[capability]["sweep"]["kernels"], f"{len(report[capability]['sweep']['quadratic'])} quadratic"
    )


if __name__ == "__main__":
    main()
