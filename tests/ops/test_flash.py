"""The flash-attn backend. No library runs without a GPU: functions that bind each call to the signatures of released
packages (`tests/assets/flash_signatures.json`), with their refusals, stand in, so that layout, pairing, widening and
pieces are compared with the formula; what is installed is tested where it is."""

import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from diffvision.ops.attention import Problem, flash, reference

SIGNATURES = json.loads((Path(__file__).parents[1] / "assets/flash_signatures.json").read_text())
PACKAGES = {package.name: package for package in flash.PACKAGES}
RELEASES = {
    "flash-attn 2.7.0": ("flash-attn 2", False),
    "flash-attn 2.8.3.post2": ("flash-attn 2", False),
    "FlashAttention-3 3.0.0 at 0251105a": ("FlashAttention-3", False),
    "flash-attn-4 4.0.0b36": ("FlashAttention-4", True),  # returns (out, lse)
}
PROBLEM = Problem(2, 4, 4, 65, 65, 64, 128, dtype=torch.bfloat16, device="cuda")


def plain(q, k, v, scale, causal):
    """[B, N, H, D] as the libraries have it; causal to the last key, rows without a key are zeros."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.mT * scale
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril(k.shape[2] - q.shape[2]) if causal else allowed
    weights = scores.masked_fill(~allowed, torch.finfo(q.dtype).min).softmax(-1) * allowed
    return (weights @ v).transpose(1, 2)


def signature(release, function):
    """The real signature; a parameter without a default has to be given."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = SIGNATURES[release][function].items()
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=... if optional else empty) for name, optional in parameters]
    )


class StandIn:
    """Both functions of one library, bound to its signature, with its return type; remembers what it was given."""

    def __init__(self, release):
        self.release, self.calls = release, []
        name, self.returns_tuple = RELEASES[release]
        self.package = PACKAGES[name]

    def libraries(self):
        return (flash.Library(self.package, self.attend, self.attend_varlen),)

    def bind(self, function, args, settings):
        bound = signature(self.release, function).bind(*args, **settings).arguments
        q, k, v = (bound.pop(name) for name in "qkv")
        sizes = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"} if "varlen" in function else set()
        assert bound.get("deterministic", False) is torch.are_deterministic_algorithms_enabled()
        assert set(bound) - {"deterministic"} == sizes | {"softmax_scale", "causal"}
        return q, k, v, bound

    def refuse(self, q, k, v):
        for t in (q, k, v):
            assert t.stride(-1) == 1, "a copy would be made"
            assert t.shape[-1] % 8 == 0
            assert t.shape[-1] <= self.package.largest
        unequal = not self.package.equal_sizes and q.shape[-1] <= 64
        assert unequal or q.shape[-1] == v.shape[-1], "one size"
        assert q.shape[-1] == k.shape[-1]
        assert k.shape[:-1] == v.shape[:-1]
        assert q.shape[-2] % k.shape[-2] == 0
        self.calls.append((q, k, v))

    def attend(self, *args, **settings):
        q, k, v, bound = self.bind("flash_attn_func", args, settings)
        assert q.dim() == k.dim() == v.dim() == 4
        assert q.shape[0] == k.shape[0]
        assert not bound["causal"] or q.shape[1] <= k.shape[1], "rows without a key are not handed over"
        self.refuse(q, k, v)
        out = plain(q, k, v, bound["softmax_scale"], bound["causal"])
        return (out, None) if self.returns_tuple else out

    def attend_varlen(self, *args, **settings):
        q, k, v, bound = self.bind("flash_attn_varlen_func", args, settings)
        assert q.dim() == k.dim() == v.dim() == 3
        assert bound["cu_seqlens_q"].dtype == bound["cu_seqlens_k"].dtype == torch.int32
        self.refuse(q, k, v)
        ends_q, ends_k = bound["cu_seqlens_q"].tolist(), bound["cu_seqlens_k"].tolist()
        assert bound["max_seqlen_q"] >= max(b - a for a, b in pairwise(ends_q))
        assert bound["max_seqlen_k"] >= max(b - a for a, b in pairwise(ends_k))
        outs = []
        for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
            own = (q[None, a:b], k[None, c:d], v[None, c:d])
            outs.append(plain(*own, bound["softmax_scale"], bound["causal"])[0])
        out = torch.cat(outs)
        return (out, None) if self.returns_tuple else out


