"""Gate, registers and the difference of V2, alone and together, on the emoji of `clip.py`: eight cells, one recipe.

    python scripts/studies/clip.py data --source data/emoji --data runs/clip/data.pt
    python scripts/studies/cures.py run --data runs/clip/data.pt --hours 3    # again until all runs are done
    python scripts/studies/cures.py segment --data runs/clip/data.pt --source /usr/share/datasets/fashion-mnist
    python scripts/studies/cures.py report

Factors: a sigmoid gate by channel in both towers (arXiv 2505.06708), four register tokens in the image tower (arXiv
2309.16588), and V2 in both towers. All cells have equal parameters up to the registers' own: gates and second queries
narrow the MLP. Everything else is `clip.py`'s.

Declared before the first run:

- Primary metric: image R@1 on the unseen style. All others are secondary.
- Learning rates: five for each cell, with a seed of their own, chosen as in `clip.py`. Five fresh seeds for each cell.
- Contrasts, paired by seed: three main effects, each the mean of the four cells with a factor less that of the four
  without, and three pairwise interactions, each the effect of one factor with the other less its effect without. Holm's
  correction is over these six. The interaction of all three is not tested.
- Cut by this rule alone, if the machine's time runs out: the four cells with registers go together, which leaves gate
  and difference with two main effects and one interaction, and Holm over three. They are trained last. No cell loses
  learning rates or seeds, and a cell that lacks some is not reported.
- DnA and CoDA, with parameters equal to plain's, are two cells by themselves: their differences from plain, with Holm's
  correction over the two. They are trained before the registers. (Found when they were run: plain's first run
  does not repeat any more, so plain is trained again with the two, in the folder `rivals`.)
- Sinks are secondary. If the plain model has none, the study is of accuracy, and its page says so.

Each run is one JSON in a folder of its kind of processor. Repeated runs are equal on one kind, and not on two, so
cells are compared within a folder. Plain and V2 are trained again at `clip.py`'s learning rates. Weights are left in
the folder `--models`, for measurements to come.

`segment` is such a measurement, and secondary: does the class token's map of the last layer lie on the objects? It
takes `SCENES` scenes of fashion-scenes' test garments, whose masks are known, and as many of the map's highest patches
as cover the mask's area. Models of emoji never saw such pictures: this says where they look on strange ones, and not
how well a model that was trained on such pictures would segment them.
"""

import argparse
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import clip
from clip import PRIMARY, Data
from diffvision.analysis.capture import Call, captured
from diffvision.data.datasets.fashion import load_splits
from diffvision.data.datasets.fashion_scenes import Scenes
from grid import Grid, Numbers, Run, contrasts, differences, processor, processor_folder, spread
from small_clip import SmallClip, Towers

FACTORS = ("gate", "registers", "difference")
SINK = 0.3  # share of the queries' attention that makes a token a sink, as in arXiv 2410.10781
OUTLIER = 3.0  # times the median norm
SCENES = 500  # of one to three garments
SINKS = {  # what `report` prints of `sinks`, and which of the layers' values
    "largest": max,
    "largest of a head": max,
    "sinks": max,
    "prefix": max,
    "value norm": statistics.mean,
    "row sum": statistics.mean,
    "text, first token": max,
    "norm": max,
    "outliers": max,
}


def towers(cell: tuple[bool, ...]) -> Towers:
    """Return the towers of a cell, which says which factors it has."""
    gate, registers, difference = cell
    variant = {(0, 0): "standard", (1, 0): "gated", (0, 1): "v2", (1, 1): "v2_gated"}[gate, difference]
    image: dict[str, Any] = {"variant": variant, **({"reg_tokens": 4} if registers else {})}
    text = {"block_type": f"diffvision:{variant}", "mlp_ratio": 4 - 0.5 * (gate + difference)}
    return Towers("plain_vit_debug_clip", image, text_settings=text)


CELLS: dict[str, tuple[bool, ...]] = {
    "plain": (False, False, False),
    "V2": (False, False, True),
    "gate": (True, False, False),
    "gate, V2": (True, False, True),
    "registers": (False, True, False),
    "registers, V2": (False, True, True),
    "gate, registers": (True, True, False),
    "gate, registers, V2": (True, True, True),
}
OF_CLIP = ("plain", "V2")  # cells that are families of `clip.py`, whose learning rates they have
FAMILIES = {name: clip.FAMILIES[name] if name in OF_CLIP else towers(cell) for name, cell in CELLS.items()}
RIVALS = {
    "DnA": Towers("dna_vit_debug_clip", text="DnACLIP-debug"),
    "CoDA": Towers("coda_vit_debug_clip", text="CoDACLIP-debug"),
}
FAMILIES |= RIVALS
WITHOUT_REGISTERS = tuple(CELLS)[:4]


