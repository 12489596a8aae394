"""Retrieval over many images and captions: time and peak memory of ours and of CLIP_benchmark's code.

    python scripts/benchmarks/bench_retrieval.py [--python PYTHON]

Random unit features of 512 numbers, five captions an image. Each measurement is a process, and its memory is the peak
above what it held when the features were made. CLIP_benchmark's functions are called as its `evaluate` calls them, with
its batches of 64, by a Python that has them; they hold all scores at once, and are left out where these would not fit.
Both must count the same recalls.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, CAPTIONS, RECALLS = 512, 5, (1, 5, 10)
Recalls = dict[str, float]


def features(images: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images [N, D], their captions [5 N, D], which lie near them, and the captions' images."""
    generator = torch.Generator().manual_seed(0)
    pictures = F.normalize(torch.randn(images, WIDTH, generator=generator), dim=1)
    owner = torch.arange(images).repeat_interleave(CAPTIONS)
    texts = torch.randn(len(owner), WIDTH, generator=generator).mul_(0.3).add_(pictures[owner])
    return pictures, F.normalize(texts, dim=1), owner


def ours(pictures: Tensor, texts: Tensor, owner: Tensor) -> Recalls:
    """Return the recalls by `diffvision evaluate`'s function."""
    from diffvision.evaluation.retrieval import recalls

    return recalls(pictures, texts, owner, RECALLS)


def theirs(pictures: Tensor, texts: Tensor, owner: Tensor) -> Recalls:
    """Return the recalls by CLIP_benchmark's functions."""
    from clip_benchmark.metrics.zeroshot_retrieval import batchify, recall_at_k

    scores = texts @ pictures.T
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(scores)), owner] = True
    found = {}
    for k in RECALLS:
        found[f"image_retrieval_recall@{k}"] = (
            (batchify(recall_at_k, scores, positive, 64, "cpu", k=k) > 0).float().mean().item()
        )
        found[f"text_retrieval_recall@{k}"] = (
            (batchify(recall_at_k, scores.T, positive.T, 64, "cpu", k=k) > 0).float().mean().item()
        )
    return found


def memory(name: str) -> int:
    """Return VmRSS, the memory that this process holds, or VmHWM, the most that it has held since Linux forgot it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def one(name: str, images: int) -> None:
    """Measure one way in this process, and print it as JSON."""
    given = features(images)
    recalls = {"diffvision": ours, "CLIP_benchmark": theirs}[name]
    recalls(*features(10))  # imports
    Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak
    held, begun = memory("VmRSS"), time.perf_counter()
    found = recalls(*given)
    print(json.dumps({"seconds": time.perf_counter() - begun, "bytes": memory("VmHWM") - held, "recalls": found}))


def measure(python: str, name: str, images: int) -> dict:
    """Return what one way took in a process."""
    command = [python, __file__, "--one", name, str(images)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 5000, 25_000])
    parser.add_argument("--python", default=sys.executable, help="with clip_benchmark")
    parser.add_argument("--memory", type=float, default=16, help="GiB that CLIP_benchmark's scores may take")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], int(args.one[1]))
        return
    from benchmark import table
    from machine import hardware

    lines = []
    for images in args.images:
        results = {"diffvision": measure(sys.executable, "diffvision", images)}
        if 5 * CAPTIONS * images**2 <= args.memory * 2**30:  # scores, and a byte for each of them
            results["CLIP_benchmark"] = measure(args.python, "CLIP_benchmark", images)
        found = [result["recalls"] for result in results.values()]
        if any(abs(other[name] - found[0][name]) > 1e-6 for other in found for name in found[0]):
            sys.exit(f"the recalls differ: {found}")
        for name, result in results.items():
            cells = [f"{result['seconds']:.1f}", f"{result['bytes'] / 2**20:,.0f}"]
            recall = f"{result['recalls']['image_retrieval_recall@1']:.4f}"
            lines.append([f"{images:,} x {CAPTIONS * images:,}", name, *cells, recall])
    print(table(["images x captions", "code", "seconds", "MiB", "image recall@1"], lines))
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"\n{hardware('cpu')['cpu']}, {torch.get_num_threads()} threads; {versions}")


if __name__ == "__main__":
    main()
