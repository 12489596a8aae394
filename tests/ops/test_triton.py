"""The fused kernels against the formula in float64: in Triton's interpreter on a CPU, compiled where there is a GPU.

Lengths, masks, sizes and layouts are paired, not multiplied out. The same bodies run as `gpu` tests, where bfloat16 and
long rows come in.
"""

import pytest
import torch
import torch.nn.functional as F

from diffvision.ops.attention import Problem, reference
from diffvision.ops.attention.shared_memory import BY_CAPABILITY, HOPPER, KIB, LEAST, shared_memory

pytest.importorskip("triton")

from diffvision.ops.attention import triton as backend

ON_GPU = torch.cuda.is_available()
GPU = pytest.mark.gpu


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def _streaming(monkeypatch):
    """Every call streams, also those that the whole-row kernels would take."""
    ops = pytest.importorskip("diffvision.ops.attention.triton.ops")
    monkeypatch.setattr(ops, "fits_rows", lambda *_, **__: False)


@pytest.fixture(params=sorted(set(BY_CAPABILITY.values())), ids=lambda shared: f"{shared // KIB} KiB")
def _card(monkeypatch, request):
    """The tiles of a card with this shared memory, in the interpreter too."""
    launch = pytest.importorskip("diffvision.ops.attention.triton.launch")
    ops = pytest.importorskip("diffvision.ops.attention.triton.ops")
    if ON_GPU and request.param > shared_memory(torch.device("cuda")):
        pytest.skip("this GPU has less shared memory")
    monkeypatch.setattr(ops, "shared_memory", lambda _: request.param)
    monkeypatch.setattr(ops, "is_hopper", lambda _: request.param == HOPPER)
    monkeypatch.setattr(launch, "_tiles", lambda _, tiles: tiles)


def inputs(m, n=None, d=16, v=32, b=1, h=2, hk=None, maps=2, lam=(1,), dtype=torch.float32, device="cpu"):
    n, hk = m if n is None else n, h if hk is None else hk
    made = [torch.randn(b, h, 2, m, d), torch.randn(b, hk, maps, n, d), torch.randn(b, hk, n, v)]
    made = [t.to(device, dtype).requires_grad_() for t in made]
    return [*made, (torch.rand(lam) + 0.2).to(device).requires_grad_()]


