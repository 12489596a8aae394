"""The choice of the heads that DEX changes in a pretrained model: those with the most spread attention.

Statistics of the heads of one input are in `statistics`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from diffvision.analysis.capture import Call, captured, run_towers
from diffvision.analysis.statistics import entropy
from diffvision.models.adapt import adapt
from diffvision.models.modes import evaluating


def highest_entropy(model: nn.Module, batches: Iterable[Mapping[str, Any]], share: float = 0.5) -> dict[str, list[int]]:
    """Return the heads of each layer whose attention has the highest entropy, for `diffvision.adapt(..., heads=)`.

    A head's entropy is the mean of -sum p log p of its map's rows, over all tokens of all samples.

    Args:
        model: a model that `adapt` takes; it is copied and not changed.
        batches: of `image` [B, 3, h, w] and/or `text` [B, L], or of a language model's `tokens` [B, N]; a few suffice.
        share: share of a layer's heads to choose; the number is rounded and at least one.

    Returns:
        {block's name: indices of the chosen heads}.

    Raises:
        ValueError: the share is not above 0 and at most 1, or the batches are empty or lack inputs for a tower.

    Source: arXiv 2505.16333 section 3.2 and appendix B.4: the k heads of highest entropy in each layer, k half of them.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share, of a layer's heads, must be above 0 and at most 1, got {share}")
    entropies = _entropies(adapt(copy.deepcopy(model), "dex"), batches)
    return {
        block: sorted(of_heads.topk(max(1, round(share * len(of_heads)))).indices.tolist())
        for block, of_heads in entropies.items()
    }


def _entropies(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the entropy of each head [H] in nats by block, summed over batches."""
    entropies: dict[str, Tensor] = {}

    def see(call: Call) -> None:
        block = call.name.removesuffix(".attn")
        entropies[block] = entropies.get(block, 0) + entropy(call.scores().maps().double()).mean((0, 2, 3))

    for batch in batches:
        with evaluating(model), captured(model, see):
            run_towers(model, batch)
    names = [name for name, module in model.named_modules() if getattr(module, "variant", None) == "dex"]
    if missed := [name for name in names if name.removesuffix(".attn") not in entropies]:
        raise ValueError(f"no batch has reached {missed[0]}: give batches with inputs for every tower")
    return entropies
