"""What a run resumes from, and what is refused before any data is read."""

import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from training_fits import Tiny

from diffvision.training.fault_tolerance.checkpoints import DurableCheckpointIO
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.protection import protect
from diffvision.training.fault_tolerance.resume import check_resumable, lock_directory, run_directories

# Lightning's advice (more workers; that a run resumed by its path saves elsewhere) is not for these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:resumed from:UserWarning"),  # test_exact.py asserts these warnings
]


class Data(pl.LightningDataModule):
    """Tells whether it was asked for anything."""

    asked = False

    def prepare_data(self):
        self.asked = True

    def setup(self, stage):
        self.asked = True

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 3))


def trainer_of(root, *callbacks, version=None, steps=2):
    saving = ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"default_root_dir": root, "logger": CSVLogger(root, "fit", version), "log_every_n_steps": 1}
    return training_fits.trainer(*callbacks, saving, LastCheckpoint(every_n_train_steps=1), max_steps=steps, **settings)


def run(root, how="never", *callbacks, module=None, data=None, version=None, steps=2, configuration=None, **settings):
    """The steps that were trained, by their batches."""
    module, trainer = module or Tiny(), trainer_of(root, *callbacks, version=version, steps=steps)
    with protect(trainer, module, resume=how, settings=configuration, **settings) as path:
        trainer.fit(module, data or Data(), ckpt_path=path)
    return module.first_batches


def saved(root, version=0) -> Path:
    return Path(root, "fit", f"version_{version}", "checkpoints")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- which one ---


def test_auto_begins_resumes_and_passes_over_what_is_damaged_and_says_so(tmp_path, caplog):
    """A run's last file is of the state before its last step, which is made again."""
    with caplog.at_level("INFO"):
        assert run(tmp_path, "auto") == [0, 1]
        assert "no checkpoint in " in caplog.text
        assert run(tmp_path, "auto", steps=4) == [1, 2, 3]
        assert f"resuming from {saved(tmp_path)}/last.ckpt" in caplog.text
    made_again = {"step=2.ckpt.replaced", "final.ckpt.replaced"}
    names = {"last.ckpt", "final.ckpt", *(f"step={number}.ckpt" for number in range(1, 5))}
    assert {path.name for path in saved(tmp_path).glob("*.ckpt*")} == names | made_again
    shutil.copy(saved(tmp_path) / "last.ckpt", newer := saved(tmp_path) / "preempted.ckpt")
    rewritten(newer, lambda content: content.update(global_step=9))
    flip(newer)
    (saved(tmp_path) / ".saving-99.tmp").write_bytes(b"half")
    with pytest.warns(UserWarning, match=r"skipped .*preempted.ckpt") as warned:
        assert run(tmp_path, "must", steps=5) == [3, 4]
    assert len([w for w in warned if "skipped" in str(w.message)]) == 1
    assert not list(saved(tmp_path).glob(".saving*"))
    assert [p.name for p in (tmp_path / "fit").iterdir()] == ["version_0"]
    columns = [p.read_text().count("\n") for p in sorted(saved(tmp_path).parent.glob("metrics*.csv"))]
    assert columns == [3, 4, 3]  # a header and the steps of each: none deleted


def rewritten(path, change):
    """Change a checkpoint's content."""
    content = torch.load(path, weights_only=True)
    change(content)
    DurableCheckpointIO().save_checkpoint(content, path)


def test_another_file_is_resumed_from_only_by_name_and_says_that_it_is_not_exact(tmp_path):
    run(tmp_path)
    (saved(tmp_path) / "last.ckpt").unlink()
    assert run(tmp_path, "auto", steps=3) == [0, 1, 2]
    with pytest.warns(UserWarning, match="as Lightning resumes, not exactly"):
        assert run(tmp_path, ckpt_path=str(saved(tmp_path) / "step=1.ckpt"), version=7) == [1]
    weights = (saved(tmp_path) / "final.ckpt").read_bytes()
    assert run(tmp_path, "auto", version=0) == [0, 1]  # where only weights are left
    assert (saved(tmp_path) / "final.ckpt.replaced").read_bytes() == weights


