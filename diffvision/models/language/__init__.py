"""The DIFF Transformer for text and its matched Transformer: configuration, model, KV cache, generation.

`create` makes a model by name, `save` writes it and `load` reads it. The module `hugging_face` converts to
transformers' classes; it is not imported here.
"""

from diffvision.models.language.configuration import FAMILIES, SIZES, LanguageConfig, Size, config, model_names
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.language_checkpoints import create, find_tokenizer, load, origin_of, save

__all__ = [
    "FAMILIES",
    "SIZES",
    "LanguageConfig",
    "LanguageModel",
    "Size",
    "config",
    "create",
    "find_tokenizer",
    "load",
    "model_names",
    "origin_of",
    "save",
]
