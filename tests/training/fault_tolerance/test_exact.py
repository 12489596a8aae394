"""A resumed run against the run never stopped, bit by bit: a few cells of the resume matrix; and its warnings."""

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

import tiny_runs
from diffvision.models import language
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance import exact
from diffvision.training.fault_tolerance.checkpoints import find_newest
from diffvision.training.fault_tolerance.exact import LastCheckpoint, describe_changes
from diffvision.training.fault_tolerance.random_state import capture_random_state, restore_random_state
from resume_matrix import CUTS, Case, Matrix
from tiny_runs import BATCHES, EPOCHS, Cut, Outcome, Setting, once, quietly

pytestmark = pytest.mark.filterwarnings("ignore:resumed from:UserWarning")
TRAINED = Setting("language", ema=True, accumulate=3)
# One cell by day, and the task that the matrix in `tests/faults` does not have.
CASES = [
    Case(TRAINED, "in accumulation"),
    pytest.param(Case(Setting("vision-language", True, 3), "in accumulation"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def root(matrix) -> Path:
    return matrix.root


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupted_run_is_the_run_never_stopped(matrix, case, tmp_path):
    matrix.check(case, tmp_path / "kept")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_finished_run_is_extended_exactly(root, tmp_path):
    """The run ends within an epoch and continues it; with EMA the last file has both sets of weights."""
    setting = Setting("language", ema=True, by="steps, without validation")
    whole, parts = Outcome(), Outcome()
    fixed = {"max_epochs": 3, "max_steps": -1}  # of which the schedule is a function
    with quietly():
        once(root / "data", tmp_path / "whole", setting, whole, None, **fixed)
        for batches in (8, 12):
            assert not once(
                root / "data", tmp_path / "kept", setting, parts, Cut("on_train_batch_start", batches), **fixed
            )
        assert once(root / "data", tmp_path / "kept", setting, parts, None, **fixed)
        once(root / "data", tmp_path / "kept", setting, parts, None, **fixed)  # ended, and its last step made again
    assert parts.began == [0, 7, 11, 17]
    assert tiny_runs.unequal(parts, whole) == []
    final = torch.load(tmp_path / "kept" / "final.ckpt", weights_only=True)["state_dict"]
    assert tiny_runs.differences(final, whole.checkpoint["state_dict"]) == []


@pytest.mark.parametrize(
    ("every", "settings", "steps"),
    [
        (None, {}, [1, 2, 4, 5]),
        (3, {}, [1, 2, 3, 4, 5]),
        (None, {"val_check_interval": timedelta(hours=1)}, [3, 5]),
        (None, {"check_val_every_n_epoch": None, "val_check_interval": 8, "max_epochs": 3}, [3, 7, 8]),
    ],
)
def test_a_file_is_written_before_steps_that_a_validation_follows_and_every_so_many(
    every, settings, steps, root, tmp_path, monkeypatch
):
    """Validations follow batches 2 and 5 of each epoch; steps have two batches, or one at an end.

    Where validations are by time, or there are none, a file is written when an epoch begins.
    """
    saved, save = [], LastCheckpoint.save
    monkeypatch.setattr(LastCheckpoint, "save", lambda *given: saved.append(given[1].global_step) or save(*given))
    setting = Setting("language", accumulate=2)
    with quietly():
        once(root / "data", tmp_path / "kept", setting, Outcome(), None, every=every, **settings)
    # Steps begin with batches 0, 2 and 4: batch 2 is in the second, batch 5 in the third.
    assert saved == steps


# --- what is refused, and what is warned of ---


@pytest.fixture(scope="module")
def kept(root) -> Path:
    """The directory of a run with averages that was cut."""
    kept = root / "kept"
    with quietly():
        once(root / "data", kept, TRAINED, Outcome(), Cut("on_train_batch_end", 7))
    return kept


def test_averages_are_evaluated_and_resumed_only_with_averaging(kept):
    path, _, _ = find_newest([kept])
    content = torch.load(path, weights_only=True)
    loaded = language.load(path).state_dict()
    assert all(torch.equal(value, loaded[name.removeprefix("model.")]) for name, value in content["state_dict"].items())
    assert tiny_runs.differences(content["state_dict"], content["current_model_state"])
    trainer = SimpleNamespace(state=SimpleNamespace(fn=exact.TrainerFn.FITTING), callbacks=[], ckpt_path=path)
    with pytest.raises(ValueError, match=r"its weights are averages"):
        LastCheckpoint().on_load_checkpoint(trainer, None, content)


def test_averages_of_sharded_weights_and_decays_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"decay must .* got 1.5"):
        EMA(decay=1.5)
    trainer = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ValueError, match="FSDPStrategy"):
        EMA().setup(trainer, None, "fit")


@pytest.mark.parametrize("cut", ["step saved", "an epoch begins"])
def test_other_data_are_refused_wherever_a_run_is_resumed(cut, root, tmp_path):
    kept, data = tmp_path / "kept", tmp_path / "data"
    shutil.copytree(root / "data", data)
    outcome = Outcome()
    with quietly():
        once(data, kept, Setting("language"), outcome, *CUTS[cut])
        shutil.rmtree(data / "text")
        tiny_runs.write_texts(data / "text", [text[::-1] for text in tiny_runs.TEXTS])
        with pytest.raises(ValueError, match="cannot resume: "):
            once(data, kept, Setting("language"), outcome, None)
    assert outcome.began[1] == EPOCHS * BATCHES  # no step was made


def test_settings_that_make_no_difference_are_not_named():
    before = {"batches": "3", "lr": "1", "seed_everything": "0"}
    now = {"batches": "3.0", "lr": "2", "seed_everything": "3", "eval_columns": "None"}  # a later version's setting
    assert list(describe_changes(before, now)) == ["lr 2 (was 1)", "seed_everything 3 (was 0)"]
    assert list(describe_changes({"limit": "1.0"}, {"limit": "1"})) == ["limit 1 (was 1.0)"]  # all, or one batch


def test_generators_continue_where_they_were(tmp_path):
    tiny_runs.seed(3)
    torch.randn(3), __import__("random").gauss(0, 1), __import__("numpy").random.normal()  # leave one half of a pair
    torch.save(capture_random_state(torch.device("cpu")), tmp_path / "state.pt")

    def drawn():
        random, numpy = __import__("random"), __import__("numpy").random
        return [random.gauss(0, 1), random.random(), numpy.normal(), numpy.rand(), torch.randn(2).tolist()]

    expected = drawn()
    tiny_runs.seed(4)
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu"))
    assert drawn() == expected
