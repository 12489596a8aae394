"""CLIP, DiffCLIP and their settings on emoji: trained on two vendors' pictures, tested on a third one's.

    python scripts/studies/clip.py data --source data/emoji   # what data/emoji.py wrote, as tensors
    python scripts/studies/clip.py grid                       # the runs, and what they cost
    python scripts/studies/clip.py tune                       # five learning rates a family, one seed
    python scripts/studies/clip.py train                      # fresh seeds
    python scripts/studies/clip.py report --images docs/images

Towers are CLIP-debug's at 64 pixels with patches of 8, and their differential twins of equal parameters. `tune` and
`train` leave out what is done; each run is one JSON. Learning rates are chosen on emoji that are in no test, in Noto's
style; `test` is the style that no model has seen.

Primary metric: image R@1 on the unseen style, one caption for each of 1,468 pictures. All others are secondary.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled
from diffvision.evaluation.pairs import inner_products, pair_scores
from diffvision.evaluation.per_sample import means
from diffvision.evaluation.retrieval import recall
from grid import Grid, Run, run_study
from small_clip import BATCH, Captions, SmallClip, Towers, pixels, read

CLIP = "CLIP-debug"
SIZE, PATCH = 64, 8
PRIMARY = ("image R@1",)
SECONDARY = ("text R@1", "names", "subcategories", "sketches image R@1", "text score", "image score", "group score")
PAIRS = tuple(f"group score, {kind}" for kind in ("skin tone", "gender", "role"))  # as far as the data have them
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6, "warmup_epochs": 2, "clip_norm": 1.0}
FAMILIES = {
    "plain": Towers(),
    "V1 0.8": Towers("diff_vit_debug_clip", {"lambda_init": 0.8}, "DiffCLIP-debug"),
    "V1 0.2, text plain": Towers("diff_vit_debug_clip", {"lambda_init": 0.2}),  # advised by common_mode.py
    "V2": Towers("diffv2_vit_debug_clip", text="DiffCLIP-V2-debug"),
}
GRID = Grid(
    Path(__file__).parents[2] / "docs" / "results" / "clip",
    tuple(FAMILIES),
    rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3),  # the last for all, since one family was best at the edge of four
    primary=PRIMARY,
    seeds=(1, 2, 3, 4, 5),
    epochs=20,
)
FOLDERS = ("retrieval", "retrieval-sketch", "zero_shot", "zero_shot-subcategories", "pairs")
SPLITS = ("validation", "test")


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Decode the folders that `data/emoji.py` wrote, and write them as one file."""
    train = read(source / "train")
    images = {"train": pixels(train)}
    content: dict[str, Any] = {"captions": [json.loads(sample["json"])["captions"] for sample in train]}
    for folder in FOLDERS:
        for split in SPLITS:
            samples, name = read(source / folder / split), f"{folder}/{split}"
            if folder == "pairs":
                images[name] = torch.stack([pixels(samples, f"{i}.png") for i in (0, 1)], dim=1).flatten(0, 1)
                content[name] = [sample[f"{i}.txt"].decode() for sample in samples for i in (0, 1)]
                content[f"{name}/kinds"] = [json.loads(sample["json"])["kind"] for sample in samples]
            else:
                images[name] = pixels(samples)
                is_retrieval = folder.startswith("retrieval")
                content[name] = [sample["txt"].decode() if is_retrieval else int(sample["cls"]) for sample in samples]
        if folder.startswith("zero_shot"):
            content[f"{folder}/names"] = (source / folder / "classnames.txt").read_text("utf-8").splitlines()
    for name, one in images.items():
        print(f"{name}: {len(one):,} images")
    pixel = images["train"].float() / 255
    file.parent.mkdir(parents=True, exist_ok=True)
    content |= {"images": images, "mean": pixel.mean().item(), "std": pixel.std().item()}
    torch.save(content, file)


