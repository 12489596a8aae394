"""What a model loses when the cache of its prompt is pruned, by method and ratio, and how sparse its attention is.

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
from diffvision.analysis.statistics import shares
from diffvision.evaluation.language.needle import NeedleSample
from diffvision.evaluation.language.pruning import METHODS, Compress, plain_methods, pruned_attention
from diffvision.evaluation.language.scoring import Progress, device_of, greedy_matches, token_losses, unseen
from diffvision.evaluation.per_sample import PerSample, each, means
from diffvision.models.modes import evaluating

RATIOS = (0.25, 0.5, 0.75, 0.9, 0.95)
WITHIN = 0.01  # of the whole cache's loss
_QUERIES = 16  # whose rows are averaged at each length


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
    progress: Progress = unseen,
) -> dict[str, PerSample | float]:
    """Return loss and needle accuracy with pruned prompts, and the sparsity of attention.

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
        ratios from 0 to the largest; "largest_ratio/<method>", up to which the loss stays within 1%; "bytes/full" and
        "bytes/<ratio>" of a row's prompt; and what `sparsity` returns.

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
        calls = _calls(model, rows[:1, :-1])
        plainest = min(calls, key=lambda call: call.lam is not None)  # a plain layer, if there is one
        names = list(methods) or (list(METHODS) if plainest.lam is not None else plain_methods())
        if not methods and calls[0].v is None:
            names = [name for name in names if not METHODS[name].by_value]
        settings = [Compress(method, ratio, window, seed) for method in names for ratio in sorted(ratios)]
        for compress in settings[:: len(ratios)]:  # raises before the work if the model lacks what a method reads
            compress.kept(plainest, torch.tensor([0], device=device_of(model)), _ends([prompt], model))
        metrics: dict[str, PerSample | float] = {
            **sparsity(model, rows[:, :-1], batch_size=batch_size, progress=progress),
            **_bytes(calls, prompt, ratios),
        }
        losses: dict[str, Tensor] = {}
        for compress in progress([None, *settings], "pruned caches"):
            name = "full" if compress is None else f"{compress.method}/{compress.ratio:g}"
            losses[name] = _losses(model, rows, prompt, compress, batch_size)
            metrics[f"nll/{name}"] = losses[name].mean().item()
            for mode in ("agnostic", "aware") if needles else ():
                metrics[f"needle_{mode}/{name}"] = _matches(model, needles, mode, compress, batch_size)
    rises = {f"nll_rise/{name}": each(loss - losses["full"]) for name, loss in losses.items() if name != "full"}
    return metrics | _summary(means(metrics), names, sorted(ratios)) | rises


def sparsity(model: nn.Module, rows: Tensor, *, batch_size: int = 8, progress: Progress = unseen) -> dict[str, float]:
    """Return how few keys hold most of the attention, by layer and length: the fewer, the more can be pruned.

    Of what multiplies the values (the difference of the maps in differential layers), in magnitude: the number of keys
    that hold 95% of a query's weights, and their Gini coefficient, 0 where all keys have equal weight and 1 where one
    has all. Means over heads and the last 16 queries of sequences cut at a quarter, half and all of their length.

    Args:
        model: as `analysis.capture.captured`.
        rows: tokens, int64 [S, N].
        batch_size: sequences at a time.
        progress: as in `scoring`.

    Returns:
        "k95/<layer>/<length>", "gini/<layer>/<length>", and "k95" and "gini", means over layers at the whole length.
    """
    whole = rows.shape[1]
    lengths = sorted({max(1, whole // 4), max(1, whole // 2), whole})
    sums: dict[str, Tensor] = {}

    def see(call: Call) -> None:
        applied = call.scores().applied()
        for length in lengths:
            last = applied[:, :, max(0, length - _QUERIES) : length, :length]
            values = torch.stack([keys_for(last).double().sum(), gini(last, causal=True).double().sum()])
            key = f"{_number(call)}/{length}"
            count = values.new_tensor([last[..., 0].numel()])
            sums[key] = sums.get(key, 0) + torch.cat([values, count]).cpu()

    with evaluating(model), captured(model, see):
        for batch in progress(rows.split(batch_size), "sparsity"):
            run_towers(model, {"tokens": batch.to(device_of(model))})
    metrics: dict[str, float] = {}
    for index, name in enumerate(("k95", "gini")):
        means = {key: (total[index] / total[2]).item() for key, total in sums.items()}
        at_end = [value for key, value in means.items() if key.endswith(f"/{whole}")]
        metrics |= {name: sum(at_end) / len(at_end), **{f"{name}/{key}": value for key, value in means.items()}}
    return metrics


def _number(call: Call) -> str:
    """Return the layer's number, which is in its name: "blocks.3.attn", "layers.3"."""
    return next((part for part in call.name.split(".") if part.isdecimal()), call.name)


@torch.no_grad()
def _calls(model: nn.Module, tokens: Tensor) -> list[Call]:
    calls: list[Call] = []
    with captured(model, lambda call: calls.append(call)):
        run_towers(model, {"tokens": tokens.to(device_of(model))})
    return calls


def _bytes(calls: Sequence[Call], prompt: int, ratios: Sequence[float]) -> dict[str, float]:
    """Return the bytes of a prompt's keys and values; a value is as wide as its keys together in every variant."""
    token = sum(
        2 * call.k[0, :, :, 0].numel() // getattr(call.layer, "num_key_value_groups", 1) * call.k.element_size()
        for call in calls
    )
    kept = {f"{ratio:g}": Compress("window", ratio).count(prompt) for ratio in ratios}
    return {"bytes/full": float(token * prompt), **{f"bytes/{ratio}": float(token * n) for ratio, n in kept.items()}}


def _ends(prompts: Sequence[int], model: nn.Module) -> Tensor:
    return torch.tensor(prompts, device=device_of(model))


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
    samples = list(map(asked_twice, needles)) if mode == "aware" else needles
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


def asked_twice(sample: NeedleSample) -> NeedleSample:
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


def keys_for(maps: Tensor, share: float = 0.95) -> Tensor:
    """Return the fewest keys that hold a share of each row's magnitude, [..., M], int64; 0 for a row of zeros."""
    ordered = shares(maps).sort(dim=-1, descending=True).values.cumsum(dim=-1)
    return (ordered < share).sum(dim=-1).add(1) * (maps != 0).any(dim=-1)


def gini(maps: Tensor, *, causal: bool = False) -> Tensor:
    """Return the Gini coefficient of each row's magnitudes, [..., M]: 0 where all keys have alike, 1 - 1 / n for one.

    Args:
        maps: [..., M, N].
        causal: query i of M has n = N - M + i + 1 keys, the first ones, else N. The rest must be zero.

    Source: as a measure of sparsity, Hurley and Rickard, "Comparing measures of sparsity", IEEE 2009, table I.
    """
    queries, keys = maps.shape[-2:]
    ordered = shares(maps).sort(dim=-1).values
    counts = torch.full((queries, 1), keys, device=maps.device)
    if causal:
        counts = torch.arange(keys - queries + 1, keys + 1, device=maps.device)[:, None]
    rank = torch.arange(1, keys + 1, device=maps.device) - (keys - counts)  # keys that may not be seen come first
    return (ordered * (2 * rank - counts - 1) / counts).sum(dim=-1)
