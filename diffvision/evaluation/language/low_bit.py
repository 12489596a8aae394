"""Low-bit attention: the loss and the error of each layer when kernels or caches round their inputs.

The paper (arXiv 2410.05258, figure 8) rounds attention logits, as `logits_8`, `logits_6` and `logits_4` do here.
Kernels do not: they round queries and keys (the product is summed in 32 bits), probabilities and values. Caches round
keys and values. Each scheme rounds one of these in a model that computes in float32 otherwise; the results are in
docs/results/low_bit.md.

A differential model is affected differently from a plain one because its logits are smaller after training, and because
the difference of its maps amplifies errors: the signal cancels, the error does not.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured, run_towers
from diffvision.evaluation.language.scoring import Progress, get_device, silent, token_losses
from diffvision.evaluation.per_sample import PerSample, count_each
from diffvision.models.modes import evaluating

QUERY_ROWS, KEY_ROWS = 128, 64  # SageAttention's blocks
GROUP = 32  # numbers that share a scale in a quantised cache (KIVI's default)
RECENT = 128  # the least number of recent tokens that a quantised cache keeps in full precision for a query


def to_integers(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """Round to 2 ** bits - 1 even levels from -a to a, a the largest absolute value along `dims`.

    This and the functions below round and scale back in one step: the result is what a kernel computes with, up to
    the order of its sums. Halves are rounded away from zero, as in SageAttention's kernels.

    Args:
        x: any shape.
        bits: of a signed integer, such as 8 (levels -127 to 127).
        dims: axes along which numbers share a scale.
    """
    highest = 2 ** (bits - 1) - 1
    step = (x.abs().amax(dim=dims, keepdim=True) / highest).clamp(min=torch.finfo(x.dtype).tiny)
    levels = x / step
    return (levels + levels.sign() / 2).trunc().clamp(-highest, highest) * step


def to_float8(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Round to float8 (e4m3), scaled so that the largest absolute value along `dims` is 448, its maximum."""
    highest = torch.finfo(torch.float8_e4m3fn).max
    scale = (x.abs().amax(dim=dims, keepdim=True) / highest).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_by_block(x: Tensor, bits: int, rows: int) -> Tensor:
    """Round each block of rows of x [..., N, D] to integers with one scale, as SageAttention does.

    Args:
        x: [..., N, D]; the last block may have fewer rows.
        bits: as `to_integers`.
        rows: tokens per block; SageAttention has 128 for q and 64 for k.
    """
    return torch.cat([to_integers(block, bits, (-2, -1)) for block in x.split(rows, dim=-2)], dim=-2)


def subtract_key_mean(k: Tensor) -> Tensor:
    """Subtract the mean over tokens from keys [..., N, D], for each map and head.

    It shifts each row of logits by a constant, which softmax ignores, and removes what the channels have in common
    before rounding (SageAttention, arXiv 2410.02367).
    """
    return k - k.mean(dim=-2, keepdim=True)


def round_by_group(x: Tensor, bits: int, dim: int) -> Tensor:
    """Round each group of `GROUP` numbers along an axis to 2 ** bits levels from its minimum to its maximum.

    KIVI (arXiv 2402.02750) groups tokens for keys, one channel at a time, and channels for values, one token at a time.

    Args:
        x: any shape; the last group may be smaller.
        bits: of an unsigned integer.
        dim: the axis.
    """

    def rounded(group: Tensor) -> Tensor:
        least, largest = group.aminmax(dim=dim, keepdim=True)
        step = ((largest - least) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
        return least + ((group - least) / step).round() * step

    return torch.cat([rounded(group) for group in x.split(GROUP, dim=dim)], dim=dim)


def quantise_logits(logits: Tensor, allowed: Tensor, bits: int) -> Tensor:
    """Round logits to the nearest of 2 ** bits - 1 even levels from -a to a (dynamic absmax).

    a is the largest absolute value that any query of a sequence may attend to in a layer. The paper does not say over
    which logits its a was taken.

    Args:
        logits: [B, H, P, M, N].
        allowed: boolean, broadcastable to the logits.
        bits: of a signed integer.
    """
    highest = 2 ** (bits - 1) - 1
    largest = (logits.abs() * allowed).amax(dim=(1, 2, 3, 4), keepdim=True)
    step = (largest / highest).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits / step).round().clamp(-highest, highest) * step


class Int8Maps(Scores):
    """Scores whose maps are rounded to 0..127 of each row's maximum, and divided by the row's sum before rounding."""

    def maps(self) -> Tensor:
        """Return the rounded maps."""
        return to_integers(super().maps(), 8, -1)


