"""Signals to a run of one process and of two, and ranks that fail, differ in their data or lose their parent."""

import itertools
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import training_fits
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from diffvision.data import ShardSet
from diffvision.data.shards.writer import write_shards
from diffvision.training.fault_tolerance import preemption, ranks
from diffvision.training.fault_tolerance.checkpoints import LAST, DurableCheckpointIO, find_newest
from diffvision.training.fault_tolerance.checkpoints import PREEMPTED as SAVED
from diffvision.training.fault_tolerance.exact import LastCheckpoint
from diffvision.training.fault_tolerance.preemption import Preempted, Preemption, watch_signals
from diffvision.training.fault_tolerance.ranks import SameShards, end_with_first_rank
from ranks import Ended, Ranks, alive, alone, children, kill, send, until

# Lightning's advice (more workers; directories that are not empty) is not for these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


class Tiny(training_fits.Tiny):
    """Does something to its process at a step, and notes which hooks were called."""

    def __init__(self, at=None, do=lambda: None, hook="training_step", ranks=(0,)):
        super().__init__()
        self.at, self.do, self.hook, self.ranks, self.hooks = at, do, hook, ranks, []

    def act(self, hook):
        self.hooks.append((hook, self.trainer.global_step))
        if self.hook == hook and self.global_rank in self.ranks and self.at in (self.trainer.global_step, "any"):
            self.do()

    def training_step(self, batch, index):
        self.act("training_step")
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.act("validation_step")
        self.log("value", 1.0)

    def on_validation_end(self):
        self.act("on_validation_end")

    def on_save_checkpoint(self, checkpoint):
        self.act("on_save_checkpoint")


def trainer_of(root, **settings):
    defaults = {"max_epochs": 2, "max_steps": -1, "plugins": [DurableCheckpointIO()], "use_distributed_sampler": True}
    settings = defaults | settings
    callbacks = settings.pop("callbacks", [ModelCheckpoint(root)])
    trainer = training_fits.trainer(*callbacks, default_root_dir=root, **settings)
    last = LastCheckpoint() if trainer.checkpoint_callbacks else None
    trainer.callbacks[:0] = [SameShards(), Preemption(last)]
    trainer.callbacks += [last] if last else []
    return trainer


def fitted(root, module, *, batches=6, **settings):
    """The trainer and the exit status of a fit."""
    trainer = trainer_of(root, **settings)
    data = DataLoader(torch.ones(batches, 3))
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    code = 0
    try:
        trainer.fit(module, data, DataLoader(torch.ones(4, 3)))
    except Preempted as ended:
        code = ended.code
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    ignored = {number for number in numbers if after[number] is signal.SIG_IGN} - {signal.SIGUSR1}
    assert ignored == ({signal.SIGTERM} if code else set())
    assert after[signal.SIGINT] == before[signal.SIGINT]
    return trainer, code


def saved(root):
    return torch.load(root / SAVED, weights_only=True)


# --- one process ---


SIGNALLED = {
    # what runs when SIGTERM comes: its step and hook, settings; the exit status, the newest file and its step
    "a step": (2, "training_step", {}, 143, SAVED, 3),
    "a step of three batches": (1, "training_step", {"accumulate_grad_batches": 3, "batches": 9}, 143, SAVED, 2),
    "the last step": (5, "training_step", {"max_steps": 6, "limit_val_batches": 0}, 0, LAST, 5),
    "a save": (1, "on_save_checkpoint", {}, 143, SAVED, 2),
    "a validation": ("any", "validation_step", {}, 143, LAST, 5),  # of the state before the step that it follows
    "a validation before training": (0, "validation_step", {"num_sanity_val_steps": 4}, 143, None, 0),
}


@pytest.mark.parametrize("running", SIGNALLED)
def test_what_runs_at_a_signal_is_finished_and_nothing_begins_after_it(running, tmp_path):
    at, hook, settings, status, name, step = SIGNALLED[running]
    module = Tiny(at, send(signal.SIGTERM, signal.SIGTERM), hook)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    _, code = fitted(tmp_path, module, callbacks=[saver], **settings)
    assert (code, find_newest([tmp_path])) == (status, (name and tmp_path / name, step, {}))
    signalled = next(place for place, call in enumerate(module.hooks) if call[0] == hook and at in (call[1], "any"))
    begun = [call for call in module.hooks[signalled + 1 :] if call[0] != "on_save_checkpoint"]
    assert set(begun) <= {("training_step", at)}  # the other batches of the step
    if name == SAVED:
        batches = saved(tmp_path)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]
        assert batches == step * settings.get("accumulate_grad_batches", 1)


