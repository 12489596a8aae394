"""WebDataset shards in, batches out.

`ShardLoader` trains: an exact, resumable order, a true length, an account of every sample. `EvaluationFolder` reads
CLIP_benchmark's layout, each sample once. `TokenWindows` are text as windows of token ids. `ImageTextData`,
`ImageLabelData`, `TextData` and `VisionLanguageData` are the LightningDataModules. `make` writes and checks shards.
Names are imported when they are first used, because PyTorch and Lightning take long.
"""

from typing import TYPE_CHECKING

from diffvision.lazy import lazy_names

if TYPE_CHECKING:
    from diffvision.data.batches import (
        ImageLabelBatch,
        ImageTextBatch,
        RetrievalBatch,
        TokenBatch,
        VisionLanguageBatch,
    )
    from diffvision.data.conversations import Conversation, VisionLanguageData
    from diffvision.data.images.folders import EvaluationFolder, find_folders
    from diffvision.data.images.module import ImageLabelData, ImageTextData
    from diffvision.data.images.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
    from diffvision.data.shards.loader import ShardLoader
    from diffvision.data.shards.report import BadDataError, Limits, Report
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.shards.writer import write_manifest
    from diffvision.data.text.module import TextData
    from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
    from diffvision.data.text.tokens import TokenSequence, TokenWindows

__all__ = [
    "BadDataError",
    "CaptionMember",
    "Conversation",
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
    "TokenWindows",
    "Tokenizer",
    "VisionLanguageBatch",
    "VisionLanguageData",
    "find_folders",
    "load_tokenizer",
    "train_tokenizer",
    "write_manifest",
]

_MODULES = {
    "BadDataError": "shards.report",
    "CaptionMember": "images.samples",
    "Conversation": "conversations",
    "EvaluationFolder": "images.folders",
    "ImageLabel": "images.samples",
    "ImageLabelBatch": "batches",
    "ImageLabelData": "images.module",
    "ImageMember": "images.samples",
    "ImageText": "images.samples",
    "ImageTextBatch": "batches",
    "ImageTextData": "images.module",
    "Limits": "shards.report",
    "Report": "shards.report",
    "Retrieval": "images.samples",
    "RetrievalBatch": "batches",
    "ShardLoader": "shards.loader",
    "ShardSet": "shards.storage",
    "TextData": "text.module",
    "TokenBatch": "batches",
    "TokenSequence": "text.tokens",
    "TokenWindows": "text.tokens",
    "Tokenizer": "text.tokenizers",
    "VisionLanguageBatch": "batches",
    "VisionLanguageData": "conversations",
    "find_folders": "images.folders",
    "load_tokenizer": "text.tokenizers",
    "train_tokenizer": "text.tokenizers",
    "write_manifest": "shards.writer",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
