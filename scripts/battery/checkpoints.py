"""Group A: checkpoints half written, damaged, of another run, or on a disk that refuses."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from battery.case import Seen, case, stock
from battery.small import fit, goes, refused, shards, short
from diffvision.training.durable.checkpoints import DurableCheckpointIO, clean, newest_valid
from diffvision.training.durable.records import record_path
from tiny_runs import plain_checkpoint

KEPT = Path("kept")
NONE_YET = "nowhere"  # a data set that is not there: what is refused before data is read does not miss it

# --- killed ---

KILLS = 20
ELSEWHERE = {"here": None, "elsewhere": "/dev/shm"}


def content(step: int) -> dict:
    state = {f"weight{i}": torch.full((1 << 18,), float(step)) for i in range(30)}
    return plain_checkpoint(state, step)


def saves(io: TorchCheckpointIO, path: Path, first: int) -> None:
    for step in range(first, first + 1000):
        io.save_checkpoint(content(step), path)


def kill_during_saves(io: TorchCheckpointIO, temporary: str | None, state: Callable[[Path], int]) -> Seen:
    """Kill a process that saves over one file without end, at a random moment, and look at the file: 20 times."""
    if temporary:
        tempfile.tempdir = tempfile.mkdtemp(dir=temporary)
    path, step, corrupt = Path("last.ckpt"), 1, 0
    io.save_checkpoint(content(step), path)
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=saves, args=(io, path, step + 1))
        process.start()
        time.sleep(0.05 + 0.4 * random.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            now = state(path)
            assert now >= step
            step = now
        except Exception:
            corrupt += 1
            path.unlink()
            io.save_checkpoint(content(step), path)
    assert not corrupt, f"{corrupt} of {KILLS} kills left a file that does not load"
    return Seen(f"{KILLS} kills, {step} saves: always a whole one, none lost but the one being written")


def valid_step(path: Path) -> int:
    found, faults = newest_valid([path.parent])
    assert found == path, faults
    clean(path.parent)
    assert {p.name for p in path.parent.iterdir()} == {path.name, record_path(path).name}
    return loaded_step(path)


def loaded_step(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


for where, directory in ELSEWHERE.items():
    name = f"A1 kill -9 in a save, TMPDIR {where}"
    case(name, "the old checkpoint or the new one, whole; no leavings")(
        partial(kill_during_saves, DurableCheckpointIO(), directory, valid_step)
    )
    stock(name)(partial(kill_during_saves, TorchCheckpointIO(), directory, loaded_step))

# --- damaged ---


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def without_record(path: Path) -> None:
    record_path(path).unlink()


def other_schema(path: Path) -> None:
    record_path(path).write_text('{"schema": 0, "records": []}')


DAMAGE = {
    "cut in half": (cut, "bytes of the"),
    "empty": (empty, "is empty"),
    "with a flipped bit": (flip, "sha256"),
    "without its record": (without_record, "has no record"),
    "of an older schema": (other_schema, "schema 0"),
}


def fall_back(damage: Callable[[Path], None], words: str) -> str:
    shards()
    goes(*fit(steps=2))
    damage(KEPT / "step=2.ckpt")
    told = goes(*fit("--resume=auto", steps=3))
    assert words in told, told[-600:]
    assert "passed over" in told
    assert "resuming from" in told
    assert "step=1.ckpt" in told
    assert newest_valid([KEPT])[0] == KEPT / "step=3.ckpt"
    return f"told ({words}); went on from step 1 to 3"


for what, (damage, words) in DAMAGE.items():
    quick = what in ("cut in half", "with a flipped bit")
    case(f"A2 newest checkpoint {what}", "goes on from the one before, and says so", quick=quick)(
        partial(fall_back, damage, words)
    )


def fall_back_of_lightning(damage: Callable[[Path], None]) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from battery.plain import Plain, loader, trainer

    keeps = {"dirpath": "kept", "filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1, "save_last": True}
    trainer(2, ModelCheckpoint(**keeps)).fit(Plain(), loader())
    damage(KEPT / "last.ckpt")
    again: pl.Trainer = trainer(3, ModelCheckpoint(**keeps))
    again.fit(Plain(), loader(), ckpt_path="last")
    assert (KEPT / "step=3.ckpt").exists()
    return "went on from the damaged one without a word"


for what in ("cut in half", "empty", "with a flipped bit"):
    stock(f"A2 newest checkpoint {what}")(partial(fall_back_of_lightning, DAMAGE[what][0]))

# --- disks ---


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process may grow beyond: what a full disk does, without being root."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@case("A3 disk full during a save", "one error with path and bytes; the checkpoint before is whole, no leavings")
def disk_full() -> str:
    shards()
    goes(*fit(steps=1))
    before = (KEPT / "step=1.ckpt").read_bytes()
    with files_up_to(100_000):
        message = refused(*fit("--resume=auto", steps=2), words="no checkpoint can be written to")
    assert "bytes" in message
    assert "step=2.ckpt" in message
    assert (KEPT / "step=1.ckpt").read_bytes() == before
    assert {p.name for p in KEPT.iterdir()} <= {"step=1.ckpt", "step=1.ckpt.json", ".lock"}
    return short(message)


@stock("A3 disk full during a save")
def disk_full_of_lightning() -> str:
    path = Path("last.ckpt")
    TorchCheckpointIO().save_checkpoint(content(1), path)
    with files_up_to(100_000):
        try:
            TorchCheckpointIO().save_checkpoint(content(2), path)
        except Exception as error:
            message = str(error)
    assert loaded_step(path) == 1
    assert "last.ckpt" in message, f"the message names no file: {message[:80]}"
    return short(message)


@case("A4 directory that cannot be written to", "one error before data is read")
def read_only() -> str:
    if os.geteuid():
        Path("fixed").mkdir(mode=0o555)
    place = "fixed/kept" if os.geteuid() else "/proc/kept"
    return short(
        refused(*fit(f"--trainer.callbacks.dirpath={place}", data=NONE_YET), words="no checkpoint can be written to")
    )


@case("A4 two runs in one directory", "the second is refused before it reads data, with the number of the first")
def two_runs() -> str:
    shards()
    ready, done = (multiprocessing.get_context("fork").Event() for _ in range(2))
    first = multiprocessing.get_context("fork").Process(target=hold, args=(ready, done))
    first.start()
    assert ready.wait(20)
    message = refused(*fit(data=NONE_YET), words=f"another run (process {first.pid}")
    first.kill()
    first.join()
    goes(*fit(steps=1))
    return short(message) + "; after its kill -9 the directory is free"


def hold(ready, done) -> None:
    from diffvision.training.durable.resume import locked

    KEPT.mkdir()
    with locked(KEPT):
        ready.set()
        done.wait(50)


@stock("A4 two runs in one directory")
def two_runs_of_lightning() -> str:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from battery.plain import Plain, loader, trainer

    keeps = {"dirpath": "kept", "filename": "{step}", "every_n_train_steps": 1, "save_top_k": 1}

    class Second(Plain):
        def on_train_start(self) -> None:
            trainer(2, ModelCheckpoint(**keeps)).fit(Plain(), loader())

    trainer(2, ModelCheckpoint(**keeps)).fit(Second(), loader())
    raise AssertionError("both ran, one over the other")


# --- of another run ---

OTHERS = {
    "depth": (["--model.model=diff_vit_debug", "--model.model_args={depth: 3}"], "keys of the state_dict differ"),
    "heads and width": (["--model.model_args={embed_dim: 96, num_heads: 3}"], "keys of the state_dict differ"),
    "classes": (["--model.num_classes=11"], "keys of the state_dict differ"),
    "kind of lambda": (["--model.model=diffv2_vit_debug"], "keys of the state_dict differ"),
    "kind of module": (["--model=ContrastiveModule", "--data=ImageTextData", "--model.model=CLIP-debug"], "resume"),
    "number of processes": (["--trainer.devices=2", "--trainer.strategy=ddp"], "processes trained it"),
}


def another(flags: list[str], words: str) -> str:
    shards()
    goes(*fit(steps=1))
    flags = [flag for flag in fit(data=NONE_YET) if "num_classes" not in flag or "--model=" not in flags[0]] + flags
    message = refused(*flags, "--resume=must", words=words)
    assert NONE_YET not in message
    return short(message)


for what, (flags, words) in OTHERS.items():
    case(
        f"A5 resume with another {what}",
        "one error before data is read, with what differs",
        quick=what in ("depth", "number of processes"),
    )(partial(another, flags, words))


@case("A5 resume with a smaller learning rate", "the flag holds, not the checkpoint's")
def flag_holds() -> str:
    shards()
    goes(*fit(steps=4))
    first = torch.load(KEPT / "step=1.ckpt", weights_only=True)
    goes(
        *fit("--model.optimizer.lr=1e-6", f"--ckpt_path={KEPT}/step=1.ckpt", "--trainer.callbacks.dirpath=new", steps=4)
    )
    second = torch.load("new/step=2.ckpt", weights_only=True)
    rates = [saved["optimizer_states"][0]["param_groups"][0]["lr"] for saved in (first, second)]
    assert 0 < rates[1] <= 1e-6 < rates[0]
    return f"rates {rates[0]:.1e}, then {rates[1]:.1e}"


# --- must, auto, never ---


@case("A7 resume must, nothing there", "an error before data is read", quick=True)
def must() -> str:
    return short(refused(*fit("--resume=must", data=NONE_YET), words="no valid checkpoint"))


@case("A7 resume must, all damaged", "an error that names each")
def must_of_damaged() -> str:
    shards()
    goes(*fit(steps=2))
    for path in KEPT.glob("*.ckpt"):
        flip(path)
    message = refused(*fit("--resume=must", data=NONE_YET), words="no valid checkpoint")
    assert "step=1.ckpt" in message
    assert "step=2.ckpt" in message
    return short(message)


@case("A7 resume auto, nothing there", "begins, and says so")
def auto() -> str:
    shards()
    told = goes(*fit("--resume=auto", steps=1))
    assert "nothing to resume from" in told
    return "nothing to resume from in kept: a new run"


@case("A7 resume never, checkpoints there", "refused: they would be written over")
def never() -> str:
    shards()
    goes(*fit(steps=1))
    return short(refused(*fit(data=NONE_YET), words="already holds 1 checkpoints"))


@stock("A7 resume must, nothing there")
def must_of_lightning() -> str:
    from battery.plain import Plain, loader, trainer

    trainer(2).fit(Plain(), loader(), ckpt_path="last")
    raise AssertionError("a warning, and training began from nothing")


# --- what is in them ---

KINDS = {
    "classification": fit(steps=1),
    "CLIP": [*(flag for flag in fit(steps=1) if "num_classes" not in flag), "--model=ContrastiveModule",
             "--model.model=DiffCLIP-debug", "--data=ImageTextData"],
}  # fmt: skip


def plain_content(command: list[str]) -> str:
    shards()
    goes(*command)
    path = KEPT / "step=1.ckpt"
    size = sum(v.numel() for v in torch.load(path, weights_only=True)["state_dict"].values())
    return f"loads with weights_only=True: {size:,} values"


for kind, command in KINDS.items():
    case(f"A8 checkpoint of {kind}", "tensors and plain values only")(partial(plain_content, command))


@case("A9 leavings of a killed save", "removed at the next start, and told; the last k are kept")
def leavings() -> str:
    shards()
    goes(*fit(steps=1))
    for name in (".saving-99.tmp", "step=9.ckpt.json"):
        (KEPT / name).write_bytes(b"half")
    told = goes(*fit("--resume=auto", "--trainer.callbacks.save_top_k=1", steps=3))
    assert "removed what a killed run left" in told
    left = {path.name for path in KEPT.iterdir()}
    assert not left & {".saving-99.tmp", "step=9.ckpt.json"}
    return "both removed and named"
