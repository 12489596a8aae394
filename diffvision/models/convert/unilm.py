"""The attention of microsoft/unilm's Diff-Transformer, V1 and V2: the same function and rows, other names.

| here | V1 there | V2 there |
|---|---|---|
| proj | out_proj | o_proj |
| head_norm | subln | |

Both count differential heads, keep a head's two queries side by side, a value of 2D in one piece (V1) and rotary pairs
interleaved, as ours. In V1 the grouped heads are those of the flash modules: the plain module there pairs keys of
different heads when there are fewer key/value heads.

Source: microsoft/unilm Diff-Transformer/multihead_flashdiff_1.py, Diff-Transformer-V2/multihead_flashdiffv2.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

NAMES = {
    "unilm-v1": {"proj": "out_proj", "head_norm": "subln"},
    "unilm-v2": {"proj": "o_proj"},
}
"""Layout -> our names within an attention -> theirs."""

_MARKS = {"unilm-v1": r"(^|\.)subln\.weight$", "unilm-v2": r"(^|\.)lambda_proj\.weight$"}


def recognised(names: Mapping[str, Tensor]) -> str | None:
    """Return the layout that has attention with these names, at the top or anywhere within a model, or None."""
    for layout, mark in _MARKS.items():
        theirs = NAMES[layout]["proj"]
        attentions = [name[: -len(match[0])] + match[1] for name in names if (match := re.search(mark, name))]
        if attentions and all(f"{prefix}{theirs}.weight" in names for prefix in attentions):
            return layout
    return None


def from_unilm(weights: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return the state_dict with the attention's tensors renamed as in our layers, the rest unchanged.

    Names are replaced right before their last part: `attn.out_proj.weight`, `out_proj.weight`.
    """
    names = {theirs: ours for ours, theirs in NAMES[layout].items()}
    out = {}
    for name, value in weights.items():
        *_, module, kind = ["", *name.split(".")][-3:]
        prefix = name.removesuffix(f"{module}.{kind}")
        out[f"{prefix}{names[module]}.{kind}" if module in names else name] = value
    return out
