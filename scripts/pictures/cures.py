"""Train one small ViT for each cure of attention noise, and draw their class tokens' maps of one picture.

    python scripts/pictures/cures.py train --output runs/cures-picture   # five runs of minutes on one CPU core
    python scripts/pictures/cures.py draw --output runs/cures-picture --images docs/images

Data, recipe and size are those of photographs.py: name the colour of a digit on a photograph. Every model has the same
seed, so the same pictures in the same order. cures.json has the accuracy on all test pictures and
the other numbers over the first `MEASURED`. The picture drawn is `SHOWN`, whatever its maps are. It shows what maps
look like and compares nothing; scripts/studies/cures.py does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from diffvision.analysis import layer_maps
from diffvision.analysis.maps import find_patches
from diffvision.data.datasets.digits import load_split
from photographs import PATCH, SIZE, TEST_SEED, DigitsOnPhotographs, covered, lay_over, load, train

SEED, SHOWN, EPOCHS, MEASURED = 0, 0, 14, 48
CURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain_vit_debug", {}),
    "registers": ("plain_vit_debug", {"reg_tokens": 4}),
    "gate": ("gated_vit_debug", {}),
    "difference (V2)": ("diffv2_vit_debug", {}),
    "sink": ("plain_vit_debug", {"variant": "sink"}),
}


def rows_of(model: torch.nn.Module, image: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the class token's rows of the maps that weight the values, [layers, tokens], and the first patch.

    Rows are means over heads.
    """
    layers = layer_maps(model, image=image)
    return np.stack([layer.applied[:, 0].mean(0).numpy() for layer in layers]), find_patches(model, image).first


def grid_of(row: np.ndarray, first: int) -> np.ndarray:
    """Return the patches of a row, [rows, columns]."""
    return row[first:].reshape(SIZE // PATCH, SIZE // PATCH)


def measure(output: Path, cure: str, held_out: DigitsOnPhotographs) -> dict[str, Any]:
    """Return what cures.json says of a model: shares of the magnitude of its class token's rows, over test pictures."""
    name, model_args = CURES[cure]
    model = load(output, name, SEED, cure, **model_args)
    gates: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: gates.append(out[:, 0].sigmoid().mean()))
        for path, module in model.named_modules()
        if path.endswith("attn.gate")
    ]
    shares = []
    for index in range(MEASURED):
        rows, first = rows_of(model, held_out[index][0])
        inside = covered(held_out.drawn(index)[1], (SIZE // PATCH, SIZE // PATCH)).flatten()
        sizes = np.abs(rows)
        parts = [sizes[:, 1:first], sizes[:, :1], sizes[:, first:][:, inside], sizes[:, first:].max(1, keepdims=True)]
        shares.append([rows.sum(1), *(part.sum(1) / sizes.sum(1) for part in parts)])
    for hook in hooks:
        hook.remove()
    sums, registers, own, digit, largest = np.stack(shares).mean(0)
    about = json.loads((output / f"{cure}-{SEED}" / "test.json").read_text())
    del about["seconds of the run"]  # of a machine that was busy
    by_layer = {"row sum": sums, "class token": own, "digit": digit, "largest patch": largest}
    by_layer |= {"registers": registers} if "reg_tokens" in model_args else {}
    if gates:
        by_layer["gate"] = torch.stack(gates).unflatten(0, (-1, len(sums))).mean(0).detach().numpy()
    by_layer = {key: [round(float(value), 3) for value in values] for key, values in by_layer.items()}
    return {"model": name, "arguments": model_args, **about, "by layer": by_layer}


def draw(output: Path, images: Path) -> None:
    """Measure the models, write the numbers, and draw the last layer's maps of one picture in light and dark."""
    digits = load_split()[1]
    held_out = DigitsOnPhotographs(digits, training=False, length=len(digits), seed=TEST_SEED)
    about = {
        "command": "python scripts/pictures/cures.py train; python scripts/pictures/cures.py draw",
        "seed": SEED,
        "test pictures": len(held_out),
        "pictures measured": MEASURED,
        "picture drawn": SHOWN,
        "models": {cure: measure(output, cure, held_out) for cure in CURES},
        "torch": torch.__version__.partition("+")[0],
    }
    (images / "cures.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    maps = {}
    for cure, (name, model_args) in CURES.items():
        rows, first = rows_of(load(output, name, SEED, cure, **model_args), held_out[SHOWN][0])
        maps[cure] = grid_of(rows[-1], first)
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        settings = {"dpi": 120, "transparent": True, "pil_kwargs": {"quality": 88, "method": 6}}
        panels(maps, held_out, ink).savefig(images / f"cures-{theme}.webp", **settings)


def panels(maps: dict[str, np.ndarray], held_out: DigitsOnPhotographs, ink: str) -> Figure:
    """Return the picture and each model's map of it, on one scale."""
    figure = Figure(figsize=(10, 2.0), layout="constrained")
    axes = figure.subplots(1, 1 + len(maps))
    picture = held_out.drawn(SHOWN, 4 * SIZE)[0]
    axes[0].imshow(picture)
    limit = max(np.abs(grid).max() for grid in maps.values())
    for ax, grid in zip(axes[1:], maps.values(), strict=True):
        lay_over(ax, picture, grid, limit)
    for ax, title in zip(axes, ("picture", *maps), strict=True):
        ax.set_title(title, color=ink, fontsize=12)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "draw"])
    parser.add_argument("--output", type=Path, default=Path("runs/cures-picture"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    settings = parser.parse_args()
    torch.set_num_threads(1)
    if settings.step == "draw":
        draw(settings.output, settings.images)
        return
    for cure, (name, model_args) in CURES.items():
        if not (settings.output / f"{cure}-{SEED}" / "test.json").exists():
            train(settings.output, name, SEED, EPOCHS, cure, **model_args)


if __name__ == "__main__":
    main()
