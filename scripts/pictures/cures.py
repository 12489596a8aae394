"""Train one small ViT for each cure of attention noise, and draw their class tokens' maps of one picture.

    python scripts/pictures/cures.py train --output runs/cures-picture   # five runs of minutes on one CPU core
    python scripts/pictures/cures.py draw --output runs/cures-picture --images docs/images

The ViTs name the colour of a digit on a photograph. The photographs are scikit-learn's two, china.jpg and flower.jpg:
training sees their lower halves, every second one with exchanged colours, and testing the upper. Digits are those of
`diffvision data make digits`, split as there. Every model has the same seed, so the same pictures in the same order.
cures.json has the accuracy on all test pictures and the other numbers over the first `MEASURED`. The picture drawn is
`SHOWN`, whatever its maps are. It shows what maps look like and compares nothing; scripts/studies/cures.py does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import diffvision  # noqa: F401  registers the models
from diffvision.analysis import layer_maps
from diffvision.analysis.figures.style import scale
from diffvision.analysis.maps import find_patches
from diffvision.data.datasets.digits import load_split
from diffvision.data.datasets.drawings import Drawings
from diffvision.training import ClassificationModule, OptimizerSettings

SIZE, PATCH = 80, 8
SIZES: dict[str, Any] = {"img_size": SIZE, "patch_size": PATCH}
SEED, TEST_SEED, SHOWN, EPOCHS, MEASURED = 0, 1000, 0, 14, 48
INKS = {
    "red": (255, 60, 60),
    "yellow": (255, 220, 40),
    "green": (60, 220, 80),
    "cyan": (70, 220, 255),
    "blue": (70, 90, 255),
    "pink": (255, 110, 220),
}
CURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain_vit_debug", {}),
    "registers": ("plain_vit_debug", {"reg_tokens": 4}),
    "gate": ("gated_vit_debug", {}),
    "difference (V2)": ("diffv2_vit_debug", {}),
    "sink": ("plain_vit_debug", {"variant": "sink"}),
}


class DigitsOnPhotographs(Dataset):
    """A digit in one colour at a random position of a random part of a photograph; sample i depends on (seed, i)."""

    def __init__(self, digits: Drawings, *, training: bool, length: int, seed: int):
        photos = load_sample_images().images
        middle = photos[0].shape[0] // 2
        halves = [photo[middle:] if training else photo[:middle] for photo in photos]
        self.photos = [Image.fromarray(half) for half in halves]
        self.digits, self.training, self.length, self.seed = digits, training, length, seed

    def __len__(self) -> int:
        return self.length

    def drawn(self, index: int, size: int = SIZE) -> tuple[Image.Image, Image.Image, int]:
        """Return the picture, the digit's mask and the number of its colour, at any size in pixels."""
        rng = np.random.default_rng([self.seed, index])
        photo = self.photos[rng.integers(len(self.photos))]
        side = int(rng.integers(120, min(photo.size)))
        left, top = (int(rng.integers(extent - side + 1)) for extent in photo.size)
        picture = photo.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
        if self.training and rng.random() < 0.5:  # so that no colour is only the photographs' or only an ink's
            picture = Image.fromarray(np.asarray(picture)[..., rng.permutation(3)])
        extent = round(size * rng.uniform(0.35, 0.55))
        ink = Image.fromarray(self.digits.images[index % len(self.digits)]).resize(
            (extent, extent), Image.Resampling.BICUBIC
        )
        mask = Image.new("L", (size, size))
        left, top = (int(rng.uniform(0, size - extent)) for _ in range(2))
        mask.paste(ink, (left, top))
        colour = int(rng.integers(len(INKS)))
        picture.paste(tuple(INKS.values())[colour], mask=mask)
        return picture, mask, colour

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, _, label = self.drawn(index)
        return as_tensor(picture), label


def as_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1


def train(folder: Path, model: str, **model_args: Any) -> None:
    """Train on new pictures in each epoch; write the weights and the test accuracy to a folder."""
    pl.seed_everything(SEED)
    training, testing = load_split()
    module = ClassificationModule(
        model,
        num_classes=len(INKS),
        model_args={**SIZES, **model_args},
        optimizer=OptimizerSettings(lr=1e-3, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-6, clip_norm=1.0),
    )
    pictures = DigitsOnPhotographs(training, training=True, length=len(training) * EPOCHS, seed=SEED)
    held_out = DigitsOnPhotographs(testing, training=False, length=len(testing), seed=TEST_SEED)
    trainer = pl.Trainer(
        max_epochs=1,
        val_check_interval=0.1,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(folder, name="fit", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        log_every_n_steps=25,
    )
    # One epoch of ever new pictures: warm-up is then a tenth of the run.
    trainer.fit(module, DataLoader(pictures, batch_size=64, num_workers=0), DataLoader(held_out, batch_size=100))
    torch.save(module.model.state_dict(), folder / "weights.pt")
    about = {
        "acc1": round(float(trainer.callback_metrics["val/acc1"]), 4),
        "steps": trainer.global_step,
        "parameters": sum(weight.numel() for weight in module.model.parameters()),
    }
    (folder / "test.json").write_text(json.dumps(about))


def load(folder: Path, model: str, **model_args: Any) -> torch.nn.Module:
    built = timm.create_model(model, num_classes=len(INKS), **SIZES, **model_args)
    built.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return built.eval()


def covered(mask: Image.Image, patches: tuple[int, int]) -> np.ndarray:
    """Return which patches, [rows, columns], a digit covers by a tenth or more."""
    return np.asarray(mask.resize(patches[::-1], Image.Resampling.BOX), dtype=float) > 25


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
    model = load(output / cure, name, **model_args)
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
    about = json.loads((output / cure / "test.json").read_text())
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
        rows, first = rows_of(load(output / cure, name, **model_args), held_out[SHOWN][0])
        maps[cure] = grid_of(rows[-1], first)
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        settings: dict[str, Any] = {"dpi": 120, "transparent": True, "pil_kwargs": {"quality": 88, "method": 6}}
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


def lay_over(ax: Any, picture: Image.Image, grid: np.ndarray, limit: float) -> None:
    """Draw a map over a darkened picture, up to a limit; negative entries are blue."""
    ax.imshow(0.5 * np.asarray(picture.convert("L")), cmap="gray", vmin=0, vmax=255)
    smooth = np.asarray(Image.fromarray(grid).resize(picture.size, Image.Resampling.BICUBIC))
    opacity = np.clip(0.35 + 0.65 * np.abs(smooth) / limit, 0, 1)
    ax.imshow(smooth, alpha=opacity, **scale(signed=True, limit=limit))


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
        if not (settings.output / cure / "test.json").exists():
            train(settings.output / cure, name, **model_args)


if __name__ == "__main__":
    main()
