"""Attention in few bits: what kernels and caches really round, and which models suffer from it.

The paper (arXiv 2410.05258, figure 8) rounds attention logits, as `logits_8` and so on do here. No kernel does: kernels
round queries and keys (the product is summed in 32 bits), probabilities and values; caches round keys and values. Here
each of them is rounded in turn in a model that computes in float32 otherwise. docs/results/low_bit.md has the reading.

Two factors decide how well a differential model fares next to a plain one: how much smaller its logits are after
training, and how much the difference of its maps amplifies errors, for what cancels in it is signal and not error.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured, run_towers
from diffvision.evaluation.language.language_options import SCHEMES as NAMES
from diffvision.evaluation.language.scoring import Progress, get_device, silent, token_losses
from diffvision.evaluation.per_sample import PerSample, count_each
from diffvision.models.modes import evaluating

QUERY_ROWS, KEY_ROWS = 128, 64  # SageAttention's blocks
GROUP = 32  # numbers that share a scale in a quantised cache (KIVI's default)
RECENT = 128  # tokens up to a query that a quantised cache keeps in full precision for it, at least

# ---- rounding ----------------------------------------------------------------------------------------------------
# Rounds and scales back in one step: the result is what a kernel computes with, apart from the order of its sums.


def to_integers(x: Tensor, bits: int, dims: int | tuple[int, ...]) -> Tensor:
    """Round to 2 ** bits - 1 even levels from -a to a, a the largest absolute value along `dims`.

    Halves are rounded away from zero, as SageAttention's kernels do.

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
    """Round to float8 (e4m3), the largest absolute value along `dims` scaled to 448, the largest that it has."""
    highest = torch.finfo(torch.float8_e4m3fn).max
    scale = (x.abs().amax(dim=dims, keepdim=True) / highest).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_by_block(x: Tensor, bits: int, rows: int) -> Tensor:
    """Round each block of rows to integers with one scale, as SageAttention does with q (128 rows) and k (64).

    Args:
        x: [..., N, D]; the last block may have fewer rows.
        bits: as `to_integers`.
        rows: tokens a block.
    """
    return torch.cat([to_integers(block, bits, (-2, -1)) for block in x.split(rows, dim=-2)], dim=-2)


def subtract_key_mean(k: Tensor) -> Tensor:
    """Subtract the mean over tokens from keys [..., N, D], each map's and head's its own.

    A row of logits changes by one number, which softmax does not see; what the channels have in common is not rounded
    (SageAttention, arXiv 2410.02367).
    """
    return k - k.mean(dim=-2, keepdim=True)


def round_by_group(x: Tensor, bits: int, dim: int) -> Tensor:
    """Round each group of `GROUP` numbers along an axis to 2 ** bits levels from its least to its largest.

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


# ---- quantised logits (arXiv 2410.05258, figure 8) ------------------------------------------------------------------


def quantise_logits(logits: Tensor, allowed: Tensor, bits: int) -> Tensor:
    """Round logits to the nearest of 2 ** bits - 1 even levels from -a to a (dynamic absmax).

    a is the largest absolute value that any query of a sequence may attend to in a layer. The paper does not say what
    shared its a.

    Args:
        logits: [B, H, P, M, N].
        allowed: boolean, broadcastable to the logits.
        bits: of a signed integer.
    """
    highest = 2 ** (bits - 1) - 1
    largest = (logits.abs() * allowed).amax(dim=(1, 2, 3, 4), keepdim=True)
    step = (largest / highest).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits / step).round().clamp(-highest, highest) * step


def row_losses(model: nn.Module, rows: Tensor, batch_size: int) -> Tensor:
    """Return the model's loss of each of rows [S, N], nats a token, float64 [S]."""
    return torch.cat([token_losses(model, batch).double().mean(dim=1).cpu() for batch in rows.split(batch_size)])


# ---- schemes -----------------------------------------------------------------------------------------------------


class Int8Maps(Scores):
    """Scores whose maps are rounded to 0..127 of each row's largest: exp(logit - largest) in steps of 1/127.

    The row's sum is that before rounding, as in kernels.
    """

    def maps(self) -> Tensor:
        """Return the rounded maps."""
        return to_integers(super().maps(), 8, -1)


class Float8Maps(Scores):
    """Scores whose maps are rounded to float8 (e4m3), each row's largest scaled to 448."""

    def maps(self) -> Tensor:
        """Return the rounded maps."""
        return to_float8(super().maps(), -1)


