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
        tokens: the most tokens of the documents that are read.
        text_key: the member of shards with the text: "txt", "json:FIELD", or "jsonl:FIELD", a document in each line.
        max_bad_fraction: documents of shards that cannot be used are left out and counted; a larger share of them is
            an error.
        window: tokens that a model reads at a time; None for the model's length, at most 2048.
        stride: perplexity: tokens from one window to the next; None for windows that do not overlap.
        points: position_nll: positions of the curve.
        frequent_text: associative_recall: training text (as `data`); its frequent bigrams do not count as recall.
        frequent_count: associative_recall: a bigram that occurs more often in that text is frequent.
        form: of needles and facts: "text", or "synthetic", for small models trained on the text of `data make recall`.
        haystack: a text file to hide needles in; None for the sentences of the form.
        lengths: tokens of the contexts with needles or facts; None for those of 512, 1024, 2048, 4096 that the model
            can read.
        depths: where in the context the answer is, from 0 (first) to 1.
        needles: "NxR", N needles of which R are asked for.
        facts: recall_errors and lookback: numbers of facts in a context, of which one is asked for.
        samples: contexts for each depth and length.
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
        batch_size: rows at a time.
        seed: of all that is drawn at random.
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
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            "tokens",
            "points",
            "samples",
            "order_shots",
            "mappings",
            "queries",
            "new_tokens",
            "shown",
            "batch_size",
        )
        lists = ("lengths", "shots", "facts")
        values = [(name, getattr(self, name)) for name in (*counts, "pruning_window", "continuation")]
        values += [(name, value) for name in lists for value in getattr(self, name) or ()]
        values += [
            (name, getattr(self, name)) for name in ("window", "stride", "rows") if getattr(self, name) is not None
        ]
        for name, value in values:
            if value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 1")
        for name in ("depths", "needles", "facts", "shots", "bits", "pruning_ratios"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        for ratio in self.pruning_ratios:
            if not 0 < ratio < 1:
                raise ValueError(
                    f"pruning_ratios has {ratio}: give shares of the prompt to drop, above 0 and below 1 (0, the whole "
                    "cache, is always measured, and 1 keeps nothing)"
                )
        for name in (
            "lengths",
            "depths",
            "needles",
            "facts",
            "shots",
            "bits",
            "schemes",
            "pruning_ratios",
            "pruning_methods",
        ):
            given = getattr(self, name) or ()
            if len(set(given)) < len(given):
                raise ValueError(f"{name} is {list(given)}: give each value once, for it would count twice")
        if self.form not in FORMS:
            raise ValueError(f"form is {self.form!r}: choose one of {', '.join(FORMS)}")
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}: write {{question}} where the question belongs")
        for pair in self.needles:
            needle_pair(pair)
        if self.pruning_methods:
            from diffvision.lab.pruning import METHODS  # imports PyTorch, as below

            if unknown := [method for method in self.pruning_methods if method not in METHODS]:
                raise ValueError(f"pruning_methods has {unknown[0]!r}: choose among {', '.join(METHODS)}")
        if self.text_key != "txt":
            from diffvision.data.text.documents import TextMember  # imports PyTorch, which the defaults do not need

            TextMember(self.text_key)
        Limits(self.max_bad_fraction)


def needle_pair(text: str) -> tuple[int, int]:
    """Return (N, R) of "NxR"; raise a ValueError if it is none."""
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(second) <= int(first)):
        raise ValueError(f"needles has {text!r}: write NxR, N needles of which R are asked for, such as 4x2")
    return int(first), int(second)
