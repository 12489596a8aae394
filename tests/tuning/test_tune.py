"""`diffvision tune`: backends are compared with the formula, timed in turns, and broken ones survived."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import broken_backends
from broken_backends import BROKEN
from diffvision.cli import main
from diffvision.ops import diff_attention, supported_backends
from diffvision.ops.attention import BACKENDS, Problem, reference, tuned
from diffvision.tuning import cases, store, timing, ways, worker
from diffvision.tuning.cases import Case
from diffvision.tuning.command import _Measuring
from diffvision.tuning.inputs import Inputs, mask_of
from diffvision.tuning.proof import find_mistake
from diffvision.tuning.timing import in_turns, peak_memory
from diffvision.tuning.ways import backends_for, calls_of
from diffvision.tuning.worker import Tried, try_backend

SMALL = Problem(batch=2, heads=2, kv_heads=1, queries=19, keys=19, head_dim=8, value_dim=16)
FORMS = {
    "V1": {},
    "causal": {"causal": True},
    "mask": {"masked": True},
    "causal mask": {"causal": True, "masked": True},
    "V2": {"shared_keys": True, "value_dim": 8},
    "decoding": {"queries": 1, "grad": False},
    "decoding with a mask": {"queries": 1, "grad": False, "masked": True},
    "forward": {"grad": False},
    "packed": {"packed": True, "causal": True},
    "packed V2": {"packed": True, "shared_keys": True, "value_dim": 8},
    "cross": {"queries": 7},
}


@pytest.fixture(autouse=True)
def _process(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFVISION_TUNING", str(tmp_path / "tuning.json"))
    with tuned.restore_at_end():
        tuned.forget()
        yield


@pytest.fixture
def with_broken(tmp_path, monkeypatch):
    """Add the broken backends to the table of this process and of those that it starts."""
    folder = Path(broken_backends.__file__).parent
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport broken_backends\nbroken_backends.register()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    for name, backend in BROKEN.items():
        monkeypatch.setitem(BACKENDS, name, backend)


@pytest.mark.parametrize("form", FORMS)
def test_our_backends_are_right(form):
    problem = SMALL._replace(**FORMS[form])
    able = [backend for backend in backends_for(problem) if backend != "flex"]  # seconds to compile: test_flex.py
    assert "blocked" in able or "triton" in able
    for backend in able:
        assert find_mistake(backend, problem) is None, backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_compared_by_their_own_rounding(dtype):
    for backend in ("eager", "blocked", "sdpa"):
        assert find_mistake(backend, SMALL._replace(dtype=dtype, causal=True)) is None


def test_long_rows_are_compared_in_part(monkeypatch):
    monkeypatch.setattr("diffvision.tuning.proof.MAP_BYTES", 16 * 2 * 2 * 300 * 9)
    assert find_mistake("blocked", SMALL._replace(queries=300, keys=300, causal=True)) is None


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("wrong", "its output is off by"),
        ("wrong_backward", "its gradient of q is off by"),
        ("nan", "its output is off by nan"),
    ],
)
def test_a_wrong_backend_is_found(with_broken, backend, message):
    assert find_mistake(backend, SMALL).startswith(message)
    if backend == "wrong_backward":
        assert find_mistake(backend, SMALL._replace(grad=False)) is None


def test_a_mask_that_is_ignored_is_found(monkeypatch):
    whole = BACKENDS["eager"].diff_attention
    deaf = SimpleNamespace(limit=lambda _: None, diff_attention=lambda *t, mask, **more: whole(*t, mask=None, **more))
    monkeypatch.setitem(BACKENDS, "deaf", deaf)
    assert find_mistake("deaf", SMALL) is None
    assert find_mistake("deaf", SMALL._replace(masked=True)).startswith("its output is off by")


def news_of(backend, *problems, compiled=False):
    said = []
    worker.run(backend, [Case("", problem, compiled) for problem in problems], said.append)
    return [news for news in said if "begun" not in news and "compiled" not in news]


def test_what_the_process_says(with_broken, monkeypatch):
    first, second = news_of("blocked", SMALL, SMALL._replace(causal=True))
    assert (first["case"], second["case"]) == (0, 1)
    assert 0 < second["seconds"] < 5
    [wrong] = news_of("raising", SMALL, SMALL)
    assert wrong["case"] == 0
    words = "2 x 2 heads of 8, 19 queries, 19 keys, forward and backward"
    assert wrong["wrong"] == f"RuntimeError: unspecified launch failure ({words})"

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(BACKENDS["raising"], "diff_attention", no_memory)
    one, two = news_of("raising", SMALL, SMALL)
    assert one["cannot"] == two["cannot"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"


def test_a_backward_without_room_leaves_the_forward(monkeypatch):
    """Triton refuses a launch that needs more shared memory than the GPU has: that excuses the case."""
    errors = pytest.importorskip("triton.runtime.errors")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, lam, settings):
            return reference.diff_attention(q, k, v, lam, **settings)

        @staticmethod
        def backward(ctx, grad):
            raise errors.OutOfResources(221_376, 101_376, "shared memory")

    half = SimpleNamespace(
        limit=lambda _: None, diff_attention=lambda *tensors, **more: Attention.apply(*tensors, more)
    )
    monkeypatch.setitem(BACKENDS, "half", half)
    training, inference = news_of("half", SMALL, SMALL._replace(grad=False))
    assert "OutOfResources: out of resource: shared memory" in training["cannot"]
    assert inference["seconds"] > 0


def test_what_the_compiler_may_have_done_excludes_nothing(with_broken, monkeypatch):
    monkeypatch.setattr(worker, "find_mistake", lambda *_, **__: "its output is off by 1")
    [one, two] = news_of("blocked", SMALL, SMALL, compiled=True)
    assert one["cannot"] == two["cannot"] == "its output is off by 1"
    [wrong] = news_of("blocked", SMALL, SMALL)
    assert wrong["wrong"].startswith("its output is off by 1 (")


def _uniform(out_of):
    """A backend that computes the formula with other arguments."""
    return SimpleNamespace(limit=lambda problem: None, diff_attention=out_of)


def test_a_lambda_of_every_query_is_proved(monkeypatch):
    def one_lambda(q, k, v, lam, **settings):
        return reference.diff_attention(q, k, v, lam.mean().view(1), **settings)

    monkeypatch.setitem(BACKENDS, "uniform", _uniform(one_lambda))
    assert "is off by" in find_mistake("uniform", SMALL)


def test_fewer_queries_than_keys_are_proved(monkeypatch):
    def from_the_first_key(q, k, v, lam, *, causal, mask, **settings):
        if causal:
            mask = torch.ones(q.shape[3], k.shape[3], dtype=torch.bool).tril()[None, None]
        return reference.diff_attention(q, k, v, lam, causal=False, mask=mask, **settings)

    monkeypatch.setitem(BACKENDS, "uniform", _uniform(from_the_first_key))
    assert find_mistake("uniform", SMALL) is None
    assert "is off by" in find_mistake("uniform", SMALL._replace(causal=True))


def test_masks_are_those_of_models():
    generator = torch.Generator().manual_seed(0)
    packed = mask_of(SMALL._replace(masked=True, causal=True), generator)
    assert packed.shape == (SMALL.batch, 1, SMALL.queries, SMALL.keys)
    assert packed.diagonal(dim1=2, dim2=3).all()
    assert not packed.all()
    assert mask_of(SMALL._replace(masked=True), generator).shape == (SMALL.batch, 1, 1, SMALL.keys)
    assert mask_of(SMALL, generator) is None


def test_a_case_whose_usual_backend_was_not_tried_has_no_choice():
    case = Case("", SMALL._replace(queries=100, keys=100))  # the rule's is blocked
    measuring = _Measuring([case], {}, 60, "2026-11-23")
    other = Tried({0: 1.0})
    assert measuring._ways(0, {"sdpa": other}) == []
    assert measuring._ways(0, {"sdpa": other, "blocked": Tried({0: 2.0})}) == ["blocked", "sdpa"]
    assert measuring._ways(0, {"sdpa": other, "blocked": Tried({0: math.inf})}) == ["sdpa"]


def test_one_that_compiles_for_each_length_is_not_chosen(monkeypatch):
    timed = timing.Timed(["blocked", "flex"])
    timed.seconds, timed.running = {"blocked": [2.0] * 5, "flex": [1.0] * 5}, ["flex"]
    monkeypatch.setattr(timing, "in_turns", lambda *_: timed)
    monkeypatch.setattr(timing, "peak_memory", lambda *_: 0)
    monkeypatch.setattr(ways, "calls_of", lambda case, names: {name: lambda: None for name in names})
    case = Case("", SMALL._replace(queries=100, keys=100, grad=False))
    choice = _Measuring([case], {}, 60, "2026-11-23")._timed(case, ["blocked", "flex"], 1)
    assert (choice.backend, choice.than, choice.faster) == ("blocked", "blocked", 1.0)


def calls_that_sleep(**seconds):
    return {name: lambda value=value: time.sleep(value) for name, value in seconds.items()}


def test_turns_end_when_the_order_is_certain(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.001)
    start = time.perf_counter()
    timed = in_turns(calls_that_sleep(slow=0.006, fast=0.002), "cpu", start + 30)
    assert timed.leader == "fast"
    assert timed.is_slower("slow", "fast")
    assert not timed.is_slower("fast", "slow")
    assert len(timed.seconds["slow"]) < timing.MOST_ROUNDS
    assert timed.median("slow") / timed.median("fast") == pytest.approx(3, rel=0.5)


def test_turns_end_with_the_time():
    timed = in_turns(calls_that_sleep(a=0.02, b=0.02), "cpu", time.perf_counter())
    assert [len(seconds) for seconds in timed.seconds.values()] == [1, 1]
    assert not timed.is_slower("a", "b")  # one round says nothing
    assert not timed.is_slower("b", "a")
    assert timed.difference("a", "b")[1] == math.inf


def test_the_peak_is_of_what_the_call_makes():
    assert peak_memory(lambda: torch.ones(1 << 20).add(1), "cpu") == pytest.approx(2 * (4 << 20), rel=1e-3)


def test_a_model_s_calls(capsys):
    tuned.use("cpu", None)
    found = cases.model_cases("DiffCLIP-debug", 16, None, "cpu", torch.float32)
    assert [(case.name, case.passes) for case in found] == [
        ("DiffCLIP-debug, images", "forward + backward"),
        ("DiffCLIP-debug, images", "forward"),
        ("DiffCLIP-debug, text", "forward + backward"),
        ("DiffCLIP-debug, text", "forward"),
    ]
    images, text = found[0].problem, found[2].problem
    assert (images.batch, images.causal, text.causal) == (16, False, True)
    assert images.dtype == torch.float32
    found = cases.model_cases("diff-debug", 4, 32, "cpu", torch.bfloat16)
    assert {(case.problem.queries, case.problem.masked, case.problem.causal) for case in found} == {
        (32, False, True),
        (32, True, True),
        (1, False, False),
        (1, True, False),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "minutes must be above 0"),
        (["--batch", "8"], "batch is of a model: give --model too"),
        (["--model", "diff_vit_debug"], "give --batch too"),
        (["--model", "diff_vit_debug", "--batch", "0"], "batch must be 1 or more, got 0"),
        (["--model", "plain_vit_debug", "--batch", "8"], "plain_vit_debug has no differential attention to tune"),
        (["--model", "nonsense", "--batch", "8"], "no such file or folder"),
        (["--device", "cuda:7"], "device 'cuda:7' is not here"),
        (["--model", "diff_vit_debug", "--batch", "8", "--tokens", "9"], "is a model of images: leave out --tokens"),
    ],
)
def test_bad_settings_are_one_line(arguments, message, capsys):
    assert main(["tune", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "crashing",
            "its process ended at 2 x 2 heads of 8, 19 queries, 19 keys, forward and backward with signal SIGABRT",
        ),
        ("raising", "RuntimeError: unspecified launch failure"),
        ("orphaned", "its process ended at 2 x 2 heads of 8"),
        ("killed", None),
        ("talking", None),
        ("blocked", None),
    ],
)
def test_a_backend_runs_in_its_process(with_broken, backend, message):
    tried = try_backend(backend, [Case("", SMALL), Case("", SMALL._replace(grad=False))], 120)
    if message is None:
        assert tried.excluded is None
        assert set(tried.seconds) == ({0} if backend == "killed" else {0, 1})
    else:
        assert tried.excluded.startswith(message)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "limit"), [("hanging", "COMPILE"), ("hanging_later", "STUCK")])
def test_a_backend_that_hangs_is_ended_and_excluded(with_broken, backend, limit, monkeypatch):
    monkeypatch.setattr(worker, limit, 8.0)  # a slow machine may take longer to start
    tried = try_backend(backend, [Case("", SMALL)], 120)
    assert tried.excluded.startswith("it did not end within 8 s at 2 x 2 heads")


@pytest.mark.slow
def test_compiling_in_the_first_call_is_not_hanging(with_broken, monkeypatch):
    monkeypatch.setattr(worker, "STUCK", 8.0)
    tried = try_backend("compiling", [Case("", SMALL)], 120)
    assert (tried.excluded, list(tried.seconds)) == (None, [0])


@pytest.mark.slow
def test_a_process_that_is_never_ready_is_an_error(monkeypatch):
    monkeypatch.setattr(worker, "START", 0.1)
    with pytest.raises(ChildProcessError, match="was not ready within 0 s: try again"):
        try_backend("fused", [Case("", SMALL)], 120)


@pytest.mark.slow
def test_a_time_too_short_for_anything_is_an_error_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    for name in BACKENDS.keys() - {"eager", "sdpa", "blocked"}:
        monkeypatch.delitem(BACKENDS, name)
    assert main(["tune", "--model", "diff_vit_debug", "--batch", "8", "--minutes", "1e-9"]) == 1
    assert "nothing was measured in 1e-09 minutes: give more" in capsys.readouterr().err
    assert not (tmp_path / "tuning.json").exists()


@pytest.mark.slow
def test_the_time_that_is_up_excludes_nothing(with_broken):
    tried = try_backend("blocked", [Case("", SMALL), Case("", SMALL)], 0)
    assert tried == ({}, None)


@pytest.mark.slow
def test_a_case_that_lasts_beyond_the_time_is_ended_and_excludes_nothing(with_broken, monkeypatch):
    monkeypatch.setattr(worker, "GRACE", 1.0)
    begun = time.perf_counter()
    assert try_backend("hanging", [Case("", SMALL)], 1) == ({}, None)
    assert time.perf_counter() - begun < 60


@pytest.mark.slow
def test_tune_from_the_command_line(with_broken, monkeypatch, capsys, tmp_path):
    shapes = {
        "one": (2, 2, Problem(1, 2, 2, 40, 40, 8, 16)),
        "two": (2, 2, Problem(1, 2, 1, 24, 24, 8, 8, shared_keys=True, causal=True)),
        "three": (1, 1, Problem(1, 2, 2, 1, 24, 8, 16)),
        "four": (2, 2, Problem(1, 2, 2, 24, 24, 8, 16, packed=True)),
    }
    monkeypatch.setattr(cases, "USUAL", shapes)
    for name in (
        "hanging",
        "hanging_later",
        "compiling",
        "nan",
        "orphaned",
        "killed",
        "talking",
        "flex",
    ):  # FlexAttention takes long to compile
        monkeypatch.delitem(BACKENDS, name)
    assert main(["tune", "--device", "cpu", "--minutes", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in printed["measured"]] == ["one", "one", "two", "two", "three", "four", "four"]
    assert set(printed["excluded"]) == {"wrong", "wrong_backward", "crashing", "raising"}
    assert printed["left_out"] == []
    assert printed["file"] == str(tmp_path / "tuning.json")
    for row in printed["measured"]:
        assert row["backend"] in row["milliseconds"]
        assert row["faster"] >= 1.0
    entry = store.read_tuning(tmp_path / "tuning.json", tuned.machine_of("cpu"))
    assert len(entry.choices) == 7
    tuned.forget()
    problem = next(iter(cases.usual_cases("cpu", torch.float32))).problem
    chosen, why = next(iter(supported_backends(problem).items()))
    assert chosen == printed["measured"][0]["backend"]
    assert why.startswith(f"chosen: measured here on {entry.date}, ")
    assert supported_backends(problem)["crashing"].startswith(
        f"passed over: excluded here, {entry.date}: its process ended"
    )
    q, k, v, lam = Inputs.random(problem, torch.Generator().manual_seed(0))
    torch.testing.assert_close(diff_attention(q, k, v, lam), diff_attention(q, k, v, lam, backend="eager"))
    # What is excluded is not tried again.
    monkeypatch.setattr(cases, "USUAL", {"one": shapes["one"]})
    assert main(["tune", "--device", "cpu", "--minutes", "3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"crashing is never chosen here: {entry.date}: its process ended" in out
    assert len(store.read_tuning(tmp_path / "tuning.json", tuned.machine_of("cpu")).choices) == 7


def test_the_calls_that_are_timed_need_what_the_problem_says():
    calls = calls_of(Case("", SMALL._replace(grad=False, masked=True)), ["blocked", "eager"])
    outputs = [call() for call in calls.values()]
    torch.testing.assert_close(*outputs)  # of the same inputs
    assert not outputs[0].requires_grad
    grads = calls_of(Case("", SMALL._replace(masked=True)), ["blocked"])["blocked"]()
    assert [tuple(grad.shape) for grad in grads] == [(2, 2, 2, 19, 8), (2, 1, 2, 19, 8), (2, 1, 19, 16), (1,)]
