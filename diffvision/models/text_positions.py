"""The positions of a text tower's tokens when it starts from weights of another context length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Positions = Literal["interpolate", "stretch", "first"]
KEPT, STRETCH = 20, 4
"""Long-CLIP's: the first positions, which are well trained, stay, and the others are stretched by a factor."""


def stretch_positions(positions: Tensor, length: int) -> Tensor:
    """Stretch positions [L, D] to [length, D] as Long-CLIP does (arXiv 2403.15378, section 3.1).

    The first 20 stay, and position 20 + i is the old one at 20 + i / 4, linearly between its neighbours and, as in the
    authors' code, beyond the last one: 77 positions become up to 248.

    Raises:
        ValueError: `length` is below L or beyond what the factor gives.
    """
    old, longest = len(positions), KEPT + STRETCH * (len(positions) - KEPT)
    if not max(old, KEPT + 2) <= length <= longest:
        raise ValueError(
            f"context_length must be {old} to {longest} to stretch {old} positions, got {length}: set "
            "context_positions to interpolate"
        )
    steps = torch.arange(length - KEPT)
    left = (KEPT + steps // STRETCH).clamp(max=old - 2)
    share = ((KEPT + steps / STRETCH) - left)[:, None]
    wide = positions.float()
    stretched = torch.lerp(wide[left], wide[left + 1], share)
    return torch.cat([wide[:KEPT], stretched]).to(positions.dtype)


@contextmanager
def resizing_positions(how: Positions | None) -> Iterator[None]:
    """Within the context, OpenCLIP gives a model of another context length the positions of its weights as `how` says.

    Args:
        how: "interpolate" linearly, as OpenCLIP does; "stretch" as Long-CLIP does; or take the "first" ones. None
            interpolates to a longer context, and raises a ValueError for a shorter one.
    """
    import open_clip.factory as factory

    interpolate = factory.resize_text_pos_embed

    def resize(state: dict[str, Any], model: Any, *args: Any, **settings: Any) -> None:
        key = next((k for k in ("positional_embedding", "text.positional_embedding") if k in state), None)
        built = getattr(getattr(model, "text", model), "positional_embedding", None)
        # OpenCLIP says what else is wrong with their shape.
        if key is not None and built is not None and state[key].shape[1:] == built.shape[1:]:
            old, new = len(state[key]), len(built)
            if old > new and how is None:
                raise ValueError(
                    f"context_length must be {old}, that of the weights, or more, got {new}: set context_positions "
                    "to first or interpolate for fewer"
                )
            if how == "stretch" and old != new:
                state[key] = stretch_positions(state[key], new)
            elif how == "first" and old != new:
                if old < new:
                    raise ValueError(
                        f"context_positions must be interpolate or stretch, got first: the weights have {old} "
                        f"positions, fewer than {new}"
                    )
                state[key] = state[key][:new].clone()
        interpolate(state, model, *args, **settings)

    factory.resize_text_pos_embed = resize
    try:
        yield
    finally:
        factory.resize_text_pos_embed = interpolate


def check_context_length(length: int, tokenizer: Any, model: Any) -> None:
    """Raise a ValueError for a context length that the tokenizer, or a text tower of the Hub's, does not have."""
    config = getattr(getattr(model, "text", None), "config", None)
    limits = [getattr(getattr(tokenizer, "tokenizer", None), "model_max_length", None)]
    limits += [getattr(config, "max_position_embeddings", None)]
    known = [limit for limit in limits if limit]
    if known and length > min(known):
        raise ValueError(f"context_length must be at most {min(known)}, what the model's tokenizer takes, got {length}")