class Float8Maps(Scores):
    """Scores whose maps are rounded to float8 (e4m3), each row's maximum scaled to 448."""

    def maps(self) -> Tensor:
        """Return the rounded maps."""
        return to_float8(super().maps(), -1)


Scheme = Callable[[Call], Scores]
"""Returns scores computed in few bits, and replaces the call's values if it rounds them."""


def _round_logits(call: Call, bits: int) -> Scores:
    """Round the logits themselves, as the paper does."""
    full = call.scores()
    return full._replace(logits=quantise_logits(full.logits, full.allowed, bits))


def _round_products(call: Call, bits: int, *, smooth: bool = False) -> Scores:
    """Round queries and keys in blocks, as SageAttention does; on GPUs its 4 bits have a scale for fewer rows."""
    q, k = _widen(call.q), _widen(call.k)
    k = subtract_key_mean(k) if smooth else k
    rounded = dataclasses.replace(call, q=round_by_block(q, bits, QUERY_ROWS), k=round_by_block(k, bits, KEY_ROWS))
    return rounded.scores()


def _round_outputs(call: Call, kind: type[Scores], values: Callable[[Tensor], Tensor]) -> Scores:
    """Round the factors of the second product: probabilities by row, values by channel."""
    call.v = values(_values(call))
    return kind(*call.scores())


def _round_cache(call: Call, bits: int) -> Scores:
    """Round as KIVI does: keys by channel over groups of tokens, values by token, but not recent ones.

    Each key has two columns of logits, one exact and one rounded, and the mask says which of the two a query reads.
    """
    full, k, v = call.scores(), _widen(call.k), _values(call)
    if not full.is_rowwise:
        raise ValueError(f"{type(call.layer).__name__} takes no cache: name other schemes (--options.schemes)")
    low = dataclasses.replace(call, k=round_by_group(k, bits, -2)).scores()
    # A group of tokens is rounded when its last token is no longer among the recent ones of the query.
    keys = torch.arange(k.shape[3], device=k.device)
    old = (keys[k.shape[3] - call.q.shape[3] :] + 1 - RECENT).clamp(min=0) // GROUP * GROUP
    is_rounded = keys < old[:, None]
    call.v = torch.cat([v, round_by_group(v, bits, -1)], dim=-2)
    logits = torch.cat([full.logits, low.logits], dim=-1)
    allowed = torch.cat([full.allowed & ~is_rounded, full.allowed & is_rounded], dim=-1)
    return full._replace(logits=logits, allowed=allowed)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _values(call: Call) -> Tensor:
    if call.v is None:
        raise ValueError(
            f"{type(call.layer).__name__} splits its values, which is not supported here: convert it with "
            "diffvision convert SOURCE DESTINATION --to language"
        )
    return _widen(call.v)


SCHEMES: dict[str, Scheme] = {
    "logits_8": partial(_round_logits, bits=8),
    "logits_6": partial(_round_logits, bits=6),
    "logits_4": partial(_round_logits, bits=4),
    "qk_int8": partial(_round_products, bits=8),
    "qk_int8_smooth": partial(_round_products, bits=8, smooth=True),
    "qk_int4": partial(_round_products, bits=4),
    "qk_int4_smooth": partial(_round_products, bits=4, smooth=True),
    "pv_int8": partial(_round_outputs, kind=Int8Maps, values=partial(to_integers, bits=8, dims=-2)),
    "pv_fp8": partial(_round_outputs, kind=Float8Maps, values=partial(to_float8, dims=-2)),
    "cache_8": partial(_round_cache, bits=8),
    "cache_4": partial(_round_cache, bits=4),
    "cache_2": partial(_round_cache, bits=2),
}


def low_bit(
    model: nn.Module,
    rows: Tensor,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, PerSample | float]:
    """Return the loss under each scheme, and what `attention_errors` returns.

    Args:
        model: as `analysis.capture.captured`, with its values in one piece (transformers' DiffLlama splits them).
        rows: int64 [S, N], which the model reads whole. They share one length, because padding would share scales with
            tokens.
        schemes: names of `SCHEMES`.
        batch_size: rows at a time.

    Returns:
        {"nll/full": nats per token, "nll/<scheme>": ..., "nll_rise/<scheme>": how much more than in full precision, by
        row, and those of `attention_errors`}.

    Raises:
        ValueError: a layer for which a scheme cannot be computed.
    """
    metrics: dict[str, PerSample | float] = {**attention_errors(model, rows, schemes=schemes, progress=progress)}
    losses: dict[str, Tensor] = {}
    for name in progress(["full", *schemes], "low-bit attention"):
        with evaluating(model), nullcontext() if name == "full" else captured(model, SCHEMES[name]):
            of_batches = [token_losses(model, batch).double().mean(dim=1).cpu() for batch in rows.split(batch_size)]
        losses[name] = torch.cat(of_batches)
        metrics[f"nll/{name}"] = losses[name].mean().item()
    return metrics | {f"nll_rise/{name}": count_each(losses[name] - losses["full"]) for name in schemes}


