"""DINT keeps no cache; its equations are in test_cross_attention.py."""

import pytest

from diffvision.models import language
from diffvision.models.language.kv_cache import KVCache
from diffvision.nn import DintAttention


def test_a_cache_is_refused_before_work_is_done():
    with pytest.raises(ValueError, match="variant 'v1_dint' cannot use a cache"):
        KVCache([DintAttention(32, 2)], 1, 8)
    model = language.create("diff-debug", variant="v1_dint", lambda_init=0.5)
    assert model.blocks[1].attn.lambda_init == 0.5
