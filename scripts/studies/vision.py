"""Small ViTs on Fashion-MNIST: accuracy, robustness to noise, blur and occlusion, and calibration, by family.

    python scripts/studies/vision.py data --source FASHION_MNIST   # the files, as `diffvision data make` takes them
    python scripts/studies/vision.py grid                          # the runs, and what they cost
    python scripts/studies/vision.py tune                          # six learning rates a family, one seed
    python scripts/studies/vision.py train                         # fresh seeds: five, three for VCA and timm
    python scripts/studies/vision.py report --images docs/images

Models are `*_vit_debug` of two layers and equal parameters, whose 16 tokens come from three convolutions, as in Xiao et
al. (arXiv 2106.14881). "timm" is timm's differential attention in a ViT of the same width, depth and convolutions, at
V1's learning rate. `tune` and `train` leave out what is done; each run is one JSON. Learning rates are chosen on the
last 5,000 training images, which no model is trained on.

Primary metrics, on the 10,000 test images: `accuracy`, by which rates are chosen, and `noise`, its mean over five
strengths of Gaussian noise, for noise is what the method is named after. All others are secondary. No corruption is
trained on.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.functional import gaussian_blur

from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled
from diffvision.data.datasets.fashion import load_splits
from diffvision.training.optim import OptimizerSettings, param_groups
from grid import Grid, Run, differences, run_study

SIZE, BATCH = 28, 128
PRIMARY = ("accuracy", "noise")
SECONDARY = ("blur", "occlusion", "calibration error", "negative log-likelihood")
SETTINGS = {"weight_decay": 0.05, "warmup_epochs": 0.5, "smoothing": 0.1, "clip_norm": 1.0}
STRENGTHS = {
    "noise": (0.1, 0.2, 0.3, 0.4, 0.5),  # standard deviation, of pixels 0 to 1
    "blur": (0.5, 1.0, 1.5, 2.0, 2.5),  # standard deviation in pixels
    "occlusion": (6, 9, 12, 15, 18),  # side of a square in pixels
}
DEPTH = 2
FAMILIES = {
    "plain": ("plain_vit_debug", {}),
    "V1 depth": ("diff_vit_debug", {}),
    "V2": ("diffv2_vit_debug", {}),
    "VCA": ("vca_vit_debug", {}),
    "timm": ("vit_tiny_patch16_224", {"embed_dim": 64, "num_heads": 4, "attn_layer": "diff"}),
}
GRID = Grid(
    Path(__file__).parents[2] / "docs" / "results" / "vision",
    tuple(FAMILIES),
    rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    primary=("accuracy",),
    seeds=(1, 2, 3, 4, 5),
    epochs=7,
    secondary=("VCA", "timm"),
    rate_of={"timm": "V1 depth"},
    digits={"negative log-likelihood": 3},
)


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Write Fashion-MNIST's splits as one file of tensors."""
    splits = load_splits(source)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: (torch.tensor(part.images), torch.tensor(part.labels)) for name, part in splits.items()}, file)
    print(", ".join(f"{len(part):,} images for {name}" for name, part in splits.items()))


class Data:
    """What `make_data` wrote: {split: (uint8 [N, 28, 28], labels)}, and the statistics of the training pixels."""

    def __init__(self, file: Path) -> None:
        self.splits: dict[str, tuple[Tensor, Tensor]] = torch.load(file, weights_only=True)
        pixels = self.splits["train"][0].float() / 255
        self.mean, self.std = pixels.mean().item(), pixels.std().item()

    def images(self, split: str) -> Tensor:
        """Return the images of a split, 0 to 1, as [N, 1, 28, 28]."""
        return self.splits[split][0][:, None].float() / 255

    def normalised(self, images: Tensor) -> Tensor:
        """Return images 0 to 1 as models take them."""
        return (images - self.mean) / self.std


def mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images [N, 1, h, w], half of them mirrored."""
    chosen = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def corrupted(images: Tensor, kind: str, strength: float) -> Tensor:
    """Return images [N, 1, h, w], 0 to 1, with noise, blur or a grey square; the same for every model."""
    generator = torch.Generator().manual_seed(0)
    if kind == "noise":
        return (images + strength * torch.randn(images.shape, generator=generator)).clamp(0, 1)
    if kind == "blur":
        side = 2 * math.ceil(3 * strength) + 1
        return gaussian_blur(images, [side, side], [strength, strength])
    size = images.shape[-1]
    corners = torch.randint(0, size - int(strength) + 1, (2, len(images), 1), generator=generator)
    covered = (torch.arange(size) >= corners) & (torch.arange(size) < corners + int(strength))  # [2, N, size]
    return torch.where((covered[0][:, :, None] & covered[1][:, None, :])[:, None], 0.5, images)


# ---- measuring -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model: nn.Module, data: Data, images: Tensor) -> Tensor:
    """Return the logits of images 0 to 1."""
    model.eval()
    return torch.cat([model(data.normalised(part)) for part in images.split(500)])


def metrics(model: nn.Module, data: Data, split: str, corruptions: Iterable[str] = STRENGTHS) -> dict[str, float]:
    """Return accuracy and calibration on a split, and accuracy with corruptions."""
    images, labels = data.images(split), data.splits[split][1]
    logits = logits_of(model, data, images)
    numbers = {
        "accuracy": accuracy(logits, labels),
        "calibration error": calibration_error(logits, labels),
        "negative log-likelihood": F.cross_entropy(logits, labels).item(),
    }
    for kind in corruptions:
        right = {s: accuracy(logits_of(model, data, corrupted(images, kind, s)), labels) for s in STRENGTHS[kind]}
        numbers |= {kind: statistics.mean(right.values())} | {f"{kind} {s:g}": value for s, value in right.items()}
    return {name: round(value, 4) for name, value in numbers.items()}


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of images whose largest logit is their label's."""
    return (logits.argmax(1) == labels).double().mean().item()


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal width.

    Source: Guo et al., arXiv 1706.04599.
    """
    confidence, chosen = logits.softmax(1).max(1)
    right = (chosen == labels).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, index, right - confidence.double())
    return (gaps.abs().sum() / len(labels)).item()


# ---- training ------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """28 x 28 pixels to 4 x 4 tokens, where timm has linear patches: three convolutions that halve the edges."""

    def __init__(self, embed_dim: int, **_: object) -> None:
        super().__init__()
        self.grid_size, self.num_patches, self.patch_size = (4, 4), 16, (7, 7)
        channels = (1, 32, 64, 128)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.proj = nn.Sequential(*layers, nn.Conv2d(channels[-1], embed_dim, 1))
        self.proj.to(memory_format=torch.channels_last)  # a fifth faster on CPUs

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [N, 16, dim] of images [N, 1, 28, 28]."""
        return self.proj(x).flatten(2).transpose(1, 2)


