"""`mmvp`: MMVP-VLM (Tong et al., "Eyes Wide Shut?", 2024, arXiv 2401.06209), 135 pairs of images in nine patterns.

Format and protocol are those of the repository tsb0601/MMVP (MIT), scripts/evaluate_vlm.py: two rows of Questions.csv
that follow each other are a pair, the odd number is of the first image, and each text is "a photo of " and the row's
statement. For both texts a softmax over the two images must choose the right one; that is Winoground's image score,
and chance is 25%. A tie counts as a choice of the second image there, and as wrong here.

Their patterns follow each other in the file, 15 pairs each; here a pattern is known by the row's type, which is also
the name of the images' folder. Quantity and Count, and Texts are not among the seven over which DiffCLIP averages
(arXiv 2503.06626, the axes of figure 4): `pairs` gives both means where all nine are there.
"""

import csv
from io import StringIO
from pathlib import Path

from diffvision.data.datasets.cases import Case, Images, file_in, folder_of, pair, write_cases
from diffvision.files import decoded

PATTERNS = {
    "Orientation": "Orientation and Direction",
    "Presence": "Presence of Specific Features",
    "State": "State and Condition",
    "Quantity": "Quantity and Count",
    "Spatial": "Positional and Relational Context",
    "Color": "Color and Appearance",
    "Structural Character": "Structural Characteristics",
    "Text": "Texts",
    "Camera Perspective": "Viewpoint and Perspective",
}
"""Type in Questions.csv -> the pattern's name in tables."""
_LAYOUT = 'MMVP-VLM is a folder with Questions.csv (number, type, statement) and "MLLM_VLM Images" or MMVP_VLM_Images'


def make_mmvp(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write MMVP-VLM, pairs of images in nine visual patterns, as the evaluation folder `pairs`.

    Args:
        directory: the folder to write.
        source: the folder with Questions.csv, such as that of
            `hf download MMVP/MMVP_VLM --repo-type dataset --local-dir FOLDER`.
        images: the folder that holds a folder of images for each pattern; by default the one in `source`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source)
    given = Path(images) if images else folder_of(root, "MLLM_VLM Images", "MMVP_VLM_Images")
    remedy = (
        "as --images give the folder that has one for each pattern (Orientation/1.jpg), of MMVP/MMVP_VLM; MMVP/MMVP is "
        "another set, whose images have the same numbers"
    )
    finder = Images(given, remedy, lambda path: str(path).replace(" ", "_"))
    cases = _pairs(file_in(root, "Questions.csv", _LAYOUT), finder)
    return write_cases(directory, "pairs", cases, finder, source="MMVP-VLM, tsb0601/MMVP", licence="MIT")


def _pairs(table: Path, images: Images) -> list[Case]:
    """Read MMVP-VLM's table, two rows a pair, as a case for each pair."""
    rows = [row for row in csv.reader(StringIO(decoded(table.read_bytes(), table), newline="")) if row][1:]
    pairs, seen = [], set()
    for line in range(0, len(rows), 2):
        two = [row for row in rows[line : line + 2] if len(row) == 3 and row[0].isdecimal() and row[2].strip()]
        numbers, kinds = [int(row[0]) for row in two], {row[1].strip().replace("_", " ") for row in two}
        where = f"rows {line + 1} and {line + 2} of {table}"
        if len(numbers) != 2 or numbers[0] % 2 == 0 or numbers[1] != numbers[0] + 1 or len(kinds) != 1:
            raise ValueError(f"{where} must be an odd and an even number of one type: {_LAYOUT}")
        kind = kinds.pop()
        if kind not in PATTERNS or (kind, *numbers) in seen:
            raise ValueError(
                f"{where} must have a type of {', '.join(PATTERNS)}, each number once, got {kind!r}, {numbers[0]}"
            )
        seen.add((kind, *numbers))
        files = [images(f"{kind}/{number}.jpg") for number in numbers]
        pairs.append(pair(files, [f"a photo of {row[2]}" for row in two], kind=PATTERNS[kind]))
    return pairs
