"""Packed documents without a mask: the operation, layers and training against the mask, by a stand-in on a CPU.

The stand-in takes the place of torch's varlen function, and computes one sequence after another by the formula.
"""

from itertools import pairwise

import pytest
import torch
from stand_ins import RELEASES, StandIn, plain_flex
from torch.nn.attention import varlen as torch_varlen

from diffvision import ops
from diffvision.models import language
from diffvision.nn import ATTENTION, build_attention
from diffvision.ops.attention import choice, flash, flex, varlen
from diffvision.ops.attention.choice import takes_blocks
from diffvision.ops.attention.problem import Problem
from diffvision.training.module import mark_batch_dynamic

NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
DOCUMENTS = ops.Documents(NUMBERS, ops.document_ends(NUMBERS))
PACKINGS = {
    "several a row": torch.tensor([[7, 6, 5, 5, 5, 4, 4, 4, 4], [7, 7, 7, 7, 7, 7, 7, 7, 6]]),
    "all of one token": torch.arange(5).expand(2, 5),
    "one a row": torch.zeros(2, 130, dtype=torch.long),
}
PACKED = Problem(2, 4, 2, 512, 512, 64, 128, True, True, dtype=torch.bfloat16, device="cuda", packed=True)


def one_by_one(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    assert cu_q is cu_k
    assert max_q == max_k
    assert scale > 0
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the flash kernel takes one size"
    assert q.shape[-1] % 8 == 0
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    out = []
    for a, b in pairwise(cu_q.tolist()):
        rows = [t[None, a:b].transpose(1, 2)[:, :, None] for t in (q, k)]
        maps = ops.attention_maps(*rows, causal=window_size == (-1, 0), scale=scale)[:, :, 0]
        values = v[a:b].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        out.append((maps[0] @ values).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def stand_in(monkeypatch):
    """Let `varlen` take packed calls on a CPU."""
    monkeypatch.setattr(torch_varlen, "varlen_attn", one_by_one)
    monkeypatch.setattr(varlen, "limit", lambda problem: None if problem.packed else "not packed")


def test_ends_of_documents():
    assert ops.document_ends(NUMBERS).tolist() == [0, 3, 7, 8, 9, 10, 18]
    assert ops.document_ends(NUMBERS).dtype == torch.int32


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("keys", "value_dim", "lam"), [(2, 24, (2, 4, 1, 1)), (1, 12, (1,)), (2, 5, (1, 4, 1, 1)), (2, 256, (1,))]
)
@pytest.mark.parametrize("backend", ["varlen", "flex", *RELEASES])
def test_the_operation_equals_the_mask(backend, keys, value_dim, lam, packing, monkeypatch, request):
    monkeypatch.setattr(flex, "_compile", lambda device: plain_flex)
    for module in (flex, flash):  # float64 on a CPU, to be compared exactly
        monkeypatch.setattr(module, "limit", lambda problem: None)
    if backend in RELEASES:
        monkeypatch.setattr(flash, "find_libraries", StandIn(backend).libraries)
    if backend == "varlen":
        request.getfixturevalue("stand_in")
    numbers, size = PACKINGS[packing], 128 if value_dim > 24 else 12
    documents, length = ops.Documents(numbers, ops.document_ends(numbers)), numbers.shape[1]
    shapes = [(2, 4, 2, length, size), (2, 2, keys, length, size), (2, 2, length, value_dim), lam]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=backend != "flex") for shape in shapes]
    for causal, scale in ((False, None), (True, -0.3)):
        results = []
        for mask, name in ((documents, "flash" if backend in RELEASES else backend), (documents.mask(), "eager")):
            with ops.attention_backend(name):
                out = ops.diff_attention(*leaves, mask=mask, causal=causal, scale=scale)
                one = ops.softmax_attention(leaves[0][:, :, 0], leaves[1][:, :, 0], leaves[2], causal=causal, mask=mask)
            grads = () if backend == "flex" else torch.autograd.grad(out.sin().sum() + one.sum(), leaves)
            results.append((out, one, *grads))  # flex has no backward on a CPU
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", [name for name, layer in ATTENTION.items() if not layer.needs_grid])
def test_every_variant_takes_documents_without_a_mask(stand_in, monkeypatch, variant):
    layer = build_attention(variant, 32, 2, rotary=10000.0).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    mask = DOCUMENTS.mask()
    for causal in (True, False):
        with monkeypatch.context() as patch:
            if variant != "sink":  # its one key belongs to every document
                patch.setattr(ops.Documents, "mask", lambda _: pytest.fail("a mask was made"))
            outs = [layer(x, DOCUMENTS, causal)]
        outs.append(layer(x, mask, causal))
        for got, expected in zip(*((out, *torch.autograd.grad(out.sin().sum(), x)) for out in outs), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    if layer.no_maps:
        return
    maps = [[], []]
    layer(x, DOCUMENTS, True, maps=maps[0])
    layer(x, mask, True, maps=maps[1])
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=0)


