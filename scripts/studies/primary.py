"""Print the primary contrasts of all studies, as their scripts declared them, with one Holm correction over all.

    python scripts/studies/primary.py

Values are those that each study's `report` prints, from the committed runs; p there is corrected within its table.
"""

from __future__ import annotations

from collections.abc import Sequence

import arithmetic
import clip
import common_mode
import controls
import cures
import language_grid
import pretrained
import scaling
import vision
import vlm
from grid import Grid, Interval, corrected, effects, paired


def loss_at_best_size() -> dict[str, Interval]:
    """Return the contrasts of scaling.py, at the most FLOPs."""
    points = scaling.points_of(language_grid.Study())
    largest = scaling.budgets_of(points)[-1]
    return paired({name: scaling.best_of(points, name, largest).losses for name in scaling.families_of(points)})


def parts_of_v1() -> dict[str, Interval]:
    """Return the contrasts of controls.py, of both groups."""
    losses = controls.losses_of(controls.STUDY)
    groups = [paired({name: losses[name] for name in (first, *of)}) for first, of in controls.CONTRASTS.items()]
    return {name: interval for group in groups for name, interval in group.items()}


def answers_of_images() -> dict[str, Interval]:
    """Return the contrasts of vlm.py, of the folder that its report reads."""
    grid = vlm.recorded(vlm.GRID)
    cells = {tuple(part == "V2" for part in of): grid.by_seed(name, vlm.PRIMARY[0]) for name, of in vlm.CELLS.items()}
    return effects(cells, vlm.FACTORS)


def cures_of_noise() -> dict[str, Interval]:
    """Return the contrasts of cures.py on the kind of processor that its page reports."""
    grid = cures.whole_grid(clip.GRID.results.with_name("cures") / "AMD_EPYC_AVX512")
    return effects({cures.CELLS[name]: grid.by_seed(name, clip.PRIMARY[0]) for name in grid.families}, cures.FACTORS)


def main() -> None:
    """Print the table."""
    found = {f"scaling: loss, {name}": one for name, one in loss_at_best_size().items()}
    found |= {f"controls: loss, {name}": one for name, one in parts_of_v1().items()}
    found |= {f"vlm: {vlm.PRIMARY[0]}, {name}": one for name, one in answers_of_images().items()}
    grids: dict[str, tuple[Grid, Sequence[str]]] = {
        "clip": (clip.GRID, clip.PRIMARY),
        "vision": (vision.GRID, vision.PRIMARY),
    }
    grids |= {"common_mode": (common_mode.GRID, common_mode.PRIMARY)}
    grids |= {"arithmetic": (arithmetic.GRID, arithmetic.GRID.primary)}
    grids |= {f"pretrained {part}": (pretrained.grid_of(part), (name,)) for part, name in pretrained.PRIMARY.items()}
    for study, (grid, metrics) in grids.items():
        for metric in metrics:
            rows = paired({family: grid.by_seed(family, metric) for family in grid.families})
            found |= {f"{study}: {metric}, {family}": one for family, one in rows.items()}
    found |= {f"cures: {clip.PRIMARY[0]}, {name}": one for name, one in cures_of_noise().items()}
    print(f"{len(found)} primary contrasts\n\n| study: metric, what is compared | difference | p |\n|---|---:|---:|")
    for name, one in sorted(corrected(found).items(), key=lambda item: item[1].p):
        low, high = one.mean - one.width, one.mean + one.width
        print(f"| {name} | {one.mean:+.3g} [{low:+.3g}, {high:+.3g}] | {one.p:.2g} |")


if __name__ == "__main__":
    main()
