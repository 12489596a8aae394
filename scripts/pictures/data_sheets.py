"""A sheet of what a made dataset holds: a row of samples of each of its folders, with their captions and labels.

    python scripts/pictures/data_sheets.py data/fashion-scenes docs/images/data-fashion-scenes.webp
    python scripts/pictures/data_sheets.py data/fashion docs/images/data-fashion.webp --columns 8

A row shows samples of a shard at about equal distances. Wrong captions and absent objects are in red.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from io import BytesIO
from pathlib import Path
from textwrap import wrap

from matplotlib.figure import Figure
from PIL import Image

IMAGES = ("png", "jpg", "jpeg", "webp")
RIGHT, WRONG = "#1f2328", "#b3261e"
WIDTH = 24  # characters of a caption's line
LINE = 0.14  # inches
Sample = dict[str, bytes]


def samples(folder: Path, count: int) -> list[Sample]:
    """Return samples of a folder's first shard; each is one further than equal distances, for what comes in turns."""
    with tarfile.open(min(folder.glob("*.tar"))) as archive:
        keys: dict[str, list[tarfile.TarInfo]] = {}
        for member in archive:
            keys.setdefault(member.name.partition(".")[0], []).append(member)
        count = min(count, len(keys))
        chosen = [list(keys)[i * (len(keys) // count + 1) % len(keys)] for i in range(count)]
        return [{m.name.partition(".")[2]: archive.extractfile(m).read() for m in keys[key]} for key in chosen]


def parts(directory: Path) -> list[Path]:
    """Return the folders with shards, one split of each evaluation folder: test, where it has one."""
    folders = {path.parent for path in directory.rglob("*.tar")}
    tested = {folder.parent for folder in folders if folder.name == "test"}
    return sorted(
        (folder for folder in folders if folder.name == "test" or folder.parent not in tested),
        key=lambda folder: (folder.name == "test", str(folder)),
    )


def pictures(sample: Sample) -> list[Image.Image]:
    """Return the images of a sample, two of `pairs`."""
    names = [name for name in sorted(sample) if name.rpartition(".")[2] in IMAGES]
    return [Image.open(BytesIO(sample[name])).convert("RGB") for name in names]


def words(sample: Sample, classnames: list[str], dataset: str) -> list[tuple[str, str]]:
    """Return lines and their colours: captions, labels, objects."""
    lines = []
    for name in sorted(name for name in sample if name.rpartition(".")[2] == "txt"):
        right, *more = sample[name].decode().splitlines()
        lines += [(right, RIGHT), *((line, WRONG if "composition" in dataset else RIGHT) for line in more[:3])]
    if "cls" in sample and classnames:
        lines.append((classnames[int(sample["cls"])], RIGHT))
    facts = json.loads(sample.get("json", b"{}"))
    lines += [(caption, RIGHT) for caption in facts.get("captions", [])[:3]]
    if "present" in facts:
        lines += [(", ".join(facts["present"]), RIGHT), (", ".join(facts["absent"]), WRONG)]
    elif "kind" in facts:
        lines.append((f"[{facts['kind']}]", "#57606a"))
    return [(line, colour) for text, colour in lines for line in wrap(text, WIDTH)]


def sheet(directory: Path, columns: int) -> Figure:
    """Return a row of samples for each folder of a dataset."""
    rows = []
    for folder in parts(directory):
        names = folder.parent / "classnames.txt"
        if not names.is_file():
            names = directory / "zero_shot" / "classnames.txt"
        classnames = names.read_text(encoding="utf-8").splitlines() if names.is_file() else []
        title = str(folder.relative_to(directory))
        rows.append([(pictures(s), words(s, classnames, title), title) for s in samples(folder, columns)])
    deepest = [max(len(lines) for _, lines, _ in row) for row in rows]
    sides = [1.25 / max(len(images) for images, *_ in row) for row in rows]
    heights = [side + LINE * (depth + 2.5) for side, depth in zip(sides, deepest, strict=True)]
    figure = Figure(figsize=(1.45 * columns, sum(heights)))
    top = 1 - 0.04 / sum(heights)
    for row, side, height in zip(rows, sides, heights, strict=True):
        figure.text(0.01, top, row[0][2], fontsize=9, weight="bold", va="top")
        for column, (images, lines, _) in enumerate(row):
            under = top - (LINE * 1.4 + side) / sum(heights)
            for number, image in enumerate(images):
                left = (column + 0.06) / columns + number * side / (1.45 * columns)
                axes = figure.add_axes((left, under, 0.97 * side / (1.45 * columns), side / sum(heights)))
                axes.imshow(image, interpolation="nearest")
                axes.axis("off")
            for number, (line, colour) in enumerate(lines):
                y = under - LINE * (number + 0.2) / sum(heights)
                figure.text((column + 0.06) / columns, y, line, fontsize=6.5, color=colour, va="top")
        top -= height / sum(heights)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a folder that `diffvision data make` wrote")
    parser.add_argument("picture", type=Path, help="the file to write, such as sheet.webp")
    parser.add_argument("--columns", type=int, default=5)
    parser.add_argument("--dpi", type=int, default=100)
    settings = parser.parse_args()
    options = {"pil_kwargs": {"quality": 80, "method": 6}} if settings.picture.suffix == ".webp" else {}
    sheet(settings.directory, settings.columns).savefig(settings.picture, dpi=settings.dpi, **options)


if __name__ == "__main__":
    main()