@pytest.fixture(params=RELEASES)
def stand_in(request, monkeypatch):
    made = StandIn(request.param)
    monkeypatch.setattr(flash, "find_libraries", made.libraries)
    return made


def test_what_is_taken_for_a_signature():
    with pytest.raises(TypeError, match="dropout"):
        signature("FlashAttention-3 3.0.0 at 0251105a", "flash_attn_func").bind(1, 2, 3, dropout_p=0.0)
    with pytest.raises(TypeError, match="max_seqlen_k"):
        signature("flash-attn 2.8.3.post2", "flash_attn_varlen_func").bind(1, 2, 3, 4, 5, 6)


def tensors(b=2, h=4, hk=4, keys=2, m=7, n=7, d=16, v=32, lam=(2, 4, 7, 1), dtype=torch.float64, device="cpu"):
    """Memory as projections leave it: [B, M, H, 2, D]."""
    q = torch.randn(b, m, h, 2, d).permute(0, 2, 3, 1, 4)
    k = torch.randn(b, n, hk, keys, d).permute(0, 2, 3, 1, 4)
    value = torch.randn(b, n, hk, v).transpose(1, 2)
    lam = torch.rand(lam, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return [*(t.to(device, dtype).requires_grad_() for t in (q, k, value)), lam.requires_grad_()]


SHAPES = {
    "v1, widened": ({}, 2),
    "v1, widened, grouped": ({"hk": 2}, 2),
    "v1, in pieces": ({"d": 128, "v": 256}, 4),
    "v1, in uneven pieces": ({"d": 104, "v": 250}, 4),
    "v1, equal": ({"v": 16}, 2),
    "v1, narrow values": ({"v": 5}, 2),
    "v1, odd sizes": ({"d": 6, "v": 19}, 2),
    "v2": ({"keys": 1, "v": 16}, 1),
    "v2, grouped": ({"keys": 1, "v": 16, "hk": 2}, 1),
    "v2, wide values in pieces": ({"keys": 1, "d": 128, "v": 256, "hk": 2}, 2),
    "a cache of keys": ({"m": 3, "n": 9, "lam": (4, 1, 1)}, 2),
    "more queries than keys": ({"m": 7, "n": 4}, 2),
    "more queries than keys, one lam": ({"m": 7, "n": 4, "lam": (1,)}, 2),
    "more queries than keys, lam a head": ({"m": 7, "n": 4, "lam": (4, 1, 1), "keys": 1}, 1),
    "one token": ({"m": 1, "n": 1, "lam": (1,)}, 2),
}


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layout_pairs_and_sizes_equal_the_formula(shape, causal, stand_in):
    sizes, calls = SHAPES[shape]
    inputs = tensors(**sizes)
    settings = {"causal": causal, "mask": None, "scale": 0.7 if causal else None, "dropout": 0.0}
    out, expected = (module.diff_attention(*inputs, **settings) for module in (flash, reference))
    torch.testing.assert_close(out, expected)
    pieces = stand_in.package.equal_sizes or sizes.get("d", 16) > 64
    assert len(stand_in.calls) == (calls if pieces else min(calls, 1 if sizes.get("keys") == 1 else 2))
    weight = torch.randn_like(out)
    grads, exact = (torch.autograd.grad(o, inputs, weight) for o in (out, expected))
    torch.testing.assert_close(grads, exact)


@pytest.mark.parametrize("keys", [1, 2])
def test_equal_sizes_are_views_of_what_came(keys, stand_in):
    q, k, v, lam = tensors(keys=keys, v=16)
    flash.diff_attention(q, k, v, lam, causal=False, mask=None, scale=None, dropout=0.0)
    for given in stand_in.calls:
        for own, seen in zip((q, k, v), given, strict=True):
            assert seen.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


PLANS = {
    (64, 64): (1, 64, 64),
    (64, 128): (1, 128, 128),  # widened: as much matrix work as two pieces, half the exponentials
    (128, 256): (2, 128, 128),  # in pieces: the kernels of size 256 are the slower
    (16, 32): (1, 32, 32),
    (96, 192): (2, 96, 96),
    (32, 33): (1, 40, 40),
    (80, 160): (2, 80, 80),
    (256, 256): (1, 256, 256),
    (256, 512): (2, 256, 256),
}


UNEQUAL = {
    (64, 128): (1, 64, 128),
    (64, 256): (1, 64, 256),
    (64, 512): (2, 64, 256),
    (32, 64): (1, 32, 64),
    (30, 61): (1, 32, 64),
    (64, 5): (1, 64, 8),
    (72, 144): (2, 72, 72),  # its kernels above 64 take one size
    (128, 256): (2, 128, 128),
}


def test_the_least_work_is_chosen_and_flash_attention_3_takes_wide_values_as_they_are():
    for sizes, expected in PLANS.items():
        for largest in (256, *([128] if sizes[0] <= 128 else [])):
            assert flash.plan(*sizes, largest=largest) == expected
    for sizes, expected in UNEQUAL.items():
        assert flash.plan(*sizes, largest=256, equal_sizes=False) == expected


PACKED = {
    "v1": {},
    "v1, grouped": {"hk": 2},
    "v1, in pieces": {"d": 128, "v": 256},
    "v2, grouped": {"keys": 1, "v": 16, "hk": 2},
}


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", PACKED)
def test_packed_sequences_equal_each_by_itself(shape, causal, stand_in, monkeypatch):
    monkeypatch.setattr(flash, "limit", lambda problem: None)  # float32 on a CPU, to be compared exactly
    lengths_q, lengths_k = [3, 1, 6], [5, 4, 2]  # the last has more queries than keys
    each = [
        tensors(b=1, m=m, n=n, lam=(1, 4, m, 1), dtype=torch.float32, **PACKED[shape])
        for m, n in zip(lengths_q, lengths_k, strict=True)
    ]

    def pack(i):
        return torch.cat([one[i][0].detach().movedim(-2, 0) for one in each]).requires_grad_()  # [T, H, .., D]

    q, k, v, lam = (pack(i) for i in range(4))
    starts_q, starts_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32) for lengths in (lengths_q, lengths_k)
    )
    out = flash.diff_attention_varlen(q, k, v, lam, starts_q, starts_k, 6, 5, causal=causal, scale=None)
    expected = torch.cat(
        [
            reference.diff_attention(*one, causal=causal, mask=None, scale=None, dropout=0.0)[0].transpose(0, 1)
            for one in each
        ]
    )
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, lam))
    exact = torch.autograd.grad(expected.square().sum(), [t for one in each for t in one])
    for i, own in enumerate(grads):
        oracle = torch.cat([g[0].movedim(-2, 0) for g in exact[i::4]])
        torch.testing.assert_close(own, oracle, rtol=1e-4, atol=1e-5)


