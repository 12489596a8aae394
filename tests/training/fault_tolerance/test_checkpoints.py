"""Checkpoints on disk: killed at every point of a save, damaged, on a full disk; and those of each of our modules."""

import errno
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader

from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.fault_tolerance import files, records
from diffvision.training.fault_tolerance.checkpoints import (
    DurableCheckpointIO,
    checkpoints_in,
    clean,
    find_newest_valid,
    verify,
)
from diffvision.training.fault_tolerance.random_state import capture
from diffvision.training.fault_tolerance.records import DamagedCheckpoint
from diffvision.training.fault_tolerance.resume import RunState
from diffvision.training.fault_tolerance.rotation import Rotation
from diffvision.training.language import LanguageModule
from diffvision.training.optim import OptimizerSettings
from tiny_runs import plain_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
IO = DurableCheckpointIO()


def content(step: int) -> dict:
    state = {"weight": torch.full((4096,), float(step))}
    return plain_checkpoint(state, step)


def save(path: Path, step: int) -> Path:
    IO.save_checkpoint(content(step), path)
    return path


def step_of(path: Path) -> int:
    return IO.load_checkpoint(path)["global_step"]


# --- killed while it saves ---


# Where a save over another touches the disk: the tensors' write, and of the checkpoint, of its record before and of its
# record after a file's sync, its rename and the directory's sync.
TOUCHES, RENAME = 10, 6


def count_touches(at) -> None:
    """Have `at` called with the number of each touch of the disk, before it happens."""
    touches = 0

    def counted(call, least=0):
        def touch(*args):
            nonlocal touches
            if not least or len(args[1]) >= least:  # of writes those of whole tensors
                touches += 1
                at(touches)
            return call(*args)

        return touch

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    files.HashingFile.write = counted(files.HashingFile.write, least=10_000)


def save_until_killed(number: int, path: Path) -> None:
    count_touches(lambda touch: os.kill(os.getpid(), signal.SIGKILL) if touch == number else None)
    save(path, 2)


def run_killed(number: int, path: Path) -> bool:
    """Whether a process that saves a second step was killed at that touch of the disk, or had fewer of them."""
    process = multiprocessing.get_context("fork").Process(target=save_until_killed, args=(number, path), daemon=True)
    process.start()
    process.join(20)
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("number", range(1, TOUCHES + 2))
def test_a_save_killed_anywhere_leaves_the_old_checkpoint_or_the_new_one(number, tmp_path):
    """Over the only good one: after each kill it is valid, and the next start finds no leavings."""
    last = save(tmp_path / "last.ckpt", 1)
    assert run_killed(number, last) == (number <= TOUCHES)
    assert find_newest_valid([tmp_path]) == (last, {})
    step = 1 if number <= RENAME else 2
    assert verify(last).step == step_of(last) == step
    torch.testing.assert_close(IO.load_checkpoint(last)["state_dict"], content(step)["state_dict"])
    aside = Rotation()
    aside.before_replacing(last)  # killed before the next step
    assert len(list(tmp_path.iterdir())) > 3
    clean(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "last.ckpt.json"}
    save(last, 3)  # and a run continues from there
    assert verify(last).step == 3


@pytest.mark.parametrize("number", range(1, 8))
def test_a_save_killed_next_to_others_leaves_them_to_resume_from(number, tmp_path):
    first = save(tmp_path / "step=1.ckpt", 1)
    assert run_killed(number, tmp_path / "step=2.ckpt")
    path, faults = find_newest_valid([tmp_path])
    assert path == (first if number <= RENAME else tmp_path / "step=2.ckpt")
    assert step_of(path) == (1 if number <= RENAME else 2)
    clean(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {n for c in (first, path) for n in (c.name, f"{c.name}.json")}
    assert not faults


def test_killed_again_and_again_while_it_is_replaced_it_is_still_known(tmp_path):
    path = save(tmp_path / "last.ckpt", 1)
    for number in (6, 6, 9):
        assert run_killed(number, path)
        assert verify(path).step == step_of(path)
        assert find_newest_valid([tmp_path]) == (path, {})


# --- damaged ---


def cut(path):
    os.truncate(path, 100)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def without_record(path):
    records.record_path(path).unlink()


def nonsense(path):
    records.record_path(path).write_text("{")


def other_schema(path):
    record = records.record_path(path)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"schema": 0}))


def nested(path):
    records.record_path(path).write_text("[" * 100_000)


