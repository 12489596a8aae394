"""What a model loses when the cache of its prompt is pruned, by method and ratio.

Masks compute what a pruned cache does, so any model whose attention can be captured is measured. Real pruning is
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

    A row's prompt is all but its last `continuation` + 1 tokens; the loss is of the predictions behind it. Needles are
    asked for in two ways: "agnostic", where the question comes after pruning, and "aware", where it is part of the
    prompt as well. There it is asked twice, for the first token behind a prompt is predicted before pruning: an answer
    of one token would not depend on it. Between the ratios the areas are of straight lines.

    Args:
        model: as `analysis.capture.captured`.
        rows: int64 [S, N], which the model reads whole but for the last token.
        needles: contexts with questions; none to measure the loss alone.
        continuation: predictions behind the prompt.
        methods: names in `pruning.METHODS`; those that the model can have if empty.
        ratios: shares of the prompt that are dropped, above 0 and below 1.
        window: as `Compress`.
        batch_size: rows at a time.
        seed: of the method "random".
        progress: as in `scoring`.

    Returns:
        "nll/full" and "nll/<method>/<ratio>" (nats a token), "nll_rise/<method>/<ratio>", by row; "needle_agnostic/..."
        and "needle_aware/...", whether each of the numbers is right; "area/<metric>/<method>", the mean over the
        ratios from 0 to the largest; "largest_ratio/<method>", up to which the loss stays within 1%.

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
        calls = _capture_calls(model, rows[:1, :-1])
        plainest = min(calls, key=lambda call: call.lam is not None)  # a plain layer, if there is one
        names = list(methods) or (list(METHODS) if plainest.lam is not None else plain_methods())
        settings = [Compress(method, ratio, window, seed) for method in names for ratio in sorted(ratios)]
        for compress in settings[:: len(ratios)]:  # raises before the work if the model lacks what a method reads
            compress.select_tokens(plainest, torch.tensor([0], device=get_device(model)), _ends([prompt], model))
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


@torch.no_grad()
def _capture_calls(model: nn.Module, tokens: Tensor) -> list[Call]:
    calls: list[Call] = []
    with captured(model, lambda call: calls.append(call)):
        run_towers(model, {"tokens": tokens.to(get_device(model))})
    return calls


def _ends(prompts: Sequence[int], model: nn.Module) -> Tensor:
    return torch.tensor(prompts, device=get_device(model))


def _attention(
    model: nn.Module, compress: Compress | None, prompts: Sequence[int], batch: int
) -> AbstractContextManager[None]:
    """Return the context in which a batch attends; each batch has other random tokens."""
    if compress is None:
        return nullcontext()
    return pruned_attention(model, dataclasses.replace(compress, seed=compress.seed + batch), _ends(prompts, model))


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
    by_context: list[list[bool]] = [[] for _ in samples]
    # Longest first, which is the order of `greedy_matches` within a batch.
    order = sorted(range(len(samples)), key=lambda number: -len(samples[number].tokens))
    for batch, start in enumerate(range(0, len(order), batch_size)):
        numbers = order[start : start + batch_size]
        chosen = [samples[number] for number in numbers]
        with _attention(model, compress, [sample.question for sample in chosen], batch):
            tokens, answers = [s.tokens for s in chosen], [s.answers for s in chosen]
            right = greedy_matches(model, tokens, answers, batch_size=len(chosen))
        for number, matches in zip(numbers, right, strict=True):
            by_context[number] = matches
    units = [number for number, matches in enumerate(by_context) for _ in matches]
    return PerSample(torch.tensor([match for matches in by_context for match in matches]), torch.tensor(units))


def repeat_question(sample: NeedleSample) -> NeedleSample:
    """Return the sample with its question, up to the first answer, twice; what ends with the first is the prompt."""
    end = sample.answers[0][0]
    more = end - sample.question
    answers = tuple((start + more, stop + more) for start, stop in sample.answers)
    return NeedleSample([*sample.tokens[:end], *sample.tokens[sample.question :]], sample.needle, end, answers)


def _summary(metrics: dict[str, float], methods: Sequence[str], ratios: Sequence[float]) -> dict[str, float]:
    """Return areas under curves, and the largest ratio that costs next to nothing."""
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
