"""`winoground`: Winoground (Thrush et al., 2022, arXiv 2204.03162), 400 times two images and two captions.

Both captions of a sample have the same words in another order. With s_ct the score of caption c and image t, the text
score needs s_00 > s_10 and s_11 > s_01, the image score s_00 > s_01 and s_11 > s_10, the group score both; chance is
25, 25 and 16.7%, and a tie is wrong in all three. The kind of a sample is its `collapsed_tag` (Object, Relation or
Both); its finer `tag` is kept next to it.

The set must be asked for: facebook/winoground on the Hugging Face Hub, for research only. It comes as .parquet files
with the images in them, or (formerly) as examples.jsonl with images.zip, which must be unpacked.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffvision.data.datasets.cases import (
    Folder,
    Images,
    checked_rows,
    folder_of,
    pair,
    read_rows,
    write_folders,
)
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
        [Path(images)] if images else [root, Path(source)], "unpack images.zip, and give its folder as --images"
    )
    tables = sorted(root.glob("test-*.parquet"))
    if tables:
        rows = _parquet(tables)
    elif (root / "examples.jsonl").is_file():
        rows = _lines(root / "examples.jsonl", finder)
    else:
        raise BadSource(f"{root} has neither examples.jsonl nor test-*.parquet: {_LAYOUT}")
    cases = [
        pair(
            [row["image_0"], row["image_1"]],
            [row["caption_0"], row["caption_1"]],
            kind=row["collapsed_tag"],
            tag=row.get("tag"),
        )
        for row in rows
    ]
    return write_folders(
        directory,
        [Folder("pairs", "pairs", cases)],
        finder,
        source="Winoground, facebook/winoground",
        licence="Winoground's, for research only; images of Getty Images",
    )


def _lines(path: Path, images: Images) -> Iterator[dict[str, Any]]:
    """Yield rows of examples.jsonl, whose images are named without their suffix."""
    for row in read_rows(path, image_0=str, image_1=str, **_FIELDS):
        for side in ("image_0", "image_1"):
            row[side] = images(row[side] if Path(row[side]).suffix else f"{row[side]}.png")
        yield row


def _parquet(tables: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield rows with the encoded bytes of their images."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f'.parquet files are read by pyarrow ({error}): pip install "diffvision[data]"') from None
    columns = ["image_0", "image_1", "tag", *_FIELDS]
    for path in tables:
        try:
            table = ParquetFile(path)
            if absent := sorted(set(columns) - set(table.schema_arrow.names)):
                raise BadSource(f"{path} has no columns {', '.join(absent)}: {_LAYOUT}")
            rows = table.read(columns=columns).to_pylist()
        except (ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): get the file again") from None
        for row in rows:
            row |= {side: (row[side] or {}).get("bytes") for side in ("image_0", "image_1")}
        yield from checked_rows(rows, path, image_0=bytes, image_1=bytes, **_FIELDS)
