"""The settings of the lab's language evaluations, in addition to those of the library's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diffvision.evaluation.language.options import LanguageOptions

Granularity = Literal["layer", "head", "row"]
"""What shares a scale in quantised logits."""
SCHEMES = (
    "logits_8",
    "logits_6",
    "logits_4",
    "qk_int8",
    "qk_int8_smooth",
    "qk_int4",
    "qk_int4_smooth",
    "pv_int8",
    "pv_fp8",
    "cache_8",
    "cache_4",
    "cache_2",
)
"""Names of the schemes of low_bit, whose module imports PyTorch."""


@dataclass(frozen=True)
class LabOptions(LanguageOptions):
    """The settings of the library's evaluations, and of the lab's; the defaults follow the paper.

    Args:
        frequent_text: associative_recall: training text (as `data`); its frequent bigrams do not count as recall.
        frequent_count: associative_recall: a bigram that occurs more often in that text is frequent.
        facts: recall_errors and lookback: numbers of facts in a context, of which one is asked for.
        shots: many_shot: numbers of demonstrations.
        order_shots: many_shot: demonstrations in the test of their order.
        permutations: many_shot: orders of them.
        mappings: many_shot, synthetic: tasks.
        classes: many_shot, synthetic: classes of a task.
        queries: many_shot, synthetic: questions of a task, of words that its demonstrations do not show.
        bits: quantization: bits of the logits.
        granularity: quantization, and the logits_* of low_bit: what shares a scale.
        quantised_needles: quantization and low_bit: measure the needle accuracy as well.
        schemes: low_bit: logits_8, logits_6, logits_4, qk_int8, qk_int8_smooth, qk_int4, qk_int4_smooth, pv_int8,
            pv_fp8, cache_8, cache_4, cache_2; None for all.
        recent: low_bit: the last tokens, which a rounded cache keeps in full precision.
        pruning_methods: cache_pruning: window, random, knorm, h2o, snap, tova, snap_value, and of differential models
            diff, diff_value, map1, sum; empty for all that the model can have.
        pruning_ratios: cache_pruning: shares of the prompt's tokens that are dropped.
        pruning_window: cache_pruning: the last tokens of a prompt, which are kept, and whose queries score the others.
        continuation: cache_pruning: tokens after the pruned prompt that are predicted.
        rows: faithfulness and math: rows of the data that are drawn with the seed; None for all.
        new_tokens: faithfulness and math: the most tokens of an output.
        prompts: faithfulness: a JSON file of other prompts, {"summary", "qa" or LongBench's dataset: text with
            {context} and {input}}, such as LongBench's dataset2prompt.json.
        chat: faithfulness and math: ask in a user's message, written by a chat template: tokenizer (the one that came
            with it), chatml, question, plain, or a file of Jinja; None for plain text, as base models are asked.
        template: math: the prompt, with {question} in it.
        examples: math: a file of questions, in any layout of its data, that are shown with their solutions before
            the question.
        shown: math: how many of the examples, from the first on.

    Raises:
        ValueError: a value is out of its range, empty, given twice, or unknown.
    """

    frequent_text: str | None = None
    frequent_count: int = 1250
    facts: tuple[int, ...] = (1, 2, 4, 8)
    shots: tuple[int, ...] = (1, 4, 16, 64)
    order_shots: int = 64
    permutations: int = 10
    mappings: int = 8
    classes: int = 4
    queries: int = 16
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: Granularity = "layer"
    quantised_needles: bool = False
    pruning_methods: tuple[str, ...] = ()
    pruning_ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 0.95)
    pruning_window: int = 32
    continuation: int = 128
    schemes: tuple[str, ...] | None = None
    recent: int = 128
    rows: int | None = None
    new_tokens: int = 256
    prompts: str | None = None
    chat: str | None = None
    template: str = "Question: {question}\nAnswer:"
    examples: str | None = None
    shown: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("order_shots", "mappings", "queries", "new_tokens", "shown", "pruning_window", "continuation")
        self.check_counts("shots", "facts", "rows")
        self.check_lists("facts", "shots", "bits", "pruning_ratios", "schemes")
        if self.pruning_methods:
            self.check_lists("pruning_methods")
        for ratio in self.pruning_ratios:
            if not 0 < ratio < 1:
                raise ValueError(f"pruning_ratios has {ratio}: give shares of the prompt to drop, above 0 and below 1")
        if self.recent < 0:
            raise ValueError(f"recent is {self.recent}: give the tokens that the cache keeps in full, 0 or more")
        if self.pruning_methods:
            from diffvision.lab.pruning import METHODS  # imports PyTorch

            if unknown := [method for method in self.pruning_methods if method not in METHODS]:
                raise ValueError(f"pruning_methods has {unknown[0]!r}: choose among {', '.join(METHODS)}")
        check_schemes(self.schemes or ())


def check_schemes(names: Sequence[str]) -> None:
    """Raise a ValueError for a name that is not in `SCHEMES`."""
    for name in names:
        if name not in SCHEMES:
            raise ValueError(f"unknown scheme {name!r}: choose among {', '.join(SCHEMES)}")


def lab_options(options: LanguageOptions) -> LabOptions:
    """Return the options, with the defaults of the lab's settings where they have none."""
    return options if isinstance(options, LabOptions) else LabOptions(**dataclasses.asdict(options))
