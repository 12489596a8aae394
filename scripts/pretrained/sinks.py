"""Count the attention sinks of pretrained models: DINOv2-S on two photographs, SmolLM2 and MiniLM on a text.

    python scripts/pretrained/fetch.py dinov2 weights/dinov2     # and smollm2, minilm
    python scripts/pretrained/sinks.py weights/dinov2 weights/smollm2 weights/minilm --output sinks.json

The photographs are scikit-learn's china.jpg and flower.jpg, the text is the first 256 tokens of a chapter of Python's
manual, which every installation has. What a sink is, and of which kind, is defined in `diffvision.analysis.sinks`;
`diffvision inspect` shows the same by layer.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import sklearn.datasets
import torch
from PIL import Image

from diffvision import open_model
from diffvision.analysis.maps import open_layers
from diffvision.analysis.sinks import OUTLIER, measure_sinks, relative_norms

TOKENS = 256
TEXT = topics["types"]


def batches(folder: str) -> tuple[Any, Iterator[dict[str, torch.Tensor]]]:
    """Return the model of a folder, and its inputs."""
    if (Path(folder) / "vocab.txt").is_file():  # a BertModel, with no head that writes text
        from transformers import AutoModel, AutoTokenizer

        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        return model, iter([{"tokens": torch.tensor([tokenizer(TEXT)["input_ids"][:TOKENS]])}])
    opened = open_model(folder)
    if opened.is_language:
        tokens = opened.for_text().tokenizer.encode(TEXT)[:TOKENS]
        return opened.module, iter([{"tokens": torch.tensor([tokens])}])
    pictures = sklearn.datasets.load_sample_images().images
    transform: Any = opened.transform
    return opened.module, ({"image": transform(Image.fromarray(picture))[None]} for picture in pictures)


def measure(folder: str) -> dict[str, Any]:
    """Return the numbers of one model, means over inputs, heads and layers unless they say otherwise."""
    model, inputs = batches(folder)
    counts: dict[str, list[torch.Tensor]] = {}
    ratios, outliers, by_layer = [], [], []
    for batch in inputs:
        of_input = []
        for layer in open_layers(model, batch):
            sinks = measure_sinks(layer)
            for kind, heads in sinks.kinds().items():
                counts.setdefault(kind, []).append(heads.float())
            counts.setdefault("on_first_token", []).append(sinks.share_by_key[:, 0])
            of_input.append(sinks.kinds()["sink"].float().mean().item())
            if layer.hidden is not None:
                norms = relative_norms(layer.hidden)
                ratios.append(norms.max().item())
                outliers.append((norms > OUTLIER).float().mean().item())
        by_layer.append(of_input)
    shares = {name: round(torch.cat(values).mean().item(), 4) for name, values in counts.items()}
    return shares | {
        "largest_over_median_norm": round(max(ratios), 2),
        "outlier_tokens": round(max(outliers), 4),
        "heads_with_a_sink_by_layer": [round(sum(each) / len(each), 3) for each in zip(*by_layer, strict=True)],
    }


def main() -> None:
    """Print a line for each model, and write all numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = {}
    for folder in args.folders:
        results[Path(folder).name] = one = measure(folder)
        shown = ", ".join(f"{name} {value}" for name, value in one.items() if not isinstance(value, list))
        print(f"{Path(folder).name}: {shown}", flush=True)
    if args.output is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        args.output.write_text(json.dumps({"machine": machine, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