Scheme = Callable[[Call], Scores]
"""Returns scores computed in few bits, and replaces the call's values where it rounds them."""


def _logits(bits: int) -> Scheme:
    """Return the paper's scheme, which rounds the logits themselves."""

    def scores(call: Call) -> Scores:
        full = call.scores()
        return full._replace(logits=quantise_logits(full.logits, full.allowed, bits))

    return scores


def _products(bits: int, keys: Callable[[Tensor], Tensor] = lambda k: k) -> Scheme:
    """Return SageAttention's scheme: queries and keys in blocks. On GPUs its 4 bits have a scale for fewer rows."""

    def scores(call: Call) -> Scores:
        k = round_by_block(keys(_widen(call.k)), bits, KEY_ROWS)
        return dataclasses.replace(call, q=round_by_block(_widen(call.q), bits, QUERY_ROWS), k=k).scores()

    return scores


def _outputs(kind: type[Scores], values: Callable[[Tensor, int], Tensor]) -> Scheme:
    """Return the scheme of the second product: probabilities by row, values by channel."""

    def scores(call: Call) -> Scores:
        call.v = values(_values(call), -2)
        return kind(*call.scores())

    return scores


def _cache(bits: int) -> Scheme:
    """Return KIVI's scheme: keys by channel over groups of tokens, values by token, recent ones kept.

    Every key stands twice in a row of logits, as it is and rounded, and the mask says which of the two a query reads.
    """

    def scores(call: Call) -> Scores:
        full, k, v = call.scores(), _widen(call.k), _values(call)
        if not full.is_rowwise:
            raise ValueError(f"{type(call.layer).__name__} takes no cache: name other schemes (--options.schemes)")
        low = dataclasses.replace(call, k=round_by_group(k, bits, -2)).scores()
        old = mask_rounded_keys(k.shape[3] - call.q.shape[3], k.shape[3], RECENT).to(k.device)
        call.v = torch.cat([v, round_by_group(v, bits, -1)], dim=-2)
        logits = torch.cat([full.logits, low.logits], dim=-1)
        return full._replace(logits=logits, allowed=torch.cat([full.allowed & ~old, full.allowed & old], dim=-1))

    return scores


