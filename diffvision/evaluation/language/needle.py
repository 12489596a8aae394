"""Multi-needle retrieval: N cities have a number each in a long context, and R of the numbers are asked for.

arXiv 2410.05258 section 3.4: the answer's needles at five depths of the context, distracting needles anywhere, 50
samples a depth and length. Depth is counted in tokens. Where R is above 1 the paper does not say how answers are placed
and counted; here they lie next to each other at the depth, and the accuracy is the share of numbers that are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diffvision.data.datasets.needle_text import FORMS, Form, NeedleText, compose_to_length
from diffvision.evaluation.language.scoring import Progress, greedy_matches, silent

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class NeedleSample:
    """A context with its question and answers as tokens; places are [start, stop) in them."""

    tokens: list[int]
    needle: tuple[int, int]  # of the first city that is asked for
    question: int  # where the haystack ends
    answers: tuple[tuple[int, int], ...]  # the numbers at the end


def needle_samples(
    tokenizer: Any,
    *,
    length: int,
    depth: float,
    needles: int = 1,
    queries: int = 1,
    samples: int = 50,
    form: str | Form = "text",
    seed: int = 0,
) -> Iterator[NeedleSample]:
    """Yield samples of one length and depth; the n-th of a seed is the same for all models of one tokenizer.

    Args:
        tokenizer: anything with encode(text) -> list[int], and a start_id or eos_id to begin with.
        length: the most tokens a sample has, start token, question and answers included.
        depth: share of the context's tokens before the needles that are asked for, which start at the nearest border
            of two sentences; the question and these needles do not count.
        needles, queries: N and R.
        form: a name in `needle_text.FORMS`, or one.

    Raises:
        ValueError: the length is too short for the needles; a tokenizer whose tokens span the border between a word and
            the next, so that an answer has no separate tokens.
    """
    start = start_tokens(tokenizer)
    for number in range(samples):
        draw = random.Random(f"evaluation {seed} {length} {depth} {needles} {queries} {number}")
        text = compose_to_length(
            FORMS[form] if isinstance(form, str) else form,
            draw,
            lambda text: len(tokenizer.encode(text)),
            length=length - len(start),
            needles=needles,
            queries=queries,
            depth=depth,
        )
        yield _tokenise(text, tokenizer, start)


def needle(
    model: Any,
    tokenizer: Any,
    *,
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    depths: Sequence[float] = DEPTHS,
    queries: int = 1,
    samples: int = 50,
    batch_size: int = 8,
    progress: Progress = silent,
    **drawing: Any,
) -> dict[str, float]:
    """Return the accuracy of greedy decoding: the share of numbers asked for that the model would write.

    Each is written after the true ones before it (see `scoring.greedy_matches`).

    Args:
        model: see `scoring`.
        tokenizer, lengths, depths, queries, samples: as `needle_samples`; `samples` for each depth and length.
        **drawing: needles, form and seed of `needle_samples`.

    Returns:
        accuracy, the mean over all; "accuracy/<length>/<depth>" of each; all_right, the share of samples whose R
        numbers all are right.
    """
    metrics: dict[str, float] = {}
    all_right = []
    for length, depth in progress([(length, depth) for length in lengths for depth in depths], "needles"):
        cell = {"length": length, "depth": depth, "queries": queries, "samples": samples, **drawing}
        drawn = list(needle_samples(tokenizer, **cell))
        right = greedy_matches(model, [s.tokens for s in drawn], [s.answers for s in drawn], batch_size=batch_size)
        metrics[f"accuracy/{length}/{depth:g}"] = sum(map(sum, right)) / (queries * samples)
        all_right.append(sum(map(all, right)) / samples)
    return {"accuracy": _mean(list(metrics.values())), "all_right": _mean(all_right)} | metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def start_tokens(tokenizer: Any) -> list[int]:
    """Return what a document begins with: the tokenizer's start_id, else the eos_id that ended the one before."""
    for name in ("start_id", "eos_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return [token]
    return []


def _tokenise(text: NeedleText, tokenizer: Any, start: list[int]) -> NeedleSample:
    """Return the sample in tokens: a character's position becomes the number of tokens before it."""
    ids = tokenizer.encode(text.text)

    def position(character: int) -> int:
        """Return the token at which a character of the text begins."""
        before = tokenizer.encode(text.text[:character])
        if ids[: len(before)] != before:
            raise ValueError(
                f"the tokenizer joins the text around {text.text[character - 8 : character + 8]!r} into one token: "
                "take a tokenizer that splits text into words"
            )
        return len(start) + len(before)

    needle, *answers = [(position(begin), position(end)) for begin, end in (text.needle, *text.answers)]
    return NeedleSample([*start, *ids], needle, position(text.question), tuple(answers))
