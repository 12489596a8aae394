"""`ohd-caps`: OHD-Caps (EMNLP 2024), images with the right caption and 27 that name objects which are not there.

The set is of Liu et al., "Investigating and Mitigating Object Hallucinations in Pretrained Vision-Language (CLIP)
Models"; the format is that of the repository Yufang-Liu/clip_hallucination (no licence file), data/OHD-Caps/test. In
*_out_label.json are 28 captions of each of 500 images, of COCO, Flickr30k and NoCaps; `label` is the position of the
right one. A model must prefer it to all others; chance is 1/28. The right caption comes first here, where their
evaluation puts it as well, and a tie goes to the first: in four samples a wrong caption repeats the right one.

`composition` has these, with the images' collection as their kind. Where *_annotations.json is there,
`ohd-caps-by-kind` has the right caption against the wrong ones of one kind: objects inserted that often occur together
with those in the image (adversarial), that are frequent (popular) or drawn at random, seven each, chance 1/8; or
objects removed (delete), six, chance 1/7. The two files have other wrong captions in 23 of the 1,500 samples.
"""

from pathlib import Path

from diffvision.data.published.cases import (
    Case,
    Folder,
    Images,
    composition,
    folder_of,
    read_rows,
    texts_in,
    write_folders,
)
from diffvision.data.shards.sample import BadSource

COLLECTIONS = {"coco": "COCO", "flickr": "Flickr30k", "nocaps": "NoCaps"}
KINDS = ("adversarial", "popular", "random", "delete")
_LAYOUT = "OHD-Caps' folder data/OHD-Caps/test has coco_out_label.json, flickr_out_label.json and nocaps_out_label.json"


def make_ohd_caps(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write OHD-Caps, captions against ones that name absent objects.

    The evaluation folders are `composition` and `ohd-caps-by-kind`.

    Args:
        directory: the folder to write.
        source: the repository Yufang-Liu/clip_hallucination of GitHub, or its folder
            data/OHD-Caps/test; with the files of one collection only, or of several.
        images: the folder that holds the collections' images, in folders of any names; by default `source`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source, "data/OHD-Caps/test")
    files = {name: root / f"{name}_out_label.json" for name in COLLECTIONS}
    files = {name: path for name, path in files.items() if path.is_file()}
    if not files:
        raise BadSource(f"{root} has no coco_out_label.json: {_LAYOUT}")
    remedy = "give a folder that holds COCO's val2014, Flickr30k's and NoCaps' images as --images, or leave out the "
    finder = Images([Path(images or source)], f"{remedy}*_out_label.json whose images you do not have")
    annotated = {name: root / f"{name}_annotations.json" for name in files}
    absent = [path for path in annotated.values() if not path.is_file()]
    if 0 < len(absent) < len(annotated):
        raise ValueError(f"there is no {absent[0]}, though other collections have one: get it again, or remove theirs")
    all_together, by_kind = [], []
    for name, path in files.items():
        rows = _with_right_first(path)
        all_together += [composition(finder(image), captions, COLLECTIONS[name]) for image, captions in rows]
        if annotated[name].is_file():
            by_kind += _by_kind(annotated[name], [image for image, _ in rows], finder)
    folders = [Folder("composition", "composition", all_together)]
    if by_kind:
        folders.append(Folder("ohd-caps-by-kind", "composition", by_kind))
    return write_folders(
        directory,
        folders,
        finder,
        source="OHD-Caps, Yufang-Liu/clip_hallucination",
        licence="none given; images of COCO, Flickr30k and NoCaps under theirs",
    )


def _with_right_first(path: Path) -> list[tuple[str, list[str]]]:
    """Return (image, captions) of each row."""
    rows = []
    for number, row in enumerate(read_rows(path, image=str, caption=list, label=int), start=1):
        captions = list(texts_in(row["caption"], path, number))
        if not 0 <= row["label"] < len(captions):
            raise ValueError(
                f"{path}, row {number}: label {row['label']} is not a position among {len(captions)} captions: get "
                "the file again"
            )
        right = captions.pop(row["label"])
        rows.append((row["image"], [right, *captions]))
    return rows


def _by_kind(path: Path, wanted: list[str], images: Images) -> list[Case]:
    """Return a case for each image and kind of hallucinated object."""
    fields = {"file_path": str, "positive_sample": str, **{f"{kind}_samples": dict for kind in KINDS}}
    rows = {row["file_path"]: (number, row) for number, row in enumerate(read_rows(path, **fields), start=1)}
    if missing := [image for image in wanted if image not in rows]:
        raise ValueError(
            f"{path} has no row for {len(missing)} of {len(wanted)} images, first {missing[0]}: get it again"
        )
    cases = []
    for image in wanted:
        number, row = rows[image]
        for kind in KINDS:
            wrong = texts_in(list(row[f"{kind}_samples"].values()), path, number)
            cases.append(composition(images(image), [row["positive_sample"], *wrong], kind))
    return cases
