"""`pope`: the questions of POPE (Li et al., 2023, arXiv 2305.10355), for CLIP-like models.

The format is that of the repository RUCAIBox/POPE (MIT), output/: rows {question_id, image, text, label} as JSON lines
or as one list. A file has 3,000 questions about 500 images: three objects of each, and three that are not there, drawn
at random, the most frequent (popular), or those that occur most often together with what is there (adversarial).
Questions with yes and no take turns, except in two files of SEEM's, which have three of each: there the first no
belongs to the first yes. Older files have fewer questions with no: those without a partner are left out. "an" and the
"imange" of derived files are read too.

POPE is made for models that answer in words. A bare CLIP has no answer yes or no, so `objects` measures what it ranks;
its numbers are not those of POPE's tables. There is a folder for each file, named after it.
"""

import re
from pathlib import Path

from diffvision.data.datasets.cases import Case, Images, folder_of, read_rows, write_folders
from diffvision.data.images.folders import TEMPLATES
from diffvision.data.shards.sample import BadSource

_QUESTION = re.compile(r"Is there an? (.+) in the iman?ge\?")
_LAYOUT = "POPE's folder output/coco has coco_pope_random.json, coco_pope_popular.json and coco_pope_adversarial.json"


def make_pope(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write POPE's questions for CLIP-like models, an evaluation folder per file, such as `coco-pope-random`.

    Args:
        directory: the folder to write.
        source: the folder of the files, or the repository RUCAIBox/POPE of GitHub, whose questions on COCO are taken.
        images: the folder of the images, COCO's val2014; by default they are looked for in `source`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source, "output/coco")
    files = sorted(root.glob("*pope*_*.json")) or sorted(root.glob("*pope*_*.jsonl"))
    if not files:
        raise BadSource(f"{root} has no file of POPE's questions: {_LAYOUT}")
    finder = Images(Path(images or source), "give the folder of COCO's val2014 as --images")
    cases, left_out = {}, {}
    for path in files:
        name = path.stem.replace("_", "-")
        cases[name], lost = _read(path, finder)
        left_out[name] = {"questions without a partner of the other answer": lost} if lost else {}
    return write_folders(
        directory,
        "objects",
        cases,
        finder,
        templates=TEMPLATES,
        left_out=left_out,
        source="POPE's questions, RUCAIBox/POPE",
        licence="MIT; images under the terms of their collection",
    )


def _read(path: Path, images: Images) -> tuple[list[Case], int]:
    """Return the questions of a file, and how many are left out: of an object both in an image and not, or unpaired.

    Raises:
        ValueError: a row is no question of POPE's.
    """
    answers: dict[str, dict[str, list[str]]] = {}
    rows = read_rows(path, image=str, text=str, label=str)
    for number, row in enumerate(rows, start=1):
        question = _QUESTION.fullmatch(row["text"].strip())
        if question is None or row["label"] not in ("yes", "no"):
            raise ValueError(
                f"{path}, row {number}: {row['text']!r}, {row['label']!r} is no question of POPE's: {_LAYOUT}"
            )
        answers.setdefault(row["image"], {"yes": [], "no": []})[row["label"]].append(question[1])
    cases, paired = [], 0
    for image, lists in answers.items():
        both = set(lists["yes"]) & set(lists["no"])
        present, absent = ([name for name in lists[answer] if name not in both] for answer in ("yes", "no"))
        if pairs := min(len(present), len(absent)):
            cases.append(Case({"": images(image)}, {}, {"present": present[:pairs], "absent": absent[:pairs]}))
            paired += 2 * pairs
    return cases, len(rows) - paired
