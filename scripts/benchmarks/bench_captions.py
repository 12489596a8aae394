"""Tokens a second that a text tower trains on at 77 and 248 tokens: captions padded to the length, and in buckets.

    python scripts/benchmarks/bench_captions.py [MODEL ...] [--batch 8] [--rounds 5]

Captions have 8 to 77, and 20 to 248 tokens, uniformly; only theirs count, not padding. A bucket's captions are padded
to a third, two thirds or all of the length. `fit` has no buckets: these are towers of three context lengths. Forward
and backward passes take turns; medians of the process's time.
"""

import argparse
import statistics
import time

import open_clip
import torch

import diffvision  # noqa: F401  # its models are OpenCLIP's then

parser = argparse.ArgumentParser()
parser.add_argument("models", nargs="*", default=["CLIP-ViT-S-16", "DiffCLIP-ViT-S-16"])
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()


def train(model: torch.nn.Module, length: int) -> float:
    text = torch.randint(1, 49000, (args.batch, length))
    start = time.process_time()
    model.encode_text(text).square().sum().backward()
    return time.process_time() - start


for name in args.models:
    lengths = {longest: [longest // 3, longest * 2 // 3, longest] for longest in (77, 248)}
    models = {n: open_clip.create_model(name, force_context_length=n) for of in lengths.values() for n in of}
    rounds = [{n: train(model, n) for n, model in models.items()} for _ in range(args.rounds + 1)][1:]
    for (longest, buckets), least in zip(lengths.items(), (8, 20), strict=True):
        drawn = range(least, longest + 1)
        shares = [
            sum(low < n <= high for n in drawn) / len(drawn)
            for low, high in zip([0, *buckets[:-1]], buckets, strict=True)
        ]
        tokens = args.batch * (least + longest) / 2
        padded = statistics.median(tokens / one[longest] for one in rounds)
        in_buckets = statistics.median(
            tokens / sum(share * one[n] for share, n in zip(shares, buckets, strict=True)) for one in rounds
        )
        print(f"{name}, {longest} tokens: {padded:,.0f} tokens/s padded, {in_buckets:,.0f} in buckets")
