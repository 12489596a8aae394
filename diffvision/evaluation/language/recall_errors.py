"""What a model answers that was asked for one of N facts: the right value, another one of the context, or an invention.

This is the contextual hallucination of arXiv 2410.05258 section 3.6 (the context holds the fact, and the answer is not
what it says) where the truth is exact and no judge is needed. Contexts are those of needle retrieval with one question;
the answer is decoded greedily.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import torch

from diffvision.data.datasets.needle_text import Form, as_form
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
    form: str | Form = "text",
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, PerSample]:
    """Return which share of the answers is of each class of `classify`.

    Args:
        model: with its tokenizer.
        facts: numbers N of facts in a context.
        lengths, depths, samples, form, seed: as `needle.needle_samples`; `samples` for each N, length and depth.
        batch_size: contexts at a time.

    Returns:
        "<class>" over all, "<N>x1/<class>" for each N, and "<N>x1/<class>/<length>"; and of two facts or more
        "<N>x1/correct_of_copied", the share of right ones among the numbers of the context that were answered.
    """
    form = as_form(form)
    classes: dict[tuple[int, int], list[Answer]] = {}
    units: dict[tuple[int, int], list[int]] = {}
    cells = [(count, length) for count in facts for length in lengths]
    # All contexts are drawn first, for one that cannot hold its facts is an error.
    drawn = {
        (count, length): [
            sample
            for depth in depths
            for sample in needle_samples(
                model.tokenizer, length=length, depth=depth, needles=count, samples=samples, form=form, seed=seed
            )
        ]
        for count, length in cells
    }
    for cell in progress(cells, "answers about one of N facts"):
        classes[cell] = [answer for _, answer in answers(model, drawn[cell], form, batch_size)]
        units[cell] = [unit(sample.tokens) for sample in drawn[cell]]
    results: dict[str, PerSample] = {}
    for answer in ANSWERS:
        results[answer] = _share(answer, cells, classes, units)
    for count in facts:
        for answer in ANSWERS:
            key = f"{count}x1/{answer}"
            results[key] = _share(answer, [cell for cell in cells if cell[0] == count], classes, units)
            results |= {f"{key}/{length}": _share(answer, [(count, length)], classes, units) for length in lengths}
        right, other = (results[f"{count}x1/{answer}"] for answer in ("correct", "distracted"))
        copied = right.values | other.values
        if count > 1 and copied.any():
            results[f"{count}x1/correct_of_copied"] = PerSample(right.values[copied], right.units[copied])
    return results


def classify(output: str, value: int, context: str, form: Form) -> Answer:
    """Return what an answer is.

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


def unit(content: object) -> int:
    """Return a number that identifies a sample, so that two models' samples can be compared only if they are equal."""
    return int(fingerprint(content)[:15], 16)


def answers(model: Model, drawn: Sequence[NeedleSample], form: Form, batch_size: int) -> list[tuple[list[int], Answer]]:
    """Return the tokens that the model writes after each sample's last city, and what they are."""
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


def _share(
    answer: Answer,
    cells: Sequence[tuple[int, int]],
    classes: dict[tuple[int, int], list[Answer]],
    units: dict[tuple[int, int], list[int]],
) -> PerSample:
    right = [given == answer for cell in cells for given in classes[cell]]
    return PerSample(torch.tensor(right), torch.tensor([number for cell in cells for number in units[cell]]))
