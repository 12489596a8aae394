"""What runs for each of the usual calls on one device: the chosen backend, why others were not, and their kernels.

    python scripts/benchmarks/gpu_kernels.py [--device cuda] [--minutes 8] [--quick] --output DIR

rewrites DIR/kernels.json after each call. Of each backend that can take a call it has the device's kernels that take
most of the time of one call (forward and backward where gradients are needed), by torch's profiler, their time in all,
and the error where it fails. `--quick` tries two calls for one sample.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmark import arguments, parse, progress, synchronize
from diffvision.ops import supported_backends
from diffvision.tuning.cases import Case, usual_cases
from diffvision.tuning.ways import backends_for, calls_of
from machine import environment

MOST = 4  # kernels of a call


def kernels_of(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the longest kernels of a call, and the milliseconds of all; on a CPU operations stand for kernels."""
    is_cuda = device.startswith("cuda")
    call()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as seen:
        call()
        synchronize(device)
    times: Counter[str] = Counter()
    for event in seen.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == is_cuda:
            times[event.name[:120]] += event.self_device_time_total if is_cuda else event.self_cpu_time_total
    return {"kernels": [name for name, _ in times.most_common(MOST)], "ms": times.total() / 1e3}


def measure(case: Case, quick: bool) -> dict[str, Any]:
    ran: dict[str, Any] = {}
    for backend in backends_for(case.problem):
        if quick and backend == "flex":  # it takes long to compile
            continue
        try:
            ran[backend] = kernels_of(calls_of(case, [backend])[backend], case.problem.device)
        except Exception as error:  # whatever a kernel may raise is the result
            lines = str(error).strip().splitlines() or [""]
            ran[backend] = {"failed": f"{type(error).__name__}: {lines[0]}"[:300]}
    chosen, *_ = supported_backends(case.problem)
    return {"chosen": chosen, "backends": supported_backends(case.problem), "ran": ran}


def main(given: list[str] | None = None) -> int:
    args = parse(arguments(__doc__ or ""), given)
    cases = usual_cases(args.device, args.dtype)
    if args.quick:
        cases = [case._replace(problem=case.problem._replace(batch=1)) for case in cases[:2]]
    report = {"benchmark": "kernels", **environment(args.device), "calls": {}, "left_out": len(cases)}
    with progress(len(cases), args.minutes) as following:
        for case in cases:
            name = f"{case.name}, {case.passes}"
            if not following(name):
                break
            report["calls"][name] = found = measure(case, args.quick)
            report["left_out"] -= 1
            (args.output / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
            failed = [backend for backend, one in found["ran"].items() if "failed" in one]
            kernels = ", ".join(found["ran"].get(found["chosen"], {}).get("kernels", []))
            print(f"{name}: {found['chosen']}: {kernels}{f'; failed: {failed}' if failed else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
