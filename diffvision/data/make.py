"""The commands `data make`, `data check` and `data stats`: they print; what they print is computed elsewhere."""

from pathlib import Path

from diffvision.data.packing import write_manifest

__all__ = ["MADE", "make", "write_manifest"]

MADE = ("digits", "digit-scenes", "folder")


def make(
    name: str,
    directory: str,
    source: str | None = None,
    captions: str | None = None,
    copies: int | None = None,
    seed: int = 0,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> int:
    """Write a data set as WebDataset shards with a manifest.

    Args:
        name: digits, digit-scenes, or folder to pack images that you have.
        directory: where; it must have no shards yet.
        source: for folder: the folder of images.
        captions: for folder: a csv or tsv with a header, columns such as image and caption; else x.txt beside x.jpg.
        copies: for digits and digit-scenes: images made of each training digit.
        seed: of all that is drawn at random in digits and digit-scenes.
        per_shard: for folder: samples a shard.
        num_workers: for folder: processes.
    """
    settings = {} if copies is None else {"copies": copies}
    if name == "digits":
        from diffvision.data.digits import make_digits

        make_digits(directory, seed=seed, **settings)
    elif name == "digit-scenes":
        from diffvision.data.scenes import make_scenes

        make_scenes(directory, seed=seed, **settings)
    else:
        raise ValueError(f"no data set is called {name!r}: there are {', '.join(MADE)}")
    print(f"made {name} in {Path(directory)}")
    return 0
