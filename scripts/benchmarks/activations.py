"""Bytes of activations per sample that torch's allocator holds for models of the families in `bench_models`.

    python scripts/benchmarks/activations.py [--model NAME ...] [--output FILE]

needs CUDA, or a stub of a device that computes nothing, since bytes do not depend on values. The forward pass is in
bfloat16 autocast over float32 weights, with the memory-efficient kernel of torch's attention alone, and without cuDNN,
which a stub has not. A sample's bytes are
the difference of two batches over the difference of their sizes, so weights and what is kept once for a model do not
count: after the forward pass, and at the peak of forward and backward.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_models import FAMILIES, Family
from machine import commit

FILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "activations.json"
SIZES = 4, 8
MODELS = ["DiffCLIP-ViT-B-16", "CLIP-ViT-B-16", "diff_vit_base", "diffv2_vit_base", "vit_base_patch16_224"]


def held(family: Family, model: nn.Module, size: int) -> tuple[int, int]:
    """Return the bytes after the forward pass, and at the peak, beyond those before a step of a batch."""
    batch = family.batch(size, "cuda")
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        loss = family.loss(model, batch)
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with torch.autograd.set_multithreading_enabled(False):  # frees in the same order each time
        loss.backward()
    return after - before, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: run it on a machine with one")
    torch.backends.cudnn.enabled = False
    report = {"torch": torch.__version__, "diffvision": commit(), "megabytes per sample": {}}
    for family in FAMILIES:
        for made in family.models:
            if made.name not in args.model:
                continue
            model = made.create().cuda().train()
            held(family, model, SIZES[0])  # makes the gradients
            small, large = (held(family, model, size) for size in SIZES)
            numbers = [round((b - a) / (SIZES[1] - SIZES[0]) / 1e6, 1) for a, b in zip(small, large, strict=True)]
            report["megabytes per sample"][made.name] = dict(zip(("after forward", "peak"), numbers, strict=True))
            print(made.name, *numbers, flush=True)
            del model
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
