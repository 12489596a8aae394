"""Digits written on photographs: train a small differential ViT to name their colour, and draw its maps.

    python scripts/pictures/photographs.py train --output runs/photographs   # five minutes on a quiet CPU core
    python scripts/pictures/photographs.py draw --output runs/photographs --images docs/images

The photographs are scikit-learn's two, china.jpg and flower.jpg. Training sees their lower halves, every second one
with exchanged colours, and testing the upper; the digits are those of `diffvision data make digits`, split as there.
The README's picture and its numbers, in photographs.json, are of this model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
from diffvision.data.made.digits import load_split
from diffvision.data.made.drawings import Drawings
from diffvision.training import ClassificationModule, OptimizerSettings

SIZE, PATCH = 80, 8
MODEL, SIZES = "diff_vit_debug", {"img_size": SIZE, "patch_size": PATCH}
INKS = {
    "red": (255, 60, 60),
    "yellow": (255, 220, 40),
    "green": (60, 220, 80),
    "cyan": (70, 220, 255),
    "blue": (70, 90, 255),
    "pink": (255, 110, 220),
}
SHOWN = (10, 18, 21)  # test pictures, chosen before the model was trained
KINDS = ("map 1", "map 2", "difference")


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


def train(output: Path, epochs: int) -> None:
    """Train on new pictures in each epoch and write the weights and the test accuracy."""
    pl.seed_everything(0)
    training, testing = load_split()
    module = ClassificationModule(
        MODEL,
        num_classes=len(INKS),
        model_args=SIZES,
        optimizer=OptimizerSettings(lr=1e-3, weight_decay=0.05, betas=(0.9, 0.999), clip_norm=1.0),
    )
    pictures = DigitsOnPhotographs(training, training=True, length=len(training) * epochs, seed=0)
    held_out = DigitsOnPhotographs(testing, training=False, length=len(testing), seed=1)
    trainer = pl.Trainer(
        max_epochs=1,
        val_check_interval=0.1,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(output, name="fit", version=0),
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        log_every_n_steps=25,
    )
    # One epoch of ever new pictures: warm-up is then a tenth of the run.
    trainer.fit(module, DataLoader(pictures, batch_size=64, num_workers=0), DataLoader(held_out, batch_size=100))
    torch.save(module.model.state_dict(), output / "weights.pt")
    accuracy = float(trainer.callback_metrics["val/acc1"])
    (output / "test.json").write_text(json.dumps({"acc1": round(accuracy, 4), "steps": trainer.global_step}))


def load(output: Path) -> torch.nn.Module:
    built = timm.create_model(MODEL, num_classes=len(INKS), **SIZES)
    built.load_state_dict(torch.load(output / "weights.pt", weights_only=True))
    return built.eval()


def maps_of(model: torch.nn.Module, image: Tensor) -> np.ndarray:
    """Return [layers, kinds, rows, columns]: how the class token attends to the patches, mean over heads."""
    return np.stack([heads.mean(0).numpy() for heads in patch_maps(model, image).values()])


def on_digit(maps: np.ndarray, mask: Image.Image) -> tuple[np.ndarray, float]:
    """Return each map's share of magnitude on the digit's patches, [layers, kinds], and their share of all patches."""
    covered = np.asarray(mask.resize(maps.shape[-2:], Image.Resampling.BOX), dtype=float) > 25
    magnitude = np.abs(maps)
    return magnitude[..., covered].sum(-1) / magnitude.sum((-2, -1)), float(covered.mean())


def draw(output: Path, images: Path) -> None:
    """Draw the maps of the shown pictures, in light and dark, and write the shares over all test pictures."""
    digits = load_split()[1]
    held_out = DigitsOnPhotographs(digits, training=False, length=len(digits), seed=1)
    model = load(output)
    measured = [on_digit(maps_of(model, held_out[i][0]), held_out.drawn(i)[1]) for i in range(len(held_out))]
    shares = np.mean([share for share, _ in measured], axis=0)
    layer = int(shares[:, -1].argmax())
    about = {
        "model": f"timm {MODEL}, {SIZES}",
        "commands": "python scripts/pictures/photographs.py train; python scripts/pictures/photographs.py draw",
        "test": json.loads((output / "test.json").read_text()) | {"pictures": len(held_out)},
        "share of the digit": {
            "of all patches": round(float(np.mean([part for _, part in measured])), 3),
            "of magnitude, by layer": [
                {kind: round(float(share), 3) for kind, share in zip(KINDS, row, strict=True)} for row in shares
            ],
        },
        "layer drawn": layer,
        "lambda": [round(float(layer.lam.mean()), 3) for layer in layer_maps(model, image=held_out[0][0])],
        "torch": torch.__version__.partition("+")[0],
    }
    (images / "photographs.json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about, indent=2))
    for theme, ink in (("light", "#1f2328"), ("dark", "#e6edf3")):
        figure = panels(model, held_out, layer, ink)
        figure.savefig(
            images / f"photographs-{theme}.webp", dpi=120, transparent=True, pil_kwargs={"quality": 88, "method": 6}
        )


def panels(model: torch.nn.Module, held_out: DigitsOnPhotographs, layer: int, ink: str) -> Figure:
    """Return a row a picture: the picture, map 1, map 2 and the difference, all maps of a row on one scale."""
    figure = Figure(figsize=(8.4, 2.15 * len(SHOWN)), layout="constrained")
    axes, names = figure.subplots(len(SHOWN), 4), tuple(INKS)
    for row, index in zip(axes, SHOWN, strict=True):
        picture, _, label = held_out.drawn(index, 4 * SIZE)
        image = held_out[index][0]
        with torch.no_grad():
            answer = int(model(image[None]).argmax())
        row[0].imshow(picture)
        row[0].set_ylabel(f"{names[label]}, named {names[answer]}", color=ink, fontsize=8)
        maps = maps_of(model, image)[layer]
        limit = np.abs(maps).max()
        for ax, grid in zip(row[1:], maps, strict=True):
            ax.imshow(0.5 * np.asarray(picture.convert("L")), cmap="gray", vmin=0, vmax=255)
            smooth = np.asarray(Image.fromarray(grid).resize(picture.size, Image.Resampling.BICUBIC))
            opacity = np.clip(0.35 + 0.65 * np.abs(smooth) / limit, 0, 1)
            ax.imshow(smooth, alpha=opacity, **scale(signed=True, limit=limit))
    for ax, title in zip(axes[0], ("picture", "map 1", "map 2", "map 1 − λ map 2"), strict=True):
        ax.set_title(title, color=ink, fontsize=10)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "draw"])
    parser.add_argument("--output", type=Path, default=Path("runs/photographs"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--epochs", type=int, default=14, help="new pictures of each training digit")
    settings = parser.parse_args()
    if settings.step == "train":
        settings.output.mkdir(parents=True, exist_ok=True)
        train(settings.output, settings.epochs)
    else:
        draw(settings.output, settings.images)


if __name__ == "__main__":
    main()
