"""Tokens a second that a text tower trains on at 77 and 248 tokens: captions padded to the length, and in buckets.

    python scripts/benchmarks/bench_captions.py [MODEL ...]

Captions have 1 to 77 or 248 tokens, uniformly; only theirs count, not padding. A bucket has the captions of a third of
these lengths. `fit` has no buckets: these are towers of three context lengths. Forward and backward passes take turns,
by the process's time.
"""

import statistics
import sys
import time
from typing import Any

import open_clip
import torch

import diffvision  # noqa: F401  # its models are OpenCLIP's then

BATCH, ROUNDS = 8, 5


def train(model: Any, length: int) -> float:
    text = torch.randint(1, 49000, (BATCH, length))
    start = time.process_time()
    model.encode_text(text).square().sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    for name in sys.argv[1:] or ("CLIP-ViT-S-16", "DiffCLIP-ViT-S-16"):
        models = {n: open_clip.create_model(name, force_context_length=n) for n in (25, 51, 77, 82, 165, 248)}
        rounds = [{n: train(model, n) for n, model in models.items()} for _ in range(ROUNDS + 1)][1:]
        for buckets in ((25, 51, 77), (82, 165, 248)):
            tokens = BATCH * (buckets[-1] + 1) / 2
            padded = statistics.median(tokens / one[buckets[-1]] for one in rounds)
            in_buckets = statistics.median(tokens / statistics.mean(one[n] for n in buckets) for one in rounds)
            print(f"{name}, {buckets[-1]} tokens: {padded:,.0f} tokens/s padded, {in_buckets:,.0f} in buckets")
