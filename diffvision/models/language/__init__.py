"""The DIFF Transformer for text and its matched Transformer: configuration, model, KV cache, generation.

`create` makes a model by name, `save` and `load` keep and read it. `transformers` has the same models as transformers'
classes and is imported only when it is asked for.
"""

from diffvision.models.language.configuration import FAMILIES, SIZES, LanguageConfig, Size, config, model_names
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.model import create, load, save, tokenizer_beside

__all__ = [
    "FAMILIES",
    "SIZES",
    "LanguageConfig",
    "LanguageModel",
    "Size",
    "config",
    "create",
    "load",
    "model_names",
    "save",
    "tokenizer_beside",
]
