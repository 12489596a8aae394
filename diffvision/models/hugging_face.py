"""The import path that exported folders hold in their one line of code; the classes are in `language.transformers`."""

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
