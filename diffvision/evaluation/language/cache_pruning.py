"""Loss and needle accuracy after pruning the KV cache of the prompt, by method and ratio.

Masks compute what a pruned cache does, so this works for any model whose attention can be captured. Actual pruning is
`generate(..., compress=Compress(...))`; both are in `pruning`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured, run_towers
from diffvision.evaluation.language.needle import NeedleSample
from diffvision.evaluation.language.pruning import METHODS, Compress, plain_methods, pruned_attention
from diffvision.evaluation.language.scoring import Progress, get_device, greedy_matches, silent, token_losses
from diffvision.evaluation.per_sample import PerSample, count_each, means
from diffvision.models.modes import evaluating

RATIOS = (0.25, 0.5, 0.75, 0.9, 0.95)
WITHIN = 0.01  # of the whole cache's loss


def cache_pruning(
    model: nn.Module,
    rows: Tensor,
    needles: Sequence[NeedleSample] = (),
    *,
    continuation: int = 128,
    methods: Sequence[str] = (),
    ratios: Sequence[float] = RATIOS,
    window: int = 32,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, PerSample | float]:
    """Return loss and needle accuracy with pruned prompts.

    A row's prompt is all but its last `continuation` + 1 tokens; the loss is that of the predictions after it. Needles
    are asked for in two ways: "agnostic", where the question comes after pruning, and "aware", where it is part of the
    prompt as well. There it is asked twice: the first token after a prompt is predicted before pruning, so an answer of
    one token would not depend on it. Areas interpolate linearly between the ratios.

    Args:
        model: as `analysis.capture.captured`.
        rows: int64 [S, N], which the model reads whole but for the last token.
        needles: contexts with questions; none to measure the loss alone.
        continuation: predictions after the prompt.
        methods: names in `pruning.METHODS`; if empty, all that the model supports.
        ratios: shares of the prompt that are dropped, above 0 and below 1.
        window: as `Compress`.
        batch_size: rows at a time.
        seed: of the method "random".
        progress: as in `scoring`.

    Returns:
        "nll/full" and "nll/<method>/<ratio>" (nats per token), "nll_rise/<method>/<ratio>", by row;
        "needle_agnostic/..." and "needle_aware/...", whether each of the numbers is right; "area/<metric>/<method>",
        the mean over the ratios from 0 to the largest; "largest_ratio/<method>", up to which the loss stays within 1%.

    Raises:
        ValueError: a row has no prompt of two tokens, or a method reads what the model does not have.
    """
    prompt = rows.shape[1] - 1 - continuation
    if prompt < 2:
        raise ValueError(
            f"a window of {rows.shape[1] - 1} tokens with a continuation of {continuation} leaves {prompt} for the "
            "prompt: give a larger window or a smaller continuation"
        )
    with evaluating(model):
        calls: list[Call] = []
        with torch.no_grad(), captured(model, calls.append):
            run_towers(model, {"tokens": rows[:1, :-1].to(get_device(model))})
        plainest = min(calls, key=lambda call: call.lam is not None)  # a plain layer, if there is one
        names = list(methods) or (list(METHODS) if plainest.lam is not None else plain_methods())
        settings = [Compress(method, ratio, window, seed) for method in names for ratio in sorted(ratios)]
        ends = torch.tensor([prompt], device=get_device(model))
        for compress in settings[:: len(ratios)]:  # raises before the work if the model lacks what a method reads
            compress.select_tokens(plainest, torch.zeros_like(ends), ends)
        metrics: dict[str, PerSample | float] = {}
        losses: dict[str, Tensor] = {}
        for compress in progress([None, *settings], "pruned caches"):
            name = "full" if compress is None else f"{compress.method}/{compress.ratio:g}"
            losses[name] = _losses(model, rows, prompt, compress, batch_size)
            metrics[f"nll/{name}"] = losses[name].mean().item()
            for mode in ("agnostic", "aware") if needles else ():
                metrics[f"needle_{mode}/{name}"] = _matches(model, needles, mode, compress, batch_size)
    rises = {f"nll_rise/{name}": count_each(loss - losses["full"]) for name, loss in losses.items() if name != "full"}
    return metrics | _summary(means(metrics), names, sorted(ratios)) | rises


def _attention(
    model: nn.Module, compress: Compress | None, prompts: Sequence[int], batch: int
) -> AbstractContextManager[None]:
    """Return the context in which a batch attends; each batch has other random tokens."""
    if compress is None:
        return nullcontext()
    ends = torch.tensor(prompts, device=get_device(model))
    return pruned_attention(model, dataclasses.replace(compress, seed=compress.seed + batch), ends)


def _losses(model: nn.Module, rows: Tensor, prompt: int, compress: Compress | None, batch_size: int) -> Tensor:
    """Return the loss behind the prompt of each row, float64 [S]."""
    losses = []
    for number, batch in enumerate(rows.split(batch_size)):
        with torch.no_grad(), _attention(model, compress, [prompt] * len(batch), number):
            losses.append(token_losses(model, batch)[:, prompt:].double().mean(dim=1).cpu())
    return torch.cat(losses)


def _matches(
    model: Any, needles: Sequence[NeedleSample], mode: str, compress: Compress | None, batch_size: int
) -> PerSample:
    """Return whether each number that is asked for is right; those of a context are of one unit."""
    samples = list(map(repeat_question, needles)) if mode == "aware" else needles
    by_context: dict[int, list[bool]] = {}
    # Longest first, which is the order of `greedy_matches` within a batch.
    order = sorted(range(len(samples)), key=lambda number: -len(samples[number].tokens))
    for batch, start in enumerate(range(0, len(order), batch_size)):
        numbers = order[start : start + batch_size]
        chosen = [samples[number] for number in numbers]
        with _attention(model, compress, [sample.question for sample in chosen], batch):
            tokens, answers = [s.tokens for s in chosen], [s.answers for s in chosen]
            right = greedy_matches(model, tokens, answers, batch_size=len(chosen))
        by_context |= dict(zip(numbers, right, strict=True))
    rows = [(match, number) for number in sorted(by_context) for match in by_context[number]]
    return PerSample(torch.tensor([match for match, _ in rows]), torch.tensor([number for _, number in rows]))


def repeat_question(sample: NeedleSample) -> NeedleSample:
    """Return the sample with its question, up to the first answer, twice; what ends with the first is the prompt."""
    end = sample.answers[0][0]
    more = end - sample.question
    answers = tuple((start + more, stop + more) for start, stop in sample.answers)
    return NeedleSample([*sample.tokens[:end], *sample.tokens[sample.question :]], sample.needle, end, answers)


def _summary(metrics: dict[str, float], methods: Sequence[str], ratios: Sequence[float]) -> dict[str, float]:
    """Return areas under curves, and the largest ratio whose loss, like those of all smaller ones, is within 1%."""
    summary: dict[str, float] = {}
    kinds = [kind for kind in ("nll", "needle_agnostic", "needle_aware") if f"{kind}/full" in metrics]
    for method in methods:
        for kind in kinds:
            curve = [metrics[f"{kind}/full"], *(metrics[f"{kind}/{method}/{ratio:g}"] for ratio in ratios)]
            area = torch.trapezoid(*torch.tensor([curve, [0.0, *ratios]], dtype=torch.float64))
            summary[f"area/{kind}/{method}"] = area.item() / ratios[-1]
        full, largest = metrics["nll/full"], 0.0
        losses = {ratio: metrics[f"nll/{method}/{ratio:g}"] for ratio in ratios}
        for ratio, loss in losses.items():
            if loss > (1 + WITHIN) * full:
                break
            largest = ratio
        summary[f"largest_ratio/{method}"] = largest
    return summary
