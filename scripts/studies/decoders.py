"""Zero-shot and retrieval results of the bundled CLIPs when images are decoded and resized by each decoder.

    python scripts/studies/decoders.py [--output docs/benchmarks/data.json]

The images are those of `digits` for testing, enlarged and written as JPEGs of 256 pixels (quality 90); the models see
32 pixels. "evaluation" resizes as the models do when they are evaluated, so "draft" equals "torchvision". "training"
takes OpenCLIP's random crop, the same for each decoder, for which "draft" decodes at a fraction of the size.
"""

import argparse
import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any, get_args

import open_clip
import torch
from PIL import Image

from diffvision import open_model
from diffvision.data import find_folders
from diffvision.data.images.pixels import Decoder, Pixels
from diffvision.data.make import make
from diffvision.data.shards.writer import write_manifest, write_tar
from diffvision.evaluation.suite import evaluate

MODELS = ("CLIP-nano.digits", "DiffCLIP-nano.digits")
METRICS = ("zero_shot/digits/acc1", "image_retrieval_recall@1", "text_retrieval_recall@1")


def enlarge(tar: Path, side: int = 256) -> None:
    """Replace the PNGs of a tar by larger JPEGs."""
    samples: dict[str, dict[str, Any]] = {}
    with tarfile.open(tar) as archive:
        for member in archive:
            key, _, name = member.name.partition(".")
            file = archive.extractfile(member)
            assert file is not None
            samples.setdefault(key, {"__key__": key})[name] = file.read()
    for sample in samples.values():
        data = io.BytesIO()
        image = Image.open(io.BytesIO(sample.pop("png"))).convert("RGB")
        image.resize((side, side), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        sample["jpg"] = data.getvalue()
    write_tar(tar, samples.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help='a JSON file, in which "decoders" is replaced')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        digits = Path(scratch, "digits")
        make("digits", str(digits), copies=1)
        for task in ("zero_shot", "retrieval"):
            for tar in (digits / task / "test").glob("*.tar"):
                enlarge(tar)
            write_manifest(digits / task / "test")
        folders = [folder for folder in find_folders(digits) if folder.task in ("zero_shot", "retrieval")]
        for name in MODELS:
            opened = open_model(name)
            size, normalize = opened.module.visual.image_size[0], opened.transform.transforms[-1]
            training = open_clip.image_transform(size, True, tuple(normalize.mean), tuple(normalize.std))
            for kind, transform in (("evaluation", opened.transform), ("training", training)):
                for decoder in get_args(Decoder):
                    torch.manual_seed(0)  # the crops
                    found: dict[str, float] = {}
                    for folder in folders:
                        pixels = Pixels(transform, decoder, on_device=False)
                        found |= evaluate(opened.module, folder, transform=pixels, tokenizer=opened.tokenizer)
                    metrics = {key: round(value, 4) for key, value in found.items() if key.endswith(METRICS)}
                    rows.append({"model": name, "transform": kind, "decoder": decoder} | metrics)
                    print(rows[-1], flush=True)
    if arguments.output is not None:
        whole = json.loads(arguments.output.read_text())
        whole["decoders"] = {"command": "python scripts/studies/decoders.py", "seed": 0, "rows": rows}
        arguments.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
