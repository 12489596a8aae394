"""Draw answers of the four models of scripts/studies/vlm.py to questions about test scenes that a seed draws.

    python scripts/pictures/vlm_answers.py --data runs/vlm/data.pt --output docs/images/vlm-answers.png

The models are those with the first fresh seed. The scenes are drawn before any answer is looked at.
"""

import argparse
import json
import random
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from diffvision.analysis.figures.style import new_figure, styled
from grid import Run
from vlm import CELLS, GRID, Data

SCENES = 6
NAMES = ("pope_adversarial", "vqa", "captions")  # a question of each about each scene
WIDTH = 34  # characters of a line
RIGHT, WRONG = "#1a7f37", "#b42318"


def chosen(data: Data) -> list[list[tuple[str, int]]]:
    """Return for each scene that is drawn a question of each set, as the set's name and the question's number."""
    draw = random.Random(0)
    scenes = []
    for image in draw.sample(range(len(data.images["test"])), SCENES):
        of = {
            name: [i for i, row in enumerate(data.content["questions"][name]) if row["image"] == image]
            for name in NAMES
        }
        scenes.append([(name, draw.choice(numbers)) for name, numbers in of.items()])
    return scenes


def is_right(data: Data, name: str, row: dict, answer: str) -> bool:
    """Return whether an answer is right; a caption is if it names the scene's objects and no others."""
    if name == "captions":
        return {*data.names.find(answer)} == {*row["objects"]}
    return answer == row["label"]


@styled
def draw(data: Data, models: Path) -> Figure:
    """Return the scenes, each with its questions and the answers of every model below it."""
    answers = {}
    for cell in CELLS:
        run = Run(cell, GRID.chosen(cell) or 0, GRID.seeds[0])
        answers[cell] = json.loads((models / f"{run.name}-answers.json").read_text())
    figure = new_figure(12.6, 6.0)
    for ax, questions in zip(figure.subplots(1, SCENES), chosen(data), strict=True):
        ax.axis("off")
        image = data.content["questions"][questions[0][0]][questions[0][1]]["image"]
        ax.imshow(data.images["test"][image].permute(1, 2, 0), extent=(0, 1, 0, 1))
        ax.set(xlim=(0, 1), ylim=(-1.95, 1))
        height = -0.08
        for name, number in questions:
            row = data.content["questions"][name][number]
            ax.text(0, height, row["text"], va="top", fontsize=7.5, weight="bold")
            height -= 0.095
            for cell, (tower, text) in CELLS.items():
                answer = answers[cell][name][number]
                lines = textwrap.wrap(f"{tower}, {text}: {answer}", WIDTH, max_lines=3) or [""]
                colour = RIGHT if is_right(data, name, row, answer) else WRONG
                ax.text(0, height, "\n".join(lines), va="top", fontsize=6.4, color=colour, linespacing=1.05)
                height -= 0.075 * len(lines) + 0.012
            height -= 0.04
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs", "vlm", "data.pt"))
    parser.add_argument("--output", type=Path, default=Path("docs", "images", "vlm-answers.png"))
    options = parser.parse_args()
    draw(Data(options.data), options.data.parent / "models").savefig(options.output, dpi=160, facecolor="white")
