"""The settings of the language evaluations, one record for all. What they compute is in a file for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diffvision.data.made.needle_text import FORMS
from diffvision.data.shards.report import Limits

Granularity = Literal["layer", "head", "row"]
"""What shares a scale in quantised logits."""


@dataclass(frozen=True)
class LanguageOptions:
    """Settings of the language evaluations; each reads those that concern it. The defaults follow the paper.

    Args:
        tokens: of the documents, the most that are read.
        text_key: the member of shards with the text: "txt", "json:FIELD", or "jsonl:FIELD", a document in each line.
        max_bad_fraction: documents of shards that cannot be used are left out and counted; more of them are an error.
        window: tokens that a model reads at a time; None for the model's length, at most 2048.
        stride: distance of perplexity's windows; None for windows that do not overlap.
        points: positions of `position_nll`'s curve.
        frequent_text: training text (as `data`) whose frequent bigrams are no recall.
        frequent_count: a bigram that occurs more often there is frequent.
        form: of the needles' text: "text", or "synthetic" for small models.
        haystack: a text file to hide needles in; None for the form's sentences.
        lengths: of the contexts with needles; None for those of 512, 1024, 2048, 4096 that the model can read.
        depths: of the answer in the context.
        needles: "NxR", N needles of which R are asked for.
        facts: of recall_errors, numbers of facts in a context, of which one is asked for.
        samples: contexts a depth and length.
        shots: numbers of demonstrations.
        order_shots: demonstrations whose order is changed.
        permutations: orders.
        mappings: tasks of the synthetic many-shot form.
        classes: classes of each.
        queries: questions of each, of words that its demonstrations do not show.
        bits: of quantised logits.
        granularity: what shares a scale: "layer", "head" or "row".
        quantised_needles: take the needle accuracy in `quantization` and `low_bit` as well.
        schemes: of `low_bit`: what is rounded, names of `low_bit.SCHEMES`; None for all.
        recent: tokens that `low_bit`'s caches keep in full precision.
        rows: of faithfulness's data, how many are drawn with the seed; None for all.
        new_tokens: the most tokens of an output of faithfulness.
        prompts: a JSON file of other prompts for faithfulness, {"summary", "qa" or LongBench's dataset: text with
            {context} and {input}}, such as LongBench's dataset2prompt.json.
        batch_size: rows at a time.
        seed: of what is drawn.
    """

    tokens: int = 400_000
    text_key: str = "txt"
    max_bad_fraction: float = 0.01
    window: int | None = None
    stride: int | None = None
    points: int = 32
    frequent_text: str | None = None
    frequent_count: int = 1250
    form: str = "text"
    haystack: str | None = None
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: tuple[str, ...] = ("1x1", "2x2", "4x2", "6x2")
    facts: tuple[int, ...] = (1, 2, 4, 8)
    samples: int = 50
    shots: tuple[int, ...] = (1, 4, 16, 64)
    order_shots: int = 64
    permutations: int = 10
    mappings: int = 8
    classes: int = 4
    queries: int = 16
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: Granularity = "layer"
    quantised_needles: bool = False
    schemes: tuple[str, ...] | None = None
    recent: int = 128
    rows: int | None = None
    new_tokens: int = 256
    prompts: str | None = None
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("tokens", "points", "samples", "order_shots", "mappings", "queries", "new_tokens", "batch_size")
        lists = ("lengths", "shots", "facts")
        values = [(name, getattr(self, name)) for name in counts]
        values += [(name, value) for name in lists for value in getattr(self, name) or ()]
        values += [
            (name, getattr(self, name)) for name in ("window", "stride", "rows") if getattr(self, name) is not None
        ]
        for name, value in values:
            if value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 1")
        for name in ("depths", "needles", "facts", "shots", "bits"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        for name in ("lengths", "depths", "needles", "facts", "shots", "bits", "schemes"):
            given = getattr(self, name) or ()
            if len(set(given)) < len(given):
                raise ValueError(f"{name} is {list(given)}: give each value once, for it would count twice")
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}: choose one of {', '.join(FORMS)}")
        for pair in self.needles:
            needle_pair(pair)
        if self.text_key != "txt":
            from diffvision.data.text.documents import TextMember  # imports PyTorch, which the defaults do not need

            TextMember(self.text_key)
        if self.schemes is not None or self.recent < 0:
            from diffvision.evaluation.language import low_bit

            low_bit.check_schemes(self.schemes or ())
            low_bit.Settings(recent=self.recent)
        Limits(self.max_bad_fraction)


def needle_pair(text: str) -> tuple[int, int]:
    """Return (N, R) of "NxR"; raise a ValueError if it is none."""
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(second) <= int(first)):
        raise ValueError(f"needles has {text!r}: write NxR, N needles of which R are asked for, such as 4x2")
    return int(first), int(second)
