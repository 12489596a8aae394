"""`winoground`: Winoground (Thrush et al., 2022, arXiv 2204.03162), 400 times two images and two captions.

Both captions of a sample have the same words in another order. With s_ct the score of caption c and image t, the text
score needs s_00 > s_10 and s_11 > s_01, the image score s_00 > s_01 and s_11 > s_10, the group score both; chance is
25, 25 and 16.7%, and a tie is wrong in all three. The kind of a sample is its `collapsed_tag` (Object, Relation or
Both); its finer `tag` is kept next to it.

The set must be asked for: facebook/winoground on the Hugging Face Hub, for research only. It comes as .parquet files
with the images in them.
"""

from pathlib import Path

from diffvision.data.datasets.cases import Images, folder_of, pair, read_rows, write_cases
from diffvision.data.shards.sample import BadSource

_FIELDS = {"caption_0": str, "caption_1": str, "collapsed_tag": str}
_LAYOUT = "Winoground is a folder with test-*.parquet"


def make_winoground(directory: str | Path, source: str | Path) -> str:
    """Write Winoground, pairs of images and captions of the same words, as the evaluation folder `pairs`.

    Args:
        directory: the folder to write.
        source: the folder of the .parquet files, or the one above it. Ask for access, then
            `hf download facebook/winoground --repo-type dataset --local-dir FOLDER`.

    Returns:
        What was written.

    Raises:
        ValueError: another layout, or damaged images.
    """
    root = folder_of(source, "data")
    tables = sorted(root.glob("test-*.parquet"))
    if not tables:
        raise BadSource(f"{root} has no test-*.parquet: {_LAYOUT}")
    cases = [
        pair(
            [row[side].get("bytes") or b"" for side in ("image_0", "image_1")],
            [row["caption_0"], row["caption_1"]],
            kind=row["collapsed_tag"],
            tag=row.get("tag"),
        )
        for table in tables
        for row in read_rows(table, image_0=dict, image_1=dict, **_FIELDS)
    ]
    images = Images(root, "ask for the set")
    licence = "Winoground's, for research only; images of Getty Images"
    return write_cases(directory, "pairs", cases, images, source="Winoground, facebook/winoground", licence=licence)
