"""CLIP, DiffCLIP and DiffCLIP-V2 on emoji with ten times the parameters of `clip.py`, for one GPU; not run on one yet.

    python scripts/studies/clip_large.py data --source data/emoji   # as in clip.py, whose file --data may name
    python scripts/studies/clip_large.py tune                       # three learning rates a family, one seed: 9 runs
    python scripts/studies/clip_large.py train                      # two fresh seeds: 6 runs
    python scripts/studies/clip_large.py report

Data, augmentation, metrics and the choice of learning rates are those of `clip.py`; towers are three times as wide,
batches four times as large. It is meant for 40 minutes of a GPU; `grid` prints what a run took and how many are left.
Each run is one JSON, and a run without one is trained from its start: stop and go on at any time. Without a GPU it runs
on the CPU, in float32.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import nn

import clip
from clip import PRIMARY, Data, make_data
from grid import Grid, Run, run_study
from small_clip import Towers

WIDTH, HEADS = 192, {2: 3, 4: 6}  # of the small towers' heads: head size 32 in both maps, and in the plain ones
BATCH = 256


@dataclass(frozen=True)
class LargeTowers(Towers):
    """The towers of `clip.py`, three times as wide."""

    def create(self, size: int, patch: int) -> Any:
        config: Any = open_clip.get_model_config(self.text)
        heads = HEADS[config["text_cfg"]["heads"]]
        config["embed_dim"] = config["text_cfg"]["width"] = WIDTH
        config["text_cfg"]["heads"] = heads
        name = f"{self.text}-{WIDTH}"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"{name}.json").write_text(json.dumps(config))
            open_clip.add_model_config(folder)
        large = replace(self, text=name, settings={**self.settings, "embed_dim": WIDTH, "num_heads": heads})
        model = Towers.create(large, size, patch)
        model.visual.head.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        return model


FAMILIES = {
    "plain": LargeTowers(),
    "V1 0.8": LargeTowers("diff_vit_debug_clip", {"lambda_init": 0.8}, "DiffCLIP-debug"),
    "V2": LargeTowers("diffv2_vit_debug_clip", text="DiffCLIP-V2-debug"),
}
GRID = Grid(
    Path(__file__).parents[2] / "docs" / "results" / "clip_large",
    tuple(FAMILIES),
    rates=(5e-4, 1e-3, 2e-3),
    primary=PRIMARY,
    seeds=(1, 2),
    epochs=40,
)


def trainer(file: Path, epochs: int) -> Callable[[Run], dict[str, Any]]:
    """Return the function that trains a run on the data of a file, on a GPU if there is one."""
    data = Data(file, "cuda" if torch.cuda.is_available() else "cpu")
    return lambda run: clip.train(run, data, epochs, FAMILIES, BATCH)


def report(grid: Grid) -> None:
    """Print the tables, in Markdown."""
    print(grid.describe(), end="\n\n")
    for metrics in (PRIMARY, clip.SECONDARY[:3]):
        print(grid.table(metrics), end="\n\n")


if __name__ == "__main__":
    run_study(GRID, __doc__, make_data=make_data, trainer=trainer, report=report)
