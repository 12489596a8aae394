"""What was measured, as "auto" reads it: choices of kinds of calls, files that are damaged or of other machines."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from diffvision import files
from diffvision.files import locked
from diffvision.ops import attention_backend, diff_attention, supported_backends
from diffvision.ops.attention import Problem, tuned
from diffvision.ops.attention.choice import problems_seen
from diffvision.tuning import store

PROBLEM = Problem(batch=2, heads=2, kv_heads=2, queries=33, keys=33, head_dim=16, value_dim=32)


@pytest.fixture(autouse=True)
def _process():
    with tuned.restore_at_end():
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
            name, "eager", 1.31, "2026-11-23", {"eager": 1.31, name: 1.0}, {name: 8}
        )
        for name, problem in choices
    }
    return tuned.Tuning(tuned.machine_of("cpu") | machine, rows, dict(excluded))


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
def test_a_compiled_graph_takes_the_choice_that_was_measured_compiled(file, dynamic):
    problem = PROBLEM._replace(grad=False)
    store.save(file, a_tuning([("sdpa", problem)], compiled=True))
    q, k, v = torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 2, 33, 16), torch.randn(2, 2, 33, 32)
    seen = []

    def backend(graph, inputs):
        seen.append(str(graph.graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda *t: diff_attention(*t, 0.5), fullgraph=True, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(compiled(q, k, v), diff_attention(q, k, v, 0.5, backend="eager"))
    assert "scaled_dot_product_attention" in seen[0]
    torch.compiler.reset()


def test_what_was_excluded_is_never_chosen(file):
    store.save(file, a_tuning(excluded=[("sdpa", "2026-11-23: its output is off by 1")]))
    store.save(file, a_tuning([], excluded=[("blocked", "2026-11-24: it crashed")]))  # its choice goes with it
    tuned.forget()
    reasons = supported_backends(PROBLEM._replace(keys=100, queries=100))
    assert next(iter(reasons)) == "eager"  # the formula stays where nothing else is left
    assert reasons["eager"] == "chosen: blocked was excluded here, 2026-11-24: it crashed"
    assert reasons["blocked"] == "passed over: excluded here, 2026-11-24: it crashed"
    assert reasons["sdpa"] == "passed over: excluded here, 2026-11-23: its output is off by 1"
    assert chosen()[0] == "eager"
    dropout = PROBLEM._replace(keys=100, queries=100, dropout=0.1)
    assert chosen(dropout) == ("eager", "chosen: sdpa was excluded here, 2026-11-23: its output is off by 1")


def test_another_takes_the_place_of_one_that_was_excluded(file):
    store.save(file, a_tuning([], excluded=[("blocked", "2026-11-24: it crashed")]))
    tuned.forget()
    long = PROBLEM._replace(keys=4096, queries=4096)
    assert chosen(long) == ("sdpa", "chosen: blocked was excluded here, 2026-11-24: it crashed")


def test_where_none_was_faster_the_rule_decides_by_the_exact_length(file):
    few, more = (PROBLEM._replace(queries=size, keys=size) for size in (77, 100))
    choice = tuned.Choice("eager", "eager", 1.0, "2026-11-23", {"eager": 1.0, "blocked": 1.2}, {})
    kind = tuned.kind_of(few, compiled=False)
    assert kind == tuned.kind_of(more, compiled=False)
    store.save(file, tuned.Tuning(tuned.machine_of("cpu"), {kind: choice}))
    tuned.forget()
    assert chosen(few) == ("eager", "chosen: measured here on 2026-11-23, none was faster")
    assert chosen(more)[0] == "blocked"


def test_one_whose_rule_failed_says_so(file):
    choice = tuned.Choice("sdpa", "blocked", 1.0, "2026-11-23", {"sdpa": 1.0}, {})
    long = PROBLEM._replace(queries=100, keys=100)
    store.save(file, tuned.Tuning(tuned.machine_of("cpu"), {tuned.kind_of(long, compiled=False): choice}))
    tuned.forget()
    assert chosen(long) == ("sdpa", "chosen: measured here on 2026-11-23, where blocked has no memory or failed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_problem_of_a_gpu_is_answered_without_one(file):
    store.save(file, a_tuning())
    tuned.forget()
    assert chosen(PROBLEM._replace(device="cuda", dtype=torch.bfloat16))[0] == "sdpa"


def test_a_home_that_is_not_known_stops_nothing(monkeypatch):
    monkeypatch.setenv("DIFFVISION_TUNING", "~nosuchuser/tuning.json")
    tuned.forget()
    with pytest.warns(UserWarning, match="DIFFVISION_TUNING: .*nosuchuser"):
        assert chosen()[0]


def test_a_user_without_a_home_folder_has_no_measurements(monkeypatch):
    def unknown(*_):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("DIFFVISION_TUNING", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.platformdirs, "user_cache_dir", unknown)
    monkeypatch.setattr(Path, "home", unknown)
    tuned.forget()
    assert chosen()[0] == "eager"
    assert files.user_cache("tuning.json") == Path("/.cache/diffvision/tuning.json")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"machines": 3}',
        '{"machines": [{"machine": 3}]}',
        '{"machines": [{"choices": [[]]}]}',
        "[" * 200_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_one_warning(file, content):
    file.write_text(content, encoding="latin-1")
    with pytest.warns(UserWarning, match=r"measurements .* are not used"):
        assert chosen()[0] == "eager"
    assert chosen()[0] == "eager"  # without another warning, which would be an error here


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_file_is_one_warning(file, make):
    make(file)
    with pytest.warns(UserWarning, match=r"remove .*tuning.json, and tune"):
        assert chosen()[0] == "eager"


@pytest.mark.parametrize("change", [{"backend": ["x"]}, {"faster": "2"}, {"calls": {}}, {"date": None}])
def test_an_entry_with_other_values_is_one_warning(file, change):
    plain = a_tuning().to_json()
    plain["choices"][0] |= change
    file.write_text(json.dumps({"machines": [plain]}))
    with pytest.warns(UserWarning, match="tuning.json, and tune again"):
        assert chosen()[0] == "eager"
    other = {"machine": {"device": "cpu"}, "of a later version": 1}
    file.write_text(json.dumps({"machines": [other]}))
    store.save(file, a_tuning())
    assert tuned.entries_of(file)[0] == other  # what others wrote stays
    tuned.forget()
    assert chosen()[0] == "blocked"


def test_a_file_of_something_else_is_not_overwritten(file):
    file.write_text("notes")
    with pytest.raises(ValueError, match=r"no file of `diffvision tune` .*"):
        store.file_to_write()
    assert file.read_text() == "notes"
    file.write_text("")  # as mktemp makes one
    assert store.file_to_write() == file


def test_a_lock_that_is_held_is_an_error_and_no_waiting_for_ever(file, monkeypatch):
    monkeypatch.setattr(store, "SECONDS", 0.1)
    with (
        locked(file.with_name("tuning.json.lock")),
        pytest.raises(ValueError, match=r"tuning.json.lock cannot be locked"),
    ):
        store.file_to_write()


def test_without_choices_one_graph_is_for_all_lengths(file):
    store.save(file, a_tuning([], excluded=[("flex", "2026-11-23: it crashed")]))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda *t: diff_attention(*t, 0.5), fullgraph=True, backend=backend, dynamic=True)
    for length in (81, 100, 200, 300, 600):
        compiled(torch.randn(1, 2, 2, length, 16), torch.randn(1, 2, 2, length, 16), torch.randn(1, 2, length, 32))
    torch.compiler.reset()
    assert len(graphs) == 1


def test_a_choice_of_an_unknown_backend_is_not_taken(file):
    plain = a_tuning().to_json()
    plain["choices"][0]["backend"] = "nonsense"
    file.write_text(json.dumps({"machines": [plain]}))
    assert chosen()[0] == "eager"


def test_measurements_of_other_versions_or_machines_are_not_used(file):
    store.save(file, a_tuning(torch="1.0", threads="96"))
    with pytest.warns(UserWarning, match=r"has none for this machine \(threads"):
        assert chosen()[0] == "eager"
    store.save(file, a_tuning())
    tuned.forget()
    assert chosen()[0] == "blocked"
    assert len(tuned.entries_of(file)) == 2


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
    with pytest.raises(ValueError, match="cannot be written: name another"):
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
    [entry] = tuned.entries_of(file)
    assert {kind.keys for kind in tuned.Tuning.from_json(entry).choices} == set(sizes)
    assert sorted(path.name for path in file.parent.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_a_damaged_file_is_replaced(file):
    file.write_text("{")
    with pytest.warns(UserWarning, match="it is replaced"):
        store.save(file, a_tuning())
    assert len(tuned.entries_of(file)) == 1