def test_a_model_with_documents_is_one_graph():
    model = language.create("diff-debug", max_length=9).train()
    tokens = torch.randint(model.config.vocab_size, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for numbers, stance in ((NUMBERS, "default"), (NUMBERS // 2, "fail_on_recompile")):
        documents = ops.Documents(numbers, mark_batch_dynamic(ops.document_ends(numbers)))  # as in training
        with torch.compiler.set_stance(stance):
            out = compiled(tokens, documents=documents)
        torch.testing.assert_close(out, model(tokens, documents=numbers))


@pytest.fixture
def seen(monkeypatch):
    """The problems of packed calls."""
    problems, choose = [], choice.choose
    monkeypatch.setattr(choice, "choose", lambda name, problem: problems.append(problem) or choose(name, problem))
    return problems


def test_without_a_kernel_for_packed_sequences_there_is_the_mask(seen):
    q = torch.randn(2, 4, 2, 9, 8)
    out = ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=DOCUMENTS)
    assert [problem.packed for problem in seen] == [True]
    assert torch.equal(out, ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=DOCUMENTS.mask()))
    plain = [q[:, :, 0]] * 3
    assert torch.equal(
        ops.softmax_attention(*plain, mask=DOCUMENTS), ops.softmax_attention(*plain, mask=DOCUMENTS.mask())
    )
    with ops.attention_backend("sdpa"):
        torch.testing.assert_close(ops.diff_attention(q, q, q[:, :, 0], 0.5, mask=DOCUMENTS), out)


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
        assert choice.choose("auto", PACKED)[0] == "varlen"
    assert reason in varlen.limit(PACKED._replace(**differing))


def test_layers_share_the_blocks_of_a_batch():
    numbers = NUMBERS.clone()
    with torch.inference_mode():
        first = flex._document_blocks(numbers, causal=True)
    assert not first.kv_indices.is_inference()
    assert flex._document_blocks(numbers, causal=True) is first
    numbers[0] = 0  # in place, as a graph's static input is filled
    again = flex._document_blocks(numbers, causal=True)
    assert again.mask_mod(torch.tensor(0), 0, torch.tensor(8), torch.tensor(0))
    assert flex._document_blocks(numbers, causal=False) is not again
    kept = len(flex._documents)
    del numbers
    assert len(flex._documents) == kept - 1


def test_flex_is_the_choice_on_cuda_where_varlen_takes_none(monkeypatch):
    problem = PACKED._replace(dtype=torch.float32, packed=False)
    monkeypatch.setattr(flex, "can_compile", lambda: True)
    assert takes_blocks("auto", problem)
    assert takes_blocks("flex", problem)
    assert not takes_blocks("sdpa", problem)
    assert not takes_blocks("auto", problem._replace(device="cpu", grad=False))
    assert not takes_blocks("auto", problem._replace(dropout=0.1))
    assert not takes_blocks("auto", problem._replace(head_dim=8))
    assert not takes_blocks("auto", problem._replace(value_dim=512))
    with ops.attention_backend("sdpa"):
        assert not takes_blocks("auto", problem)
    monkeypatch.setattr(flex, "can_compile", lambda: False)
    assert not takes_blocks("auto", problem)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("half", [True, False])  # `varlen` and `flex`
@pytest.mark.parametrize("variant", ["standard", "v1", "v1_dint"])
def test_a_model_s_step_on_a_gpu_has_no_mask_and_does_not_wait(variant, half, seen, monkeypatch):
    monkeypatch.setattr(ops.Documents, "mask", lambda _: pytest.fail("a mask was made"))
    model = language.create("diff-debug", variant=variant, max_length=2048).cuda().train()
    numbers = (torch.rand(2, 2048) < 0.01).cumsum(1)
    tokens, documents = numbers.cuda() % 7, ops.Documents(numbers.cuda(), ops.document_ends(numbers).cuda())
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        model(tokens, documents=documents).sum().backward()  # FlexAttention compiles, which may wait
    documents = ops.Documents(documents.numbers.clone(), documents.ends)
    try:
        torch.cuda.set_sync_debug_mode("error")
        seen.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            model(tokens, documents=documents).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(seen) == (variant != "standard")  # plain attention chooses no backend
    assert all(problem.packed and not problem.masked for problem in seen)
    with torch.autocast("cuda", torch.bfloat16, enabled=half), torch.inference_mode():
        model.eval()(tokens, documents=documents.numbers)  # waits once, and makes no mask
    monkeypatch.undo()
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=half), torch.no_grad():
        expected = model(tokens, documents=documents.numbers)
        torch.testing.assert_close(compiled(tokens, documents=documents), expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("keys", "head_dim", "value_dim"), [(2, 64, 128), (1, 64, 64), (2, 20, 40), (2, 128, 256)])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents_on_a_gpu(dtype, keys, head_dim, value_dim, compiled):
    numbers = (torch.rand(2, 704) < 0.01).cumsum(1)
    documents = ops.Documents(numbers.cuda(), ops.document_ends(numbers).cuda())
    shapes = [(2, 4, 2, 704, head_dim), (2, 2, keys, 704, head_dim), (2, 2, 704, value_dim)]
    leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    lam = torch.full((1,), 0.5, device="cuda", requires_grad=True)
    torch.compiler.reset()  # each case is a graph of one function, of which torch keeps eight
    function = torch.compile(ops.diff_attention, fullgraph=True) if compiled else ops.diff_attention
    outs = [function(*leaves, lam, mask=documents, causal=True)]
    outs.append(ops.diff_attention(*leaves, lam, mask=documents.mask(), causal=True, backend="eager"))
    grad = torch.randn_like(outs[0])
    for got, expected in zip(*((out, *torch.autograd.grad(out, leaves, grad)) for out in outs), strict=True):
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), error