def create(family: str) -> nn.Module:
    """Return a family's model with random weights."""
    name, settings = FAMILIES[family]
    pixels = {"depth": DEPTH, "img_size": SIZE, "patch_size": 7, "in_chans": 1, "embed_layer": Convolutions}
    head = {"num_classes": 10, "class_token": False, "global_pool": "avg"}
    return timm.create_model(name, **pixels, **head, **settings)


def fit(model: nn.Module, data: Data, run: Run, epochs: int) -> float:
    """Train with AdamW, warm-up and a cosine to zero, and return the seconds of the training steps."""
    images, labels = data.images("train"), data.splits["train"][1]
    groups = param_groups(model, OptimizerSettings(weight_decay=SETTINGS["weight_decay"]))
    optimizer = torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.98), fused=True)
    steps = len(images) // BATCH
    total, warmup, step = epochs * steps, round(SETTINGS["warmup_epochs"] * steps), 0
    model.train()
    start = time.process_time()
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(1000 * run.seed + epoch)
        for batch in torch.randperm(len(images), generator=generator)[: steps * BATCH].view(steps, BATCH):
            done = (step - warmup) / (total - warmup)
            factor = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
            for group in optimizer.param_groups:
                group["lr"] = run.rate * factor
            logits = model(data.normalised(mirrored(images[batch], generator)))
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=SETTINGS["smoothing"])
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_norm"])
            optimizer.step()
            step += 1
    return time.process_time() - start


def train(run: Run, data: Data, epochs: int) -> dict[str, Any]:
    """Train and measure one run."""
    torch.manual_seed(run.seed)
    model = create(run.family).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(data.images("validation")[:1])
    numbers: dict[str, Any] = {
        **asdict(run),
        "epochs": epochs,
        "images": len(data.splits["train"][1]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "FLOPs": counter.get_total_flops(),
    }
    try:
        seconds = fit(model, data, run, epochs)
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    measured = {"validation": metrics(model, data, "validation", ["noise"])}
    if run.seed != GRID.tuning_seed:
        measured["test"] = metrics(model, data, "test")
    return {**numbers, "diverged": "", "seconds": round(seconds), **measured}


# ---- report --------------------------------------------------------------------------------------------------------


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    print(grid.describe(), end="\n\n")
    print(grid.table(PRIMARY), end="\n\n")
    print(grid.means(SECONDARY), end="\n\n")
    print(grid.tuned(PRIMARY), end="\n\n")
    for metric in PRIMARY:
        pair = differences({family: grid.by_seed(family, metric) for family in ("V1 depth", "timm")})
        print(f"timm's differential from V1 depth, {metric}: {pair.get('timm', '')}")


def draw(grid: Grid, folder: Path) -> None:
    """Draw the accuracy over the strength of each corruption."""
    draw_robustness(grid).savefig(folder / "vision-robustness.svg", facecolor="white", metadata={"Date": None})


@styled
def draw_robustness(grid: Grid) -> Any:
    """Return a figure with a panel for each corruption: accuracy over its strength, a line for each family."""
    figure, axes = panels(len(STRENGTHS), width=2.6, height=2.8, sharey=True)
    colours = colours_of(FAMILIES)
    for ax, (kind, strengths) in zip(axes, STRENGTHS.items(), strict=True):
        for family in FAMILIES:
            names = ["accuracy", *(f"{kind} {strength:g}" for strength in strengths)]
            values = [list(grid.by_seed(family, name).values()) for name in names]
            if all(values):
                means = [statistics.mean(of) for of in values]
                ax.plot((0, *strengths), means, "o-", color=colours[family], label=family, linewidth=1.4, markersize=3)
        ax.set(title=kind, xlabel="strength")
    axes[0].set_ylabel("accuracy, %")
    return legend_below(figure, axes[0], columns=5)


def trainer(file: Path, epochs: int) -> Callable[[Run], dict[str, Any]]:
    """Return the function that trains a run on the data of a file."""
    data = Data(file)
    return lambda run: train(run, data, epochs)


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=make_data, trainer=trainer, report=report, draw=draw)