def test_a_run_warns_of_what_it_loses_when_it_resumes(tmp_path):
    """The best scores, because it saves elsewhere, and the state of a callback that it does not have."""
    run(tmp_path)
    given = saved(tmp_path) / "step=1.ckpt"
    rewritten(given, lambda content: content["callbacks"].update(Gone={"count": 1}))
    with pytest.warns(UserWarning, match="dirpath|callbacks") as warned:
        run(tmp_path, ckpt_path=str(given))
    texts = [str(line.message) for line in warned]
    assert any("The dirpath has changed" in text for text in texts)
    assert any("add the following callbacks: ['Gone']" in text for text in texts)


def test_a_run_warns_of_each_way_in_which_it_differs(tmp_path):
    """Another loader, number of ranks and configuration: one line each."""
    run(tmp_path, configuration={"model.lr": 1, "resume": "never"})

    def from_two_ranks(content):
        recorded = content["diffvision_run"]
        recorded.update(world_size=2, random=2 * recorded["random"])

    rewritten(saved(tmp_path) / "last.ckpt", from_two_ranks)
    changed = {"model.lr": 2, "resume": "auto", "trainer.logger.x": 1}
    with pytest.warns(UserWarning, match="resumed from") as lines:
        run(tmp_path, "auto", ranks="any", steps=3, configuration=changed)
    loader, ranks, settings = [str(line.message) for line in lines if "resumed from" in str(line.message)]
    assert "DataLoader does not save its position" in loader
    assert "2 processes trained it and here are 1" in ranks
    assert settings.endswith("have changed: model.lr 2 (was 1)")


def test_never_takes_a_new_version_and_refuses_one_with_checkpoints(tmp_path):
    assert run(tmp_path) == [0, 1]
    assert run(tmp_path) == [0, 1]
    assert sorted(p.name for p in (tmp_path / "fit").iterdir()) == ["version_0", "version_1"]
    data = Data()
    with pytest.raises(ValueError, match="checkpoints already holds"):
        run(tmp_path, version=1, data=data)
    assert not data.asked
    assert run(tmp_path, "auto", version=0, steps=3) == [1, 2]
    assert run(tmp_path, "auto", steps=4) == [1, 2, 3]  # of several the last, whose version is 1


def test_must_is_an_error_where_there_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="resume is must"):
        run(tmp_path, "must", data=(data := Data()))
    assert not data.asked


@pytest.mark.parametrize(("how", "version"), [("auto", 0), ("auto", None), ("must", None)])
def test_a_run_does_not_begin_over_checkpoints_that_are_all_damaged(how, version, tmp_path):
    run(tmp_path)
    flip(path := saved(tmp_path) / "last.ckpt")
    left, data = path.read_bytes(), Data()
    with (
        pytest.warns(UserWarning, match=r"skipped .*last.ckpt"),
        pytest.raises(ValueError, match=r"no checkpoint can be|resume is must"),
    ):
        run(tmp_path, how, version=version, data=data)
    assert path.read_bytes() == left
    assert not data.asked


