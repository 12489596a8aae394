"""What was measured, as "auto" reads it: choices of kinds of calls, files that are damaged or of other machines."""

import json
import threading

import pytest
import torch

from diffvision.ops import attention_backend, diff_attention, supported_backends
from diffvision.ops.attention import Problem, tuned
from diffvision.ops.attention.choice import problems_seen
from diffvision.tuning import store

PROBLEM = Problem(batch=2, heads=2, kv_heads=2, queries=33, keys=33, head_dim=16, value_dim=32)


@pytest.fixture(autouse=True)
def _process():
    with tuned.kept():
        tuned.forget()
        yield


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of measurements, which does not exist yet."""
    monkeypatch.setenv("DIFFVISION_TUNING", str(tmp_path / "tuning.json"))
    return tmp_path / "tuning.json"


def a_tuning(choices=(("blocked", PROBLEM),), excluded=(), compiled=False, **machine):
    rows = {
        tuned.kind_of(problem, compiled=compiled): tuned.Choice(
            name, "eager", 1.31, {"eager": 1.31, name: 1.0}, {name: 8}
        )
        for name, problem in choices
    }
    return tuned.Tuning(tuned.machine_of("cpu") | machine, "2026-11-23", rows, dict(excluded))


def chosen(problem=PROBLEM):
    return next(iter(supported_backends(problem).items()))


def test_a_choice_holds_for_calls_of_its_kind(file):
    store.save(file, a_tuning())
    assert chosen() == ("blocked", "chosen: measured here on 2026-11-23, 1.31x faster than eager")
    assert supported_backends(PROBLEM)["sdpa"].startswith("passed over: blocked was chosen, measured here")
    same = ({"queries": 64, "keys": 64}, {"batch": 1}, {"head_dim": 12}, {"queries": 40})
    for change in same:
        assert chosen(PROBLEM._replace(**change))[0] == "blocked", change
    others = (
        {"queries": 65, "keys": 65},
        {"keys": 32, "queries": 32},
        {"batch": 3},
        {"head_dim": 17},
        {"causal": True},
        {"masked": True},
        {"packed": True},
        {"shared_keys": True, "value_dim": 16},
        {"kv_heads": 1},
        {"grad": False},
        {"dtype": torch.float16},
    )
    for change in others:
        assert "measured" not in chosen(PROBLEM._replace(**change))[1], change
    assert chosen(PROBLEM._replace(dropout=0.1)) == ("eager", "chosen: it draws dropout")


def test_layers_take_the_choice_and_a_context_still_decides(file):
    store.save(file, a_tuning([("sdpa", PROBLEM._replace(grad=False))]))
    q, k, v = torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 33, 32)
    assert torch.equal(diff_attention(q, k, v, 0.5), diff_attention(q, k, v, 0.5, backend="sdpa"))
    with attention_backend("blocked"):
        assert torch.equal(diff_attention(q, k, v, 0.5), diff_attention(q, k, v, 0.5, backend="blocked"))
    with problems_seen() as seen:
        diff_attention(q, k, v, 0.5)
    assert seen == [PROBLEM._replace(grad=False)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_takes_the_choice_that_was_measured_compiled(file, dynamic, monkeypatch):
    problem = PROBLEM._replace(grad=False)
    store.save(file, a_tuning([("sdpa", problem)], compiled=True))
    taken = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda *a, **k: taken.append(1) or real(*a, **k)
    )
    q, k, v = torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 33, 32)
    seen = []

    def backend(graph, inputs):
        seen.append(str(graph.graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda *t: diff_attention(*t, 0.5), fullgraph=True, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(compiled(q, k, v), diff_attention(q, k, v, 0.5, backend="eager"))
    assert "scaled_dot_product_attention" in seen[0] or taken
    torch.compiler.reset()


def test_what_was_excluded_is_never_chosen(file):
    store.save(file, a_tuning(excluded=[("eager", "its output is off by 1")]))
    store.save(
        file, a_tuning(excluded=[("blocked", "it crashed")])
    )  # its choice goes with it, the other stays excluded
    tuned.forget()
    reasons = supported_backends(PROBLEM._replace(keys=100, queries=100))
    assert next(iter(reasons)) == "eager"  # the formula stays where nothing else is left by the rule
    assert reasons["eager"] == "chosen: blocked was excluded here on 2026-11-23: it crashed"
    assert reasons["blocked"] == "passed over: excluded here on 2026-11-23: it crashed"
    assert chosen()[0] == "eager"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"machines": 3}',
        '{"machines": [{"machine": {}}]}',
        '{"machines": [{"choices": [[]]}]}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_one_warning(file, content):
    file.write_text(content, encoding="latin-1")
    with pytest.warns(UserWarning, match=r"is no file of `diffvision tune` .*; remove it, and tune again"):
        assert chosen()[0] == "eager"
    assert chosen()[0] == "eager"  # without another warning, which would be an error here


def test_a_choice_of_an_unknown_backend_is_not_taken(file):
    plain = a_tuning().to_json()
    plain["choices"][0]["backend"] = "nonsense"
    file.write_text(json.dumps({"machines": [plain]}))
    assert chosen()[0] == "eager"


def test_measurements_of_other_versions_or_machines_are_not_used(file):
    store.save(file, a_tuning(torch="1.0", threads="96"))
    with pytest.warns(
        UserWarning, match=r"no measurements for this machine \(threads 1, .*with 96; torch .* with 1.0\)"
    ):
        assert chosen()[0] == "eager"
    store.save(file, a_tuning())
    tuned.forget()
    assert chosen()[0] == "blocked"
    assert len(tuned.read(file)) == 2


def test_the_variable_switches_it_off_and_names_a_file(file, monkeypatch, tmp_path):
    store.save(file, a_tuning())
    monkeypatch.setenv("DIFFVISION_TUNING", "off")
    assert chosen()[0] == "eager"
    with pytest.raises(ValueError, match='DIFFVISION_TUNING is "off"'):
        store.file_to_write()
    monkeypatch.setenv("DIFFVISION_TUNING", str(tmp_path / "none.json"))
    tuned.forget()
    with pytest.warns(UserWarning, match=r"DIFFVISION_TUNING: .*No such file"):
        assert chosen()[0] == "eager"
    monkeypatch.delenv("DIFFVISION_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.tuning_file() == tmp_path / "diffvision" / "tuning.json"
    tuned.forget()
    assert chosen()[0] == "eager"


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFVISION_TUNING", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot be written: name another file with DIFFVISION_TUNING"):
        store.file_to_write()


def test_two_that_tune_at_once_both_stay(file):
    sizes = [2**power for power in range(1, 9)]

    def save(size):
        store.save(file, a_tuning([("blocked", PROBLEM._replace(queries=size, keys=size))]))

    threads = [threading.Thread(target=save, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [entry] = tuned.read(file)
    assert {kind.keys for kind in entry.choices} == set(sizes)
    assert sorted(path.name for path in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_a_damaged_file_is_written_anew(file):
    file.write_text("{")
    with pytest.warns(UserWarning, match="it is written anew"):
        store.save(file, a_tuning())
    assert len(tuned.read(file)) == 1