def test_what_is_saved_is_printed(tmp_path, capsys):
    fitted(tmp_path, Tiny(2, send(signal.SIGTERM)))
    assert f"SIGTERM: saved {tmp_path / SAVED} at step 3" in capsys.readouterr().err
    _, code = fitted(tmp_path, Tiny(2, send(signal.SIGTERM)), enable_checkpointing=False, callbacks=[])
    assert code == 143
    assert "SIGTERM: no ModelCheckpoint says where to save, so nothing is saved" in capsys.readouterr().err


@pytest.mark.forks
def test_another_sigterm_does_not_change_how_a_preempted_run_ends(tmp_path):
    """torchrun sends one to all ranks when the first has ended: the others have ended their fit, not their process."""

    class Again(pl.Callback):
        def on_exception(self, trainer, pl_module, exception):
            os.kill(os.getpid(), signal.SIGTERM)

    def work():
        trainer = trainer_of(tmp_path)
        trainer.callbacks.append(Again())  # after Preemption
        try:
            trainer.fit(Tiny(2, send(signal.SIGTERM)), DataLoader(torch.ones(6, 3)), DataLoader(torch.ones(4, 3)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    assert alone(work).code == 143
    assert saved(tmp_path)["global_step"] == 3


@pytest.mark.forks
def test_a_later_fit_of_the_process_hears_signals_again(tmp_path):
    def work():
        for name in ("first", "second"):
            trainer = trainer_of(tmp_path / name)
            code = 0
            try:
                trainer.fit(Tiny(2, send(signal.SIGTERM)), DataLoader(torch.ones(6, 3)), DataLoader(torch.ones(4, 3)))
            except SystemExit as ended:
                code = ended.code
            assert code == 143, name
        sys.exit(7)

    assert alone(work).code == 7


def test_a_long_evaluation_is_left_between_its_batches(tmp_path):
    class Evaluating(Tiny):
        def validation_step(self, batch, index):
            for number in watch_signals(self.trainer, range(100)):
                self.last = number
                if number == 7:
                    os.kill(os.getpid(), signal.SIGTERM)

    module = Evaluating()
    assert fitted(tmp_path, module)[1] == 143
    assert module.last == 7
    plain = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert watch_signals(plain, range(3)) == range(3)


def test_a_signal_before_the_fit_ends_it_before_its_first_step(tmp_path):
    class Early(Tiny):
        def configure_optimizers(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().configure_optimizers()

    module = Early()
    assert (fitted(tmp_path, module)[1], module.hooks) == (143, [])


def test_sigint_is_as_sigterm_and_a_second_ends_at_once(tmp_path):
    handlers = []

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        handlers.append(signal.getsignal(signal.SIGINT))

    _, code = fitted(tmp_path, Tiny(2, interrupt))
    assert (code, saved(tmp_path)["global_step"]) == (130, 3)
    assert handlers == [signal.SIG_DFL]


@pytest.mark.parametrize("array", [False, True])
def test_slurm_requeues_once_the_checkpoint_is_on_disk(tmp_path, monkeypatch, array):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* $(ls {tmp_path}/{SAVED}) >> {tmp_path}/called\n")
    scontrol.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    slurm = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    plugins = [DurableCheckpointIO(), SLURMEnvironment()]
    _, code = fitted(tmp_path, Tiny(2, send(signal.SIGUSR1)), plugins=plugins)
    assert (code, saved(tmp_path)["global_step"]) == (128 + signal.SIGUSR1, 3)
    job = "16_4" if array else "17"
    assert (tmp_path / "called").read_text() == f"requeue {job} {tmp_path / SAVED}\n"
    assert not list(tmp_path.glob("hpc_ckpt*"))


# --- two ranks, each a separate process ---


@pytest.fixture(autouse=True)
def _ask_after_each_step(monkeypatch):
    """Signals come at a step here; `test_ranks_ask_each_other_about_once_a_second` has when ranks ask otherwise."""
    monkeypatch.setattr(preemption, "MOST", 1)


@pytest.mark.parametrize(("seconds", "every"), [(0.001, 16), (0.3, 3), (20.0, 1)])
def test_ranks_ask_each_other_about_once_a_second(seconds, every, monkeypatch):
    """The slowest rank counts; here the other one takes half the time."""
    monkeypatch.setattr(preemption, "MOST", 16)
    now, asked = [0.0], []
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])

    class Two(Preemption):
        def _max_over_ranks(self, *numbers):
            asked.append(step)
            return [*numbers[:-1], 2 * numbers[-1]]

    monkeypatch.setattr(preemption.lightning_internals, "is_accumulating", lambda trainer: False)
    callback = Two(None)
    callback._group = "two"
    for step in range(1, 60):  # noqa: B007  `max` notes it
        now[0] += seconds / 2
        callback.on_train_batch_end(SimpleNamespace(global_step=0, max_steps=99))
    assert {later - earlier for earlier, later in itertools.pairwise(asked[1:])} == {every}


def two(root, module, shards=None) -> list[Ended]:
    """What became of two ranks that fit a module, each within a minute; each may have a folder of shards."""

    def work():
        callbacks = [ModelCheckpoint(root, filename="{step}", every_n_train_steps=2)]
        batches, whole = DataLoader(torch.ones(12, 3)), {"use_distributed_sampler": not shards}
        if shards:
            batches.shards = ShardSet(shards[int(os.environ["LOCAL_RANK"])])
        trainer = trainer_of(root, devices=2, strategy="ddp", callbacks=callbacks, **whole)
        trainer.fit(module, batches, DataLoader(torch.ones(8, 3)))

    ended = Ranks(root / "ranks", work).ended()
    assert all(rank.code is not None for rank in ended), ended  # killed, for they hung
    return ended


@pytest.mark.quick("ranks0")
@pytest.mark.forks
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_all_ranks_save_once_and_end_whichever_had_the_signal(tmp_path, ranks):
    hook = "validation_step" if ranks == (1,) else "training_step"
    at = 6 if ranks == (1,) else 2
    first, second = two(tmp_path, Tiny(at, send(signal.SIGTERM), hook, ranks))
    assert (first.code, second.code) == (143, 143), first.output + second.output
    assert find_newest([tmp_path])[1] == (5 if ranks == (1,) else 3)
    assert first.output.count("SIGTERM: ") == 1
    assert "SIGTERM" not in second.output


def boom():
    raise KeyError("no such colour")


def leave():
    os._exit(0)


@pytest.mark.quick("boom-1", "kill-1", "leave-1")
@pytest.mark.forks
@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("end", [boom, kill, leave], ids=["boom", "kill", "leave"])
def test_a_rank_that_is_gone_ends_the_others(tmp_path, end, gone):
    ranks = two(tmp_path, Tiny(3, end, ranks=(gone,)))
    ended, left = ranks[gone], ranks[1 - gone]
    assert left.code != 0
    if gone == 1:
        assert left.code == 1
    assert ended.code in (0, 1, -signal.SIGKILL)
    assert ended.output.count("KeyError: 'no such colour'") == (end is boom)
    assert (tmp_path / "step=2.ckpt").is_file()


@pytest.mark.forks
def test_ranks_with_other_shards_of_the_same_names_end_before_the_first_step(tmp_path):
    folders = [tmp_path / text for text in "ab"]
    for folder in folders:
        write_shards(folder, [{"__key__": f"{number}", "txt": folder.name} for number in range(4)])
    ended = two(tmp_path, Tiny(), folders)
    assert [rank.code for rank in ended] == [1, 1]
    assert re.search(r"ValueError: all ranks .* rank 1 has 4 samples .*\(sha256", ended[0].output)
    assert not [*tmp_path.glob("*.ckpt")]


@pytest.mark.forks
def test_a_rank_ends_with_the_first_one_that_started_it(tmp_path):
    """The first rank is killed; the other one trains on for ever, with a worker, and must not."""

    def first():
        def second():
            os.environ["LOCAL_RANK"] = "1"
            end_with_first_rank()
            os.environ["LOCAL_RANK"] = "0"  # it trains alone
            trainer = trainer_of(tmp_path, max_epochs=-1, limit_val_batches=0)
            data = DataLoader(torch.ones(99, 3), num_workers=1, multiprocessing_context="fork")
            trainer.fit(Tiny(3, (tmp_path / "trains").touch), data)

        rank = multiprocessing.get_context("fork").Process(target=second)
        rank.start()
        (tmp_path / "pid").write_text(str(rank.pid))
        time.sleep(60)

    started = multiprocessing.get_context("fork").Process(target=first)
    started.start()
    until((tmp_path / "trains").exists, 60, "a run that trains")
    rank = int((tmp_path / "pid").read_text())
    (worker,) = children(rank)
    started.kill()
    started.join()
    try:
        until(lambda: not alive(rank) and not alive(worker), 20, "the end of the rank and its worker")
    finally:
        for left in filter(alive, (rank, worker)):  # or pytest's reader waits for their end
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "7"}])
def test_the_kernel_does_not_end_the_first_rank_nor_those_of_a_launcher(variables, monkeypatch):
    monkeypatch.setattr(ranks.ctypes, "CDLL", lambda _: pytest.fail("the kernel was asked"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    end_with_first_rank()
