"""Digits written on photographs: train small ViTs to name their colour, and draw where they attend.

    python scripts/pictures/photographs.py train --output runs/photographs   # six runs of minutes on one CPU core
    python scripts/pictures/photographs.py draw --output runs/photographs --images docs/images

A differential ViT (V1) and its parameter-matched plain ViT are trained with the same recipe, three seeds each. The
photographs are scikit-learn's two, china.jpg and flower.jpg. Training sees their lower halves, every second one with
exchanged colours, and testing the upper; the digits are those of `diffvision data make digits`, split as there.

The statement of the picture is counted in every test picture: the digit's share of map 1 - lambda * map 2 is larger
than its share of map 1. Each model is read in the layer that attends to the digit most, of all test pictures. The
pictures drawn are chosen at random among those where the statement holds; photographs.json has all numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
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
from diffvision.analysis import layer_maps, patch_maps
from diffvision.analysis.figures.style import scale
from diffvision.data.datasets.digits import load_split
from diffvision.data.datasets.drawings import Drawings
from diffvision.training import ClassificationModule, OptimizerSettings

SIZE, PATCH = 80, 8
MODELS, SIZES = ("diff_vit_debug", "plain_vit_debug"), {"img_size": SIZE, "patch_size": PATCH}
SEEDS, TEST_SEED = (0, 1, 2), 1000
INKS = {
    "red": (255, 60, 60),
    "yellow": (255, 220, 40),
    "green": (60, 220, 80),
    "cyan": (70, 220, 255),
    "blue": (70, 90, 255),
    "pink": (255, 110, 220),
}
ROWS = 4  # pictures drawn, by `SEEDS[0]`'s models
KINDS = {"diff_vit_debug": ("map 1", "map 2", "difference"), "plain_vit_debug": ("map",)}


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
        mask.paste(ink, tuple(int(rng.uniform(0, size - extent)) for _ in range(2)))
        colour = int(rng.integers(len(INKS)))
        picture.paste(tuple(INKS.values())[colour], mask=mask)
        return picture, mask, colour

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, _, label = self.drawn(index)
        return as_tensor(picture), label


def as_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1


def train(output: Path, model: str, seed: int, epochs: int, label: str = "", **model_args: Any) -> None:
    """Train on new pictures in each epoch; write the weights and the test accuracy to LABEL-SEED, or MODEL-SEED."""
    pl.seed_everything(seed)
    training, testing = load_split()
    module = ClassificationModule(
        model,
        num_classes=len(INKS),
        model_args={**SIZES, **model_args},
        optimizer=OptimizerSettings(lr=1e-3, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-6, clip_norm=1.0),
    )
    pictures = DigitsOnPhotographs(training, training=True, length=len(training) * epochs, seed=seed)
    held_out = DigitsOnPhotographs(testing, training=False, length=len(testing), seed=TEST_SEED)
    folder = output / f"{label or model}-{seed}"
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
    begun = time.perf_counter()
    # One epoch of ever new pictures: warm-up is then a tenth of the run.
    trainer.fit(module, DataLoader(pictures, batch_size=64, num_workers=0), DataLoader(held_out, batch_size=100))
    torch.save(module.model.state_dict(), folder / "weights.pt")
    about = {
        "acc1": round(float(trainer.callback_metrics["val/acc1"]), 4),
        "steps": trainer.global_step,
        "parameters": sum(weight.numel() for weight in module.model.parameters()),
        "seconds of the run": round(time.perf_counter() - begun),
    }
    (folder / "test.json").write_text(json.dumps(about))


def load(output: Path, model: str, seed: int, label: str = "", **model_args: Any) -> torch.nn.Module:
    built = timm.create_model(model, num_classes=len(INKS), **SIZES, **model_args)
    built.load_state_dict(torch.load(output / f"{label or model}-{seed}" / "weights.pt", weights_only=True))
    return built.eval()


def maps_of(model: torch.nn.Module, image: Tensor) -> np.ndarray:
    """Return [layers, kinds, rows, columns]: how the class token attends to the patches, mean over heads."""
    return np.stack([heads.mean(0).numpy() for heads in patch_maps(model, image).values()])


def covered(mask: Image.Image, patches: tuple[int, int]) -> np.ndarray:
    """Return which patches, [rows, columns], a digit covers by a tenth or more."""
    return np.asarray(mask.resize(patches[::-1], Image.Resampling.BOX), dtype=float) > 25


def on_digit(maps: np.ndarray, mask: Image.Image) -> np.ndarray:
    """Return each map's share of magnitude on the digit's patches, [layers, kinds]."""
    magnitude = np.abs(maps)
    return magnitude[..., covered(mask, maps.shape[-2:])].sum(-1) / magnitude.sum((-2, -1))


def measure(output: Path, model: str, seed: int, held_out: DigitsOnPhotographs) -> tuple[np.ndarray, dict]:
    """Return the digit's share of each map, [pictures, layers, kinds], and what the JSON says of one trained model."""
    loaded = load(output, model, seed)
    pictures = range(len(held_out))
    shares = np.stack([on_digit(maps_of(loaded, held_out[i][0]), held_out.drawn(i)[1]) for i in pictures])
    means = shares.mean(0)
    about = json.loads((output / f"{model}-{seed}" / "test.json").read_text()) | {
        "share of the digit, by layer": [
            {kind: round(float(share), 3) for kind, share in zip(KINDS[model], row, strict=True)} for row in means
        ],
        "layer": int(means[:, -1].argmax()),
    }
    lambdas = [layer.lam for layer in layer_maps(loaded, image=held_out[0][0])]
    if lambdas[0] is not None:
        about["lambda, by layer"] = [round(float(lam.mean()), 3) for lam in lambdas]
    return shares[:, about["layer"]], about