def attention_errors(
    model: nn.Module,
    rows: Tensor,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    progress: Progress = silent,
) -> dict[str, float]:
    """Return each layer's error under each scheme, its largest logit, and how much its difference amplifies errors.

    Each layer reads exact inputs, so that errors of the layers before it do not count. Its output is that of the heads,
    before a head norm. The measures are SageAttention's.

    Args:
        model, rows, schemes: as `low_bit`. Rows are read one at a time, because several logits of a layer are in memory
            at once.

    Returns:
        For each scheme and layer i from 0, "cosine/<scheme>/i", of the output with that in full precision, and
        "relative_l1/<scheme>/i", the sum of absolute differences over that of absolute values. "largest_logit/i", the
        largest absolute logit that a query may attend to. "cancellation/i", sqrt(|O1|^2 + |lambda O2|^2) over
        |O1 - lambda O2|: how much the difference of the maps amplifies their errors; 1 for a single map. Each also
        without "/i": the largest of all layers' logits, and means over layers.
    """
    layers: dict[str, _Layer] = defaultdict(_Layer)

    def see(call: Call) -> None:
        call.v, low = _values(call), {}
        for name in schemes:
            copy = dataclasses.replace(call)
            low[name] = _output(copy, SCHEMES[name](copy))
        layers[call.name].add(call, low)

    with evaluating(model), captured(model, see):
        for row in progress(rows.split(1), "errors of low-bit attention"):
            run_towers(model, {"tokens": row.to(get_device(model))})
    by_layer = [layer.metrics() for layer in layers.values()]
    metrics: dict[str, float] = {}
    for metric in by_layer[0]:
        values = [of_layer[metric] for of_layer in by_layer]
        metrics[metric] = max(values) if metric == "largest_logit" else sum(values) / len(values)
        metrics |= {f"{metric}/{index}": value for index, value in enumerate(values)}
    return metrics


class _Layer:
    """Sums over rows of one layer's outputs and their errors."""

    def __init__(self) -> None:
        self.largest_logit = 0.0
        self.maps_square, self.output_square, self.output_absolute = 0.0, 0.0, 0.0
        # For each scheme: the product with the exact output, the square, and the absolute difference.
        self.low: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, call: Call, low: Mapping[str, Tensor]) -> None:
        """Add a call in full precision, and its outputs [B, H, N, V] under each scheme."""
        scores = call.scores()
        self.largest_logit = max(self.largest_logit, (scores.logits.abs() * scores.allowed).max().item())
        values = call.values(scores.logits.dtype)
        weights: list[Any] = [1.0] if scores.lam is None else [1.0, scores.lam]
        for weight, attention in zip(weights, scores.maps().unbind(2), strict=True):
            self.maps_square += (weight * attention @ values).double().square().sum().item()
        output = _output(call, scores).double()
        self.output_square += output.square().sum().item()
        self.output_absolute += output.abs().sum().item()
        for name, other in low.items():
            wide = other.double()
            sums = [(wide * output).sum(), wide.square().sum(), (wide - output).abs().sum()]
            self.low[name] += torch.stack(sums).cpu()

    def metrics(self) -> dict[str, float]:
        """Return the layer's metrics, NaN if its output is zero."""
        cancellation = _ratio(self.maps_square, self.output_square) ** 0.5
        metrics = {"largest_logit": self.largest_logit, "cancellation": cancellation}
        for name, sums in self.low.items():
            product, square, difference = sums.tolist()
            metrics[f"cosine/{name}"] = _ratio(product, (square * self.output_square) ** 0.5)
            metrics[f"relative_l1/{name}"] = _ratio(difference, self.output_absolute)
        return metrics


def _output(call: Call, scores: Scores) -> Tensor:
    applied = scores.compute_weights()
    return applied @ call.values(applied.dtype)


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")
