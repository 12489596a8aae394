"""The import path that exported folders hold in their one line of code.

The classes are in `diffvision.models.language.transformers`; this module only names them.
"""

from diffvision.models.language.transformers import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    DiffTransformerModel,
    export,
)

__all__ = [
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "export",
]
