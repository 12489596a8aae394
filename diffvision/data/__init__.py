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
    from diffvision.data.images.image_data import ImageData, ImageLabelData, ImageTextData
    from diffvision.data.images.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
    from diffvision.data.shards.loader import ShardLoader
    from diffvision.data.shards.report import BadDataError, Limits, Report
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.shards.writer import write_manifest
    from diffvision.data.text.text_data import TextData
    from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
    from diffvision.data.text.tokens import TokenSequence, TokenWindows

__all__ = [
    "BadDataError",
    "CaptionMember",
    "Conversation",
    "EvaluationFolder",
    "ImageData",
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

_NAMES = {
    "batches": "ImageLabelBatch ImageTextBatch RetrievalBatch TokenBatch VisionLanguageBatch",
    "conversations": "Conversation VisionLanguageData",
    "images.folders": "EvaluationFolder find_folders",
    "images.image_data": "ImageData ImageLabelData ImageTextData",
    "images.samples": "CaptionMember ImageLabel ImageMember ImageText Retrieval",
    "shards.loader": "ShardLoader",
    "shards.report": "BadDataError Limits Report",
    "shards.storage": "ShardSet",
    "shards.writer": "write_manifest",
    "text.text_data": "TextData",
    "text.tokenizers": "Tokenizer load_tokenizer train_tokenizer",
    "text.tokens": "TokenSequence TokenWindows",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
