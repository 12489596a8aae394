"""`aro`: ARO (Yuksekgonul et al., ICLR 2023, arXiv 2210.01936): relations, attributes, and the order of words.

Formats and protocol are those of the repository mertyg/vision-language-models-are-bows (MIT). A folder is written for
each of these files that is there:

- visual_genome_relation.json -> `vg-relation`, the kind being the relation. The paper's number is the mean over
  relations, without those of `NOT_COUNTED`, which their notebook calls symmetric (exchanging the two objects would say
  the same) and leaves out: they are not written.
- visual_genome_attribution.json -> `vg-attribution`, the kind being the two attributes. The paper's number is the mean
  over pairs of attributes that have 25 cases or more; others are not written.
- coco_order.json, flickr30k_order.json -> `coco-order`, `flickr30k-order`. A caption against four shuffles of its words
  (nouns and adjectives; all but these; words within three; threes of words), lower case, without punctuation, cut to 30
  words; the share that prefers the caption, chance 20%. The shuffles need a part-of-speech tagger and are drawn at
  random, so the authors' code makes them, once, where that repository is:

      python -c "import json, random, numpy, dataset_zoo; random.seed(1); numpy.random.seed(1); \\
          json.dump(dataset_zoo.COCO_Order(root_dir='coco').test_cases, open('coco_order.json', 'w'))"

Images of the first two are cropped to the box of the row before all else. There a tie is wrong in the authors' code,
which has the wrong caption first, and right here; in the others it is right in both. All four are solved by models that
see no image and know which sentence is plausible (SugarCrepe, arXiv 2306.14610): look at the blind baseline first.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffvision.data.published.cases import (
    Box,
    Case,
    Folder,
    Images,
    composition,
    folder_of,
    one_line,
    read_rows,
    texts_in,
    write_folders,
)
from diffvision.data.shards.sample import BadSource

MIN_CASES = 25
"""Of a pair of attributes."""
MAX_WORDS = 30
_FARTHEST = 5000  # pixels; images of Visual Genome have up to 1,280 on a side
_PUNCTUATION = re.compile(r'[.!"()*#:;~]')
_BOX = {f"bbox_{side}": float for side in "xywh"}
_CAPTIONS = {"image_path": str, "true_caption": str, "false_caption": str}
_LAYOUT = (
    "ARO is a folder with visual_genome_relation.json, visual_genome_attribution.json and images/, or with "
    "coco_order.json or flickr30k_order.json"
)


def make_aro(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write ARO: relations, attributes and the order of words, each as an evaluation folder.

    They are `vg-relation`, `vg-attribution`, `coco-order` and `flickr30k-order`.

    Args:
        directory: the folder to write.
        source: the folder with some of the four files, and images/ for the first two: what VG_Relation and
            VG_Attribution of mertyg/vision-language-models-are-bows download.
        images: another folder of images, such as the one that holds COCO's val2014 or flickr30k-images.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source)
    finder = Images([*([Path(images)] if images else []), root], "give the folder of the images as --images")
    folders = []
    for name, file, read in (
        ("vg-relation", "visual_genome_relation.json", _read_relations),
        ("vg-attribution", "visual_genome_attribution.json", _read_attributions),
    ):
        if (root / file).is_file():
            rows, cases = read(root / file, finder)
            left_out = {"that the paper does not count": rows - len(cases)} if rows > len(cases) else {}
            folders.append(Folder(name, "composition", cases, left_out=left_out))
    for name in ("coco_order", "flickr30k_order"):
        if (root / f"{name}.json").is_file():
            cases = _read_orders(root / f"{name}.json", finder)
            folders.append(Folder(name.replace("_", "-"), "composition", cases))
    if not folders:
        raise BadSource(f"{root} has none of ARO's files: {_LAYOUT}")
    return write_folders(
        directory,
        folders,
        finder,
        source="ARO, mertyg/vision-language-models-are-bows",
        licence="MIT; images of Visual Genome (CC BY 4.0), COCO and Flickr30k under theirs",
    )


def _read_relations(path: Path, images: Images) -> tuple[int, list[Case]]:
    """Return the number of rows, and the cases of relations that count."""
    rows = read_rows(path, relation_name=str, **_CAPTIONS, **_BOX)
    kinds = [row["relation_name"] for row in rows]
    return len(rows), _make_cases(path, rows, kinds, images, lambda kind: kind not in NOT_COUNTED)


def _read_attributions(path: Path, images: Images) -> tuple[int, list[Case]]:
    """Return the number of rows, and the cases of pairs of attributes that count."""
    rows = read_rows(path, attributes=list, **_CAPTIONS, **_BOX)
    kinds = [" and ".join(map(str, row["attributes"][:2])) for row in rows]
    count = Counter(kinds)
    return len(rows), _make_cases(path, rows, kinds, images, lambda kind: count[kind] >= MIN_CASES)


def _make_cases(
    path: Path, rows: list[dict[str, Any]], kinds: list[str], images: Images, counts: Callable[[str], bool]
) -> list[Case]:
    """Return the cases of the rows whose kind counts, each with its box."""
    cases = []
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True), start=1):
        if counts(kind):
            x, y, width, height = (row[field] for field in _BOX)
            if not (all(abs(side) <= _FARTHEST for side in (x, y, width, height)) and min(width, height) >= 1):
                raise ValueError(
                    f"{path}, row {number}, has a box of {width} x {height} pixels at {x}, {y}: both sides must be 1 "
                    f"to {_FARTHEST:,}; get ARO's files again"
                )
            box: Box = (x, y, x + width, y + height)
            captions = [row["true_caption"], row["false_caption"]]
            cases.append(composition(images(row["image_path"]), captions, kind, box))
    return cases


def _read_orders(path: Path, images: Images) -> list[Case]:
    cases = []
    for number, row in enumerate(read_rows(path, image=str, caption_options=list), start=1):
        captions = [_clean(caption) for caption in texts_in(row["caption_options"], path, number)]
        cases.append(composition(images(row["image"]), captions))
    return cases


def _clean(caption: str) -> str:
    """Return a caption in lower case, without punctuation, cut to 30 words; one that is so already stays as it is."""
    return " ".join(one_line(_PUNCTUATION.sub(" ", caption.lower())).split()[:MAX_WORDS])


_NOT_COUNTED = """
    adjusting, around, attached to, beside, between, bigger than, biting, boarding, brushing, by, chewing,
    cleaning, climbing, close to, coming from, coming out of, contain, crossing, dragging, draped over, drinking,
    drinking from, driving, driving down, driving on, eating from, eating in, enclosing, exiting, facing, filled
    with, floating in, floating on, flying, flying above, flying in, flying over, flying through, full of, going
    down, going into, going through, grazing in, growing in, growing on, guiding, hanging from, hanging in,
    hanging off, hanging over, higher than, holding onto, hugging, in between, jumping off, jumping on, jumping
    over, kept in, larger than, leading, leaning over, leaving, licking, longer than, looking in, looking into,
    looking out, looking over, looking through, lying next to, lying on top of, making, mixed with, mounted on,
    moving, near, next to, of, on the back of, on the edge of, on the front of, on the other side of, on the side
    of, opening, painted on, parked at, parked beside, parked by, parked in, parked in front of, parked near,
    parked next to, perched on, petting, piled on, playing, playing in, playing on, playing with, pouring,
    reaching for, reading, reflected on, riding on, running in, running on, running through, seen through, sitting
    behind, sitting beside, sitting by, sitting in front of, sitting near, sitting next to, sitting under, skiing
    down, skiing on, sleeping in, sleeping on, smiling at, sniffing, splashing, sprinkled on, stacked on, standing
    against, standing around, standing behind, standing beside, standing in front of, standing near, standing next
    to, staring at, stuck in, surrounding, swimming in, swinging, talking to, topped with, touching, traveling
    down, traveling on, tying, typing on, underneath, wading in, waiting for, walking across, walking by, walking
    down, walking next to, walking through, with, working in, working on, worn on, wrapped around, wrapped in
"""
NOT_COUNTED = frozenset(one_line(name) for name in _NOT_COUNTED.split(","))
"""Relations that ARO's notebook leaves out of the mean."""