DAMAGE = [
    (cut, r"has 100 bytes of the [\d,]+ that were saved"),
    (empty, "is empty"),
    (flip, r"has other bytes than were saved \(sha256\)"),
    (without_record, "has no record step=2.ckpt.json next to it"),
    (nonsense, "has an unreadable record step=2.ckpt.json"),
    (nested, "has an unreadable record step=2.ckpt.json"),
    (other_schema, "has a record of schema 0, not 1"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(damage, reason, tmp_path):
    first, second = save(tmp_path / "step=1.ckpt", 1), save(tmp_path / "step=2.ckpt", 2)
    assert find_newest_valid([tmp_path]) == (second, {})
    damage(second)
    with pytest.raises(DamagedCheckpoint, match=reason):
        verify(second)
    path, faults = find_newest_valid([tmp_path])
    assert path == first
    assert list(faults) == [second]
    damage(first)
    assert find_newest_valid([tmp_path])[0] is None


def with_record(path, **values):
    """Put values into the record of a checkpoint."""
    record = records.record_path(path)
    written = json.loads(record.read_text())
    written["records"][0] |= values
    record.write_text(json.dumps(written))


def believed(path):
    """Have the record of a checkpoint fit whatever bytes are there now."""
    data = path.read_bytes()
    with_record(path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"step": "9"}, "step in an item of records .*is of type str, not int"),
        ({"step": None}, "step .*is of type NoneType"),
        ({"step": True}, "step .*is of type bool, not int"),
        ({"bytes": 1.5}, "bytes .*is of type float"),
        ({"sha256": 0}, "sha256 .*is of type int"),
        ({"saved": "now"}, "saved .*is of type str"),
        ({"resumable": "yes"}, "resumable .*is of type str"),
        (None, "an item of records in its content has no step"),
        ([], "records in it is empty"),
        ("x", "records .*is of type str, not list"),
        ("9" * 5000, "has an unreadable record step=2.ckpt.json next to it$"),  # more digits than Python reads
    ],
)
def test_a_record_of_other_types_is_an_unreadable_one(values, reason, tmp_path):
    first, second = save(tmp_path / "step=1.ckpt", 1), save(tmp_path / "step=2.ckpt", 2)
    record = records.record_path(second)
    written = json.loads(record.read_text())
    if values is None:
        del written["records"][0]["step"]
    elif isinstance(values, dict):
        written["records"][0] |= values
    else:
        written["records"] = values
    text = json.dumps(written)
    record.write_text(text.replace(f'"{values}"', values) if len(values or ()) > 1000 else text)
    path, faults = find_newest_valid([tmp_path])
    assert path == first
    assert list(faults) == [second]
    assert re.search(reason, faults[second])
    with pytest.raises(DamagedCheckpoint, match="has an unreadable record"):
        verify(second)


OPTIMIZER = {"state": {}, "param_groups": []}
EXACT = {
    "place": "step",
    "random": [capture(torch.device("cpu"))],
    "metrics": {"loss": torch.ones(())},
    "saves": {},
    "row": {},
    "settings": {},
}


