"""Answers to a question about one of N facts: the right value, another value of the context, or an invented one.

It measures the contextual hallucination of arXiv 2410.05258 section 3.6 (the context holds the fact, and the answer
contradicts it) where the truth is exact and no judge is needed. Contexts are those of needle retrieval with one
question; the answer is decoded greedily.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch

from diffvision.data.datasets.needle_text import FORMS, Form
from diffvision.evaluation.language.generations import continue_greedily
from diffvision.evaluation.language.needle import DEPTHS, NeedleSample, needle_samples
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.evaluation.per_sample import PerSample, fingerprint
from diffvision.models.modes import evaluating
from diffvision.opening import Model

Answer = Literal["correct", "distracted", "fabricated", "malformed"]
ANSWERS: tuple[Answer, ...] = ("correct", "distracted", "fabricated", "malformed")


def recall_errors(
    model: Model,
    *,
    facts: Sequence[int] = (1, 2, 4, 8),
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    depths: Sequence[float] = DEPTHS,
    samples: int = 50,
    form: Form = FORMS["text"],
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, PerSample]:
    """Return the share of the answers in each class of `classify`.

    Args:
        model: with its tokenizer.
        facts: numbers N of facts in a context.
        lengths, depths, samples, form, seed: as `needle.needle_samples`; `samples` for each N, length and depth.
        batch_size: contexts at a time.

    Returns:
        "<class>" over all, "<N>x1/<class>" for each N, and "<N>x1/<class>/<length>"; and for two facts or more
        "<N>x1/correct_of_copied", the share of right ones among answers that are a number of the context.
    """
    shared: dict[str, Any] = {"samples": samples, "form": form, "seed": seed}
    # All contexts are drawn first, because a length that cannot hold its facts is an error.
    drawn = {
        (count, length): [
            sample
            for depth in depths
            for sample in needle_samples(model.tokenizer, length=length, depth=depth, needles=count, **shared)
        ]
        for count in facts
        for length in lengths
    }
    rows: list[tuple[int, int, Answer, int]] = []  # number of facts, length, answer, unit
    for count, length in progress(list(drawn), "answers about one of N facts"):
        of_cell = drawn[count, length]
        for sample, (_, answer) in zip(of_cell, decode_answers(model, of_cell, form, batch_size), strict=True):
            rows.append((count, length, answer, hash_sample(sample.tokens)))

    results: dict[str, PerSample] = {answer: _share(answer, rows) for answer in ANSWERS}
    for count in facts:
        of_count = [row for row in rows if row[0] == count]
        for answer in ANSWERS:
            results[f"{count}x1/{answer}"] = _share(answer, of_count)
            for length in lengths:
                of_length = [row for row in of_count if row[1] == length]
                results[f"{count}x1/{answer}/{length}"] = _share(answer, of_length)
        copied = [row for row in of_count if row[2] in ("correct", "distracted")]
        if count > 1 and copied:
            results[f"{count}x1/correct_of_copied"] = _share("correct", copied)
    return results


def _share(answer: Answer, rows: Sequence[tuple[int, int, Answer, int]]) -> PerSample:
    """Return which rows have an answer."""
    return PerSample(torch.tensor([row[2] == answer for row in rows]), torch.tensor([row[3] for row in rows]))


def classify(output: str, value: int, context: str, form: Form) -> Answer:
    """Return the class of an answer.

    Args:
        output: what the model wrote after the city's name.
        value: the right number.
        context: the text with all facts.
        form: how numbers are written: one outside of its range, or with more behind it ("12a", "12,5"), is malformed.

    Returns:
        "correct"; "distracted", if it is another number of the context; "fabricated", if the number is nowhere in it;
        "malformed", if the output does not begin with a number of the form.
    """
    number = re.match(r"\s*([1-9]\d*)(?!\w|[.,]\d)", output)
    if number is None or not form.lowest <= int(number[1]) <= form.highest:
        return "malformed"
    if int(number[1]) == value:
        return "correct"
    return "distracted" if int(number[1]) in map(int, re.findall(r"\d+", context)) else "fabricated"


def hash_sample(content: object) -> int:
    """Return a hash of a sample as its unit, so that two models are compared only on equal samples."""
    return int(fingerprint(content)[:15], 16)


def decode_answers(
    model: Model, drawn: Sequence[NeedleSample], form: Form, batch_size: int
) -> list[tuple[list[int], Answer]]:
    """Return the tokens that the model writes after each sample's last city, and their class."""
    tokenizer = model.tokenizer
    end = form.answer.partition("{number}")[2][:1]  # the mark after the number
    digits = len(str(form.highest)) + 2  # as many tokens as a number can have, with a space and what ends it
    written: list[tuple[list[int], Answer]] = []
    with evaluating(model.module):
        for start in range(0, len(drawn), batch_size):
            batch = drawn[start : start + batch_size]
            prompts = [sample.tokens[: sample.answers[0][0]] for sample in batch]
            room = digits if model.max_length is None else min(digits, model.max_length - max(map(len, prompts)))
            new = continue_greedily(model, prompts, max_new_tokens=room, stops=(end,) if end else ())
            for sample, tokens in zip(batch, new, strict=True):
                value = int(tokenizer.decode(sample.tokens[slice(*sample.answers[0])]))
                context = tokenizer.decode(sample.tokens[: sample.question])
                written.append((tokens, classify(tokenizer.decode(tokens), value, context, form)))
    return written
