"""Whether heads look back at the context where a model answers rightly, and less where it does not.

The lookback ratio (Chuang et al. 2024, arXiv 2407.07071; see `lab.lookback_ratios`) of the answers that `recall_errors`
counts, where it is known which of them are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diffvision.data.datasets.needle_text import Form, as_form
from diffvision.evaluation.language.needle import DEPTHS, needle_samples
from diffvision.evaluation.language.scoring import Progress, device_of, unseen
from diffvision.lab.language.recall_errors import ANSWERS, answers
from diffvision.lab.lookback_ratios import lookback_ratios
from diffvision.opening import Model


def lookback(
    model: Model,
    *,
    facts: Sequence[int] = (1, 2, 4, 8),
    length: int = 512,
    depths: Sequence[float] = DEPTHS,
    samples: int = 50,
    form: str | Form = "text",
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress = unseen,
) -> dict[str, float]:
    """Return the mean lookback ratio of answers by what they are, and how well it tells right from wrong ones.

    An answer's ratio is the mean over layers, heads and the tokens that the model wrote; the question counts as new.

    Args:
        model: with its tokenizer, and attention that can be captured.
        length: of the contexts in tokens; all maps of one context are in memory at once.
        facts, depths, samples, form, seed, batch_size: as `recall_errors`.

    Returns:
        "ratio/<class>" for each class that occurs, "share/<class>", and "auc": how likely it is that a right answer
        has a higher ratio than a wrong one (1/2 is chance; NaN if all are right, or none).
    """
    form = as_form(form)
    ratios: dict[str, list[float]] = {answer: [] for answer in ANSWERS}
    cells = [(count, depth) for count in facts for depth in depths]
    for count, depth in progress(cells, "lookback ratios"):
        drawn = list(
            needle_samples(
                model.tokenizer, length=length, depth=depth, needles=count, samples=samples, form=form, seed=seed
            )
        )
        for sample, (new, answer) in zip(drawn, answers(model, drawn, form, batch_size), strict=True):
            asked = sample.tokens[: sample.answers[0][0]]
            ratios[answer].append(_ratio(model, [*asked, *new[:-1]], sample.question, len(asked) - 1))
    total = sum(map(len, ratios.values()))
    metrics = {f"ratio/{answer}": sum(values) / len(values) for answer, values in ratios.items() if values}
    metrics |= {f"share/{answer}": len(values) / total for answer, values in ratios.items()}
    wrong = [ratio for answer in ANSWERS[1:] for ratio in ratios[answer]]
    return metrics | {"auc": _auc(ratios["correct"], wrong)}


def _ratio(model: Model, tokens: Sequence[int], context: int, first: int) -> float:
    """Return the mean ratio of the queries from `first` on, which predict what the model wrote."""
    by_layer = lookback_ratios(model.module, torch.tensor(tokens, device=device_of(model.module)), context)
    return torch.stack([ratio[:, first - context :] for ratio in by_layer.values()]).nanmean().item()


def _auc(right: Sequence[float], wrong: Sequence[float]) -> float:
    if not right or not wrong:
        return math.nan
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score([1] * len(right) + [0] * len(wrong), [*right, *wrong]))
