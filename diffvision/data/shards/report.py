"""What became of an epoch's samples: seen, skipped by reason, in the tail; and when bad ones are too many.

The loaders count; nothing is read or printed here.
"""

from collections import Counter
from dataclasses import dataclass, field


class BadDataError(RuntimeError):
    """Too many samples of a dataset cannot be used."""


class WorkerError(RuntimeError):
    """A process that reads data is stuck, or ended in the middle of its work."""


@dataclass(frozen=True)
class Limits:
    """When bad samples stop a run: more than this fraction of an epoch's samples, or this many in a row.

    `settable` says whether the user has the option max_bad_fraction.
    """

    max_bad_fraction: float = 0.01
    max_bad_in_a_row: int = 100
    settable: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction is {self.max_bad_fraction}: it must lie between 0 and 1")
        if self.max_bad_in_a_row < 1:
            raise ValueError(f"max_bad_in_a_row is {self.max_bad_in_a_row}: it must be at least 1")


@dataclass
class Tally:
    """What a worker reports of one batch, next to it: plain values, so that they are cheap to send."""

    start: int
    stop: int
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)  # position -> (reason, "shard: key")
    substituted: int = 0
    given_up: bool = False
    cut: int = 0


@dataclass
class Report:
    """One rank's account of one epoch: `seen + skipped + tail + before + remaining == total`, summed over ranks.

    Attributes:
        total: samples in the dataset, of all ranks.
        seen: samples delivered at their position, by this rank.
        skipped: bad samples at this rank's positions, by reason.
        substituted: good samples delivered a second time, in place of a bad one.
        cut: captions with more tokens than the tokenizer keeps.
        tail: samples after the last whole global batch, left for other epochs (of all ranks).
        before: samples consumed before the run was resumed (of all ranks).
        examples: for each reason the first few samples, as "shard: key".
        extra_counts: counts of what is in no sample of the dataset, such as the tokens after the last whole sequence.
    """

    total: int
    epoch: int = 0
    tail: int = 0
    before: int = 0
    world_size: int = 1
    seen: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    substituted: int = 0
    cut: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    in_a_row: int = 0
    extra_counts: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Bad samples, whatever the reason."""
        return sum(self.skipped.values())

    @property
    def remaining(self) -> int:
        """Samples of all ranks that are still to come in this epoch."""
        return self.total - self.tail - self.before - (self.seen + self.bad) * self.world_size

    def add(self, tally: Tally, limits: Limits) -> None:
        """Count one batch.

        Raises:
            BadDataError: a limit is passed; the message has a summary.
        """
        self.cut += tally.cut
        self.seen += tally.stop - tally.start - len(tally.bad)
        if not tally.bad:
            self.in_a_row = 0
            return
        self.substituted += tally.substituted
        for reason, example in tally.bad.values():
            self.skipped[reason] += 1
            shown = self.examples.setdefault(reason, [])
            if len(shown) < 3:
                shown.append(example)
        longest = 0
        for position in range(tally.start, tally.stop):
            self.in_a_row = self.in_a_row + 1 if position in tally.bad else 0
            longest = max(longest, self.in_a_row)
        share = self.total / self.world_size  # of the whole epoch, or a run resumed near its end would stop at one
        is_away = self.skipped.keys() == {"unreadable shard"}
        remedy = "check that the disk is mounted and the server answers" if is_away else "correct or remove the files"
        if longest >= limits.max_bad_in_a_row or tally.given_up:
            raise BadDataError(
                f"{counted(longest)} in a row, nothing good to take their place: {remedy}.\n{self.summary()}"
            )
        if self.bad > limits.max_bad_fraction * share:
            raise BadDataError(
                f"{counted(self.bad)}: the limit is {limits.max_bad_fraction:.2%} of {share:,.0f}; {remedy}"
                f"{', or raise max_bad_fraction' if limits.settable else ''}.\n{self.summary()}"
            )

    def summary(self) -> str:
        """Return a line of counts, and the lines of `details`."""
        counts = (
            f"epoch {self.epoch + 1}: {self.seen:,} seen, {self.bad:,} skipped, {self.substituted:,} substituted, "
            f"{self.tail:,} in the incomplete last batch, of {self.total:,}"
        )
        return "\n".join([counts, *self.details()])

    def details(self) -> list[str]:
        """Return a line for each reason with its examples, one for cut captions, and one for the extra counts."""
        lines = [
            f"{count:,} x {reason}: {', '.join(self.examples[reason])}" for reason, count in self.skipped.most_common()
        ]
        if self.cut:
            lines.append(f"{self.cut:,} captions cut")
        if besides := [f"{count:,} {name.replace('_', ' ')}" for name, count in self.extra_counts.items() if count]:
            lines.append(f"besides: {', '.join(besides)}")
        return [f"  {line}" for line in lines]


def counted(bad: int) -> str:
    """Return "1 bad sample" or "2 bad samples"."""
    return f"{bad} bad sample{'' if bad == 1 else 's'}"
