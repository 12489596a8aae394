"""`sugarcrepe`: SugarCrepe (Hsieh et al., 2023, arXiv 2306.14610), 7,511 captions of COCO with one wrong caption each.

The format is that of the repository RAIVNLab/sugar-crepe (MIT): seven files of {number: {filename, caption,
negative_caption}}, whose images are COCO's val2017. The kind of a sample is the name of its file; the paper gives the
accuracy of each file. A number is missing in swap_obj.json: rows are read in their order, all of them. 26 captions
have a line break in them, which becomes a space. A tie is wrong in their main_eval.py, and right in CLIP_benchmark and
here.
"""

from pathlib import Path

from diffvision.data.datasets.cases import Case, Images, file_in, folder_of, read_rows, write_cases

KINDS = ("add_att", "add_obj", "replace_att", "replace_obj", "replace_rel", "swap_att", "swap_obj")
_LAYOUT = f"SugarCrepe's folder data has {', '.join(f'{kind}.json' for kind in KINDS)}"


def make_sugarcrepe(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write SugarCrepe, captions of COCO against wrong ones, as the evaluation folder `composition`.

    Args:
        directory: the folder to write.
        source: the repository RAIVNLab/sugar-crepe of GitHub, or its folder data.
        images: COCO's val2017; by default it is looked for in `source`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source, "data")
    finder = Images(Path(images or source), "give the folder of COCO's val2017 as --images")
    cases = []
    for kind in KINDS:
        for row in read_rows(file_in(root, f"{kind}.json", _LAYOUT), filename=str, caption=str, negative_caption=str):
            captions = {"txt": [row["caption"], row["negative_caption"]]}
            cases.append(Case({"": finder(row["filename"])}, captions, {"kind": kind}))
    source = "SugarCrepe, RAIVNLab/sugar-crepe, on images of COCO val2017"
    licence = "MIT; COCO's captions CC BY 4.0, its images under Flickr's terms"
    return write_cases(directory, "composition", cases, finder, source=source, licence=licence)
