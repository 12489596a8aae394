"""The decoding kernel, in Triton's interpreter on a CPU (float32 and float16: its bfloat16 products are wrong)."""

import os

import pytest
import torch

from diffvision.ops.attention import reference

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("diffvision.ops.attention.triton.decode")
decode, split_keys = kernels.decode, kernels.split_keys

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="runs in the interpreter"
)


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch):
    monkeypatch.setattr(kernels, "MIN_KEYS", 64)  # so that a cache which an interpreter can read has several


def tensors(b=2, h=4, hk=2, keys=2, m=1, n=150, d=16, v=32, lam=(1,), dtype=torch.float32, device="cpu"):
    q = torch.randn(b, m, h, 2, d).permute(0, 2, 3, 1, 4)
    k = torch.randn(b, n, hk, keys, d).permute(0, 2, 3, 1, 4)
    value = torch.randn(b, n, hk, v).transpose(1, 2)
    return [*(t.to(device, dtype) for t in (q, k, value)), torch.rand(lam, device=device)]


def exact(q, k, v, lam, **settings):
    return reference.diff_attention(q.double(), k.double(), v.double(), lam.double(), dropout=0.0, **settings)


def agree(out, expected):
    assert out.shape == expected.shape
    tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


SHAPES = {
    "one query": {},
    "one query, ungrouped": {"h": 2},
    "many splits": {"b": 1, "h": 1, "hk": 1, "n": 900},
    "a shared key": {"keys": 1, "v": 16},
    "a few queries, a shared key, grouped": {"keys": 1, "m": 3, "h": 3, "hk": 1},
    "sizes that are no powers of two": {"d": 20, "v": 37},
    "more rows than a program holds": {"m": 16, "h": 3, "hk": 1, "b": 1, "n": 70, "lam": (1, 3, 16, 1)},
    "short": {"n": 5, "m": 3},
    "one key": {"n": 1},
    "more queries than keys": {"m": 7, "n": 4, "lam": (4, 1, 1)},
    "wide": {"b": 1, "h": 2, "hk": 1, "d": 128, "v": 256, "n": 130},
}


HALF = ("one query", "a few queries, a shared key, grouped", "sizes that are no powers of two")
CASES = [(shape, torch.float32, True) for shape in SHAPES]
CASES += [pytest.param(shape, torch.float32, False, marks=pytest.mark.slow) for shape in SHAPES]
CASES += [(shape, torch.float16, True) for shape in HALF]


@pytest.mark.quick(
    "one query-dtype0-True",
    "a shared key-dtype3-True",
    "sizes that are no powers of two-dtype24-True",
    "one key-dtype8-True",
    "wide-dtype10-True",
    "short-dtype7-True",
)
@interpreted
@pytest.mark.parametrize(("shape", "dtype", "causal"), CASES)
def test_equals_the_formula(shape, dtype, causal):
    inputs = tensors(**SHAPES[shape], dtype=dtype)
    settings = {"causal": causal, "mask": None, "scale": None}
    agree(decode(*inputs, **settings), exact(*inputs, **settings))


MASKS = {
    "padding": lambda b, h, m, n: torch.arange(n).expand(b, 1, 1, n) >= torch.tensor([3, n - 2])[:, None, None, None],
    "by query": lambda b, h, m, n: torch.rand(1, 1, m, n) > 0.5,
    "by head": lambda b, h, m, n: torch.rand(h, 1, n).expand(b, h, m, n) > 0.5,
    "all axes": lambda b, h, m, n: torch.rand(b, h, m, n) > 0.5,
    "by query, one for all keys": lambda b, h, m, n: torch.rand(b, 1, m, 1) > 0.5,
}


@pytest.mark.quick("padding-", "by query-causal", "by head-", "all axes-")
@interpreted
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read_where_they_lie(name, causal):
    inputs = tensors(m=3)
    settings = {"causal": causal, "mask": MASKS[name](2, 4, 3, 150), "scale": 0.4}
    agree(decode(*inputs, **settings), exact(*inputs, **settings))