def test_a_checkpoint_that_is_given_holds(tmp_path):
    run(tmp_path, steps=3)
    given, last = saved(tmp_path) / "step=1.ckpt", saved(tmp_path) / "last.ckpt"
    assert run(tmp_path, ckpt_path=str(given), steps=3) == [1, 2]
    with pytest.raises(ValueError, match=r"last\.ckpt"):
        run(tmp_path, ckpt_path=str(given), version=0)
    assert run(tmp_path, ckpt_path=str(last), version=0, steps=4) == [2, 3]
    with pytest.raises(ValueError, match="ckpt_path must be null"):
        run(tmp_path, "auto", ckpt_path=str(given))
    for none in ("nowhere.ckpt", "last", "https://example.org/x.ckpt"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint {none}"):
            run(tmp_path, ckpt_path=none)
    flip(given)
    with pytest.raises(ValueError, match=r"cannot resume from .*step=1.ckpt"):
        run(tmp_path, ckpt_path=str(given))


def test_accumulation_continues_as_its_epoch_began(tmp_path):
    """Of 8 batches each the second epoch makes 4 steps."""
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    run(tmp_path, "never", scheduler, steps=10)
    batches = run(tmp_path, "must", scheduler, steps=12)
    assert batches == [9, 9, 10, 10, 11, 11]


@pytest.mark.parametrize("logger", [True, False])
def test_directories_are_lightnings(logger, tmp_path):
    trainer = pl.Trainer(accelerator="cpu", logger=logger and CSVLogger(tmp_path), default_root_dir=tmp_path)
    trainer.callbacks.append(ModelCheckpoint(tmp_path / "best"))
    directories = run_directories(trainer)
    for saver in trainer.checkpoint_callbacks:
        saver.setup(trainer, Tiny(), "fit")
    assert [Path(saver.dirpath) for saver in trainer.checkpoint_callbacks] == directories


# --- what is refused ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    run(root, module=Tiny(layers=2), steps=1)
    return saved(root) / "step=1.ckpt"


@pytest.mark.parametrize(("layers", "differing"), [(1, "2 keys"), (9, "14 keys"), (3, "set layers to 2")])
def test_another_architecture_is_refused_with_its_keys_or_what_to_set(checkpoint, layers, differing, tmp_path):
    class Checked(Tiny):
        def check_checkpoint(self, checkpoint):
            if layers == 3:
                raise ValueError("set layers to 2")

    check_resumable(str(checkpoint), Tiny(layers=2), world_size=1, ranks="same")
    with pytest.raises(ValueError, match=rf"cannot resume from .*step=1.ckpt: .*{differing}"):
        run(tmp_path, ckpt_path=str(checkpoint), module=Checked(layers=layers), data=(data := Data()))
    assert not data.asked


def test_another_optimizer_is_refused_before_the_first_batch(checkpoint, tmp_path):
    module = Tiny(layers=2, optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="its optimizer is AdamW and here"):
        run(tmp_path, ckpt_path=str(checkpoint), module=module)
    stock = tmp_path / "stock.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    del content["diffvision_run"]
    torch.save(content, stock)
    assert module.first_batches == []
    assert run(tmp_path, ckpt_path=str(stock), module=Tiny(layers=2)) == [1]


def test_another_number_of_processes_is_refused_or_accepted(checkpoint):
    module = Tiny(layers=2)
    with pytest.raises(ValueError, match="1 processes trained it, not 4"):
        check_resumable(str(checkpoint), module, world_size=4, ranks="same")
    check_resumable(str(checkpoint), module, world_size=4, ranks="any")


def hold(directory, ready, done):
    with lock_directory(directory):
        ready.set()
        done.wait(20)


def test_a_run_that_is_refused_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="refused"), lock_directory(tmp_path / "run"):
        raise ValueError("refused")
    assert not (tmp_path / "run").exists()
    with lock_directory(tmp_path / "run"):
        (tmp_path / "run/metrics.csv").touch()
    assert (tmp_path / "run/metrics.csv").exists()


def test_two_runs_in_one_directory_are_refused_until_the_first_is_gone(tmp_path):
    directory, context = saved(tmp_path), multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    first = context.Process(target=hold, args=(directory, ready, done), daemon=True)
    first.start()
    assert ready.wait(20)
    with pytest.raises(OSError, match=rf"another run writes to {directory}"):
        run(tmp_path, version=0, data=(data := Data()))
    assert not data.asked
    first.kill()  # nothing is left to be cleaned by hand
    first.join(20)
    assert run(tmp_path, version=0) == [0, 1]


def test_nothing_is_written_to_what_links_lead_to(tmp_path):
    saved(tmp_path).mkdir(parents=True)
    other = tmp_path / "notes.txt"
    other.write_text("years of work")
    for name in (f".saving-{os.getpid()}.tmp", ".lock"):
        (saved(tmp_path) / name).symlink_to(other)
    DurableCheckpointIO().save_checkpoint({"state_dict": {}}, saved(tmp_path) / "weights.ckpt")
    (saved(tmp_path) / "weights.ckpt").unlink()
    (saved(tmp_path).parent / "metrics.csv").symlink_to(other)
    assert run(tmp_path, version=0) == [0, 1]
    assert other.read_text() == "years of work"


def test_a_directory_that_cannot_be_written_is_one_error_before_data_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="no checkpoint can be written"):
        run(tmp_path / "file", data=(data := Data()))
    assert not data.asked


def test_ranks_that_see_other_files_do_not_resume():
    last, stopped = LastCheckpoint(), LastCheckpoint()
    last.enabled = stopped.enabled = False

    class Strategy:
        broadcast = staticmethod(lambda path: "a.ckpt")
        reduce_boolean_decision = staticmethod(bool)

    trainer = SimpleNamespace(world_size=2, global_rank=1, strategy=Strategy(), ckpt_path="a.ckpt")
    last.setup(trainer, None, "fit")
    trainer.ckpt_path = None
    with pytest.raises(RuntimeError, match="process 1 resumes from None"):
        stopped.setup(trainer, None, "fit")