def moments(value: float, *, sparse: bool = False) -> dict:
    average = torch.full((2,), value)
    return OPTIMIZER | {"state": {0: {"step": torch.ones(()), "exp_avg": average.to_sparse() if sparse else average}}}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (b"PK\x03\x04 and no more", "is damaged or no checkpoint"),
        (b"no archive", "is damaged or no checkpoint"),
        (pickle.dumps({"object": Path(".")}), "is damaged or no checkpoint"),
        ([1], "holds a list, not a checkpoint's dictionary"),
        ({"state_dict": None}, "its content has no state_dict"),
        ({"global_step": None}, "its content has no global_step"),
        ({"pytorch-lightning_version": None}, "its content has no pytorch-lightning_version"),
        ({"loops": {}}, "loops in its content has no fit_loop"),
        ({"global_step": "2"}, "global_step .*is of type str, not int"),
        ({"epoch": 0.5}, "epoch .*is of type float"),
        ({"state_dict": [1]}, "state_dict .*is of type list, not dict"),
        ({"state_dict": {1: torch.ones(1)}}, "a key of state_dict .*is of type int"),
        ({"state_dict": {"weight": torch.ones(2, device="meta")}}, "weight in state_dict is a tensor without values"),
        ({"current_model_state": torch.ones(1)}, "current_model_state .*is of type Tensor"),
        ({"optimizer_states": {}}, "optimizer_states .*is of type dict, not list"),
        ({"optimizer_states": [[]]}, "an item of optimizer_states .*is of type list, not dict"),
        ({"optimizer_states": [{"state": {}}]}, "an item of optimizer_states in its content has no param_groups"),
        ({"optimizer_states": [OPTIMIZER | {"state": 1}]}, "state in an item of optimizer_states .*is of type int"),
        ({"optimizer_states": [OPTIMIZER | {"param_groups": [3]}]}, "an item of param_groups .*is of type int"),
        ({"lr_schedulers": [None]}, "an item of lr_schedulers .*is of type NoneType"),
        ({"diffvision": "DiffCLIP-debug"}, "diffvision .*is of type str, not dict"),
        ({"diffvision_run": []}, "diffvision_run .*is of type list, not dict"),
        ({"diffvision_run": {"world_size": "2"}}, "world_size in diffvision_run .*is of type str, not int"),
        ({"diffvision_run": {"place": "step"}}, "diffvision_run has no random"),
        (
            {"state_dict": {"weight": torch.eye(2).to_sparse()}},
            "weight in state_dict is a tensor of layout",
        ),
        ({"state_dict": {"w": torch.full((2,), math.nan * 1j)}}, "holds NaN or infinity in w"),
        ({"pytorch-lightning_version": "abc"}, "pytorch-lightning_version in its content is 'abc'"),
        ({"epoch": -5}, "epoch in its content is '-5'"),
        ({"epoch": True}, "epoch in its content is of type bool, not int"),
        ({"diffvision_run": {"optimizers": ["AdamW"]}}, "has 0 states for the 1 optimizers of its run"),
        ({"diffvision_run": {"schedulers": ["LambdaLR"]}}, "has 0 states for the 1 schedulers of its run"),
        ({"optimizer_states": [moments(math.nan)]}, "holds NaN or infinity in exp_avg of parameter 0"),
        (
            {"optimizer_states": [moments(1.0, sparse=True)]},
            "exp_avg of parameter 0 in optimizer_states is a tensor of",
        ),
        ({"diffvision_run": EXACT | {"place": 3}}, "place in diffvision_run is of type int, not str"),
        ({"diffvision_run": {"world_size": 0}}, "world_size in diffvision_run is '0'"),
        ({"diffvision_run": EXACT | {"place": "lunch"}}, "place in diffvision_run is 'lunch'"),
        ({"diffvision_run": EXACT | {"random": [{}]}}, "an item of random in diffvision_run has no python"),
        (
            {"diffvision_run": EXACT | {"metrics": {"a": "b"}}},
            "a in metrics in diffvision_run is of type str, not Tensor",
        ),
        ({"diffvision_run": EXACT | {"saves": {"k": 3}}}, "k in saves in diffvision_run is of type int, not dict"),
        ({"diffvision_run": EXACT | {"settings": {"a": [1]}}}, "a in settings in diffvision_run is of type list"),
        ({"diffvision_run": EXACT | {"row": {1: 1.0}}}, "a key of row in diffvision_run is of type int, not str"),
    ],
)
def test_content_that_does_not_load_is_passed_over_though_its_record_is_right(values, reason, tmp_path):
    first, second = save(tmp_path / "step=1.ckpt", 1), save(tmp_path / "step=2.ckpt", 2)
    if isinstance(values, bytes):
        second.write_bytes(values)
    else:
        whole = content(2) | values if isinstance(values, dict) else values
        gone = [key for key, value in values.items() if value is None] if isinstance(values, dict) else []
        torch.save({k: v for k, v in whole.items() if k not in gone} if gone else whole, second)
    believed(second)
    verify(second)
    path, faults = find_newest_valid([tmp_path])
    assert path == first
    assert list(faults) == [second]
    assert re.search(reason, faults[second])


def test_what_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    first, second = save(tmp_path / "step=1.ckpt", 1), save(tmp_path / "step=2.ckpt", 2)
    whole = Path.open

    def bad_block(path, *args, **kwargs):
        if path == second:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", bad_block)
    assert find_newest_valid([tmp_path]) == (first, {second: "cannot be read (Input/output error)"})


def test_a_flipped_step_in_a_record_makes_no_checkpoint_newer(tmp_path):
    first, second = save(tmp_path / "step=1.ckpt", 1), save(tmp_path / "step=2.ckpt", 2)
    record = records.record_path(first)
    record.write_text(record.read_text().replace('"step": 1', '"step": 9'))
    assert find_newest_valid([tmp_path]) == (second, {first: "is of step 1, and its record of step 9"})