@interpreted
def test_a_negative_scale():
    inputs = tensors(m=2)
    settings = {"causal": True, "mask": None, "scale": -0.5}
    agree(decode(*inputs, **settings), exact(*inputs, **settings))


@interpreted
def test_a_row_that_may_attend_to_nothing_is_zeros():
    inputs = tensors(m=3)
    mask = torch.ones(2, 1, 3, 150, dtype=torch.bool)
    mask[0, :, 1] = False
    out = decode(*inputs, causal=False, mask=mask, scale=None)
    assert (out[0, :, 1] == 0).all()
    agree(out, exact(*inputs, causal=False, mask=mask, scale=None))
    no_keys = [inputs[0], inputs[1][:, :, :, :0], inputs[2][:, :, :0], inputs[3]]
    assert (decode(*no_keys, causal=False, mask=None, scale=None) == 0).all()


@interpreted
def test_any_strides():
    q, k, v, lam = tensors(n=70)
    settings = {"causal": False, "mask": None, "scale": None}
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    assert torch.equal(decode(*strided, lam, **settings), decode(q, k, v, lam, **settings))


@interpreted
@pytest.mark.parametrize("logit", [1e3, 6e4])
def test_extreme_logits_stay_finite(logit):
    q, k, v, lam = tensors(m=2)
    q, k = q.sign() * logit**0.5, k.sign() * logit**0.5
    settings = {"causal": True, "mask": None, "scale": None}
    out = decode(q, k, v, lam, **settings)
    torch.testing.assert_close(out.double(), exact(q, k, v, lam, **settings), rtol=1e-3, atol=1e-3)


@interpreted
def test_compiles_whole_and_is_a_sound_operator():
    q, k, v, lam = tensors(n=40)
    mask = torch.rand(2, 1, 1, 40) > 0.4

    def call(q, k, v, lam, mask):
        return decode(q, k, v, lam, causal=True, mask=mask, scale=None) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, lam, mask), call(q, k, v, lam, mask))
    torch.library.opcheck(
        kernels._decode, (q, k, v, lam, mask, True, 0.25), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("processors", [1, 4, 132])
@pytest.mark.parametrize("programs", [1, 7, 600])
@pytest.mark.parametrize("keys", [0, 1, 63, 64, 300, 4096, 100_001])
def test_splits_cover_every_key_once(keys, programs, processors):
    splits, each = split_keys(keys, programs, 64, processors)
    assert each % 64 == 0
    assert (splits - 1) * each < max(keys, 1) <= splits * each
    assert splits * programs < 2 * processors + programs  # no more than fill the GPU twice
    assert splits == 1 or each >= 64


def test_a_long_cache_fills_the_gpu():
    splits, _ = split_keys(32_768, 8, 64, 132)
    assert splits * 8 >= 2 * 132 * 0.9


GPU = {
    "one query": {"h": 8, "n": 4096, "d": 64, "v": 128},
    "one query, language": {"h": 8, "n": 5000, "d": 128, "v": 256},
    "a shared key, grouped": {"h": 8, "n": 4096, "d": 128, "v": 128, "keys": 1},
    "a few queries": {"m": 5, "n": 1023, "d": 64, "v": 128, "lam": (2, 4, 5, 1)},
    "more rows than a program holds": {"m": 16, "h": 8, "n": 777, "d": 128, "v": 256},
    "sizes that are no powers of two": {"n": 500, "d": 96, "v": 192},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", GPU)
def test_equals_the_formula_on_a_gpu(shape, dtype, causal, masked):
    inputs = tensors(**GPU[shape], dtype=dtype, device="cuda")
    keys = inputs[1].shape[3]
    mask = (torch.arange(keys, device="cuda") >= 70).expand(2, 1, 1, keys) if masked else None
    settings = {"causal": causal, "mask": mask, "scale": None}
    agree(decode(*inputs, **settings), exact(*inputs, **settings))