def draw(output: Path, images: Path) -> None:
    """Measure all models on all test pictures, write the numbers, and draw the maps of a few in light and dark."""
    digits = load_split()[1]
    held_out = DigitsOnPhotographs(digits, training=False, length=len(digits), seed=TEST_SEED)
    masks = [held_out.drawn(i)[1] for i in range(len(held_out))]
    patches = (SIZE // PATCH, SIZE // PATCH)
    about = {
        "models": f"timm {' and '.join(MODELS)}, {SIZES}",
        "commands": "python scripts/pictures/photographs.py train; python scripts/pictures/photographs.py draw",
        "test pictures": len(held_out),
        "the digit's share of all patches": round(float(np.mean([covered(mask, patches).mean() for mask in masks])), 3),
        "seeds": [],
        "torch": torch.__version__.partition("+")[0],
    }
    shares = {}
    for seed in SEEDS:
        run = {}
        for model in MODELS:
            shares[model, seed], run[model] = measure(output, model, seed, held_out)
        of_diff, of_plain = (shares[model, seed] for model in MODELS)
        run["pictures where the digit's share of"] = {
            "the difference exceeds its share of map 1": int((of_diff[:, 2] > of_diff[:, 0]).sum()),
            "the difference exceeds its share of the plain map": int((of_diff[:, 2] > of_plain[:, 0]).sum()),
        }
        about["seeds"].append(run)
    first = SEEDS[0]
    holds = np.flatnonzero(shares[MODELS[0], first][:, 2] > shares[MODELS[0], first][:, 0])
    shown = np.random.default_rng(0).choice(holds, ROWS, replace=False).tolist()
    about["pictures drawn"] = shown
    (images / "photographs.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2))
    layers = {load(output, model, first): about["seeds"][0][model]["layer"] for model in MODELS}
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        figure = panels(layers, held_out, shown, ink)
        figure.savefig(
            images / f"photographs-{theme}.webp", dpi=120, transparent=True, pil_kwargs={"quality": 88, "method": 6}
        )


def panels(layers: dict[torch.nn.Module, int], held_out: DigitsOnPhotographs, shown: Sequence[int], ink: str) -> Figure:
    """Return a row per picture: the picture, the plain ViT's map, map 1, map 2 and the difference, on one scale."""
    figure = Figure(figsize=(10, 2.1 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 5)
    for row, index in zip(axes, shown, strict=True):
        picture = held_out.drawn(index, 4 * SIZE)[0]
        row[0].imshow(picture)
        of_diff, of_plain = (maps_of(model, held_out[index][0])[layer] for model, layer in layers.items())
        maps = [*of_plain, *of_diff]
        limit = np.abs(maps).max()
        for ax, grid in zip(row[1:], maps, strict=True):
            lay_over(ax, picture, grid, limit)
    titles = ("picture", "plain ViT", "map 1", "map 2", "map 1 − λ map 2")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, color=ink, fontsize=13)
    for ax in axes.flat:
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
    parser.add_argument("--output", type=Path, default=Path("runs/photographs"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--epochs", type=int, default=14, help="new pictures of each training digit")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    if settings.step == "draw":
        draw(settings.output, settings.images)
        return
    for seed in SEEDS:
        for model in MODELS:
            if not (settings.output / f"{model}-{seed}" / "test.json").exists():
                train(settings.output, model, seed, settings.epochs)


if __name__ == "__main__":
    main()
