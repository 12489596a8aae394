"""A resumed run against the run never stopped, bit by bit: a few cells of the resume matrix; and its warnings."""

import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader

import tiny_runs
from diffvision.data.shards.writer import write_shards
from diffvision.models import language
from diffvision.training.ema import EMA
from diffvision.training.fault_tolerance import run_state
from diffvision.training.fault_tolerance.checkpoints import find_newest_valid, verify
from diffvision.training.fault_tolerance.random_state import capture, restore
from diffvision.training.fault_tolerance.resume import check_resumable
from diffvision.training.fault_tolerance.run_state import RunState, describe_changes, flatten
from resume_matrix import CUTS, Case, outcome_of, verdict
from tiny_runs import BATCHES, EPOCHS, Cut, Outcome, Setting, once, quietly

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:resumed from:UserWarning"),
]
TRAINED = Setting("language", ema=True, accumulate=3)
CASES = [
    Case(TRAINED, "in accumulation, saved there"),
    Case(TRAINED, "three: epoch's end", (1, 2, 0)),
    Case(Setting("conversations", accumulate=3), "in accumulation, saved there"),
    Case(Setting("language", by="steps"), "last step of the run saved"),
    pytest.param(Case(Setting("vision-language", True, 3), "in accumulation, saved there"), marks=pytest.mark.slow),
    Case(Setting("classification", True), "in validation, saved there"),
    Case(Setting("classification", True), "three: validation"),
    pytest.param(Case(Setting("clip", True, 3), "last step of an epoch saved"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    tiny_runs.write_data(root / "data")
    return root


@pytest.fixture(scope="module")
def whole(root):
    """The outcome of a case's run that is not interrupted, trained once."""
    known: dict[Case, Outcome] = {}

    def outcome(case: Case) -> Outcome:
        if case.whole not in known:
            known[case.whole] = outcome_of(root / "data", root / f"whole{len(known)}", case.whole)
        return known[case.whole]

    return outcome


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.parametrize("ranks", [(2,), (2, 1)])
def test_ranks_resume_exactly_and_others_with_the_same_samples(root, whole, ranks, tmp_path):
    case = Case(Setting("language"), "step saved", ranks=ranks)
    outcome = outcome_of(root / "data", tmp_path / "kept", case)
    assert outcome.began == [0, 2]
    assert verdict(case, outcome, whole(case)) == []


@pytest.mark.quick("language-epochs-ema-accumulate_3-workers_0-ranks_1-in_accumulation,_saved_there")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupted_run_is_the_run_never_stopped(root, whole, case, tmp_path):
    outcome = outcome_of(root / "data", tmp_path / "kept", case)
    assert len(outcome.began) == 1 + len(CUTS[case.cut])
    assert verdict(case, outcome, whole(case)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_that_ended_within_an_epoch_is_extended_from_there(root, tmp_path, capsys):
    """Lightning counts that epoch as done, and would leave out its remaining samples."""
    setting = Setting("language", by="steps, without validation")
    whole, parts = Outcome(), Outcome()
    with quietly():
        once(root / "data", tmp_path / "whole", setting, whole, None, max_steps=11)
        for steps in (8, 8, 11):
            assert once(root / "data", tmp_path / "kept", setting, parts, None, max_steps=steps)
    assert parts.began[0::2] == [0, 8]
    assert parts.samples == whole.samples


def test_what_differs_between_two_runs_is_named(whole):
    outcome = whole(Case(TRAINED, ""))
    other = Outcome(**vars(outcome) | {"samples": outcome.samples | {3: ["x"]}, "files": []})
    assert [line.split(":")[0].split("/")[0] for line in tiny_runs.unequal(outcome, other)] == ["samples", "files"]
    a, b = {"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([-0.0, 1.0])}
    assert tiny_runs.differences(a, b) == ["/x: tensor [2] | tensor [2]"]  # equal, but not bit by bit


# --- what is refused, and what is warned of ---


@pytest.fixture(scope="module")
def kept(root) -> Path:
    """The directory of a run with averages that was cut between the batches of a step, and saved there."""
    kept = root / "kept"
    with quietly():
        once(root / "data", kept, TRAINED, Outcome(), Cut("on_train_batch_end", 7, save=True))
    return kept


def test_a_checkpoint_between_two_steps_is_passed_over(kept):
    asked = kept / "asked.ckpt"
    assert not verify(asked).resumable
    path, faults = find_newest_valid([kept])
    assert path is not None
    assert path != asked
    assert faults[asked] == "holds weights alone, or was not taken between two steps"
    with pytest.raises(ValueError, match=r"asked.ckpt: it was taken between"):
        check_resumable(str(asked), tiny_runs.module_of(TRAINED), world_size=1, ranks="same")


def test_averages_are_evaluated_and_resumed_only_with_averaging(kept):
    path, _ = find_newest_valid([kept])
    content = torch.load(path, weights_only=True)
    loaded = language.load(path).state_dict()
    assert all(torch.equal(value, loaded[name.removeprefix("model.")]) for name, value in content["state_dict"].items())
    assert tiny_runs.differences(content["state_dict"], content["current_model_state"])
    trainer = SimpleNamespace(state=SimpleNamespace(fn=run_state.TrainerFn.FITTING), callbacks=[], ckpt_path=path)
    with pytest.raises(ValueError, match=r"its weights are averages"):
        RunState().on_load_checkpoint(trainer, None, content)


def test_averages_of_sharded_weights_and_decays_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"decay is 1.5"):
        EMA(decay=1.5)
    trainer = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ValueError, match="FSDPStrategy shards the weights"):
        EMA().setup(trainer, None, "fit")


def test_a_warning_names_what_differs(root, kept, tmp_path):
    """Another precision, number of ranks and configuration: one line each."""
    run = torch.load(find_newest_valid([kept])[0], weights_only=True)["diffvision_run"]
    loader = SimpleNamespace(state_dict=dict)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, max_steps=7, precision="bf16-mixed")
    resumed = SimpleNamespace(**{n: getattr(trainer, n) for n in (*run_state.COMPARED, "strategy")})
    resumed = SimpleNamespace(**vars(resumed) | {"train_dataloader": loader, "world_size": 4, "ckpt_path": "x.ckpt"})
    with pytest.warns(UserWarning, match="resumed from x.ckpt") as lines:
        RunState()._warn(resumed, run)
    ranks, settings = [str(line.message) for line in lines]
    assert ranks.startswith(
        "resumed from x.ckpt: 1 processes trained it and here are 4: every sample comes as it would"
    )
    assert "other settings than before: accumulate_grad_batches 1 (was 3), " in settings
    assert "precision bf16-mixed (was 32-true)" in settings
    resumed.train_dataloader, resumed.world_size = DataLoader([0]), 1
    with pytest.warns(UserWarning, match="resumed from x.ckpt") as lines:
        RunState()._warn(resumed, {})
    assert "DataLoader does not save its position (state_dict), so its samples may be" in str(lines[0].message)
    assert "it has no states of random generators, so dropout and the like will differ" in str(lines[1].message)


def texts_of(folder):
    """The samples of text shards, in order."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as members:
            for member in members:
                key, _, name = member.name.partition(".")
                yield {"__key__": key, name: members.extractfile(member).read().decode()}


@pytest.mark.parametrize("cut", ["step saved", "an epoch begins"])
def test_other_data_are_refused_wherever_a_run_is_resumed(cut, root, tmp_path):
    kept, data = tmp_path / "kept", tmp_path / "data"
    shutil.copytree(root / "data", data)
    outcome = Outcome()
    with quietly():
        once(data, kept, Setting("language"), outcome, *CUTS[cut])
        shutil.rmtree(data / "text")
        samples = ({**sample, "txt": sample["txt"][::-1]} for sample in texts_of(root / "data" / "text"))
        write_shards(data / "text", samples, per_shard=7)
        with pytest.raises(ValueError, match="cannot resume: "):
            once(data, kept, Setting("language"), outcome, None)
    assert outcome.began[1] == EPOCHS * BATCHES  # no step was made


def test_settings_that_make_no_difference_are_not_compared():
    settings = {"model": {"lr": 0.1, "sizes": [1]}, "resume": "auto", "trainer": {"logger": {"x": 1}, "max_steps": 3}}
    assert flatten(settings) == {"model.lr": "0.1", "model.sizes": "[1]", "trainer.max_steps": "3"}
    one, other = (flatten({"seed_everything": seed}) for seed in (0, 3))
    (line,) = describe_changes(one, other)
    assert line.startswith("seed_everything 3 (was 0")
    assert not list(describe_changes({}, other))  # earlier versions did not save it
    before, now = {"batches": "3", "share": "1"}, {"batches": "3.0", "share": "1.0"}
    assert list(describe_changes(before, now)) == ["share 1.0 (was 1)"]
    assert not list(describe_changes({}, {"eval_columns": "None"}))  # a later version's setting, by default none
    several = "[{'class_path': 'Throughput'}, {'class_path': 'ModelCheckpoint', 'init_args': {'monitor': 'MONITOR'}}]"
    before, now = ({"callbacks": several.replace("MONITOR", one)} for one in ("zero_shot/digits/acc1", "headline"))
    (line,) = describe_changes(before, now)
    assert "'monitor': 'headline'}}] (was 'init_args'" in line
    assert len(line) < 120


def test_generators_continue_where_they_were(tmp_path):
    tiny_runs.seed(3)
    torch.randn(3), __import__("random").gauss(0, 1), __import__("numpy").random.normal()  # leave one half of a pair
    torch.save(capture(torch.device("cpu")), tmp_path / "state.pt")

    def drawn():
        random, numpy = __import__("random"), __import__("numpy").random
        return [random.gauss(0, 1), random.random(), numpy.normal(), numpy.rand(), torch.randn(2).tolist()]

    expected = drawn()
    tiny_runs.seed(4)
    restore(torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu"))
    assert drawn() == expected
