"""Loss on the tokens that can be recalled from the context, and on the rest.

A token is a recall hit if it ends a bigram that was in the context before: after "... Hakuna Matata ... Hakuna" comes
"Matata". Bigrams that are frequent in the training data are known without the context, so they count as the rest.
Source: Arora et al., arXiv 2312.04927 (frequent: more than 1,250 occurrences); arXiv 2410.05258, table 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffvision.evaluation.language.perplexity import scored_windows, windows
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.models.modes import evaluating


def associative_recall(
    model: Any,
    documents: Sequence[Tensor],
    *,
    window: int,
    frequent: Tensor | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the mean loss of recall hits, of the other tokens, and of all, over windows that do not overlap.

    Args:
        model: see `scoring`.
        documents: int64 [N] each.
        window: tokens that the model reads at a time; a bigram counts as repeated within one.
        frequent: codes from `frequent_bigrams` of the training data; None counts no bigram as frequent.

    Returns:
        nll/ar_hit, nll/others, nll/all in nats (NaN where there is no such token), ar_hit_share.

    Raises:
        ValueError: no document has two tokens.
    """
    pieces = [piece for document in documents for piece in windows(document, window)]
    if not pieces:
        raise ValueError("no document has two tokens: a bigram needs them")
    totals, counts = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with evaluating(model):
        for _, losses, scored, tokens in scored_windows(model, pieces, batch_size, progress, "associative recall"):
            hits = repeated_bigrams(tokens)
            if frequent is not None:
                hits &= ~torch.isin(_codes(tokens), frequent)
            for kind, mask in enumerate((hits & scored, ~hits & scored)):
                totals[kind] += losses[mask].double().sum()
                counts[kind] += mask.sum()
    means = (totals / counts).tolist()
    return {
        "nll/ar_hit": means[0],
        "nll/others": means[1],
        "nll/all": (totals.sum() / counts.sum()).item(),
        "ar_hit_share": (counts[0] / counts.sum()).item(),
    }


def repeated_bigrams(tokens: Tensor) -> Tensor:
    """Return whether each token after the first completes a bigram that occurs earlier in its row, bool [B, N - 1]."""
    codes, order = _codes(tokens).sort(dim=1, stable=True)  # equal bigrams are adjacent, the earliest first
    repeated = torch.zeros_like(codes, dtype=torch.bool)
    repeated[:, 1:] = codes[:, 1:] == codes[:, :-1]
    return torch.zeros_like(repeated).scatter(1, order, repeated)


def frequent_bigrams(documents: Iterable[Tensor], more_than: int = 1250) -> Tensor:
    """Return the bigrams that occur more than `more_than` times in the documents, as sorted codes.

    The codes are the argument `frequent` of `associative_recall`. Where the documents are only a sample of the training
    data, lower `more_than` in proportion.
    """
    counts: Counter[int] = Counter()
    for document in documents:
        codes, occurrences = _codes(document[None])[0].unique(return_counts=True)
        counts.update(dict(zip(codes.tolist(), occurrences.tolist(), strict=True)))
    return torch.tensor(sorted(code for code, count in counts.items() if count > more_than), dtype=torch.int64)


def _codes(tokens: Tensor) -> Tensor:
    """Return a unique number for each bigram of tokens [B, N], int64 [B, N - 1]."""
    return (tokens[:, :-1] << 32) | tokens[:, 1:]
