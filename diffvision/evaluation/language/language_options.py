"""The settings of the language evaluations; each evaluation has a file."""

from __future__ import annotations

from dataclasses import dataclass

from diffvision.data.datasets.needle_text import FORMS
from diffvision.data.shards.report import Limits

SCHEMES = (
    *("logits_8", "logits_6", "logits_4", "qk_int8", "qk_int8_smooth", "qk_int4", "qk_int4_smooth"),
    *("pv_int8", "pv_fp8", "cache_8", "cache_4", "cache_2"),
)
"""Of low_bit."""
METHODS = ("window", "random", "knorm", "h2o", "snap", "tova", "diff")
"""Of cache_pruning."""


@dataclass(frozen=True)
class LanguageOptions:
    """Settings of the language evaluations. The defaults follow the paper.

    Args:
        tokens: the most tokens to read from the documents.
        text_key: the member of shards with the text: "txt", "json:FIELD", or "jsonl:FIELD", a document in each line.
        max_bad_fraction: the largest share of unusable documents in shards, which are skipped and counted.
        window: tokens that a model reads at a time; None for the model's length, at most 2048.
        form: of needles: "text", or "synthetic", for small models trained on the text of `data make recall`.
        lengths: tokens of the contexts with needles; None for those of 512, 1024, 2048, 4096 that the model can read.
        depths: where in the context the answer is, from 0 (first) to 1.
        needles: "NxR", N needles of which R are asked for.
        samples: contexts for each depth and length.
        batch_size: rows at a time.
        seed: for all random draws.
        facts: recall_errors: numbers of facts in a context, of which one is asked for.
        shots: many_shot: numbers of demonstrations; their order is varied for the largest.
        permutations: many_shot: how many orders of the demonstrations.
        mappings: many_shot: how many tasks.
        schemes: low_bit: logits_8, logits_6, logits_4, qk_int8, qk_int8_smooth, qk_int4, qk_int4_smooth, pv_int8,
            pv_fp8, cache_8, cache_4, cache_2; None for all.
        pruning_methods: cache_pruning: window, random, knorm, h2o, snap, tova, and for differential models diff; empty
            for all that the model supports.
        pruning_ratios: cache_pruning: shares of the prompt's tokens that are dropped.
        continuation: cache_pruning: tokens after the pruned prompt that are predicted.
        rows: math: questions of each file that are drawn with the seed; None for all.
        new_tokens: math: the most tokens of an output.
        template: math: the prompt, with {question} in it.

    Raises:
        ValueError: a value is out of its range, empty, or given twice.
    """

    tokens: int = 400_000
    text_key: str = "txt"
    max_bad_fraction: float = 0.01
    window: int | None = None
    form: str = "text"
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: tuple[str, ...] = ("1x1", "2x2", "4x2", "6x2")
    samples: int = 50
    batch_size: int = 8
    seed: int = 0
    facts: tuple[int, ...] = (1, 2, 4, 8)
    shots: tuple[int, ...] = (1, 4, 16, 64)
    permutations: int = 10
    mappings: int = 8
    pruning_methods: tuple[str, ...] = ()
    pruning_ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 0.95)
    continuation: int = 128
    schemes: tuple[str, ...] | None = None
    rows: int | None = None
    new_tokens: int = 256
    template: str = "Question: {question}\nAnswer:"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        for pair in self.needles:
            needle_pair(pair)
        if self.text_key != "txt":
            from diffvision.data.text.documents import TextMember  # imports PyTorch, which the defaults do not need

            TextMember(self.text_key)
        Limits(self.max_bad_fraction)
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if not values and name != "pruning_methods":
                raise ValueError(f"{name} is empty: give at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must have each value once, or it counts twice, got {list(values)}")
            small = [number for number in values if isinstance(number, int) and number < 1]
            if small and name not in ("seed", "depths", "max_bad_fraction"):
                raise ValueError(f"{name} must be at least 1, got {small[0]}")
        for name, known in (("schemes", SCHEMES), ("pruning_methods", METHODS)):
            if unknown := [value for value in getattr(self, name) or () if value not in known]:
                raise ValueError(f"{name} must be among {', '.join(known)}, got {unknown[0]!r}")
        for ratio in self.pruning_ratios:
            if not 0 < ratio < 1:
                raise ValueError(
                    f"pruning_ratios, shares of the prompt to drop, must be above 0 and below 1, got {ratio}"
                )
        if "{question}" not in self.template:
            raise ValueError(f"template must have {{question}}, got {self.template!r}")


def needle_pair(text: str) -> tuple[int, int]:
    """Return (N, R) of "NxR".

    Raises:
        ValueError: the text has another form.
    """
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(second) <= int(first)):
        raise ValueError(f"needles must be NxR, N needles of which R are asked for, such as 4x2, got {text!r}")
    return int(first), int(second)
