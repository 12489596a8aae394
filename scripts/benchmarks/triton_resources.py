"""Compile the fused kernels for GPUs, none needed, and print what each launch uses, one JSON object a line.

    python scripts/benchmarks/triton_resources.py [--cards 80,86,89,90,100,120] [--output FILE [--missing]] [case ...]
    python scripts/benchmarks/triton_resources.py --table FILE     its table of cards

Registers, shared memory, tensor-core instructions, how many warps repeat a product, and how often a pass of an
innermost loop goes to memory for want of registers, by compute capability. The launches are those that
`diffvision.ops.attention.triton` would make for these shapes: of training, and of inference where its forward is
another kernel.
"""

import argparse
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

from diffvision.ops.attention.shared_memory import BY_CAPABILITY, KIB
from diffvision.ops.attention.triton import decode, launch

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32"}
HALF, FULL = torch.bfloat16, torch.float32

# name -> (queries and keys, D, V, maps of keys, dtype, causal, mask or "packed")
CASES = {
    "ViT": (197, 64, 128, 2, HALF, False, None),
    "ViT, 50 tokens": (50, 64, 128, 2, HALF, False, None),
    "ViT V2": (197, 64, 64, 1, HALF, False, None),
    "ViT, any mask": (197, 64, 128, 2, HALF, False, "pairs"),
    "text": (77, 64, 128, 2, HALF, True, None),
    "text, padding": (77, 64, 128, 2, HALF, False, "keys"),
    "rows, D 32": (197, 32, 64, 2, HALF, False, None),
    "rows, D 128": (128, 128, 256, 2, HALF, True, None),
    "few rows, D 128": (64, 128, 256, 2, HALF, True, None),
    "rows V2, D 128": (128, 128, 128, 1, HALF, True, None),
    "rows, float32": (64, 64, 128, 2, FULL, True, None),
    "long, D 64": (1024, 64, 128, 2, HALF, False, None),
    "long causal, D 64": (1024, 64, 128, 2, HALF, True, None),
    "long causal padding, D 64": (1024, 64, 128, 2, HALF, True, "keys"),
    "long any mask, D 64": (1024, 64, 128, 2, HALF, False, "pairs"),
    "long V2, D 64": (1024, 64, 64, 1, HALF, False, None),
    "long, D 32": (1024, 32, 64, 2, HALF, False, None),
    "language": (1024, 128, 256, 2, HALF, True, None),
    "language, any mask": (1024, 128, 256, 2, HALF, False, "pairs"),
    "language V2": (1024, 128, 128, 1, HALF, True, None),
    "three tokens": (3, 64, 128, 2, HALF, True, None),
    "odd sizes": (77, 20, 40, 2, HALF, True, "pairs"),
    "long, odd sizes": (1000, 20, 40, 2, HALF, True, "keys"),
    "packed": (197, 64, 128, 2, HALF, False, "packed"),
    "packed, long": (1024, 128, 256, 2, HALF, True, "packed"),
    "long, float32": (1024, 64, 128, 2, FULL, False, None),
    "language, float32": (1024, 128, 256, 2, FULL, True, None),
}
# name -> (rows of queries, D, V, maps of keys, dtype, masked)
DECODING = {
    f"decoding, {rows} x {d} + {v}{', one key' if maps == 1 else ''}{', masked' if masked else ''}"
    f"{', float32' if dtype == FULL else ''}": (rows, d, v, maps, dtype, masked)
    for dtype, rows, d, v in [
        *((HALF, rows, d, v) for d, v in ((64, 64), (64, 128), (128, 128), (128, 256)) for rows in (1, 32)),
        *((FULL, 1, d, v) for d, v in ((64, 128), (128, 256))),
    ]
    for masked, maps in ((False, 2), (True, 2), (True, 1))
}


def launches(n, d, v, maps, dtype, causal, mask, *, card, batch=2, heads=8) -> list[launch.Launch]:
    """Return what a card would launch, on tensors without memory, laid out as projections leave them."""

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
    shared = BY_CAPABILITY[card]
    x = launch.Inputs(q, k, value, lam, mask, causal, d**-0.5, shared, card == 90, packed)
    out = empty(batch, n, heads, v).transpose(1, 2)
    lse = empty(batch, heads, 2, n, dtype=torch.float32)
    fits = {
        backward: n <= launch.rows_limit(d, v, maps, dtype.itemsize, shared, backward=backward)
        for backward in (False, True)
    }
    if fits[True]:
        return launch.forward_rows(x, out, lse) + launch.backward_rows(x, out, lse, lse, (q, k, value))
    inference = launch.forward_rows(x, out, None) if fits[False] else []
    forward = launch.forward_streaming(x, out, out, lse)
    return inference + forward + launch.backward_streaming(x, out, out, out, lse, lse, (q, k, value))


def launches_of(name: str, card: int) -> list[launch.Launch]:
    """Return the launches of a named case on a compute capability."""
    return launches(*CASES[name], card=card) if name in CASES else decoding(*DECODING[name])


