"""A run keeps the choices of attention backends that it started with, whatever is measured meanwhile."""

import json
from types import SimpleNamespace

import pytest
import torch

import tiny_runs
from diffvision import nn
from diffvision.ops.attention import Problem, tuned
from diffvision.ops.attention.choice import BACKENDS, problems_seen
from diffvision.training.fault_tolerance import backends
from tiny_runs import Cut, Outcome, Setting, once, quietly

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:resumed from:UserWarning"),
]
PROBLEM = Problem(batch=2, heads=2, kv_heads=2, queries=33, keys=33, head_dim=16, value_dim=32)


@pytest.fixture(autouse=True)
def _process():
    with tuned.restore_at_end():
        yield


def measured(backend, problems=(PROBLEM,), **machine):
    choice = tuned.Choice(backend, "eager", 1.5, "2026-11-23", {}, {})
    kinds = {tuned.kind_of(problem, compiled=False): choice for problem in problems}
    return tuned.Tuning(tuned.machine_of("cpu") | machine, kinds)


def trainer(of_rank_0="mine"):
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), broadcast=lambda plain: plain if of_rank_0 == "mine" else of_rank_0
    )
    return SimpleNamespace(strategy=strategy, ckpt_path="last.ckpt")


def test_a_resumed_run_is_bit_equal_across_a_new_tuning(tmp_path):
    setting = Setting("language", accumulate=3)
    tiny_runs.write_data(tmp_path / "data")
    outcomes = {}

    def whole(name, tuning):
        tuned.use("cpu", tuning)
        outcomes[name] = Outcome()
        with quietly(), problems_seen() as seen:
            assert once(tmp_path / "data", tmp_path / name, setting, outcomes[name], None)
        return list(dict.fromkeys(seen))

    problems = whole("rule", None)
    assert problems
    before, after = (measured(name, problems) for name in ("sdpa", "blocked"))
    whole("before", before)
    whole("after", after)
    # The two choices give other numbers, so that a run that took the new one would be found.
    assert tiny_runs.unequal(outcomes["before"], outcomes["after"])

    tuned.use("cpu", before)
    outcome = Outcome()
    with quietly():
        assert not once(tmp_path / "data", tmp_path / "cut", setting, outcome, Cut("on_train_batch_end", 8, save=True))
        tuned.use("cpu", after)  # `diffvision tune` ran meanwhile
        assert once(tmp_path / "data", tmp_path / "cut", setting, outcome, None)
    assert len(outcome.began) == 2
    assert tiny_runs.unequal(outcomes["before"], outcome) == []


def test_a_run_without_measurements_stays_without():
    tuned.use("cpu", None)
    run = {"place": "step", "tuning": backends.describe_tuning(trainer())}
    tuned.use("cpu", measured("blocked"))
    backends.agree_on_tuning(trainer(), torch.nn.Identity(), run)
    assert tuned.tuning_of("cpu") is None


@pytest.mark.parametrize(
    ("run", "is_kept"), [({"place": "step"}, False), ({}, True), ({"place": "step", "tuning": ""}, True)]
)
def test_earlier_versions_had_no_choices_and_other_programs_and_devices_say_nothing(run, is_kept):
    tuned.use("cpu", measured("blocked"))
    backends.agree_on_tuning(trainer(), torch.nn.Identity(), run)
    assert (tuned.tuning_of("cpu") is not None) == is_kept


def test_on_another_machine_the_choices_are_taken_anew_with_one_warning():
    tuned.use("cpu", measured("sdpa"))
    saved = json.loads(backends.describe_tuning(trainer()))
    saved["machine"]["name"] = "Another CPU"
    tuned.use("cpu", measured("blocked"))
    with pytest.warns(UserWarning, match=r"resumed from last.ckpt") as news:
        backends.agree_on_tuning(trainer(), torch.nn.Identity(), {"place": "step", "tuning": json.dumps(saved)})
    assert len(news) == 1
    [choice] = tuned.tuning_of("cpu").choices.values()
    assert choice.backend == "blocked"


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"machine": 1}', '{"machine": {}, "tuning": {}}'])
def test_choices_that_cannot_be_read_are_taken_anew(text):
    tuned.use("cpu", measured("blocked"))
    with pytest.warns(UserWarning, match="its choices of attention backends"):
        backends.agree_on_tuning(trainer(), torch.nn.Identity(), {"place": "step", "tuning": text})
    assert tuned.tuning_of("cpu") is not None


def test_all_ranks_use_what_rank_0_has():
    tuned.use("cpu", None)
    backends.agree_on_tuning(trainer(of_rank_0=measured("sdpa").to_json()), torch.nn.Identity(), None)
    [choice] = tuned.tuning_of("cpu").choices.values()
    assert choice.backend == "sdpa"
    backends.agree_on_tuning(trainer(of_rank_0=None), torch.nn.Identity(), None)
    assert tuned.tuning_of("cpu") is None


@pytest.mark.parametrize(
    ("module", "is_said"), [(nn.DiffAttention(32, num_heads=2), True), (torch.nn.Linear(2, 2), False)]
)
def test_a_gpu_that_was_not_measured_is_named_once_with_the_command(module, is_said, monkeypatch):
    said = []
    monkeypatch.setattr(backends, "rank_zero_info", said.append)
    monkeypatch.setattr(tuned, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("DIFFVISION_TUNING", "tuning.json")
    tuned.use("cuda", None)
    gpu = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda:0"), broadcast=lambda plain: plain))
    backends.agree_on_tuning(gpu, module, None)
    assert len(said) == is_said
    assert all("not measured on NVIDIA H200: `diffvision tune`" in text for text in said)
    monkeypatch.setenv("DIFFVISION_TUNING", "off")
    backends.agree_on_tuning(gpu, module, None)
    assert len(said) == is_said


def test_every_backend_s_name_can_be_kept():
    for name in BACKENDS:
        tuning = measured(name)
        assert tuned.Tuning.from_json(json.loads(json.dumps(tuning.to_json()))) == tuning
