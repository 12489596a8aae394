"""Samples a second: our indexed reading against webdataset's sequential reading, and our loader against OpenCLIP's.

    python scripts/benchmarks/bench_data.py [DIRECTORY]     (shards of images and txt; `digits` by default)
    python scripts/benchmarks/bench_data.py --openclip [--openclip-python PYTHON]

The second measures OpenCLIP's training pipeline on digits and on photographs, in a separate Python environment that is
made for it unless one is given (`openclip_versus.py` says what it needs). `bench_step.py` measures what the checks cost
a training step.

Every figure is the median over rounds, in one process unless it says otherwise. `webdataset` reads the shards in
order; ours reads in shuffled order. Decoding is the same function in both.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import webdataset

from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.images.decode import decode_image
from diffvision.data.images.image_data import to_float
from diffvision.data.make import make
from diffvision.data.shards.index import scan
from diffvision.data.shards.order import ShuffledOrder


def tokens(captions: list[str]) -> torch.Tensor:
    return torch.zeros(len(captions), 32, dtype=torch.int64)


def headers(tars: list[str]) -> int:
    return sum(len(scan(tar)) for tar in tars)


def raw_webdataset(tars: list[str]) -> int:
    return sum(1 for _ in webdataset.WebDataset(tars, shardshuffle=False))


def decoded_webdataset(tars: list[str]) -> int:
    def image(sample: dict) -> torch.Tensor:
        return to_float(decode_image(sample.get("png") or sample["jpg"]))

    return sum(1 for _ in webdataset.WebDataset(tars, shardshuffle=False).map(image))


def raw_indexed(shards: ShardSet) -> int:
    order = ShuffledOrder(shards.counts, seed=0, epoch=0)
    for start in range(0, len(order), 1000):
        for sample in order.samples(start, min(start + 1000, len(order))):
            shards.members(sample)
    return len(order)


def loaded(loader: ShardLoader) -> int:
    return sum(len(batch["image"]) for batch in loader)


def rates(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Return the samples a second of each way in each round; the ways take turns, as noise disturbs all alike then."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            count = way()
            measured[name].append(count / (time.perf_counter() - start))
    return measured


def against_openclip(python: str | None, rounds: int) -> None:
    """Print a table of both on the same shards, in turns."""
    import open_clip

    import openclip_versus

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        python = python or openclip_versus.environment(Path(scratch, "python"))
        make("digits", f"{scratch}/digits")
        photos = openclip_versus.photos(Path(scratch, "photos"))
        kinds = {"digits, PNG of 32 px": (Path(scratch, "digits/train"), 32), "JPEG of 256 to 512 px": (photos, 224)}
        print(f"{platform.machine()}, {os.cpu_count()} cores; python {platform.python_version()}, ", end="")
        print(f"torch {torch.__version__}, open_clip {open_clip.__version__}, its webdataset 0.2.86; {rounds} rounds\n")
        for line in openclip_versus.table(python, kinds, rounds):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--openclip", action="store_true", help="measure OpenCLIP's training pipeline instead")
    parser.add_argument("--openclip-python", help="with open_clip_torch and webdataset 0.2.86; by default one is made")
    arguments = parser.parse_args()
    if arguments.openclip or arguments.openclip_python:
        against_openclip(arguments.openclip_python, arguments.rounds)
        return
    directory = arguments.directory
    with tempfile.TemporaryDirectory() as scratch:
        if directory is None:
            directory = f"{scratch}/digits/train"
            make("digits", f"{scratch}/digits")
        tars = [str(path) for path in sorted(Path(directory).glob("*.tar"))]
        shards = ShardSet(directory)
        kind = ImageText(ImageMember(to_float), CaptionMember(), tokens)
        loaders = {n: ShardLoader(shards, kind, 128, num_workers=n) for n in (0, 1, 2)}
        size = sum(Path(tar).stat().st_size for tar in tars)
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        print(f"{len(shards):,} samples in {len(tars)} shards, {size / 1e6:.1f} MB; {machine}")
        print(f"python {platform.python_version()}, torch {torch.__version__}, webdataset {webdataset.__version__}\n")
        ways = {
            "headers read once (kept afterwards)": lambda: headers(tars),
            "members only: webdataset, in order": lambda: raw_webdataset(tars),
            "members only: by index, shuffled": lambda: raw_indexed(shards),
            "decoded: webdataset, in order": lambda: decoded_webdataset(tars),
            "batches of 128: ShardLoader": lambda: loaded(loaders[0]),
            "batches of 128: ShardLoader, 1 worker": lambda: loaded(loaders[1]),
            "batches of 128: ShardLoader, 2 workers": lambda: loaded(loaders[2]),
        }
        print("| what | samples/s | times webdataset's |\n|---|---:|---:|")
        measured = rates(ways, arguments.rounds)
        for name, values in measured.items():
            baseline = "members" if name.startswith(("headers", "members")) else "decoded"
            other = next(others for way, others in measured.items() if way.startswith(baseline) and "webd" in way)
            ratio = statistics.median(a / b for a, b in zip(values, other, strict=True))
            print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
