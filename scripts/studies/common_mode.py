"""What a large lambda costs: colours and backgrounds by image towers with differential attention.

    python scripts/studies/common_mode.py data --source FASHION_MNIST   # scenes of one garment, as tensors
    python scripts/studies/common_mode.py grid                          # the runs, and what they cost
    python scripts/studies/common_mode.py tune                          # three learning rates a family, one seed
    python scripts/studies/common_mode.py train                         # fresh seeds
    python scripts/studies/common_mode.py report                        # tables, of all runs there are

Rows of A1 - lambda A2 sum to 1 - lambda, so what all patches share passes multiplied by that: a tint, a background, an
average. Each family replaces the attention of CLIP-debug's image tower (the text tower stays plain), or of the text
tower alone; its learning rate is the best of three by the mean of the primary metrics on validation scenes, with a seed
that is used for nothing else. Each is trained with fresh seeds at the rate that the plain tower chose, and at the one
it chose itself. `tune` and `train` leave out what is done; each run is one JSON.

A scene is one of `fashion-scenes` with one garment; a caption names its kind, and its colour and the background where
the shares below say so: with many colours in the captions these are learned at once and kinds late.

Primary metrics, on test scenes: `colour`, that of the garment in the first image that a caption retrieves among one
image for each kind, colour and background; and `kind`, zero-shot classification. All others are secondary.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffvision.analysis.figures.style import COLOURS as COLOUR_TABLE
from diffvision.analysis.figures.style import colours_of, legend_below, panels, styled
from diffvision.data.datasets.drawings import with_article
from diffvision.data.datasets.fashion import WORDS, load_splits
from diffvision.data.datasets.fashion_scenes import BACKGROUND_TEMPLATES, COLOUR_TEMPLATES, KIND_TEMPLATES, Scenes
from diffvision.data.datasets.scenes import BACKGROUNDS, COLOURS
from diffvision.evaluation.retrieval import recalls
from grid import Grid, Run, run_study, spread
from small_clip import Captions, SmallClip, Towers, pixels

CLIP = "CLIP-debug"
SIZE, PATCH = 48, 8
NAMED = {"colour": 0.1, "background": 0.1}  # shares of the training captions
COUNTS = {"train": 20_000, "validation": 1_000, "test": 2_000}  # scenes of one garment
PRIMARY = ("colour", "kind")
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6, "warmup_epochs": 0.5, "clip_norm": 1.0}
TEMPLATES = {"kind": KIND_TEMPLATES, "colour": COLOUR_TEMPLATES, "background": BACKGROUND_TEMPLATES}
FACTORS = {"kind": WORDS, "colour": tuple(COLOURS), "background": tuple(BACKGROUNDS)}


FAMILIES = {
    "plain": Towers(),
    "V1 0.2": Towers("diff_vit_debug_clip", {"lambda_init": 0.2}),
    "V1 0.5": Towers("diff_vit_debug_clip", {"lambda_init": 0.5}),
    "V1 0.8": Towers("diff_vit_debug_clip", {"lambda_init": 0.8}),
    "V1 depth": Towers("diff_vit_debug_clip", {"lambda_init": "depth"}),
    "DINT 0.8": Towers("dint_vit_debug_clip", {"lambda_init": 0.8}),
    "V2": Towers("diffv2_vit_debug_clip"),
    "VCA": Towers("vca_vit_debug_clip"),
    "text V1 0.8": Towers(text="DiffCLIP-debug"),
}
GRID = Grid(
    Path(__file__).parents[2] / "docs" / "results" / "common_mode",
    tuple(FAMILIES),
    rates=(5e-4, 1e-3, 2e-3),
    primary=PRIMARY,
    seeds=(1, 2, 3),
    epochs=4,
    shared=True,
)


# ---- data ----------------------------------------------------------------------------------------------------------


def make_data(source: Path, file: Path) -> None:
    """Draw the scenes, and write them as one file of tensors and their truth."""
    images, truth = {}, {}
    for number, (split, garments) in enumerate(load_splits(source).items()):
        made = Scenes(garments, [0, 31 + number])
        parts = {f"single/{split}": [sample for sample, _ in made.single(COUNTS[split])]}
        if split != "train":
            parts |= {
                f"colours/{split}": list(made.retrieval_of_colours()),
                f"several/{split}": list(made.retrieval(COUNTS["validation"])),
            }
        for name, samples in parts.items():
            images[name] = F.interpolate(pixels(samples).float(), SIZE, mode="area").round().to(torch.uint8)
            truth[name] = [json.loads(sample["json"]) for sample in samples]
            print(f"{name}: {len(samples):,} images", flush=True)
    pixel = images["single/train"].float() / 255
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"images": images, "truth": truth, "mean": pixel.mean().item(), "std": pixel.std().item()}, file)


class Data:
    """What `make_data` wrote, with captions: `single` garments, `colours` (all combinations) and `several` garments."""

    def __init__(self, file: Path) -> None:
        content = torch.load(file, weights_only=True)
        self.images: dict[str, Tensor] = content["images"]
        self.truth: dict[str, list[dict[str, Any]]] = content["truth"]
        self.mean, self.std = content["mean"], content["std"]
        rng = np.random.default_rng(0)
        captions = {"single/train": [caption(scene, rng) for scene in self.truth["single/train"]]}
        captions |= {name: [caption(scene) for scene in self.truth[name]] for name in self.truth if "colours" in name}
        for factor, templates in TEMPLATES.items():
            captions[factor] = [template.format(c=word) for word in FACTORS[factor] for template in templates]
        self.captions = Captions(captions, CLIP)

    def labels(self, folder: str, factor: str) -> Tensor:
        """Return a factor of images of one garment as the index of its word, or the count or layout of any."""
        truth = self.truth[folder]
        if factor == "background":
            values = [scene["background"] for scene in truth]
        elif factor in FACTORS:
            values = [scene["garments"][0][factor] for scene in truth]
        else:
            values = [str(scene[factor]) for scene in truth]
        words = FACTORS[factor] if factor in FACTORS else sorted({str(scene[factor]) for scene in truth})
        return torch.tensor([words.index(value) for value in values])


def caption(scene: dict[str, Any], rng: np.random.Generator | None = None) -> str:
    """Return the words for a scene of one garment: with all there is to say, or with a random share of it."""
    named = {factor: rng is None or rng.random() < share for factor, share in NAMED.items()}
    garment = scene["garments"][0]
    words = with_article(f"{garment['colour']} {garment['kind']}" if named["colour"] else garment["kind"])
    return f"{words}, on {with_article(scene['background'])} background" if named["background"] else words


# ---- measuring -----------------------------------------------------------------------------------------------------


class Measured:
    """What is measured of a trained CLIP."""

    def __init__(self, clip: SmallClip, data: Data) -> None:
        self.clip, self.data = clip, data

    def metrics(self, split: str) -> dict[str, float]:
        """Return the primary metrics and the others on the scenes of a split."""
        data, of = self.data, self.data.captions.of
        features = self.clip.images(data.images[f"single/{split}"])
        numbers = {}
        for factor, words in FACTORS.items():
            classes = F.normalize(self.clip.texts(of[factor]).unflatten(0, (len(words), -1)).mean(1), dim=-1)
            right = (features @ classes.T).argmax(1) == data.labels(f"single/{split}", factor)
            numbers["kind" if factor == "kind" else f"zero-shot {factor}"] = right.float().mean().item()
        folder = f"colours/{split}"
        images, texts = self.clip.images(data.images[folder]), self.clip.texts(of[folder])
        retrieved = (texts @ images.T).argmax(1)
        for factor in FACTORS:
            labels = data.labels(folder, factor)
            name = factor if factor == "colour" else f"retrieved {factor}"
            numbers[name] = (labels[retrieved] == labels).float().mean().item()
        numbers["image R@1"] = recalls(images, texts, torch.arange(len(images)))["image_retrieval_recall@1"]
        return {name: round(value, 4) for name, value in numbers.items()}

    def layers(self) -> list[dict[str, float]]:
        """Return for each layer of the image tower what linear probes read from it, and its mean component's share.

        A probe takes the class token and the mean of the patches after the layer. Kind, colour, background and place
        are of images of one garment (fitted on 4,000 of training), count of one to three (fitted on validation's).
        The share is of the attention's output: the squared length of the mean over patches, by the mean squared length.
        """
        data = self.data
        fitted = {"single": ("single/train", 4000), "several": ("several/validation", None)}
        rows: list[dict[str, float]] = [{"mean component": share} for share in self._mean_shares()]
        for part, (folder, count) in fitted.items():
            train = self._tokens(data.images[folder][:count])
            test = self._tokens(data.images[f"{part}/test"])
            for factor in (*FACTORS, "layout") if part == "single" else ("count",):
                labels = [data.labels(folder, factor)[:count], data.labels(f"{part}/test", factor)]
                for row, x, y in zip(rows, train, test, strict=True):
                    row[factor] = probe(x, labels[0], y, labels[1])
        return [{name: round(value, 4) for name, value in row.items()} for row in rows]

    @torch.no_grad()
    def row_sums(self) -> list[float]:
        """Return the mean sum of the rows that multiply the values, by layer; empty where there are no such rows."""
        from diffvision.analysis.maps import layer_maps

        trunk = self.clip.model.visual.trunk
        sums: list[list[float]] = []
        for image in self.data.images["single/test"][:16]:
            try:
                maps = layer_maps(trunk, self.clip.normalised(image))
            except ValueError:  # VCA has two stages and no one map
                return []
            sums.append([layer.applied.sum(-1).mean().item() for layer in maps])
        return [round(statistics.mean(layer), 4) for layer in zip(*sums, strict=True)]

    @torch.no_grad()
    def _tokens(self, images: Tensor) -> list[Tensor]:
        """Return after each layer the class token and the mean of the patches, [N, 2C]."""
        outputs: list[list[Tensor]] = [[] for _ in self._blocks]

        def note(layer: int) -> Any:
            return lambda module, inputs, output: outputs[layer].append(
                torch.cat([output[:, 0], output[:, 1:].mean(1)], 1)
            )

        hooks = [block.register_forward_hook(note(i)) for i, block in enumerate(self._blocks)]
        try:
            self.clip.images(images)
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.cat(layer) for layer in outputs]

    @torch.no_grad()
    def _mean_shares(self) -> list[float]:
        shares: list[float] = []

        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            patches = output[:, 1:]
            shares.append((patches.mean(1).square().sum(-1).mean() / patches.square().sum(-1).mean()).item())

        hooks = [block.attn.register_forward_hook(note) for block in self._blocks]
        try:
            self.clip.images(self.data.images["single/test"][:256])
        finally:
            for hook in hooks:
                hook.remove()
        return shares

    @property
    def _blocks(self) -> Any:
        return self.clip.model.visual.trunk.blocks


def probe(train: Tensor, labels: Tensor, test: Tensor, wanted: Tensor, ridge: float = 1.0) -> float:
    """Return the accuracy on test features of ridge regression to one-hot labels, on standardised features."""
    mean, std = train.mean(0), train.std(0).clamp_min(1e-6)
    x = F.pad((train - mean) / std, (0, 1), value=1.0).double()
    y = F.one_hot(labels, int(labels.max()) + 1).double()
    weights = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
    scores = F.pad((test - mean) / std, (0, 1), value=1.0).double() @ weights
    return (scores.argmax(1) == wanted).double().mean().item()


# ---- training ------------------------------------------------------------------------------------------------------


def train(run: Run, data: Data, epochs: int) -> dict[str, Any]:
    """Train and measure one run."""
    torch.manual_seed(run.seed)
    clip = SmallClip(FAMILIES[run.family].create(SIZE, PATCH), data.captions, data.mean, data.std)
    measured, learned = Measured(clip, data), {}

    def evaluate(epoch: int) -> None:
        learned[epoch] = measured.metrics("validation")

    numbers: dict[str, Any] = {
        **asdict(run),
        "epochs": epochs,
        "images": len(data.images["single/train"]),
        "parameters": sum(p.numel() for p in clip.model.visual.trunk.parameters()),
    }
    try:
        seconds = clip.fit(
            data.images["single/train"],
            data.captions.of["single/train"],
            {**SETTINGS, "lr": run.rate},
            epochs=epochs,
            seed=run.seed,
            evaluate=evaluate,
        )
    except FloatingPointError as error:
        return {**numbers, "diverged": str(error)}
    with torch.no_grad():
        return {
            **numbers,
            "diverged": "",
            "seconds": round(seconds),
            "learned": learned,
            "validation": learned[epochs],
            "test": measured.metrics("test"),
            "layers": measured.layers(),
            "row sums": measured.row_sums(),
        }


# ---- report --------------------------------------------------------------------------------------------------------


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    secondary = ("retrieved background", "retrieved kind", "image R@1", "zero-shot colour", "zero-shot background")
    for shared in (True, False):
        print(grid.table(PRIMARY, shared=shared), end="\n\n")
    print(grid.means(secondary, shared=True))
    print(f"\n{layer_table(grid)}")


def layer_table(grid: Grid) -> str:
    """Return by layer, as means over fresh seeds, sums of rows and mean components; and what probes read at the end."""
    probed = (*FACTORS, "layout", "count")
    lines = [
        "| | sum of a row | mean component, % | " + " | ".join(probed) + " |",
        "|---|---|---|" + "---:|" * len(probed),
    ]
    for family in FAMILIES:
        runs = trained(grid, family)
        if runs:
            sums = [statistics.mean(column) for column in zip(*(run["row sums"] for run in runs), strict=True)]
            layers = list(zip(*(run["layers"] for run in runs), strict=True))
            shares = [100 * statistics.mean(layer["mean component"] for layer in column) for column in layers]
            ends = [spread([100 * layer[factor] for layer in layers[-1]]) for factor in probed]
            by_layer = [" ".join(f"{value:.2f}" for value in sums), " ".join(f"{value:.0f}" for value in shares)]
            lines.append(f"| {family} | {' | '.join(by_layer + ends)} |")
    return "\n".join(lines)


def trained(grid: Grid, family: str) -> list[dict[str, Any]]:
    """Return what a family's runs with fresh seeds at the plain tower's rate measured, but for those that diverged."""
    rate = grid.chosen("plain") or 0
    runs = [grid.numbers(Run(family, rate, seed)) for seed in grid.seeds]
    return [run for run in runs if run and not run["diverged"]]


def pictures(grid: Grid, folder: Path) -> None:
    """Draw what is learned first, and what linear probes read from each layer; means over fresh seeds, plain's rate."""
    runs = {family: of for family in FAMILIES if (of := trained(grid, family))}
    learned = {
        name: {
            family: [[100 * one[name] for one in run["learned"].values()] for run in of] for family, of in runs.items()
        }
        for name in (*PRIMARY, "retrieved background")
    }
    read = {
        factor: {family: [[100 * row[factor] for row in run["layers"]] for run in of] for family, of in runs.items()}
        for factor in (*PRIMARY, "layout", "mean component")
    }
    for name, drawn, axis in (("learned", learned, "epoch"), ("layers", read, "after layer")):
        draw_lines(drawn, axis).savefig(folder / f"common-mode-{name}.svg", facecolor="white", metadata={"Date": None})


@styled
def draw_lines(drawn: dict[str, dict[str, list[list[float]]]], axis: str) -> Any:
    """Return a figure with a panel for each metric, in percent, and a line for each family: its mean over runs."""
    figure, axes = panels(len(drawn), width=2.2, height=3.2)
    colours = colours_of(FAMILIES)
    for ax, (title, families) in zip(axes, drawn.items(), strict=True):
        for number, (family, values) in enumerate(families.items()):
            mean = [statistics.mean(column) for column in zip(*values, strict=True)]
            line = "-" if number < len(COLOUR_TABLE) else "--"
            ax.plot(range(1, len(mean) + 1), mean, line, color=colours[family], label=family, linewidth=1.4)
        ax.set(title=title, xlabel=axis)
    axes[0].set_ylabel("%")
    return legend_below(figure, axes[0], columns=5)


def trainer(file: Path, epochs: int) -> Callable[[Run], dict[str, Any]]:
    """Return the function that trains a run on the data of a file."""
    data = Data(file)
    return lambda run: train(run, data, epochs)


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=make_data, trainer=trainer, report=report, draw=pictures)
