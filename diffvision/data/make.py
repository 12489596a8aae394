"""The commands `data make`, `data check` and `data stats`: they print; what they print is computed elsewhere."""

from pathlib import Path

from rich.console import Console

from diffvision.data.packing import write_manifest

__all__ = ["MADE", "check", "make", "stats", "write_manifest"]

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
    made = f"made {name} in {Path(directory)}"
    settings = {} if copies is None else {"copies": copies}
    if name == "digits":
        from diffvision.data.digits import make_digits

        make_digits(directory, seed=seed, **settings)
    elif name == "digit-scenes":
        from diffvision.data.scenes import make_scenes

        make_scenes(directory, seed=seed, **settings)
    elif name == "folder":
        from diffvision.data.packing import pack_folder

        if source is None:
            raise ValueError("make folder needs --source, the folder of images")
        packed = pack_folder(source, directory, captions, per_shard=per_shard, num_workers=num_workers)
        made = f"packed {packed.samples:,} samples in {Path(directory)}, left out {packed.skipped.total():,}"
        for reason, count in packed.skipped.most_common():
            made += f"\n  {count:,} x {reason}, first {packed.examples[reason]}"
    else:
        raise ValueError(f"no data set is called {name!r}: there are {', '.join(MADE)}")
    print(made)
    return 0


def check(directory: str, num_workers: int = 2) -> int:
    """Verify shards and decode every sample of them. Returns 1 if anything is wrong.

    Args:
        directory: shards, or folders of shards at any depth.
        num_workers: processes.
    """
    from diffvision.data.checks import check_shards, check_tables

    results = check_shards(directory, num_workers)
    Console().print(check_tables(results, directory))
    return 0 if all(result.ok for result in results) else 1


def stats(directory: str, num_workers: int = 2) -> int:
    """Count and measure shards.

    Args:
        directory: shards, or folders of shards at any depth.
        num_workers: processes.
    """
    from diffvision.data.checks import shard_stats, stats_table

    Console().print(stats_table(shard_stats(directory, num_workers), directory))
    return 0
