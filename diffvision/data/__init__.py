"""WebDataset shards in, batches out.

`ShardLoader` trains: an exact, resumable order, a true length, an account of every sample. `EvaluationFolder` reads
CLIP_benchmark's layout, each sample once. `TokenShards` are text as packed sequences of token ids. `ImageTextData`,
`ImageLabelData` and `TextData` are the LightningDataModules, imported when they are first used, for Lightning takes
seconds. `make` writes and checks shards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diffvision.data.batches import ImageLabelBatch, ImageTextBatch, RetrievalBatch, TokenBatch
from diffvision.data.images.folders import EvaluationFolder, find_folders
from diffvision.data.images.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
from diffvision.data.shards.loader import ShardLoader
from diffvision.data.shards.report import BadDataError, Limits, Report
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from diffvision.data.text.tokens import TokenSequence, TokenShards

if TYPE_CHECKING:
    from diffvision.data.images.module import ImageLabelData, ImageTextData
    from diffvision.data.text.module import TextData

_MODULES = {"ImageLabelData": "images.module", "ImageTextData": "images.module", "TextData": "text.module"}

__all__ = [
    "BadDataError",
    "CaptionMember",
    "EvaluationFolder",
    "ImageLabel",
    "ImageLabelBatch",
    "ImageLabelData",
    "ImageMember",
    "ImageText",
    "ImageTextBatch",
    "ImageTextData",
    "Limits",
    "Report",
    "Retrieval",
    "RetrievalBatch",
    "ShardLoader",
    "ShardSet",
    "TextData",
    "TokenBatch",
    "TokenSequence",
    "TokenShards",
    "Tokenizer",
    "find_folders",
    "load_tokenizer",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
