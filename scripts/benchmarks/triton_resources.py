"""Compile the fused kernels for Hopper, no GPU needed, and print what each configuration uses, one JSON object a line.

    python scripts/benchmarks/triton_resources.py [name ...]

Registers, shared memory, tensor-core instructions, and how often a pass of an innermost loop goes to memory for want of
registers. The launches are those that `diffvision.ops.attention.triton` would make for these shapes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffvision.ops.attention.triton import launch

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32"}
HALF, FULL = torch.bfloat16, torch.float32

# name -> (family, queries and keys, D, V, maps of keys, dtype, causal, mask or "packed")
CASES = {
    "ViT": ("rows", 197, 64, 128, 2, HALF, False, None),
    "ViT, 50 tokens": ("rows", 50, 64, 128, 2, HALF, False, None),
    "ViT V2": ("rows", 197, 64, 64, 1, HALF, False, None),
    "ViT, any mask": ("rows", 197, 64, 128, 2, HALF, False, "pairs"),
    "text": ("rows", 77, 64, 128, 2, HALF, True, None),
    "text, padding": ("rows", 77, 64, 128, 2, HALF, False, "keys"),
    "rows, D 32": ("rows", 197, 32, 64, 2, HALF, False, None),
    "rows, D 128": ("rows", 128, 128, 256, 2, HALF, True, None),
    "few rows, D 128": ("rows", 64, 128, 256, 2, HALF, True, None),
    "rows V2, D 128": ("rows", 128, 128, 128, 1, HALF, True, None),
    "rows, float32": ("rows", 64, 64, 128, 2, FULL, True, None),
    "long, D 64": ("streaming", 1024, 64, 128, 2, HALF, False, None),
    "long causal, D 64": ("streaming", 1024, 64, 128, 2, HALF, True, None),
    "long causal padding, D 64": ("streaming", 1024, 64, 128, 2, HALF, True, "keys"),
    "long any mask, D 64": ("streaming", 1024, 64, 128, 2, HALF, False, "pairs"),
    "long V2, D 64": ("streaming", 1024, 64, 64, 1, HALF, False, None),
    "long, D 32": ("streaming", 1024, 32, 64, 2, HALF, False, None),
    "language": ("streaming", 1024, 128, 256, 2, HALF, True, None),
    "language, any mask": ("streaming", 1024, 128, 256, 2, HALF, False, "pairs"),
    "language V2": ("streaming", 1024, 128, 128, 1, HALF, True, None),
    "three tokens": ("rows", 3, 64, 128, 2, HALF, True, None),
    "odd sizes": ("rows", 77, 20, 40, 2, HALF, True, "pairs"),
    "long, odd sizes": ("streaming", 1000, 20, 40, 2, HALF, True, "keys"),
    "packed": ("rows", 197, 64, 128, 2, HALF, False, "packed"),
    "packed, long": ("streaming", 1024, 128, 256, 2, HALF, True, "packed"),
    "long, float32": ("streaming", 1024, 64, 128, 2, FULL, False, None),
    "language, float32": ("streaming", 1024, 128, 256, 2, FULL, True, None),
}


def launches(family, n, d, v, maps, dtype, causal, mask, *, batch=2, heads=8) -> list[launch.Launch]:
    """Return what forward and backward would launch, on tensors without memory, laid out as projections leave them."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = None
    if mask == "packed":
        starts = empty(batch + 1, dtype=torch.int32)
        mask, packed = None, launch.Sequences(starts, starts, n, n)
    elif mask is not None:
        mask = empty(batch, 1, n if mask == "pairs" else 1, n, dtype=torch.bool).expand(batch, heads, n, n)
    q = empty(batch, n, heads, 2, d).permute(0, 2, 3, 1, 4)
    k = empty(batch, n, heads, maps, d).permute(0, 2, 3, 1, 4)
    value = empty(batch, n, heads, v).transpose(1, 2)
    lam = empty(1, 1, 1, 1, dtype=torch.float32).expand(batch, heads, n, 1)
    x = launch.Inputs(q, k, value, lam, mask, causal, d**-0.5, packed)
    out = empty(batch, n, heads, v).transpose(1, 2)
    lse = empty(batch, heads, 2, n, dtype=torch.float32)
    if family == "rows":
        return launch.forward_rows(x, out, lse) + launch.backward_rows(x, out, lse, lse, (q, k, value))
    forward = launch.forward_streaming(x, out, out, lse)
    return forward + launch.backward_streaming(x, out, out, out, lse, lse, (q, k, value))


def compile_for_hopper(one: launch.Launch):
    """Return the compiled kernel, its arguments specialised as a launch would specialise them."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(one.kernel.params):
        name, value = parameter.name, one.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free(parameter)):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and not free(parameter):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=one.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=one.options())


def free(parameter) -> bool:
    return parameter.do_not_specialize


def resources(one: launch.Launch) -> dict:
    compiled = compile_for_hopper(one)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    loads, stores = innermost_spills(compiled.asm["sass"])
    return {
        "kernel": one.kernel.fn.__name__ + part(one.arguments),
        "tiles": list(one.tiles),
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"] + numbers["LOCAL"],
        "loop_loads": loads,
        "loop_stores": stores,
        "shared_kib": compiled.metadata.shared / 1024,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def part(arguments: dict) -> str:
    halves = [name.lower() for name in ("KEYS", "VALUES") if arguments.get(name)]
    return f" ({halves[0]})" if len(halves) == 1 else ""


def innermost_spills(sass: str) -> tuple[int, int]:
    """Return loads and stores of spilled registers in a pass of the worst innermost loop (0, 0 without loops)."""
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\w+):$", line):
            labels[label.group(1)] = len(instructions)
        else:
            instructions.append(line)
    ends = [
        (labels.get(m.group(1), i), i) for i, line in enumerate(instructions) if (m := re.search(r"BRA (\w+)", line))
    ]
    loops = [(a, b) for a, b in ends if a < b - 3]
    inner = [(a, b) for a, b in loops if not any(a <= c and d < b for c, d in loops if (c, d) != (a, b))]
    counts = [[sum(word in line for line in instructions[a:b]) for word in ("LDL", "STL")] for a, b in inner]
    return max((c[0] for c in counts), default=0), max((c[1] for c in counts), default=0)


def main(names: list[str]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: the interpreter does not compile")
    for name, case in CASES.items():
        if not names or name in names:
            for one in launches(*case):
                print(json.dumps({"case": name, "half": case[5] == HALF, **resources(one)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