class Data:
    """What `make_data` wrote; captions have numbers in one table. Images and tokens are on the device."""

    def __init__(self, file: Path, device: str = "cpu") -> None:
        self.content, self.device = torch.load(file, weights_only=True), device
        self.images: dict[str, Tensor] = {name: one.to(device) for name, one in self.content["images"].items()}
        self.mean, self.std = self.content["mean"], self.content["std"]
        captions = {"train": [one for captions in self.content["captions"] for one in captions]}
        for name in (f"{folder}/{split}" for folder in FOLDERS for split in SPLITS if "zero_shot" not in folder):
            captions[name] = self.content[name]
        for folder in ("zero_shot", "zero_shot-subcategories"):
            captions[folder] = [f"a picture of {name}" for name in self.content[f"{folder}/names"]]
        self.captions = Captions(captions, CLIP)
        self.captions.tokens = self.captions.tokens.to(device)
        # Of each training image: where its captions begin in the list of all, and how many it has.
        self.count = torch.tensor([len(captions) for captions in self.content["captions"]])
        self.start = self.count.cumsum(0) - self.count

    def drawn(self, seed: int) -> Any:
        """Return a function that draws one of each training image's captions for an epoch."""

        def draw(epoch: int) -> Tensor:
            uniform = torch.rand(len(self.count), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            return self.captions.of["train"][self.start + (uniform * self.count).long()]

        return draw


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images [N, 3, h, w], each scaled by 0.8 to 1.1 and moved by up to a tenth of its size."""
    n = len(images)
    scale = 1 / (0.8 + 0.3 * torch.rand(n, generator=generator))
    moved = 0.2 * (torch.rand(n, 2, generator=generator) - 0.5)
    affine = torch.cat([scale[:, None, None] * torch.eye(2), moved[:, :, None]], dim=2)
    grid = F.affine_grid(affine.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


# ---- measuring -----------------------------------------------------------------------------------------------------


def retrieved(clip: SmallClip, data: Data, name: str) -> dict[str, float]:
    """Return image and text R@1 of the pairs of that name."""
    images, texts = clip.images(data.images[name]).cpu(), clip.texts(data.captions.of[name]).cpu()
    found = means(recall(images, texts, torch.arange(len(images))))
    return {f"{kind} R@1": round(found[f"{kind}_retrieval_recall@1"], 4) for kind in ("image", "text")}


def metrics(clip: SmallClip, data: Data, split: str) -> dict[str, float]:
    """Return the primary metric and the others of a split."""
    of, numbers = data.captions.of, {}

    def images_of(name: str) -> Tensor:
        return clip.images(data.images[name]).cpu()

    def texts_of(name: str) -> Tensor:
        return clip.texts(of[name]).cpu()

    for folder, prefix in (("retrieval", ""), ("retrieval-sketch", "sketches ")):
        found = retrieved(clip, data, f"{folder}/{split}")
        numbers |= {f"{prefix}{name}": value for name, value in found.items()}
    for folder, metric in (("zero_shot", "names"), ("zero_shot-subcategories", "subcategories")):
        name = f"{folder}/{split}"
        right = (images_of(name) @ texts_of(folder).T).argmax(1)
        numbers[metric] = (right == torch.tensor(data.content[name])).float().mean().item()
    name = f"pairs/{split}"
    kinds = np.array(data.content[f"{name}/kinds"])
    for score, right in pair_scores(inner_products(images_of(name), texts_of(name))).items():
        score = score.replace("_", " ")
        numbers[score] = right.float().mean().item()
        for kind in sorted(set(kinds)):
            numbers[f"{score}, {kind}"] = right[torch.from_numpy(kinds == kind)].float().mean().item()
    return {name: round(value, 4) for name, value in numbers.items()}


def flops(clip: SmallClip, data: Data) -> int:
    """Return the FLOPs of a forward pass of one image and one caption, 2 a multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        clip.images(data.images["train"][:1])
        clip.texts(data.captions.of["train"][:1])
    return counter.get_total_flops()


def train(
    run: Run,
    data: Data,
    epochs: int,
    families: Mapping[str, Towers] = FAMILIES,
    batch: int = BATCH,
    also: Callable[[SmallClip, Data], dict[str, Any]] = lambda clip, data: {},
) -> dict[str, Any]:
    """Train and measure one run; `also` returns further numbers of the trained model."""
    torch.manual_seed(run.seed)
    model = families[run.family].create(SIZE, PATCH)
    clip = SmallClip(model, data.captions, data.mean, data.std)
    model.to(data.device)
    learned = {}

    def evaluate(epoch: int) -> None:
        learned[epoch] = retrieved(clip, data, "retrieval/validation")["image R@1"]

    numbers: dict[str, Any] = {
        **asdict(run),
        "epochs": epochs,
        "images": len(data.images["train"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "FLOPs": flops(clip, data),
    }
    try:
        seconds = clip.fit(
            data.images["train"],
            data.drawn(run.seed),
            {**SETTINGS, "lr": run.rate},
            epochs=epochs,
            seed=run.seed,
            evaluate=evaluate,
            augment=shifted,
            batch=batch,
        )
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    with torch.no_grad():
        measured: dict[str, Any] = {split: metrics(clip, data, split) for split in SPLITS}
        measured |= also(clip, data)
    return {**numbers, "diverged": "", "seconds": round(seconds), "learned": learned, **measured}


# ---- report --------------------------------------------------------------------------------------------------------


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    print(grid.describe(), end="\n\n")
    print(grid.table(PRIMARY), end="\n\n")
    first = next(numbers for run in grid.confirming() if (numbers := grid.numbers(run)))
    for metrics in (SECONDARY[:3], SECONDARY[3:], [name for name in PAIRS if name in first["test"]]):
        if metrics:
            print(grid.table(metrics), end="\n\n")


def draw(grid: Grid, folder: Path) -> None:
    """Draw what was learned over learning rates and over epochs."""
    draw_learning(grid).savefig(folder / "clip-learning.svg", facecolor="white", metadata={"Date": None})


@styled
def draw_learning(grid: Grid) -> Any:
    """Return two panels with a line for each family: R@1 on validation data over learning rates, and over epochs."""
    figure, (rates, epochs) = panels(2, width=3.6, height=3.0)
    colours = colours_of(FAMILIES)
    for family in FAMILIES:
        line = {"color": colours[family], "linewidth": 1.4, "markersize": 3}
        tried = {rate: grid.numbers(Run(family, rate, grid.tuning_seed)) for rate in grid.rates}
        scores = {rate: one["learned"] for rate, one in tried.items() if one and not one["diverged"]}
        rates.plot(list(scores), [100 * list(learned.values())[-1] for learned in scores.values()], "o-", **line)
        runs = [grid.numbers(run) for run in grid.confirming() if run.family == family]
        learned = [list(one["learned"].values()) for one in runs if one and not one["diverged"]]
        if learned:
            means = 100 * np.mean(learned, axis=0)
            deviations = 100 * np.std(learned, axis=0, ddof=1) if len(learned) > 1 else np.zeros_like(means)
            steps = range(1, len(means) + 1)
            epochs.plot(steps, means, label=family, **line)
            epochs.fill_between(steps, means - deviations, means + deviations, color=colours[family], alpha=0.15)
    rates.set(xscale="log", xlabel="learning rate", ylabel="image R@1 on validation, %", title="one tuning seed")
    rates.set_xticks(grid.rates, [f"{rate:g}" for rate in grid.rates])
    rates.minorticks_off()
    epochs.set(xlabel="epoch", title="five fresh seeds, ± standard deviation")
    return legend_below(figure, epochs, columns=4)


def trainer(file: Path, epochs: int) -> Callable[[Run], dict[str, Any]]:
    """Return the function that trains a run on the data of a file."""
    data = Data(file)
    return lambda run: train(run, data, epochs)


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=make_data, trainer=trainer, report=report, draw=draw)
