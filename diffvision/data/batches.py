"""What a batch is: the keys, shapes and dtypes that `data` hands to training and evaluation.

The classes that make them are in `images.samples` and `text.tokens`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from torch import Tensor


class ImageTextBatch(TypedDict):
    """Images and their captions as token ids, for contrastive training."""

    image: Tensor  # [B, 3, height, width] float
    text: Tensor  # [B, context length] int64


class TokenBatch(TypedDict):
    """Packed text: tokens[:, :-1] are what a model reads, tokens[:, 1:] what it predicts.

    `documents` counts the documents of a row from 0; the token that ends a document belongs to it. Where there is
    `learned`, only tokens that have it count in the loss, when they are predicted.
    """

    tokens: Tensor  # [B, L + 1] int64
    documents: NotRequired[Tensor]  # [B, L + 1] int64
    learned: NotRequired[Tensor]  # [B, L + 1] bool
    ends: NotRequired[Tensor]  # int32, where documents end in tokens[:, :-1]; a module adds it on the way to a device


class VisionLanguageBatch(TypedDict):
    """Conversations about images, padded at the right; `attention_mask` is arange(L) < lengths[:, None].

    Each image has its placeholders in `tokens`, as many as the model has tokens for it. A row may have several images,
    or none.
    """

    image: Tensor  # [I, 3, height, width] float: all images of the batch in reading order
    tokens: Tensor  # [B, L] int64, 0 where padded
    lengths: Tensor  # [B] int64
    learned: Tensor  # [B, L] bool: the answers, which count in the loss


class ImageLabelBatch(TypedDict):
    """Images and their class numbers, for classification and zero-shot evaluation."""

    image: Tensor  # [B, 3, height, width] float
    label: Tensor  # [B] int64


class RetrievalBatch(TypedDict):
    """Images with every caption of each; where one caption is right and the others wrong, the right one is first.

    Of `pairs`, a sample is two images that follow each other, each with its one caption. Of `objects`, the captions are
    names: those of objects in the image, then as many of objects that are not.
    """

    image: Tensor  # [B, 3, height, width] float
    captions: list[list[str]]
    kind: NotRequired[list[str]]  # of each image, "" where its sample has none; of composition and pairs


def named(batch: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return a batch of any loader as a dictionary: a tuple or list by position, a single tensor as its first part.

    Args:
        batch: what the loader gave.
        keys: the names of the parts of a tuple, in its order.

    Raises:
        ValueError: it is none of these, or has more parts than there are keys.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    parts = [batch] if isinstance(batch, Tensor) else batch
    if not isinstance(parts, list | tuple) or len(parts) > len(keys):
        size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        raise ValueError(
            f"a batch is a {type(batch).__name__}{size}: give a dictionary with {', '.join(keys)}, or a tuple of these"
        )
    return dict(zip(keys, parts, strict=False))
