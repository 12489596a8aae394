"""What img2dataset notes of each shard that it writes: `00000_stats.json` next to `00000.tar`.

A URL that failed is in no shard, so these notes alone say how much of a list was downloaded, and why not all.
"""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diffvision.data.shards.sources import PLAIN, Shard, read_small_file

_REASONS = 20  # of a shard that are kept apart: servers write them
_MAX_REASON = 80  # characters


@dataclass
class Downloads:
    """The URLs of one shard or several: how many were tried, became samples, and failed by reason."""

    urls: int = 0
    samples: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Downloads") -> "Downloads":
        return Downloads(self.urls + other.urls, self.samples + other.samples, self.failed + other.failed)

    def summary(self) -> str:
        """Return a line of the counts, with the commonest reasons."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.failed.most_common(3))
        return (
            f"img2dataset downloaded {self.samples:,} of {self.urls:,} URLs ({self.samples / max(1, self.urls):.1%})"
            + (f"; failed: {reasons}" if reasons else "")
        )


def read_downloads(shard: Shard) -> Downloads | None:
    """Return img2dataset's notes of a local shard; None where there are none, or only the beginning of a file."""
    if shard.remote or not shard.name.endswith(PLAIN):
        return None
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        name = shard.name.removesuffix(PLAIN[0]) + "_stats.json"
        stats = json.loads(read_small_file(Path(shard.location).parent, name) or "")
        urls, samples = int(stats["count"]), int(stats["successes"])
        reasons = Counter({str(name): int(count) for name, count in stats["status_dict"].items()})
        del reasons["success"]
        failed = Counter[str]()
        for reason, count in reasons.most_common(_REASONS):
            failed["".join(c if c.isprintable() else " " for c in reason[:_MAX_REASON])] += count
        if rest := urls - samples - failed.total():
            failed["other reasons"] += rest
        return Downloads(urls, samples, failed)
    return None


def sum_downloads(shards: Iterable[Shard]) -> Downloads | None:
    """Return the sum of img2dataset's notes of some shards; None where it has noted nothing of any."""
    noted = [one for one in map(read_downloads, shards) if one is not None]
    return sum(noted, Downloads()) if noted else None
