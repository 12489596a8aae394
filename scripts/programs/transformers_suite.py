"""transformers' common tests of a language model, on our classes: what `run_transformers_tests.py` hands to pytest.

`tests/test_modeling_common.py` is in transformers' source distribution. The two mixins that it imports from other
folders are not: where they are missing, empty ones take their place. A clone of the repository has them.
"""

import sys
import types
import unittest
from importlib.util import find_spec
from typing import Any

import torch
from transformers.models.auto import modeling_auto

for package, module, mixin in [
    ("tests.generation", "test_utils", "GenerationTesterMixin"),
    ("tests.exporters", "test_export", "ExportTesterMixin"),
]:
    if find_spec(package) is None:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[f"{package}.{module}"] = types.ModuleType(module)
        setattr(sys.modules[f"{package}.{module}"], mixin, type(mixin, (), {}))

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402

from diffvision.models.language import transformers as ours  # noqa: E402

# The tests ask these tables which classes take labels.
NAMES = [
    (modeling_auto.MODEL_MAPPING_NAMES, "DiffTransformerModel"),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "DiffTransformerForCausalLM"),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, "DiffTransformerForSequenceClassification"),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "DiffTransformerForTokenClassification"),
]
CLASSES = [getattr(ours, name) for _, name in NAMES if hasattr(ours, name)]
for names, name in NAMES:
    names["diff_transformer"] = name


class ModelTester:
    """Sizes and inputs under the names that the tests ask for.

    Args:
        variant: of the attention.
        head_dim: such that the heads' outputs together are as wide as the model.
    """

    batch_size, seq_length, is_training = 13, 7, True
    vocab_size, hidden_size, intermediate_size = 99, 32, 37
    num_hidden_layers, num_attention_heads, num_key_value_heads = 2, 4, 2

    def __init__(self, variant: str, head_dim: int) -> None:
        self.variant, self.head_dim = variant, head_dim

    def get_config(self) -> ours.DiffTransformerConfig:
        return ours.DiffTransformerConfig(
            variant=self.variant,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            dim=self.hidden_size,
            mlp_dim=self.intermediate_size,
            depth=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            max_position_embeddings=512,
            tied=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[ours.DiffTransformerConfig, dict[str, Any]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens).tril()}


class Common(ModelTesterMixin, GenerationTesterMixin):
    """What the three variants share."""

    all_model_classes = tuple(CLASSES)
    _torch_compile_train_cls = ours.DiffTransformerForCausalLM
    variant, head_dim = "standard", 8

    def setUp(self) -> None:
        self.model_tester = ModelTester(self.variant, self.head_dim)


class TestStandard(Common, unittest.TestCase):
    """The plain Transformer."""


class TestV1(Common, unittest.TestCase):
    """Differential attention V1: a head is two maps wide."""

    variant, head_dim = "v1", 4


class TestV2(Common, unittest.TestCase):
    """Differential attention V2."""

    variant = "v2"