LIMITS = {
    "device": ({"device": "cpu"}, "cuda, not on cpu"),
    "dtype": ({"dtype": torch.float32}, "torch.float32"),
    "dropout": ({"dropout": 0.1}, "dropout 0.1"),
    "mask": ({"masked": True}, "diff_attention_varlen"),
    "no keys": ({"keys": 0}, "0 keys"),
    "head size": ({"head_dim": 264}, "head size 264: {} is used up to {}"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_limit_names_the_value(case, stand_in):
    change, message = LIMITS[case]
    assert flash.limit(PROBLEM) is None
    message = message.format(stand_in.package.name, stand_in.package.largest)
    assert message in flash.limit(PROBLEM._replace(**change))


def test_what_cannot_be_traced_is_refused_in_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(flash, "find_libraries", StandIn("flash-attn-4 4.0.0b36").libraries)
    assert flash.limit(PROBLEM) is None
    assert torch.compile(lambda: flash.limit(PROBLEM) is not None, backend="eager", fullgraph=True)()


@pytest.fixture
def both(monkeypatch):
    """Two libraries, of which the first is preferred."""

    def install(*releases):
        made = [StandIn(release) for release in releases]
        monkeypatch.setattr(flash, "find_libraries", lambda: tuple(one.libraries()[0] for one in made))
        return made

    return install


def attend(**sizes):
    inputs = tensors(**sizes)
    settings = {"causal": False, "mask": None, "scale": None, "dropout": 0.0}
    out, expected = (module.diff_attention(*inputs, **settings) for module in (flash, reference))
    torch.testing.assert_close(out, expected)


def test_a_problem_that_one_cannot_take_goes_to_the_next(both):
    fourth, second = both("flash-attn-4 4.0.0b36", "flash-attn 2.8.3.post2")
    assert flash.limit(PROBLEM._replace(head_dim=136)) is None
    attend(d=136, v=136)
    assert (len(fourth.calls), len(second.calls)) == (0, 2)
    attend(d=64, v=64)
    assert (len(fourth.calls), len(second.calls)) == (2, 2)
    reasons = flash.limit(PROBLEM._replace(head_dim=264))
    assert "FlashAttention-4 is used up to 128" in reasons
    assert "flash-attn 2 is used up to 256" in reasons


def test_in_a_graph_the_traceable_one_is_taken(both):
    both("flash-attn-4 4.0.0b36", "flash-attn 2.8.3.post2")
    named = torch.compile(lambda: flash._library(64).package.name, backend="eager", fullgraph=True)
    assert flash._library(64).package.name == "FlashAttention-4"
    assert named() == "flash-attn 2"


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic", "stand_in")
@pytest.mark.parametrize("keys", [1, 2])
def test_each_library_is_told_to_be_deterministic(keys):
    attend(keys=keys, d=64, v=64 * keys)


@pytest.mark.usefixtures("deterministic")
def test_flash_attention_3_is_deterministic_only_below_256(both):
    third, second = both("FlashAttention-3 3.0.0 at 0251105a", "flash-attn 2.8.3.post2")
    attend(d=64, v=256)  # its values are cut: 192 is the most
    assert [v.shape[-1] for _, _, v in third.calls] == [128] * 4
    assert {q.shape[-1] for q, _, _ in third.calls} == {64}
    attend(d=200, v=200)
    assert len(second.calls) == 2
    (third,) = both("FlashAttention-3 3.0.0 at 0251105a")
    assert "FlashAttention-3 is used up to 192 deterministically" in flash.limit(PROBLEM._replace(head_dim=200))
    with pytest.raises(ValueError, match="sdpa"):
        attend(d=200, v=200)


# What is installed


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path of its own, where a test writes packages; what was found before is forgotten."""
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if "flash" not in p)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flash, "_found", {})
    flash._search_once.cache_clear()

    def write(file, text=""):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    yield write
    flash._search_once.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


FUNCTIONS = "def flash_attn_func(): return __name__\ndef flash_attn_varlen_func(): return __name__\n"


def test_nothing_installed(packages):
    found = flash.find_libraries()
    missing = [f"{package.module} is not installed" for package in flash.PACKAGES]
    assert found.startswith("; ".join(missing))
    assert "pip install" in found
    assert flash.limit(PROBLEM) == found


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("flash_attn/other/__init__.py", "", "flash_attn is not installed"),  # a namespace package
        ("flash_attn/__init__.py", "", "flash_attn_func"),
        ("flash_attn/__init__.py", "raise ImportError('undefined symbol: _ZN3c105')", "undefined symbol"),
        ("flash_attn/cute/__init__.py", "import no_such_compiler", "flash_attn.cute needs no_such_compiler"),
    ],
)
def test_what_cannot_be_used_is_none_and_says_why(file, text, reason, packages):
    packages(file, text)
    assert reason in flash.find_libraries()


CONFIG = (
    "CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_BACKWARD': False, 'FLASH_ATTENTION_DISABLE_HDIMDIFF64': %s}}"
)


@pytest.fixture
def all_installed(packages):
    packages("flash_attn/__init__.py", FUNCTIONS)
    packages("flash_attn/cute/__init__.py", FUNCTIONS)
    packages("flash_attn_interface.py", FUNCTIONS)
    packages("flash_attn_config.py", CONFIG % False)
    return packages


@pytest.mark.parametrize("package", flash.PACKAGES, ids=lambda package: package.name)
def test_each_alone(package, packages):
    packages("flash_attn_config.py", CONFIG % False)
    path = package.module.replace(".", "/")
    packages(f"{path}.py" if package.module == "flash_attn_interface" else f"{path}/__init__.py", FUNCTIONS)
    [found] = flash.find_libraries()
    assert (found.package, found.attend()) == (package, package.module)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, ["flash-attn 2"]),
        (89, ["flash-attn 2"]),
        (90, ["FlashAttention-3", "FlashAttention-4", "flash-attn 2"]),
        (100, ["FlashAttention-4", "flash-attn 2"]),
        (110, ["FlashAttention-4", "flash-attn 2"]),
        (120, ["flash-attn 2"]),
    ],
)
def test_the_gpu_decides_between_them(all_installed, capability, names, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash, "compute_capability", lambda: capability)
    assert [library.package.name for library in flash.find_libraries()] == names


@pytest.mark.parametrize("capability", [75, 120])
def test_a_gpu_that_none_suits(packages, capability, monkeypatch):
    packages("flash_attn/cute/__init__.py", FUNCTIONS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash, "compute_capability", lambda: capability)
    assert f"compute capability {capability / 10}" in flash.find_libraries()


@pytest.mark.parametrize("reason", ["DISABLE_HDIMDIFF64", "needs flash_attn_config"])
def test_a_flash_attention_3_that_lacks_what_is_used_is_none(packages, reason):
    packages("flash_attn_interface.py", FUNCTIONS)
    if "DISABLE" in reason:
        packages("flash_attn_config.py", CONFIG % True)
    assert reason in flash.find_libraries()


def test_looking_is_done_once_and_not_on_import(packages):
    packages("flash_attn/__init__.py", FUNCTIONS)
    assert flash.find_libraries() is flash.find_libraries()
    assert flash._search_once.cache_info().misses == 1


TRACEABLE = """
import torch

def flash_attn_func(q, k, v, softmax_scale, causal):
    weights = (torch.einsum("bmhd,bnhd->bhmn", q, k) * softmax_scale).softmax(-1)
    return torch.einsum("bhmn,bnhd->bmhd", weights, v)

flash_attn_varlen_func = flash_attn_func
"""


@pytest.mark.slow
def test_a_compiled_graph_finds_it_and_stays_whole(packages):
    packages("flash_attn/__init__.py", TRACEABLE)
    inputs = tensors(dtype=torch.float32)

    def call(*inputs):
        assert flash.limit(PROBLEM) is None
        return flash.diff_attention(*inputs, causal=False, mask=None, scale=None, dropout=0.0)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    expected = reference.diff_attention(*inputs, causal=False, mask=None, scale=None, dropout=0.0)
    torch.testing.assert_close(out, expected)
