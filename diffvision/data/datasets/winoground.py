"""`winoground`: Winoground (Thrush et al., 2022, arXiv 2204.03162), 400 times two images and two captions.

Both captions of a sample have the same words in another order. With s_ct the score of caption c and image t, the text
score needs s_00 > s_10 and s_11 > s_01, the image score s_00 > s_01 and s_11 > s_10, the group score both; chance is
25, 25 and 16.7%, and a tie is wrong in all three. The kind of a sample is its `collapsed_tag` (Object, Relation or
Both); its finer `tag` is kept next to it.

The set must be asked for: facebook/winoground on the Hugging Face Hub, for research only. It comes as .parquet files
with the images in them, or (formerly) as examples.jsonl with images.zip, which must be unpacked.
"""

from pathlib import Path
from typing import Any

from diffvision.data.datasets.cases import Images, folder_of, pair, read_rows, write_folders
from diffvision.data.shards.sample import BadSource

_FIELDS = {"caption_0": str, "caption_1": str, "collapsed_tag": str}
_LAYOUT = "Winoground is a folder with examples.jsonl and images/ (images.zip, unpacked), or with test-*.parquet"


def make_winoground(directory: str | Path, source: str | Path, images: str | Path | None = None) -> str:
    """Write Winoground, pairs of images and captions of the same words, as the evaluation folder `pairs`.

    Args:
        directory: the folder to write.
        source: the folder of examples.jsonl or of the .parquet files, or the one above it. Ask for access, then
            `hf download facebook/winoground --repo-type dataset --local-dir FOLDER`.
        images: the folder with the images of images.zip; by default it is looked for in `source`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or images are missing or damaged.
    """
    root = folder_of(source, "data")
    finder = Images(
        Path(images or (source if Path(source, "images").is_dir() else root)),
        "unpack images.zip, and give its folder as --images",
    )
    tables = sorted(root.glob("test-*.parquet"))
    if tables:
        rows = [row for path in tables for row in read_rows(path, image_0=dict, image_1=dict, **_FIELDS)]
    elif (root / "examples.jsonl").is_file():
        rows = read_rows(root / "examples.jsonl", image_0=str, image_1=str, **_FIELDS)
    else:
        raise BadSource(f"{root} has neither examples.jsonl nor test-*.parquet: {_LAYOUT}")
    cases = [
        pair(
            [_image(row[side], finder) for side in ("image_0", "image_1")],
            [row["caption_0"], row["caption_1"]],
            kind=row["collapsed_tag"],
            tag=row.get("tag"),
        )
        for row in rows
    ]
    return write_folders(
        directory,
        "pairs",
        {"pairs": cases},
        finder,
        source="Winoground, facebook/winoground",
        licence="Winoground's, for research only; images of Getty Images",
    )


def _image(given: Any, images: Images) -> Path | bytes:
    """Return the bytes of a table's image, or the file of one that is named without its suffix."""
    if isinstance(given, dict):
        return given.get("bytes") or b""
    return images(given if Path(given).suffix else f"{given}.png")
