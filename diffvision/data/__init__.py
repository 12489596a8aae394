"""WebDataset shards in, batches out.

`ShardLoader` trains: an exact, resumable order, a true length, an account of every sample. `EvaluationFolder` reads
CLIP_benchmark's layout, each sample once. `TokenShards` are text as packed sequences of token ids. `modules` and
`language` have the LightningDataModules, `make` writes and checks shards.
"""

from diffvision.data.batches import ImageLabelBatch, ImageTextBatch, RetrievalBatch, TokenBatch
from diffvision.data.folders import EvaluationFolder, find_folders
from diffvision.data.report import BadDataError, Limits, Report
from diffvision.data.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
from diffvision.data.shards import ShardLoader
from diffvision.data.storage import ShardSet
from diffvision.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from diffvision.data.tokens import TokenSequence, TokenShards

__all__ = [
    "BadDataError",
    "CaptionMember",
    "EvaluationFolder",
    "ImageLabel",
    "ImageLabelBatch",
    "ImageMember",
    "ImageText",
    "ImageTextBatch",
    "Limits",
    "Report",
    "Retrieval",
    "RetrievalBatch",
    "ShardLoader",
    "ShardSet",
    "TokenBatch",
    "TokenSequence",
    "TokenShards",
    "Tokenizer",
    "find_folders",
    "load_tokenizer",
    "train_tokenizer",
]
