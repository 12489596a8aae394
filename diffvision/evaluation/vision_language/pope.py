"""POPE (Li et al. 2023, arXiv 2305.10355): is there such an object in the image? The answer is yes or no.

The two programs that most results come from read answers differently, so a score is only comparable under one parser.
All three are computed: ours, which counts the answers that say neither, LLaVA's and lmms-eval's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from diffvision.evaluation.per_sample import Metrics, PerSample, count_each


def parse(answer: str) -> bool | None:
    """Return whether an answer is yes; None where it is neither yes nor no.

    The first word decides if it is yes or no, otherwise the only one of the two that occurs.
    """
    words = re.findall(r"[a-z]+", answer.lower())
    said = [word == "yes" for word in words if word in ("yes", "no")]
    return said[0] if said and (len({*said}) == 1 or words[0] in ("yes", "no")) else None


def parse_llava(answer: str) -> bool:
    """Return whether an answer is yes as LLaVA's `eval_pope.py` reads it: without a no before the first full stop."""
    words = answer.partition(".")[0].replace(",", "").split(" ")
    return not {"No", "not", "no"} & {*words}


def parse_lmms_eval(answer: str) -> bool | None:
    """Return whether an answer is yes as lmms-eval reads it: the bare word, so that "Yes." is neither yes nor no."""
    return {"yes": True, "no": False}.get(answer.lower().strip())


PARSERS: Mapping[str, Callable[[str], bool | None]] = {"": parse, "llava/": parse_llava, "lmms_eval/": parse_lmms_eval}
"""Prefix of a parser's metrics -> the parser."""


def pope(answers: Sequence[str], truth: Sequence[bool], images: Sequence[int]) -> Metrics:
    """Return accuracy, precision, recall, f1 and yes_ratio by each parser, unparsed, and the number of questions.

    yes_ratio is the share of yes among the answers; lmms-eval's metric of this name is among the labels. An answer that
    is neither is wrong; in lmms-eval's recall and F1 it is left out. Without a yes precision is NaN, in lmms-eval 0.

    Args:
        answers: what a model wrote, N.
        truth: whether yes is right, N.
        images: numbers of the questions' images, N; the interval of F1 is a bootstrap's over images.
    """
    right, units = torch.tensor(truth), torch.tensor(images)
    metrics: Metrics = {"questions": float(len(answers))}
    for prefix, parser in PARSERS.items():
        said = [parser(answer) for answer in answers]
        yes, no = (torch.tensor([one is word for one in said]) for word in (True, False))
        hits = yes & right
        undefined = 0.0 if parser is parse_lmms_eval else math.nan
        missed = right & (no if parser is parse_lmms_eval else ~yes)
        total = 2 * hits.long() + (yes & ~right).long() + missed.long()
        found: Metrics = {
            "accuracy": count_each(hits | (no & ~right)),
            "precision": _share_among(hits, yes, undefined),
            "recall": _share_among(hits, hits | missed, undefined),
            "f1": PerSample(2.0 * hits, units, weights=total, ratio=True) if total.any() else undefined,
            "yes_ratio": count_each(yes),
        }
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        if parser is parse:
            metrics["unparsed"] = count_each(~(yes | no))
    return metrics


def _share_among(hits: Tensor, which: Tensor, undefined: float) -> PerSample | float:
    """Return the share of hits among some of the samples, undefined if there are none."""
    return PerSample(hits[which], which.nonzero()[:, 0]) if which.any() else undefined