class Cells(Grid):
    """The grid on one kind of processor. Plain's and V2's learning rates are those of `clip.py`."""

    def tuning(self) -> list[Run]:
        """Return the runs that choose the other cells' learning rates."""
        return [run for run in super().tuning() if run.family not in OF_CLIP]

    def chosen(self, family: str) -> float | None:
        """Return a cell's learning rate; None before all its rates were tried."""
        return clip.GRID.chosen(family) if family in OF_CLIP else super().chosen(family)

    def fresh(self, family: str) -> list[Run]:
        """Return a cell's runs with fresh seeds."""
        return [Run(family, self.chosen(family) or 0, seed) for seed in self.seeds]


def grid_of(cells: tuple[str, ...], results: Path) -> Cells:
    """Return the grid of some cells with its runs in a folder."""
    return Cells(results, cells, clip.GRID.rates, PRIMARY, clip.GRID.seeds, clip.GRID.epochs)


# ---- measuring -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def sinks(trained: SmallClip, data: Data) -> dict[str, Any]:
    """Return where attention goes on the validation images and their captions, by layer.

    The share of a token is what it has of the absolute weights of a row, in the mean over queries:
        largest: of an image's and head's largest token, in the mean over images and heads, and in the head with most.
        sinks: share of images and heads in which one token has more than `SINK`.
        prefix: of the class token and registers together.
        value norm: that of the largest token over the image's median, 1 where it is like the others.
        row sum: mean sum of a row of the map that weights the values.
    Of the text: the first token's share of the last token's row. Of the patches before the final norm: the largest norm
    over the median, and how many exceed `OUTLIER` times the median.
    """
    trunk, layers, texts, norms = trained.model.visual.trunk, [], [], []
    prefix = trunk.num_prefix_tokens

    def see(call: Call) -> None:
        applied = call.scores().compute_weights()
        share = (applied.abs() / applied.abs().sum(-1, keepdim=True).clamp(min=1e-9)).mean(2)
        top = share.max(-1)
        values = call.values(share.dtype).norm(dim=-1)
        layers.append(
            {
                "largest": top.values.mean(),
                "largest of a head": top.values.mean(0).max(),
                "sinks": (top.values > SINK).float().mean(),
                "prefix": share[..., :prefix].sum(-1).mean(),
                "value norm": (values.gather(-1, top.indices[..., None])[..., 0] / values.median(-1).values).mean(),
                "row sum": applied.sum(-1).mean(),
            }
        )

    def see_text(call: Call) -> None:
        applied = call.scores().compute_weights().abs()
        last = applied[torch.arange(len(ends)), :, ends]
        texts.append((last[..., 0] / last.sum(-1).clamp(min=1e-9)).mean())

    def note(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        norms.append(inputs[0][:, prefix:].norm(dim=-1))

    name = "retrieval/validation"
    hook = trunk.norm.register_forward_pre_hook(note)
    with captured(trunk, see):
        trained.images(data.images[name][:256])
    hook.remove()
    numbers, _ = torch.unique(data.captions.of[name], return_inverse=True)
    ends = data.captions.lengths[numbers] - 1
    with captured(trained.model.transformer, see_text):
        trained.texts(data.captions.of[name])
    median = norms[0].median(-1, keepdim=True).values
    found = {key: [layer[key] for layer in layers] for key in layers[0]}
    found |= {"text, first token": texts, "norm": [(norms[0].amax(-1, keepdim=True) / median).mean()]}
    found["outliers"] = [(norms[0] > OUTLIER * median).float().mean()]
    return {key: [round(float(value), 4) for value in values] for key, values in found.items()}


def trainer(data: Data, epochs: int, models: Path) -> Callable[[Run], Numbers]:
    """Return the function that trains and measures a run, and saves its weights."""
    models.mkdir(parents=True, exist_ok=True)

    def train(run: Run) -> Numbers:
        def also(trained: SmallClip, data: Data) -> dict[str, Any]:
            torch.save(trained.model.state_dict(), models / f"{run.name}.pt")
            measured: dict[str, Any] = {"processor": processor()}
            if run.family not in RIVALS:  # DnA weights two values with two maps
                measured["sinks"] = sinks(trained, data)
            return measured

        return clip.train(run, data, epochs, FAMILIES, also=also)

    return train


def run_all(data: Data, results: Path, models: Path, hours: float, quick: bool) -> None:
    """Train the runs that are not done, the cells without registers first; start none after so many hours."""
    end = time.monotonic() + 3600 * hours
    studies = (WITHOUT_REGISTERS, results), (("plain", *RIVALS), results / "rivals"), (tuple(CELLS), results)
    for cells, folder in studies:
        grid = grid_of(cells, folder).quick() if quick else grid_of(cells, folder)
        train = trainer(data, grid.epochs, models)
        for runs in (grid.tuning, grid.confirming):
            for run in runs():
                if time.monotonic() > end:
                    return
                if grid.numbers(run) is None:
                    grid.train([run], train)


# ---- segmentation --------------------------------------------------------------------------------------------------


def class_rows(visual: Any, images: Tensor) -> Tensor:
    """Return the last layer's map of the class token over the patches [N, patches], the mean over heads.

    It is the map that weights the values: in V2 a difference, with entries below zero. Gates are not in it.

    Args:
        visual: the image tower.
        images: as it takes them.
    """
    calls: list[Call] = []
    with torch.no_grad(), captured(visual.trunk, calls.append):
        visual(images)
    return calls[-1].scores().compute_weights()[:, :, 0, visual.trunk.num_prefix_tokens :].mean(1)


def overlaps(scores: Tensor, masks: Tensor) -> Tensor:
    """Return the intersection over union [N] of each mask with the highest patches, as many as have its area.

    Args:
        scores: of patches in rows [N, patches].
        masks: of square images [N, h, w].
    """
    side = math.isqrt(scores.shape[1])
    patch = masks.shape[1] // side
    ranks = scores.argsort(dim=1, descending=True).argsort(dim=1)
    count = (masks.sum((1, 2)) / patch**2).round().clamp(min=1)
    chosen = F.interpolate((ranks < count[:, None]).float().view(-1, 1, side, side), scale_factor=patch)[:, 0] > 0
    return (chosen & masks).sum((1, 2)) / (chosen | masks).sum((1, 2))


def scenes(source: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return uint8 images [N, 3, 64, 64] of fashion-scenes' test garments, and their masks [N, 64, 64]."""
    images, masks = zip(*Scenes(load_splits(source)["test"], [0, 33]).masked(count), strict=True)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.from_numpy(np.stack(masks))


def segment(weights: Sequence[Path], source: Path, data: Path, results: Path, count: int = SCENES) -> None:
    """Write the mean overlap of every saved run with the masks of scenes to segmentation.json; a run is done once.

    `chance` is that of random patches, the mean of 100 draws for each scene, and `best` that of the patches which the
    masks cover most.
    """
    file = results / "segmentation.json"
    images, masks = scenes(source, count)
    content = torch.load(data, weights_only=True, mmap=True)
    normalised = (images.float() / 255 - content["mean"]) / content["std"]
    generator = torch.Generator().manual_seed(0)
    patches = (images.shape[-1] // clip.PATCH) ** 2
    draws = [overlaps(torch.rand(count, patches, generator=generator), masks).mean() for _ in range(100)]
    best = overlaps(F.avg_pool2d(masks.float(), clip.PATCH).flatten(1), masks).mean()
    found: dict[str, Any] = {"scenes": count, "chance": round(float(torch.stack(draws).mean()), 4)}
    found |= {"best": round(float(best), 4), "runs": {}}
    if file.is_file() and (before := json.loads(file.read_text())) | {"runs": {}} == found:
        found = before
    for path in weights:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        if found["runs"].get(path.stem, {}).get("weights") == digest:
            continue
        cells = [name for name in FAMILIES if path.stem.startswith(Run(name, 0, 0).name.removesuffix("0-0"))]
        if not cells:
            raise SystemExit(f"{path} is a run of no cell: give a folder of this study's weights")
        visual = FAMILIES[cells[0]].create(clip.SIZE, clip.PATCH).visual.eval()
        state = torch.load(path, weights_only=True)
        visual.load_state_dict({key[7:]: value for key, value in state.items() if key.startswith("visual.")})
        overlap = overlaps(class_rows(visual, normalised), masks).mean()
        found["runs"][path.stem] = {"IoU": round(float(overlap), 4), "weights": digest}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.rename(file)
        print(f"{path.stem} {found['runs'][path.stem]['IoU']} (chance {found['chance']})", flush=True)


# ---- report --------------------------------------------------------------------------------------------------------


def whole_grid(results: Path) -> Cells:
    """Return the grid of the whole factorial of which a folder has all runs, with registers or without."""
    whole = grid_of(tuple(CELLS), results)
    complete = {
        name for name in CELLS if whole.chosen(name) and len(whole.by_seed(name, PRIMARY[0])) == len(whole.seeds)
    }
    cells = tuple(CELLS) if complete == set(CELLS) else WITHOUT_REGISTERS
    if not complete >= set(cells):
        print(whole.describe())
        raise SystemExit(f"{len(complete)} of {len(CELLS)} cells are whole: {', '.join(sorted(complete))}")
    return grid_of(cells, results)


def report(results: Path) -> None:
    """Print the tables of a folder's runs, in Markdown."""
    grid = whole_grid(results)
    cells = tuple(grid.families)
    print(grid.describe(), end="\n\n")
    for metrics in (PRIMARY, clip.SECONDARY[:3], clip.SECONDARY[3:]):
        print(grid.means(metrics), end="\n\n")
    print_contrasts("points of image R@1", {name: grid.by_seed(name, PRIMARY[0]) for name in cells})
    again = differences({name: grid.by_seed(name, PRIMARY[0]) for name in OF_CLIP})
    print(f"\nV2 minus plain alone, as in clip.py: {again['V2'].text(2)}")
    print_runs(grid)
    if (file := results / "segmentation.json").is_file():
        print()
        print_segmentation(grid, json.loads(file.read_text()))
    rivals = grid_of(("plain", *RIVALS), results / "rivals")
    print(f"\nRivals: {rivals.describe()}")
    if all(len(rivals.by_seed(name, PRIMARY[0])) == len(rivals.seeds) for name in rivals.families):
        for metrics in (PRIMARY, clip.SECONDARY[:3]):
            print(f"\n{rivals.table(metrics)}")
        print_runs(rivals)


def print_runs(grid: Cells) -> None:
    """Print what each cell costs, and the sinks where they were measured."""
    print("\n| cell | learning rate | parameters | FLOPs | seconds |\n|---|---:|---:|---:|---:|")
    runs: dict[str, dict[int, Numbers]] = {}
    for name in grid.families:
        runs[name] = of = {run.seed: numbers for run in grid.fresh(name) if (numbers := grid.numbers(run))}
        one, seconds = next(iter(of.values())), spread([numbers["seconds"] for numbers in of.values()], 0)
        print(f"| {name} | {grid.chosen(name):g} | {one['parameters']:,} | {one['FLOPs']:,} | {seconds} |")
    if not RIVALS.keys() & runs.keys():
        print()
        print_sinks(runs)


def print_contrasts(unit: str, values: dict[str, dict[int, float]]) -> None:
    """Print main effects and interactions of {cell: {seed: value}}, with Holm's correction over them."""
    print(f"| contrast, {unit} | |\n|---|---|")
    for name, one in contrasts({CELLS[cell]: of for cell, of in values.items()}, FACTORS).items():
        print(f"| {name} | {one.text(2)} |")


def print_sinks(runs: dict[str, dict[int, Numbers]]) -> None:
    """Print what `sinks` measured in the runs of each cell, by the layer that `SINKS` says."""
    print(f"| cell | runs | {' | '.join(SINKS)} |\n|---|---:|" + len(SINKS) * "---:|")
    found = {name: {seed: one["sinks"] for seed, one in of.items() if "sinks" in one} for name, of in runs.items()}
    for name, of in found.items():
        shown = " | ".join(spread([layer(one[key]) for one in of.values()], 4) for key, layer in SINKS.items())
        print(f"| {name} | {len(of)} | {shown} |")
    if all(len(of) > 1 for of in found.values()):
        print()
        shares = {name: {seed: 100 * max(one["sinks"]) for seed, one in of.items()} for name, of in found.items()}
        print_contrasts("points of sinks", shares)


def print_segmentation(grid: Cells, found: Numbers) -> None:
    """Print the overlap of each cell's maps with the masks of scenes."""
    limits = f"chance {100 * found['chance']:.1f}, best {100 * found['best']:.1f}"
    print(f"| cell | runs | IoU, % ({limits}) |\n|---|---:|---:|")
    overlap = {
        name: {run.seed: 100 * one["IoU"] for run in grid.fresh(name) if (one := found["runs"].get(run.name))}
        for name in grid.families
    }
    for name, of in overlap.items():
        print(f"| {name} | {len(of)} | {spread(list(of.values()))} |")
    if all(len(of) > 1 for of in overlap.values()):
        print()
        print_contrasts("points of IoU", overlap)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "segment", "report"])
    parser.add_argument("--data", type=Path, default=Path("runs", "clip", "data.pt"))
    parser.add_argument("--models", type=Path, default=Path("runs", "cures"), help="the folder of weights")
    parser.add_argument("--source", type=Path, help="with segment: the folder of Fashion-MNIST's files")
    parser.add_argument("--hours", type=float, default=math.inf, help="start no run after so many")
    parser.add_argument("--processor", help="the folder of a kind of processor's runs; by default this machine's")
    parser.add_argument("--quick", action="store_true", help="the whole in minutes, to see that it runs")
    options = parser.parse_args()
    results = clip.GRID.results.with_name("cures") / (options.processor or processor_folder())
    if options.what == "report":
        report(results)
        return
    if options.what == "segment":
        weights = sorted(options.models.glob("*.pt"))
        if options.source is None or not weights:
            parser.error(f"segment needs --source, and weights in --models: {options.models} has {len(weights)}")
        segment(weights, options.source, options.data, results)
        return
    data = Data(options.data)
    run_all(data, results, options.models, options.hours, options.quick)


if __name__ == "__main__":
    main()
