"""How far `diffvision.adapt` is off before training: docs/benchmarks/adapt_exactness.json.

    python scripts/benchmarks/adapt_exactness.py

Random weights, scattered so that every part of a layer matters; two random inputs; the largest difference of outputs
over the largest output, the worse tower's where there are two. What is exact does not depend on what the weights are.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import open_clip
import timm
import torch
from torch import Tensor, nn

import diffvision
from diffvision.export.adapted_folder import largest_difference
from diffvision.models import language

TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch16_224": {"qk_norm": True, "init_values": 1e-1},
    "vit_base_patch16_224": {},
    "vit_so150m_patch16_reg4_gap_256": {},
    "deit3_small_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"img_size": 224},
}
OPEN_CLIP = ("ViT-B-32", "ViT-B-16-SigLIP", "ViT-B-16-quickgelu")
LANGUAGE = ("transformer-1m", "transformer-30m")
Named = tuple[str, Callable[[], nn.Module], dict[str, Tensor]]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| model | layers | v2, float32 | v2, float64 | dex, float32 | dex, float64 | v1, float32 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, make, inputs in subjects():
        torch.manual_seed(0)
        model = scattered(make())
        cells = [cell(model, method, inputs, dtype) for method, dtype in COLUMNS]
        layers = sum(hasattr(module, "dex") for module in diffvision.adapt(copy.deepcopy(model), "dex").modules())
        print(f"| {name} | {layers} | {' | '.join(cells)} |", flush=True)


COLUMNS = (
    ("v2", torch.float32),
    ("v2", torch.float64),
    ("dex", torch.float32),
    ("dex", torch.float64),
    ("v1", torch.float32),
)


def subjects() -> list[Named]:
    draws = torch.Generator().manual_seed(1)
    named: list[Named] = []
    for name, settings in TIMM.items():
        size = timm.create_model(name, **settings).patch_embed.img_size
        image = torch.randn(2, 3, *size, generator=draws)
        words = "".join(f", {key}={value}" for key, value in settings.items())
        named.append((f"timm `{name}`{words}", lambda n=name, s=settings: timm.create_model(n, **s), {"image": image}))
    for name in OPEN_CLIP:
        image = torch.randn(2, 3, 224, 224, generator=draws)
        length = open_clip.get_model_config(name)["text_cfg"].get("context_length", 77)
        text = torch.randint(1, 30_000, (2, length), generator=draws)
        named.append((f"OpenCLIP `{name}`", lambda n=name: open_clip.create_model(n), {"image": image, "text": text}))
    for name in LANGUAGE:
        tokens = torch.randint(4096, (2, 128), generator=draws)
        named.append((f"language `{name}`", lambda n=name: language.create(n), {"tokens": tokens}))
    return named


@torch.no_grad()
def scattered(model: nn.Module) -> nn.Module:
    """Add noise to all weights: of a trained model's size, so that biases and scales are not their starting values."""
    for parameter in model.parameters():
        if parameter.ndim:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def cell(model: nn.Module, method: Any, inputs: dict[str, Tensor], dtype: torch.dtype) -> str:
    before = copy.deepcopy(model).to(dtype)
    try:
        after = diffvision.adapt(copy.deepcopy(before), method)
    # An odd number of heads has no pairs.
    except ValueError:
        return ""
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return f"{largest_difference(before, after, inputs):.1e}"


if __name__ == "__main__":
    main()
