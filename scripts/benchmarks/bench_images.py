"""Images a second of one core: how long decoding, resizing, tokenising and batching take, and whole pipelines.

    python scripts/benchmarks/bench_images.py [--output docs/benchmarks/data.json] [--openclip-python PYTHON]

JPEGs of several sizes, quality 90, are parts of three photographs that scikit-learn and matplotlib install. The
pipelines read the same shards with OpenCLIP's training transform for 224 pixels and its tokenizer, in batches of 128
that one worker makes: webdataset's, OpenCLIP's (see `openclip_versus.py`) and ours. They take
turns, and a ratio is that of one round. Times are of the processor, of the worker and of the process that reads its
batches, so other programs on the machine disturb them less. Our batches of uint8 are not normalised in them: that is
the device's work, and the stage "normalise a uint8 batch" says what it costs on this CPU.
"""

import argparse
import io
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.cbook
import numpy as np
import open_clip
import torch
import webdataset
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.io import ImageReadMode, decode_jpeg

import machine
import openclip_versus
from diffvision.data import CaptionMember, ImageMember, ImageText, ShardLoader, ShardSet
from diffvision.data.images.decode import decode_image
from diffvision.data.images.pixels import Pixels
from diffvision.data.shards.writer import write_manifest, write_tar
from openclip_data import MODEL, cpu_seconds, transform
from openclip_versus import BATCH, WORDS

SHARDS, EACH = 4, BATCH  # of images
SIZE = 224  # the model's


def write(directory: Path, side: int) -> Path:
    """Write shards of square JPEGs."""
    draw, images = random.Random(side), write_jpegs(side, SHARDS * EACH)
    directory.mkdir(parents=True)
    for shard in range(SHARDS):
        samples = []
        for number in range(shard * EACH, (shard + 1) * EACH):
            text = " ".join(draw.choices(WORDS, k=10))
            samples.append({"__key__": f"{number:06d}", "jpg": images[number], "txt": text})
        write_tar(directory / f"{shard:06d}.tar", samples)
    write_manifest(directory)
    return directory


def write_jpegs(side: int, count: int) -> list[bytes]:
    """Return JPEGs, which are parts of the photographs."""
    draw = random.Random(side)
    sources = [Image.fromarray(image) for image in load_sample_images().images]
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        sources.append(Image.open(file).convert("RGB"))
    images = []
    for _ in range(count):
        source = draw.choice(sources)
        part = draw.uniform(0.8, 1.0) * min(source.size)
        left, top = draw.uniform(0, source.width - part), draw.uniform(0, source.height - part)
        data = io.BytesIO()
        box = (left, top, left + part, top + part)
        source.resize((side, side), Image.Resampling.BICUBIC, box=box).save(data, "JPEG", quality=90)
        images.append(data.getvalue())
    return images


