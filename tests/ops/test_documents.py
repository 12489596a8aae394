"""Packed documents without a mask: the operation, layers and training against the mask, by a stand-in on a CPU.

The stand-in takes the place of torch's varlen function, and computes one sequence after another by the formula.
"""

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from diffvision import ops
from diffvision.models import language
from diffvision.nn import ATTENTION, build_attention
from diffvision.ops.attention import varlen
from diffvision.ops.attention.choice import problems_seen, supported_backends
from diffvision.ops.attention.problem import Problem

NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
PACKED = Problem(2, 4, 2, 512, 512, 64, 128, True, True, dtype=torch.bfloat16, device="cuda", packed=True)


def one_by_one(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    assert (cu_q is cu_k) == (max_q == max_k)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the flash kernel takes one size"
    assert q.shape[-1] % 8 == 0
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    out = []
    for (a, b), (c, d) in zip(*(zip(e[:-1].tolist(), e[1:].tolist(), strict=True) for e in (cu_q, cu_k)), strict=True):
        rows = [t[None].transpose(1, 2)[:, :, None] for t in (q[a:b], k[c:d])]
        maps = ops.attention_maps(*rows, causal=window_size == (-1, 0), scale=scale)[:, :, 0]
        values = v[c:d].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        out.append((maps[0] @ values).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def stand_in(monkeypatch):
    """Let `varlen` take packed calls on a CPU; yield the calls of torch's function."""
    calls = []

    def attend(*tensors, **settings):
        calls.append(tensors)
        return one_by_one(*tensors, **settings)

    monkeypatch.setattr(torch_varlen, "varlen_attn", attend)
    monkeypatch.setattr(varlen, "limit", lambda problem: None if problem.packed else "not packed")
    return calls


def test_ends_of_documents():
    assert ops.document_ends(NUMBERS).tolist() == [0, 3, 7, 8, 9, 10, 18]
    assert ops.document_ends(NUMBERS).dtype == torch.int32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("keys", "value_dim"), [(2, 16), (1, 8), (2, 5)])
@pytest.mark.parametrize("lam", [(1,), (1, 4, 1, 1), (2, 4, 9, 1)])
def test_the_operation_equals_the_mask(stand_in, causal, keys, value_dim, lam):
    shapes = [(2, 4, 2, 9, 8), (2, 2, keys, 9, 8), (2, 2, 9, value_dim), lam]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    documents = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
    outs = [ops.diff_attention(*leaves, mask=mask, causal=causal) for mask in (documents, documents.mask())]
    assert len(stand_in) == keys
    grad = torch.randn_like(outs[0])
    for got, expected in zip(*((out, *torch.autograd.grad(out, leaves, grad)) for out in outs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", [name for name, layer in ATTENTION.items() if layer.cacheable or layer.reads_mask])
def test_every_variant_takes_documents(stand_in, variant):
    layer = build_attention(variant, 32, 2, rotary=10000.0).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    documents = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
    torch.testing.assert_close(layer(x, documents, True), layer(x, documents.mask(), True), rtol=0, atol=1e-12)
    assert bool(stand_in) != layer.reads_mask
    maps = [[], []]
    layer(x, documents, True, maps=maps[0])
    layer(x, documents.mask(), True, maps=maps[1])
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["diff-debug", "transformer-debug"])
def test_a_model_s_gradients_equal_the_mask_s(stand_in, name):
    model = language.create(name, max_length=9).double().train()
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    documents = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
    results = []
    for given in (documents, NUMBERS):
        loss = model(tokens, documents=given).logsumexp(-1).square().sum()
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert stand_in
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_model_with_documents_is_one_graph():
    model = language.create("diff-debug", max_length=9).train()
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    documents = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens, documents=documents), model(tokens, documents=NUMBERS))


def test_without_a_kernel_for_packed_sequences_there_is_the_mask():
    documents = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
    q = torch.randn(2, 4, 2, 9, 8)
    with problems_seen() as seen:
        out = ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=documents)
    assert [problem.packed for problem in seen] == [True, False]
    assert torch.equal(out, ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=documents.mask()))
    with ops.attention_backend("sdpa"):
        torch.testing.assert_close(ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=documents), out)


@pytest.mark.parametrize(
    ("differing", "reason"),
    [
        ({"packed": False}, "packed"),
        ({"device": "cpu"}, "cuda"),
        ({"dtype": torch.float32}, "float32"),
        ({"dropout": 0.1}, "dropout"),
        ({"value_dim": 512}, "512"),
    ],
)
def test_it_is_the_heuristic_s_choice_on_cuda_within_its_limits(differing, reason):
    if varlen.limit(PACKED) is None:
        assert next(iter(supported_backends(PACKED))) == "varlen"
    assert reason in varlen.limit(PACKED._replace(**differing))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["diff-debug", "transformer-debug"])
def test_a_model_s_step_on_a_gpu_has_no_mask_and_does_not_wait(name, monkeypatch):
    monkeypatch.setattr(ops.Documents, "mask", lambda _: pytest.fail("a mask was made"))
    model = language.create(name, max_length=2048).cuda().train()
    numbers = (torch.rand(2, 2048) < 0.01).cumsum(1)
    tokens, documents = numbers.cuda() % 7, ops.Documents(numbers.cuda(), ops.document_ends(numbers).cuda())
    try:
        torch.cuda.set_sync_debug_mode("error")
        with problems_seen() as seen, torch.autocast("cuda", torch.bfloat16):
            model(tokens, documents=documents).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(seen) == name.startswith("diff")  # plain attention chooses no backend
    assert all(problem.packed and not problem.masked for problem in seen)
    monkeypatch.undo()
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        expected = model(tokens, documents=documents.numbers)
        torch.testing.assert_close(compiled(tokens, documents=documents), expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("keys", "head_dim", "value_dim"), [(2, 64, 128), (1, 64, 64), (2, 20, 40), (2, 128, 256)])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents_on_a_gpu(dtype, keys, head_dim, value_dim, compiled):
    numbers = (torch.rand(2, 704) < 0.01).cumsum(1)
    documents = ops.Documents(numbers.cuda(), ops.document_ends(numbers).cuda())
    shapes = [(2, 4, 2, 704, head_dim), (2, 2, keys, 704, head_dim), (2, 2, 704, value_dim)]
    leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    lam = torch.full((1,), 0.5, device="cuda", requires_grad=True)
    function = torch.compile(ops.diff_attention, fullgraph=True) if compiled else ops.diff_attention
    outs = [function(*leaves, lam, mask=documents, causal=True)]
    outs.append(ops.diff_attention(*leaves, lam, mask=documents.mask(), causal=True, backend="eager"))
    grad = torch.randn_like(outs[0])
    for got, expected in zip(*((out, *torch.autograd.grad(out, leaves, grad)) for out in outs), strict=True):
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < 4 * torch.finfo(dtype).eps, error
