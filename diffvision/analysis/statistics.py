"""Statistics of attention maps: entropy, similarity between heads, rank, row sums, and shares of chosen keys.

Pictures of the numbers are in `figures`; maps are captured in `capture` and `maps`.

Maps are [..., M, N]: M queries, N keys. A softmax map has rows of weights that sum to 1; the difference of two has
negative entries and rows that sum to 1 - lambda, and may be all but zero. Whatever needs weights (entropy, sinks,
noise) takes `normalize_rows`: |entry| / sum of |entries|. The magnitude is how much a value counts in the result,
whatever its sign; the positive part alone would ignore the values that a head subtracts. The shares of a softmax map
are the map itself, so all maps are compared by one measure.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normalize_rows(maps: Tensor) -> Tensor:
    """Return the share of each key in its row, [..., M, N]: magnitudes that sum to 1; a row of zeros stays zeros."""
    size = maps.abs()
    return size / size.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)


def entropy(maps: Tensor) -> Tensor:
    """Return the entropy of each normalised row in nats, [..., M]: 0 where one key has all, log N where all have 1 / N.

    Source: Shannon; of attention as in Clark et al. 2019 (arXiv 1906.04341) section 4.
    """
    return torch.special.entr(normalize_rows(maps)).sum(dim=-1)


def relative_entropy(maps: Tensor, *, causal: bool = False) -> Tensor:
    """Return the entropy of each row as a share of the most it can have, log n, [..., M]: 0 to 1.

    Args:
        maps: [..., M, N].
        causal: query i of M has n = N - M + i + 1 keys to attend to, else N. A row with one key is NaN.
    """
    queries, keys = maps.shape[-2:]
    counts = torch.full((queries,), keys, dtype=maps.dtype, device=maps.device)
    if causal:
        counts = torch.arange(keys - queries + 1, keys + 1, dtype=maps.dtype, device=maps.device)
    most = counts.log()
    return torch.where(most > 0, entropy(maps) / most.clamp(min=1e-12), torch.nan)


def effective_rank(maps: Tensor) -> Tensor:
    """Return exp of the entropy of a map's singular values over their sum, [...].

    It is 1 for a map of rank one, N for the identity, and 0 for zeros.

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    values = torch.linalg.svdvals(maps)
    total = values.sum(dim=-1)
    parts = values / total.clamp(min=torch.finfo(maps.dtype).tiny)[..., None]
    return torch.special.entr(parts).sum(dim=-1).exp() * (total > 0)


def numerical_rank(maps: Tensor, tolerance: float = 0.01) -> Tensor:
    """Count the singular values of a map above `tolerance` times its largest, [...], int64.

    Source: Golub and Van Loan, "Matrix computations", section 5.4.1. With a machine-epsilon tolerance nearly
    every softmax map has full rank, so singular values below 1% of the largest are ignored.
    """
    values = torch.linalg.svdvals(maps)
    return (values > tolerance * values[..., :1]).sum(dim=-1)


def row_sums(weights: Tensor) -> Tensor:
    """Return the sums of the rows of what multiplies the values, [..., M].

    They are 1 - lambda in differential layers (arXiv 2410.05258 equation 1), 1 in standard ones.
    """
    return weights.sum(dim=-1)


def negative_share(weights: Tensor, *, causal: bool = False) -> Tensor:
    """Return the share of entries below zero among those that may attend, [...].

    Source: the negative attention of arXiv 2505.16333 section 3.
    """
    queries, keys = weights.shape[-2:]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=weights.device)
    allowed = allowed.tril(keys - queries) if causal else allowed
    return ((weights < 0) & allowed).sum(dim=(-2, -1)) / allowed.sum()


def head_redundancy(maps: Tensor) -> Tensor:
    """Return the mean cosine similarity over all pairs of heads' maps [H, M, N].

    It is 1 for identical heads, and NaN for a single head. The cosine is of the maps as vectors of M N
    entries, so what all heads have in common, such as an even spread, counts as well.

    Source: pairwise cosine of heads, with which arXiv 2505.16333 shows that differential heads are less redundant.
    """
    heads = len(maps)
    if heads < 2:
        return maps.new_tensor(math.nan)
    flat = torch.nn.functional.normalize(maps.flatten(1), dim=1)
    cosines = flat @ flat.T
    return (cosines.sum() - cosines.diagonal().sum()) / (heads * (heads - 1))


def share_on_keys(maps: Tensor, weights: Tensor) -> Tensor:
    """Return the share of each row that falls on some of the keys, [..., M].

    Args:
        maps: [..., M, N].
        weights: [N], how much of each key counts, 0 to 1. For a sink 1 at the class or register tokens (arXiv
            2309.16588) or at a text's first token (arXiv 2309.17453); for attention noise (arXiv 2410.05258 figure 1)
            the part of each patch outside of an object, or 1 at the tokens outside of the answer.
    """
    return normalize_rows(maps) @ weights.to(maps.dtype)


def largest_column(maps: Tensor) -> Tensor:
    """Return the largest share that one key has of all rows together, [...].

    It is 1 / N where there is no sink, and 1 where all queries look at one token (the sinks of arXiv 2309.17453,
    wherever they are).
    """
    return share_by_key(maps).amax(dim=-1)


def share_by_key(maps: Tensor) -> Tensor:
    """Return the share that each key has of all rows together, [..., N]: the mean over queries of `normalize_rows`."""
    return normalize_rows(maps).mean(dim=-2)


def shared_fraction(outputs: Tensor) -> Tensor:
    """Return the part of head outputs [..., M, V] that all queries share, [...]: 0 to 1.

    It is the squared norm of the mean over queries, over the mean of the squared norms. A head that gives all tokens
    the same output has 1.
    """
    whole = outputs.square().sum(dim=-1).mean(dim=-1)
    common = outputs.mean(dim=-2).square().sum(dim=-1)
    return common / whole.clamp(min=torch.finfo(outputs.dtype).tiny)


def kurtosis(x: Tensor) -> Tensor:
    """Return the kurtosis of all entries of a tensor, a scalar: 3 for a normal distribution, large with outliers.

    Source: Bondarenko et al. 2023 (arXiv 2306.12929) section 5, of activations.
    """
    centred = x - x.mean()
    return centred.pow(4).mean() / centred.square().mean().square()


def rms(heads: Tensor) -> Tensor:
    """Return the root mean square of head outputs [..., V] over their last axis, [...]: what RMSNorm divides by."""
    return heads.square().mean(dim=-1).sqrt()