def stages(shards: ShardSet, tokenizer: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that each do one thing to every image, with what they need prepared."""
    every = [(shard, row) for shard in range(SHARDS) for row in range(EACH)]
    members = [shards.members(one) for one in every]
    data, texts = [m["jpg"] for m in members], [m["txt"].decode() for m in members]
    crop, _, to_tensor, normalize = transform(SIZE).transforms
    decoded, fast = [decode_image(d) for d in data], Pixels(transform(SIZE), "torchvision")
    wholes = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in decoded]
    small = [crop(image) for image in decoded]
    floats, bytes_ = [normalize(to_tensor(image)) for image in small], [fast(image) for image in decoded]
    batches = range(0, len(every), BATCH)
    uint8 = torch.stack(bytes_[:BATCH])

    def to_tensors(image: torch.Tensor) -> torch.Tensor:
        return decode_jpeg(image, ImageReadMode.RGB)

    def fast_crop(image: Image.Image, whole: torch.Tensor) -> torch.Tensor:
        return fast._resize(whole, crop.get_params(image, crop.scale, crop.ratio))

    buffers = [torch.frombuffer(bytearray(d), dtype=torch.uint8) for d in data]
    return {
        "read the members": lambda: [shards.members(one) for one in every],
        "decode: Pillow": lambda: [decode_image(d) for d in data],
        "decode: torchvision": lambda: [to_tensors(b) for b in buffers],
        "crop and resize: Pillow": lambda: [crop(image) for image in decoded],
        "crop and resize: torchvision, uint8": lambda: [fast_crop(*pair) for pair in zip(decoded, wholes, strict=True)],
        "ToTensor and Normalize": lambda: [normalize(to_tensor(image)) for image in small],
        "tokenise": lambda: [tokenizer(texts[start : start + BATCH]) for start in batches],
        "stack floats": lambda: [torch.stack(floats[start : start + BATCH]) for start in batches],
        "stack uint8": lambda: [torch.stack(bytes_[start : start + BATCH]) for start in batches],
        "normalise a uint8 batch": lambda: [fast.normalize(uint8) for _ in batches],
    }


def ours(shards: ShardSet, image: Any, tokenizer: Any) -> Callable[[], int]:
    loader = ShardLoader(shards, ImageText(ImageMember(image), CaptionMember(), tokenizer), BATCH, num_workers=1)
    return lambda: sum(len(batch["image"]) for batch in loader)


def with_webdataset(shards: ShardSet, tokenizer: Any) -> Callable[[], int]:
    make = transform(SIZE)

    def batch(samples: list[tuple[torch.Tensor, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([image for image, _ in samples]), tokenizer([text for _, text in samples])

    dataset = (
        webdataset.WebDataset(_tars(shards), shardshuffle=SHARDS).shuffle(1000).decode("pil").to_tuple("jpg", "txt")
    )
    dataset = dataset.map_tuple(make, str).batched(BATCH, collation_fn=batch)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    return lambda: sum(len(images) for images, _ in loader)


def rate(way: Callable[[], int]) -> float:
    """Return the images a second of processor time, the children's included."""
    before = cpu_seconds()
    count = way()
    return count / (cpu_seconds() - before)


def measure(directory: Path, side: int, python: str, rounds: int) -> dict[str, Any]:
    """Return the medians of the stages in ms an image, and of the pipelines' rates and ratios to webdataset's."""
    shards, tokenizer = ShardSet(write(directory / str(side), side)), open_clip.get_tokenizer(MODEL)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, stage in stages(shards, tokenizer).items():
            start = time.process_time()
            stage()
            times[name].append((time.process_time() - start) * 1e3 / len(shards))
    rates: dict[str, list[float]] = defaultdict(list)
    with openclip_versus.running(python, shards, SIZE, 1) as theirs:
        ways: dict[str, Callable[[], float]] = {"OpenCLIP's": lambda: theirs.epoch("cpu")}
        counted = {
            "webdataset": with_webdataset(shards, tokenizer),
            "ours, floats": ours(shards, transform(SIZE), tokenizer),
        }
        for decoder in ("pillow", "torchvision"):
            counted[f"ours, uint8: {decoder}"] = ours(shards, Pixels(transform(SIZE), decoder), tokenizer)
        ways |= {name: (lambda way=way: rate(way)) for name, way in counted.items()}
        for way in ways.values():  # processes start, and files are read for the first time
            way()
        for number in range(rounds):
            for name in [*ways] if number % 2 else [*ways][::-1]:
                rates[name].append(ways[name]())
    row: dict[str, Any] = {
        "pixels": side,
        "KB an image": round(sum(map(os.path.getsize, _tars(shards))) / 1e3 / len(shards)),
    }
    row["ms an image"] = {name: round(statistics.median(values), 3) for name, values in times.items()}
    row["images a second of a core"] = {}
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["webdataset"], strict=True)]
        row["images a second of a core"][name] = {
            "median": round(statistics.median(values)),
            "over webdataset's": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return row


def _tars(shards: ShardSet) -> list[str]:
    return [str(shard.location) for shard in shards.shards]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openclip-python", help="with open_clip_torch and webdataset 0.2.86; by default one is made")
    parser.add_argument("--output", type=Path, help='a JSON file, in which "images of a core" is replaced')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {"images of a core": machine.environment("cpu")}
    report["images of a core"] |= {"batch": BATCH, "rounds": arguments.rounds, "load at the start": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as scratch:
        python = arguments.openclip_python or openclip_versus.environment(Path(scratch, "python"))
        rows = [measure(Path(scratch), side, python, arguments.rounds) for side in arguments.sizes]
    report["images of a core"] |= {"load at the end": os.getloadavg()[0], "rows": rows}
    print(json.dumps(report, indent=1))
    if arguments.output is not None:
        whole = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(whole | report, indent=1) + "\n")


if __name__ == "__main__":
    main()