def mask_of(kind, b, m, n, device="cpu"):
    if kind == "keys":  # padding on the right, and on the left of the last
        mask = torch.arange(n) < torch.randint(1, n + 1, (b, 1, 1, 1))
        mask[-1] = mask[-1].flip(-1)
        return mask.to(device)
    if kind == "pairs":  # rows that may attend to nothing among them
        mask = torch.rand(b, 1, m, n) > 0.4
        mask[:, :, :: max(2, m // 3)] = False
        return mask.to(device)
    return None


def call(tensors, causal=False, mask=None, scale=None):
    return backend.diff_attention(*tensors, causal=causal, mask=mask, scale=scale)


def oracle(tensors, causal=False, mask=None, scale=None):
    return reference.diff_attention(*tensors, causal=causal, mask=mask, scale=scale, dropout=0.0)


def two_calls(tensors, causal=False, mask=None, scale=None):
    """Two of torch's plain attentions and a subtraction: the error that plain attention makes at this dtype."""
    q, k, v, lam = tensors
    group, m, n = q.shape[1] // k.shape[1], q.shape[3], k.shape[3]
    allowed = torch.ones(m, n, dtype=torch.bool, device=q.device)
    allowed = allowed.tril(n - m) if causal else allowed
    allowed = allowed if mask is None else allowed & mask
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    maps = [
        F.scaled_dot_product_attention(q[:, :, p], k[:, :, min(p, k.shape[2] - 1)], v, attn_mask=allowed, scale=scale)
        for p in range(2)
    ]
    return (maps[0] - lam * maps[1]).to(q.dtype)


def gradients(function, tensors, weight, **settings):
    out = function(tensors, **settings)
    return [out, *torch.autograd.grad(out, tensors, weight.to(out.dtype))]


def check(tensors, **settings):
    """Outputs within 2.5 times, gradients within 3 times the error of plain attention, and a floor of a rounding."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    weight = torch.randn(*tensors[0].shape[:2], tensors[0].shape[3], tensors[2].shape[3]).to(tensors[0])
    ours = gradients(call, tensors, weight, **settings)
    plain = gradients(two_calls, tensors, weight, **settings)
    true = gradients(oracle, exact, weight, **settings)
    eps = torch.finfo(tensors[0].dtype).eps
    for name, a, p, t in zip(("out", "dq", "dk", "dv", "dlam"), ours, plain, true, strict=True):
        assert a.dtype == p.dtype
        assert a.shape == p.shape
        error, theirs = (a.double() - t).abs().max(), (p.double() - t).abs().max()
        size = t.abs().max()
        assert error <= (2.5 if name == "out" else 3.0) * theirs + 2 * eps * size + 1e-6, f"{name}: {error} {theirs}"


# m, n, the rest. In turn: every length of the list, V1 and V2, causal, masks, groups, forms of lam, odd sizes.
CASES = {
    "1": (1, 1, {}),
    "2 causal": (2, 2, {"causal": True}),
    "3 keys grouped": (3, 3, {"mask": "keys", "h": 4, "hk": 2}),
    "17 causal pairs token": (17, 17, {"causal": True, "mask": "pairs", "lam": (2, 2, 17, 1), "b": 2}),
    "31 shared": (31, 31, {"maps": 1, "v": 16, "lam": (2, 1, 1)}),
    "33 causal keys odd sizes": (33, 33, {"causal": True, "mask": "keys", "d": 20, "v": 19, "b": 2}),
    "63 shared causal grouped token": (63, 63, {"maps": 1, "causal": True, "h": 2, "hk": 1, "lam": (1, 2, 63, 1)}),
    "65 pairs shared": (65, 65, {"mask": "pairs", "maps": 1, "lam": (2, 1, 1)}),
    "77 causal": (77, 77, {"causal": True, "lam": (2, 1, 1)}),
    "127 keys token": (127, 127, {"mask": "keys", "lam": (1, 2, 127, 1), "h": 2, "hk": 1}),
    "129 causal": (129, 129, {"causal": True, "d": 24, "v": 40, "h": 1}),
    "197": (197, 197, {"h": 1}),
    "197 shared causal keys": (197, 197, {"h": 1, "maps": 1, "causal": True, "mask": "keys"}),
    "257 causal shared": (257, 257, {"h": 1, "maps": 1, "causal": True}),
    "257 pairs": (257, 257, {"h": 1, "mask": "pairs", "lam": (1, 1, 257, 1)}),
    "1 query, 65 keys": (1, 65, {"causal": True}),
    "more keys causal": (33, 129, {"causal": True, "h": 2, "hk": 1, "lam": (1, 2, 33, 1)}),
    "more queries causal": (77, 31, {"causal": True, "maps": 1}),
    "more queries keys": (129, 17, {"mask": "keys"}),
    "scale": (33, 65, {"scale": 0.7, "causal": True}),
    "negative scale": (17, 33, {"scale": -0.3, "mask": "pairs"}),
}


def make(case, device, dtype=torch.float32):
    m, n, rest = case
    rest = dict(rest)
    settings = {"causal": rest.pop("causal", False), "scale": rest.pop("scale", None)}
    settings["mask"] = mask_of(rest.pop("mask", None), rest.get("b", 1), m, n, device)
    return inputs(m, n, dtype=dtype, device=device, **rest), settings


@pytest.mark.quick(
    "129 causal",
    "33 causal keys odd sizes",
    "17 causal pairs token",
    "65 pairs shared",
    "3 keys grouped",
    "1 query, 65 keys",
    "63 shared causal grouped token",
    "more keys causal",
    "negative scale",
    "1",
)
@pytest.mark.parametrize("name", CASES)
def test_whole_rows_equal_the_formula(device, name):
    """float32, but half precision in every third case; rows beyond 256 keys stream anyway."""
    dtype = torch.float16 if list(CASES).index(name) % 3 == 0 else torch.float32
    tensors, settings = make(CASES[name], device, dtype)
    check(tensors, **settings)


@pytest.mark.quick(
    "33 causal keys odd sizes",
    "65 pairs shared",
    "3 keys grouped",
    "63 shared causal grouped token",
    "more queries causal",
    "1 query, 65 keys",
)
@pytest.mark.usefixtures("_streaming")
@pytest.mark.parametrize("name", [n for i, n in enumerate(CASES) if i % 4 and not n.startswith("257")])
def test_streaming_equals_the_formula(device, name):
    dtype = torch.float16 if list(CASES).index(name) % 3 == 1 else torch.float32
    tensors, settings = make(CASES[name], device, dtype)
    check(tensors, **settings)


# Sizes that reach each tile of `launch`: short rows and those whose backward streams where shared memory is small,
# narrow and wide heads.
TILED = {
    "33 pairs": (33, 33, {"mask": "pairs", "lam": (1, 2, 33, 1)}),
    "67 causal grouped": (67, 67, {"causal": True, "h": 2, "hk": 1}),
    "77 of a text": (77, 77, {"causal": True, "d": 64, "v": 128, "h": 1}),
    "70 wide pairs": (70, 70, {"mask": "pairs", "d": 128, "v": 256, "h": 1}),
    "130 wide shared causal keys": (40, 130, {"causal": True, "mask": "keys", "d": 128, "v": 128, "maps": 1, "h": 1}),
}


@pytest.mark.quick("99 KiB-dtype1-67 causal grouped", "99 KiB-dtype1-77 of a text", "99 KiB-dtype1-70 wide pairs")
@pytest.mark.usefixtures("_card")
@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tiles_of_every_card_equal_the_formula(device, name, dtype):
    tensors, settings = make(TILED[name], device, dtype)
    check(tensors, **settings)


# What models call: keys, D, V, maps of keys, the longest row that whole-row kernels train at 99, 163 and 227 KiB.
@pytest.mark.parametrize(
    ("d", "v", "maps", "longest"),
    [
        (64, 128, 2, (64, 128, 256)),
        (64, 64, 1, (128, 256, 256)),
        (32, 64, 2, (128, 256, 256)),
        (128, 256, 2, (32, 64, 128)),
    ],
)
def test_training_streams_where_whole_rows_do_not_fit(d, v, maps, longest):
    rows_limit = pytest.importorskip("diffvision.ops.attention.triton.launch").rows_limit
    cards = sorted(set(BY_CAPABILITY.values()))
    assert tuple(rows_limit(d, v, maps, 2, shared, backward=True) for shared in cards) == longest
    assert {rows_limit(d, v, maps, 2, shared, backward=False) for shared in cards} == {longest[-1]}


# Every case compiles kernels, so not every size meets every dtype.
REAL = [(name, 64, dtype) for name in CASES for dtype in (torch.bfloat16, torch.float16)]
REAL += [(name, 64, torch.float32) for name in list(CASES)[::3]]
REAL += [(name, d, torch.bfloat16) for d in (32, 128) for name in list(CASES)[1::3]]


@GPU
@pytest.mark.parametrize(("name", "d", "dtype"), REAL)
def test_gpu_real_sizes(name, d, dtype):
    m, n, rest = CASES[name]
    tensors, settings = make((m, n, {**rest, "d": d, "v": d if rest.get("maps") == 1 else 2 * d}), "cuda", dtype)
    check(tensors, **settings)


CALLS = {
    "ViT V1": (197, 197, {"d": 64, "v": 128, "h": 6, "b": 4}),
    "ViT V2": (197, 197, {"d": 64, "v": 64, "maps": 1, "h": 12, "b": 4}),
    "ViT V1, D 32": (197, 197, {"d": 32, "v": 64, "h": 6, "b": 4}),
    "ViT V1, any mask": (197, 197, {"d": 64, "v": 128, "h": 6, "b": 4, "mask": "pairs"}),
    "text V1": (77, 77, {"d": 64, "v": 128, "h": 4, "b": 4, "causal": True}),
    "long V1": (1024, 1024, {"d": 64, "v": 128, "h": 6}),
    "long V1, any mask": (1024, 1024, {"d": 64, "v": 128, "mask": "pairs"}),
    "language V1": (1024, 1024, {"d": 128, "v": 256, "h": 4, "hk": 2, "causal": True}),
    "language V1, any mask": (1024, 1024, {"d": 128, "v": 256, "mask": "pairs"}),
    "language V2": (1024, 1024, {"d": 128, "v": 128, "maps": 1, "h": 8, "hk": 2, "causal": True}),
}


@GPU
@pytest.mark.usefixtures("_card")
@pytest.mark.parametrize("name", CALLS)
def test_gpu_calls_of_models_with_the_tiles_of_every_card(name):
    """Forward and backward launch, with the tiles of this card and of those that have less shared memory."""
    tensors, settings = make(CALLS[name], "cuda", torch.bfloat16)
    check(tensors, **settings)
    with torch.no_grad():
        alone = call(tensors, **settings)
    torch.testing.assert_close(alone.double(), oracle([t.double() for t in tensors], **settings), rtol=2e-2, atol=2e-2)


LONG = [(577, False, None), (577, True, "keys"), (1023, True, None), (1023, False, "pairs")]
LONG += [(1025, True, "pairs"), (1025, False, "keys"), (4096, True, None), (4096, False, None)]


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "causal", "kind"), LONG)
def test_gpu_long_rows(n, causal, kind, dtype):
    tensors = inputs(n, d=128, v=256, h=2, hk=1, dtype=dtype, device="cuda")
    check(tensors, causal=causal, mask=mask_of(kind, 1, n, n, "cuda"))


@GPU
@pytest.mark.usefixtures("_streaming")
@pytest.mark.parametrize("name", CASES)
def test_gpu_streaming_in_bfloat16(name):
    m, n, rest = CASES[name]
    tensors, settings = make((m, n, {**rest, "d": 64, "v": 128}), "cuda", torch.bfloat16)
    check(tensors, **settings)


@pytest.fixture(params=["rows", "streaming"])
def kernels(request):
    """Both families of kernels, one after the other."""
    if request.param == "streaming":
        request.getfixturevalue("_streaming")
    return request.param


@pytest.mark.quick("rows")
@pytest.mark.usefixtures("kernels")
def test_strides_of_every_kind(device):
    """Projections' layout, a transposed last axis, keys shared by expansion: the same as of copies."""
    q = torch.randn(2, 33, 2, 2, 16, device=device).permute(0, 2, 3, 1, 4)
    k = torch.randn(2, 2, 2, 16, 33, device=device).transpose(-1, -2)
    v = torch.randn(1, 1, 33, 32, device=device).expand(2, 2, 33, 32)
    lam = torch.rand(33, 2, device=device).t()[None, :, :, None]
    mask = torch.rand(33, 33, device=device).gt(0.3).t()[None, None]
    views = [t.detach().requires_grad_() for t in (q, k, v, lam)]
    copies = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (q, k, v, lam)]
    weight = torch.randn(2, 2, 32, 33, device=device).transpose(-1, -2)
    for a, b in zip(
        gradients(call, views, weight, mask=mask),
        gradients(call, copies, weight.contiguous(), mask=mask.contiguous()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_heads_lie_side_by_side_in_the_result(device):
    out = call([t.detach() for t in inputs(9, h=4, device=device)])
    assert out.transpose(1, 2).is_contiguous(), "merging heads would copy"


@pytest.mark.usefixtures("kernels")
def test_a_row_without_keys_is_zeros_and_hurts_nobody(device):
    tensors = inputs(17, 33, h=1, device=device)
    mask = torch.ones(1, 1, 17, 33, dtype=torch.bool, device=device)
    mask[:, :, 4] = False
    out, dq, *others = gradients(call, tensors, torch.randn(1, 1, 17, 32, device=device), mask=mask)
    assert (out[:, :, 4] == 0).all()
    assert (dq[:, :, :, 4] == 0).all()
    assert (out[:, :, 5] != 0).any()
    assert all(t.isfinite().all() for t in others)


@pytest.mark.usefixtures("kernels")
def test_without_any_key_everything_is_zeros(device):
    tensors = inputs(5, 0, device=device)
    for t in gradients(call, tensors, torch.ones(1, 2, 5, 32, device=device)):
        assert (t == 0).all()


def test_empty_batches_pass(device):
    out = gradients(call, inputs(5, b=0, device=device), torch.ones(0, 2, 5, 32, device=device))
    assert out[0].shape == (0, 2, 5, 32)
    assert (out[-1] == 0).all()


@pytest.mark.quick("rows-dtype0-10000.0", "streaming-dtype1-100.0")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("logit", [1e2, 1e4, 6e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_logits_stay_finite(device, dtype, logit):
    tensors = inputs(17, dtype=dtype, device=device)
    extreme = [(t.detach().sign() * logit**0.5).requires_grad_() for t in tensors[:2]]
    for t in gradients(call, [*extreme, *tensors[2:]], torch.ones(1, 2, 17, 32, device=device), causal=True, scale=1.0):
        assert t.isfinite().all()


@pytest.mark.quick("rows")
@pytest.mark.usefixtures("kernels")
def test_every_run_gives_the_same(device):
    tensors = inputs(77, h=2, hk=1, dtype=torch.float16, device=device)
    weight = torch.randn(1, 2, 77, 32, device=device)
    first, second = (gradients(call, tensors, weight, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_with_and_without_gradients_is_one_result(device):
    tensors = inputs(33, device=device)
    with torch.no_grad():
        alone = call(tensors, causal=True)
    torch.testing.assert_close(call(tensors, causal=True), alone)


@pytest.mark.usefixtures("_streaming")
def test_streaming_without_gradients_keeps_its_second_product_in_the_result(device):
    tensors = inputs(77, dtype=torch.float16, device=device)
    with torch.no_grad():
        alone = call(tensors, causal=True)
    assert torch.equal(call(tensors, causal=True), alone)


def test_few_queries_of_a_long_cache_are_decoded(device, monkeypatch):
    """Without gradients, by the kernel that splits the keys; with them, by the one that has a backward."""
    decode = pytest.importorskip("diffvision.ops.attention.triton.decode")
    seen = []
    monkeypatch.setattr(decode, "decode", lambda *tensors, **_: seen.append(tensors) or tensors[2])
    tensors = inputs(3, 512, h=1, device=device)
    with torch.no_grad():
        assert call(tensors, causal=True) is tensors[2]
        call(inputs(17, 16, h=1, device=device))
    assert len(seen) == 1
    torch.testing.assert_close(call(tensors, causal=True), oracle(tensors, causal=True), rtol=1e-5, atol=1e-5)
    assert len(seen) == 1


# opcheck looks at .grad of copies that are no leaves.
OPCHECK = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.quick("nothing")
@OPCHECK
@pytest.mark.parametrize("keep", ["nothing", "rows", "streaming"])
def test_opcheck(device, keep):
    from diffvision.ops.attention.triton.ops import attention

    q, k, v, lam = inputs(5, 9, h=2, hk=1, lam=(1, 2, 1, 1), device=device)
    if keep == "nothing":
        q, k, v, lam = (t.detach() for t in (q, k, v, lam))
    mask = torch.rand(1, 1, 1, 9, device=device) > 0.2
    torch.library.opcheck(attention, (q, k, v, lam, mask, None, None, 5, 9, True, 0.3, keep))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_compiles_whole_with_its_gradient(device, dynamic):
    torch.compiler.reset()
    tensors = inputs(9, device=device)
    weight = torch.randn(1, 2, 9, 32, device=device)
    mask = torch.rand(9, device=device).gt(0.2)[None, None, None]

    def step(tensors, causal, mask):
        return call(tensors, causal=causal, mask=mask)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = gradients(step, tensors, weight, causal=True, mask=mask)
    got = gradients(compiled, tensors, weight, causal=True, mask=mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_exports_with_a_free_batch_and_length(device):
    class Call(torch.nn.Module):
        def forward(self, q, k, v, lam):
            return call([q, k, v, lam], causal=True)

    tensors = [t.detach() for t in inputs(9, b=2, device=device)]
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes = ({0: batch, 3: length}, {0: batch, 3: length}, {0: batch, 2: length}, None)
    exported = torch.export.export(Call(), tuple(tensors), dynamic_shapes=shapes)
    other = [t.detach() for t in inputs(33, b=4, device=device)]
    torch.testing.assert_close(exported.module()(*other), call(other, causal=True))


PACKED = {
    "v1": {},
    "v2 grouped causal": {"maps": 1, "h": 4, "hk": 2, "causal": True, "v": 16},
    "cross causal": {"causal": True, "keys": (33, 3, 70, 40)},
    "per token": {"lam": "token", "causal": True},
}
LENGTHS = (17, 1, 65, 40)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", PACKED)
@pytest.mark.quick("rows-v1")
def test_packed_sequences_equal_a_loop(device, case):
    rest = dict(PACKED[case])
    causal, keys, lam = rest.pop("causal", False), rest.pop("keys", LENGTHS), rest.pop("lam", None)
    heads = rest.get("h", 2)
    q, k, v, _ = inputs(sum(LENGTHS), sum(keys), device=device, **rest)
    lam = torch.rand(sum(LENGTHS), heads, 1, device=device) if lam else torch.rand(1, heads, 1, device=device)
    packed = [q[0].permute(2, 0, 1, 3), k[0].permute(2, 0, 1, 3), v[0].transpose(0, 1), lam]
    packed = [t.detach().requires_grad_() for t in packed]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
        for lengths in (LENGTHS, keys)
    )
    out = backend.diff_attention_varlen(*packed, cu_q, cu_k, max(LENGTHS), max(keys), causal=causal, scale=None)
    assert out.is_contiguous()

    def loop(q, k, v, lam):
        parts = zip(
            q.split(LENGTHS), k.split(keys), v.split(keys), lam.expand(*q.shape[:2], 1).split(LENGTHS), strict=True
        )
        outs = [
            oracle(
                [
                    a.permute(1, 2, 0, 3)[None],
                    b.permute(1, 2, 0, 3)[None],
                    c.transpose(0, 1)[None],
                    d.transpose(0, 1)[None],
                ],
                causal=causal,
            )[0].transpose(0, 1)
            for a, b, c, d in parts
        ]
        return torch.cat(outs)

    exact = [t.detach().double().requires_grad_() for t in packed]
    weight = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, packed, weight)]
    expected = loop(*exact)
    true = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    for a, t in zip(ours, true, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=2e-5)


def test_packed_rows_beyond_the_last_sequence_are_zeros(device):
    q, k, v, lam = inputs(20, device=device)
    packed = [q[0].permute(2, 0, 1, 3), k[0].permute(2, 0, 1, 3), v[0].transpose(0, 1)]
    packed = [t.detach().requires_grad_() for t in packed]
    cu = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    out = backend.diff_attention_varlen(*packed, lam.reshape(1, 1, 1), cu, cu, 9, 9, causal=False, scale=None)
    grads = torch.autograd.grad(out.sum(), packed)
    assert (out[16:] == 0).all()
    assert (out[:16] != 0).all()
    assert all((g[16:] == 0).all() for g in grads)


@pytest.mark.slow
@OPCHECK
def test_packed_opcheck(device):
    from diffvision.ops.attention.triton.ops import attention

    q, k, v, lam = inputs(9, lam=(1, 2, 9, 1), device=device)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    torch.library.opcheck(attention, (q, k, v, lam, None, cu, cu, 5, 5, True, 0.3, "rows"))


LIMITS = {
    "double": ({"dtype": torch.float64}, "not torch.float64"),
    "dropout": ({"dropout": 0.1}, "no dropout, got 0.1"),
    "head size": ({"head_dim": 129}, "129"),
    "value size": ({"value_dim": 257}, "257"),
    "other device": ({"device": "mps"}, "not mps"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_are_named(device, case):
    change, message = LIMITS[case]
    problem = Problem(1, 2, 2, 65, 65, 64, 128, device=device)
    assert backend.limit(problem) is None
    assert message in backend.limit(problem._replace(**change))


def test_a_cpu_needs_the_interpreter_and_no_bfloat16(monkeypatch):
    problem = Problem(1, 2, 2, 65, 65, 64, 128)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "bfloat16 needs a GPU" in backend.limit(problem._replace(dtype=torch.bfloat16))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in backend.limit(problem)


def test_a_gpu_with_less_shared_memory_is_refused(monkeypatch):
    problem = Problem(1, 2, 2, 65, 65, 64, 128, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "compute_capability", lambda: (8, 9))
    monkeypatch.setattr(backend, "shared_memory", lambda _: LEAST)
    assert backend.limit(problem) is None
    monkeypatch.setattr(backend, "shared_memory", lambda _: LEAST - KIB)
    assert "99 KiB of shared memory a program, this device allows 98" in backend.limit(problem)
