"""WebDataset shards in, batches out.

`ShardLoader` trains: an exact, resumable order, a true length, an account of every sample. `EvaluationFolder` reads
CLIP_benchmark's layout, each sample once. `modules` has the LightningDataModules, `make` writes and checks shards.
"""

from diffvision.data.batches import ImageLabelBatch, ImageTextBatch, RetrievalBatch
from diffvision.data.folders import EvaluationFolder, find_folders
from diffvision.data.report import BadDataError, Limits, Report
from diffvision.data.samples import CaptionMember, ImageLabel, ImageMember, ImageText, Retrieval
from diffvision.data.shards import ShardLoader
from diffvision.data.storage import ShardSet

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
    "find_folders",
]
