"""The settings of the language evaluations. What they compute is in a file for each."""

from __future__ import annotations

from dataclasses import dataclass

from diffvision.data.datasets.needle_text import FORMS
from diffvision.data.shards.report import Limits


@dataclass(frozen=True)
class LanguageOptions:
    """Settings of the language evaluations; each reads those that concern it. The defaults follow the paper.

    Args:
        tokens: the most tokens of the documents that are read.
        text_key: the member of shards with the text: "txt", "json:FIELD", or "jsonl:FIELD", a document in each line.
        max_bad_fraction: documents of shards that cannot be used are left out and counted; a larger share of them is
            an error.
        window: tokens that a model reads at a time; None for the model's length, at most 2048.
        stride: perplexity: tokens from one window to the next; None for windows that do not overlap.
        points: position_nll: positions of the curve.
        form: of needles: "text", or "synthetic", for small models trained on the text of `data make recall`.
        haystack: a text file to hide needles in; None for the sentences of the form.
        lengths: tokens of the contexts with needles; None for those of 512, 1024, 2048, 4096 that the model can read.
        depths: where in the context the answer is, from 0 (first) to 1.
        needles: "NxR", N needles of which R are asked for.
        samples: contexts for each depth and length.
        batch_size: rows at a time.
        seed: of all that is drawn at random.

    Raises:
        ValueError: a value is out of its range, empty, or given twice.
    """

    tokens: int = 400_000
    text_key: str = "txt"
    max_bad_fraction: float = 0.01
    window: int | None = None
    stride: int | None = None
    points: int = 32
    form: str = "text"
    haystack: str | None = None
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: tuple[str, ...] = ("1x1", "2x2", "4x2", "6x2")
    samples: int = 50
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_counts("tokens", "points", "samples", "batch_size", "lengths", "window", "stride")
        self.check_lists("depths", "needles", "lengths")
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}: choose one of {', '.join(FORMS)}")
        for pair in self.needles:
            needle_pair(pair)
        if self.text_key != "txt":
            from diffvision.data.text.documents import TextMember  # imports PyTorch, which the defaults do not need

            TextMember(self.text_key)
        Limits(self.max_bad_fraction)

    def check_counts(self, *names: str) -> None:
        """Raise a ValueError for a number below 1, by itself or in a list."""
        for name in names:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and number < 1:
                    raise ValueError(f"{name} is {number}: give a number of at least 1")

    def check_lists(self, *names: str) -> None:
        """Raise a ValueError for a list that is empty, or has a value twice."""
        for name in names:
            values = getattr(self, name)
            if values == ():
                raise ValueError(f"{name} is empty: give at least one")
            if values is not None and len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}: give each value once, or it counts twice")


def needle_pair(text: str) -> tuple[int, int]:
    """Return (N, R) of "NxR".

    Raises:
        ValueError: the text has another form.
    """
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(second) <= int(first)):
        raise ValueError(f"needles has {text!r}: write NxR, N needles of which R are asked for, such as 4x2")
    return int(first), int(second)