def decoding(rows, d, v, maps, dtype, masked) -> list[launch.Launch]:
    """Return the launch that decodes rows of queries, its strides multiples of 16."""
    arguments = dict.fromkeys(decode._split.arg_names, 32)
    arguments |= dict.fromkeys(("q", "k", "v"), torch.empty(0, dtype=dtype, device="meta"))
    arguments |= dict.fromkeys(("tops", "totals", "products"), torch.empty(0, device="meta"))
    arguments |= {"mask": torch.empty(0, dtype=torch.uint8, device="meta"), "scale": 0.125}
    arguments |= dict.fromkeys(("q_d", "k_d", "v_v", "mask_n"), 1)
    arguments |= dict.fromkeys(("HK", "G", "M", "N", "R", "splits", "keys_a_split"), 3)
    arguments |= {"CAUSAL": masked, "MASK": masked, "SHARED": maps == 1} | decode.constants(dtype, d, v, rows)
    warps, stages = arguments.pop("num_warps"), arguments.pop("num_stages")
    return [
        launch.Launch(decode._split, 1, arguments, launch.Tiles(arguments["ROWS"], arguments["BLOCK_N"], warps, stages))
    ]


def compile_launch(one: launch.Launch, card: int):
    """Return the kernel compiled for a compute capability, its arguments specialised as a launch would."""
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
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=one.options())


def free(parameter) -> bool:
    return parameter.do_not_specialize


def rows_of(name: str, card: int) -> list[dict]:
    """Return what each launch of a named case uses of a card."""
    half = (CASES | DECODING)[name][4] == HALF
    return [{"case": name, "half": half, **resources(one, card)} for one in launches_of(name, card)]


def resources(one: launch.Launch, card: int) -> dict:
    """Return what a launch uses of a card. Disassembling takes long, so only a kernel that spills is disassembled."""
    compiled = compile_launch(one, card)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    stack = numbers["STACK"] + numbers["LOCAL"]
    loads, stores = innermost_spills(compiled.asm["sass"]) if stack else (0, 0)
    return {
        "card": card,
        "kernel": name_of(one),
        "fits": compiled.metadata.shared <= BY_CAPABILITY[card],
        "tiles": list(one.tiles),
        "registers": numbers["REG"],
        "stack_bytes": stack,
        "loop_loads": loads,
        "loop_stores": stores,
        "shared_kib": round(compiled.metadata.shared / KIB, 1),
        "repeats": repeats(compiled.asm["ttgir"]),
        "tensor_cores": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", compiled.asm["ptx"])),
    }


def table(rows: list[dict]) -> list[str]:
    """Return a row for each card of the table on the page of GPUs."""
    lines = []
    for card, limit in BY_CAPABILITY.items():
        mine = [row for row in rows if row["card"] == card]
        spills = [row["loop_loads"] + row["loop_stores"] for row in mine]
        largest, spilling = max(row["shared_kib"] for row in mine), sum(map(bool, spills))
        card_name, launches = f"{card // 10}.{card % 10}", f"{spilling} of {len(mine)}"
        lines.append(f"| {card_name} | {largest:.0f} of {limit // KIB} | {launches} | {max(spills)} |")
    return lines


def name_of(one: launch.Launch) -> str:
    """Return the kernel's module and name, and which gradients it computes where that is one of two passes."""
    function = one.kernel.fn
    halves = [name.lower() for name in ("KEYS", "VALUES") if one.arguments.get(name)]
    part = f" ({halves[0]})" if len(halves) == 1 else ""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}{part}"


def repeats(ttgir: str) -> float:
    """Return how many warps at most compute the same part of a product: 1 where none is computed twice."""
    layouts = re.findall(r"(#mma\d*) = .*warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+)", ttgir)
    covered = {name: (int(rows) * int(m), int(columns) * int(n)) for name, rows, columns, m, n in layouts}
    products = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, (#mma\d*)>", ttgir)
    worst = (
        max(1, covered[name][0] / int(rows)) * max(1, covered[name][1] / int(columns))
        for rows, columns, name in products
    )
    return max(worst, default=1)


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


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("unset TRITON_INTERPRET: the interpreter does not compile")
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="case")
    parser.add_argument("--cards", default=",".join(map(str, BY_CAPABILITY)), help="compute capabilities")
    parser.add_argument("--output", type=Path, help="a JSON file, whose other rows are kept")
    parser.add_argument("--missing", action="store_true", help="leave out what the file has for the same tiles")
    parser.add_argument("--table", type=Path, help="a JSON file, whose table is printed instead")
    given = parser.parse_args()
    if given.table is not None:
        print(*table(json.loads(given.table.read_text())["rows"]), sep="\n")
        return
    recorded = json.loads(given.output.read_text())["rows"] if given.missing and given.output.exists() else []
    for card in map(int, given.cards.split(",")):
        for name in given.cases or CASES | DECODING:
            if given.missing and is_recorded(name, card, recorded):
                continue
            rows = rows_of(name, card)
            print(*map(json.dumps, rows), sep="\n", flush=True)
            if given.output is not None:
                record(given.output, rows)


def is_recorded(name: str, card: int, recorded: list[dict]) -> bool:
    """Return whether rows hold a case's launches as the code makes them now."""
    made = [(name_of(one), list(one.tiles)) for one in launches_of(name, card)]
    return made == [(row["kernel"], row["tiles"]) for row in recorded if (row["card"], row["case"]) == (card, name)]


def record(file: Path, rows: list[dict]) -> None:
    """Write rows into a file, in place of those of the same cards and cases; what else it holds stays."""
    data = json.loads(file.read_text()) if file.exists() else {"rows": []}
    new = {(row["card"], row["case"]) for row in rows}
    data["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    data["rows"] = [row for row in data["rows"] if (row["card"], row["case"]) not in new] + rows
    order = [*CASES, *DECODING]
    data["rows"].sort(key=lambda row: (row["card"], order.index(row["case"])))
    texts = {
        key: "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)
        for key, value in data.items()
    }
    whole = file.with_suffix(".part")
    whole.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n")
    whole.replace(file)


if __name__ == "__main__":
    main()