def mask_rounded_keys(start: int, stop: int, recent: int) -> Tensor:
    """Return [stop - start, stop]: which keys of a cache the queries at positions start to stop read rounded.

    A group of tokens is rounded when the last of it is no longer among the `recent` tokens up to the query.
    """
    old = (torch.arange(start, stop) + 1 - recent).clamp(min=0)
    return torch.arange(stop) < (old // GROUP * GROUP)[:, None]


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _values(call: Call) -> Tensor:
    if call.v is None:
        raise ValueError(
            f"{type(call.layer).__name__} splits its values, which is not supported here: convert it with "
            "diffvision convert SOURCE DESTINATION --to language"
        )
    return _widen(call.v)


_SCHEMES = (
    *(_logits(8), _logits(6), _logits(4)),
    *(_products(8), _products(8, subtract_key_mean), _products(4), _products(4, subtract_key_mean)),
    *(_outputs(Int8Maps, lambda v, dim: to_integers(v, 8, dim)), _outputs(Float8Maps, to_float8)),
    *(_cache(8), _cache(4), _cache(2)),
)
SCHEMES: dict[str, Scheme] = dict(zip(NAMES, _SCHEMES, strict=True))


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
        model: as `analysis.capture.captured`, with its values in one piece (transformers' DiffLlama has not).
        rows: int64 [S, N], which the model reads whole.
        schemes: names of `SCHEMES`.
        batch_size: rows at a time.

    Returns:
        {"nll/full": nats a token, "nll/<scheme>": ..., "nll_rise/<scheme>": how much more than in full precision, by
        row, and those of `attention_errors`}.

    Raises:
        ValueError: a layer that a scheme cannot be computed for.
    """
    metrics: dict[str, PerSample | float] = {**attention_errors(model, rows, schemes=schemes, progress=progress)}
    losses: dict[str | None, Tensor] = {}
    for name in progress([None, *schemes], "low-bit attention"):
        rounded = nullcontext() if name is None else low_bit_attention(model, name)
        with evaluating(model), rounded:
            losses[name] = row_losses(model, rows, batch_size)
            metrics[f"nll/{name or 'full'}"] = losses[name].mean().item()
    return metrics | {f"nll_rise/{name}": count_each(losses[name] - losses[None]) for name in schemes}


def low_bit_attention(model: nn.Module, scheme: str) -> AbstractContextManager[None]:
    """Return a context in which the model attends by one of `SCHEMES`.

    The padding of a batch of unequal rows shares scales with its tokens: give rows of one length, or a batch of one.
    """
    return captured(model, SCHEMES[scheme])


def attention_errors(
    model: nn.Module,
    rows: Tensor,
    *,
    schemes: Sequence[str] = tuple(SCHEMES),
    progress: Progress = silent,
) -> dict[str, float]:
    """Return each layer's error under each scheme, and the two factors that decide about it.

    The layer reads what it reads in full precision, so that errors of the layers before it do not count. Its output is
    that of the heads, before a head norm. The measures are SageAttention's.

    Args:
        model, rows, schemes: as `low_bit`. Rows are read one at a time; a few logits of a layer are in memory
            at once.

    Returns:
        For each scheme and layer i from 0, "cosine/<scheme>/i", of the output with that in full precision, and
        "relative_l1/<scheme>/i", the sum of absolute differences over that of absolute values. "largest_logit/i", in
        absolute value, of all that a query may attend to. "cancellation/i", sqrt(|O1|^2 + |lambda O2|^2) over
        |O1 - lambda O2|, how much more errors of the maps count in their difference than in the maps; 1 where there is
        one map. Each also without "/i": the largest of all layers' logits, and means over layers.
    """
    layers: dict[str, Layer] = defaultdict(Layer)

    def see(call: Call) -> None:
        call.v, low = _values(call), {}
        for name in schemes:
            copy = dataclasses.replace(call)
            low[name] = _output(copy, SCHEMES[name](copy))
        layers[call.name].add(call, low)

    with evaluating(model), captured(model, see):
        for row in progress(rows.split(1), "errors of low-bit attention"):
            run_towers(model, {"tokens": row.to(get_device(model))})
    by_metric: dict[str, list[float]] = defaultdict(list)
    for layer in layers.values():
        for metric, value in layer.metrics().items():
            by_metric[metric].append(value)
    metrics: dict[str, float] = {}
    for metric, values in by_metric.items():
        metrics[metric] = max(values) if metric == "largest_logit" else sum(values) / len(values)
        metrics |= {f"{metric}/{index}": value for index, value in enumerate(values)}
    return metrics


class Layer:
    """Sums over rows of one layer's outputs and their errors."""

    def __init__(self) -> None:
        self.largest = 0.0
        # Squares of the maps' outputs, and of the layer's.
        self.parts, self.square = 0.0, 0.0
        self.absolute = 0.0
        # Of each scheme: the product with the full output, the square, and the absolute difference.
        self.low: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, call: Call, low: Mapping[str, Tensor]) -> None:
        """Take a call in full precision, and its outputs [B, H, N, V] under each scheme."""
        scores = call.scores()
        self.largest = max(self.largest, (scores.logits.abs() * scores.allowed).max().item())
        output, values = _output(call, scores), call.values(scores.logits.dtype)
        weights: list[Any] = [1.0] if scores.lam is None else [1.0, scores.lam]
        for weight, attention in zip(weights, scores.maps().unbind(2), strict=True):
            self.parts += (weight * attention @ values).double().square().sum().item()
        output = output.double()
        self.square += output.square().sum().item()
        self.absolute += output.abs().sum().item()
        for name, other in low.items():
            wide = other.double()
            sums = [(wide * output).sum(), wide.square().sum(), (wide - output).abs().sum()]
            self.low[name] += torch.stack(sums).cpu()

    def metrics(self) -> dict[str, float]:
        """Return the layer's metrics, NaN where its output is zero."""
        metrics = {"largest_logit": self.largest, "cancellation": _ratio(self.parts, self.square) ** 0.5}
        for name, sums in self.low.items():
            product, square, difference = sums.tolist()
            metrics[f"cosine/{name}"] = _ratio(product, (square * self.square) ** 0.5)
            metrics[f"relative_l1/{name}"] = _ratio(difference, self.absolute)
        return metrics


def _output(call: Call, scores: Scores) -> Tensor:
    applied = scores.compute_weights()
    return applied @ call.values(applied.dtype)


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")