def test_weights_alone_directories_and_links_are_no_checkpoints_to_resume(tmp_path):
    first = save(tmp_path / "step=1.ckpt", 1)
    IO.save_checkpoint({k: v for k, v in content(9).items() if k != "optimizer_states"}, tmp_path / "best.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    path, faults = find_newest_valid([tmp_path, tmp_path / "none"])
    assert path == first
    assert {p.name: reason.split(",")[0] for p, reason in faults.items()} == {
        "best.ckpt": "holds weights alone",
        "sharded.ckpt": "has no record sharded.ckpt.json next to it",
    }
    IO.remove_checkpoint(tmp_path / "sharded.ckpt")
    assert not (tmp_path / "sharded.ckpt").exists()


def test_a_record_tells_what_a_run_resumes_from(tmp_path):
    IO.save_checkpoint(content(7), tmp_path / "a.ckpt")
    record = verify(tmp_path / "a.ckpt")
    assert (record.step, record.resumable) == (7, True)
    assert record.bytes == (tmp_path / "a.ckpt").stat().st_size
    assert (tmp_path / "a.ckpt").stat().st_mode == (tmp_path / "a.ckpt.json").stat().st_mode


# --- disks and content that refuse ---


def test_a_full_disk_is_one_error_and_the_checkpoint_before_stays(tmp_path):
    path = save(tmp_path / "last.ckpt", 1)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"last\.ckpt: File too large\. It"):
            save(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "last.ckpt.json"}
    assert verify(path).step == 1


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_error_at_any_call_leaves_no_temporary(name, tmp_path, monkeypatch):
    path = save(tmp_path / "last.ckpt", 1)

    def failing(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(OSError, match="no checkpoint can be written"):
        save(path, 2)
    assert verify(path).step == 1
    assert not list(tmp_path.glob(".saving*"))


def test_objects_are_refused_before_they_replace_anything(tmp_path):
    path = save(tmp_path / "last.ckpt", 1)
    with pytest.raises(ValueError, match=r"would hold objects of pathlib\.\w+"):
        IO.save_checkpoint(content(2) | {"here": Path(".")}, path)
    assert verify(path).step == 1
    torch.save({"here": Path(".")}, tmp_path / "other.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        IO.load_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="is a URL: download it"):
        IO.load_checkpoint("https://example.org/x.ckpt")


# --- ModelCheckpoint and our modules ---


class Rows(pl.LightningDataModule):
    """Each row again and again."""

    def __init__(self, row):
        super().__init__()
        self.row = row

    def train_dataloader(self):
        return DataLoader([self.row] * 8, batch_size=2)


def trained(module, row, *callbacks, steps=3):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        max_steps=steps,
        callbacks=[RunState(), *callbacks],
        plugins=[DurableCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Rows(row))
    return trainer


SETTINGS = OptimizerSettings(lr=1e-3, warmup_steps=0)
TOKENS = {"vocab_size": 50, "dim": 32, "num_heads": 2, "head_dim": 8, "mlp_dim": 48, "max_length": 64}
MODULES = {
    "clip": lambda: ContrastiveModule("DiffCLIP-debug", optimizer=SETTINGS),
    "classification": lambda: ClassificationModule("diff_vit_debug", num_classes=3, optimizer=SETTINGS),
    "language": lambda: LanguageModule("diff-debug", model_args=TOKENS, optimizer=SETTINGS),
}


def row_of(module):
    if isinstance(module, LanguageModule):
        return {"tokens": torch.arange(13)}
    image = torch.rand(3, 32, 32)
    if isinstance(module, ContrastiveModule):
        return {"image": image, "text": module.tokenizer("a nine")[0]}
    return {"image": image, "label": torch.tensor(1)}


@pytest.mark.quick("classification", "language")
@pytest.mark.parametrize("name", MODULES)
def test_every_checkpoint_of_our_modules_is_plain_and_recorded(name, tmp_path):
    module = MODULES[name]()
    kept = ModelCheckpoint(tmp_path, "{step}", "train/loss", save_last=True, save_top_k=2, every_n_train_steps=1)
    more = [EMAWeightAveraging(decay=0.9)] if name == "classification" else []
    trained(module, row_of(module), kept, *more)
    names = {path.name for path in checkpoints_in(tmp_path)}
    assert len(names) == 3  # the best two and the last one
    assert {p.name for p in tmp_path.iterdir()} == names | {f"{n}.json" for n in names}
    for path in checkpoints_in(tmp_path):
        stored, record = torch.load(path, weights_only=True), verify(path)
        assert stored["state_dict"].keys() == module.state_dict().keys()
        assert record.step == stored["global_step"]
    assert find_newest_valid([tmp_path])[0] is not None
