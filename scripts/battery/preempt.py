"""Group B, signals: to one process through the command line, and to one or both of two ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from battery.case import case, stock
from battery.ranks import Ranks, send
from battery.small import fit, goes, run, shards, short
from battery.two_ranks import KEPT, Line, at_the_end, plain_fit, two
from diffvision.training.durable.checkpoints import newest_valid
from diffvision.training.durable.preemption import SAVED

# --- one process, through the command line ---


class Shot(pl.Callback):
    """Sends this process a signal, in a hook, once `step` steps are made."""

    def __init__(self, step: int, number: int, hook: str = "on_train_batch_start") -> None:
        self.step, self.number = step, number
        setattr(self, hook, self.shoot)

    def shoot(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), self.number)


def shot(step: int, number: int = signal.SIGTERM, hook: str = "on_train_batch_start") -> list[str]:
    own = "--trainer.callbacks"
    words = ["--allow", "battery.preempt", f"{own}+=battery.preempt.Shot", f"{own}.step={step}"]
    return [*words, f"{own}.number={int(number)}", f"{own}.hook={hook}"]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["global_step"] == other["global_step"], f"{one['global_step']} steps and {other['global_step']}"
    flat, wanted = leaves(one, "state_dict", "optimizer_states"), leaves(other, "state_dict", "optimizer_states")
    differing = [name for name, value in wanted.items() if not torch.equal(torch.as_tensor(flat[name]), value)]
    assert not differing, f"{len(differing)} of {len(wanted)} tensors differ, such as {differing[0]}"


def leaves(content: Any, *names: str) -> dict[str, Tensor]:
    """The tensors of nested dictionaries and lists, by their place."""
    if isinstance(content, Tensor):
        return {"": content}
    if not isinstance(content, dict | list):
        return {}
    items = content.items() if isinstance(content, dict) else enumerate(content)
    return {f"{k}.{n}": v for k, part in items if not names or k in names for n, v in leaves(part).items()}


@case(
    "B1 SIGTERM in the first, a middle and the last step of an epoch, in an accumulation and in validation",
    "each time a valid checkpoint and exit status 143; resumed, weights and moments as never interrupted",
)
def _sigterm_and_resume() -> str:
    shards(count=4)  # 8 steps an epoch
    settings = ["--trainer.max_epochs=2", "--trainer.accumulate_grad_batches=2", "--data.evaluation=shards"]
    settings += ["--trainer.limit_val_batches=3", "--trainer.max_steps=-1"]
    command = partial(fit, *settings, "--resume=auto")
    goes(*command("--trainer.callbacks.dirpath=whole"))
    cuts = {"first": shot(0), "middle": shot(2), "last": shot(3), "validation": shot(4, hook="on_validation_batch_end")}
    for name, cut in cuts.items():
        here = f"--trainer.callbacks.dirpath={name}"
        status, told = run(*command(here, *cut))
        assert status == 143, f"{name}: exit status {status}: {told[-300:]}"
        saved = torch.load(Path(name, SAVED), weights_only=True)
        assert saved["global_step"] == {"first": 1, "middle": 3, "last": 4, "validation": 4}[name]
        goes(*command(here))
        same(at_the_end(name), at_the_end("whole"))
    return f"{len(cuts)} runs: 143, resumed, every tensor equal"


@stock("B1 SIGTERM in the first, a middle and the last step of an epoch, in an accumulation and in validation")
def _stock_sigterm() -> str:
    status = status_of(lambda: plain_fit(Line(2, send(signal.SIGTERM)), ours=False))
    assert status == 143, f"exit status {status}, as a run that has finished"
    return "143"


@case("B7 SIGUSR2 saves and the run goes on", "a valid checkpoint of that step; the run's end as without")
def _sigusr2() -> str:
    shards()
    goes(*fit("--trainer.callbacks.dirpath=whole", steps=4))
    told = goes(*fit(*shot(1, signal.SIGUSR2), steps=4))
    assert torch.load(KEPT / SAVED, weights_only=True)["global_step"] == 2
    same(at_the_end("kept"), at_the_end("whole"))
    return next(short(line) for line in told.splitlines() if "SIGUSR2" in line)


@case("B7 SIGTERM during a save", "that save is whole, another follows, exit status 143", quick=True)
def _in_a_save() -> str:
    shards()
    status, told = run(*fit(*shot(2, hook="on_save_checkpoint"), steps=8))
    path, faults = newest_valid([KEPT])
    assert (status, faults) == (143, {}), f"exit status {status}, {faults}"
    return f"143, newest {path.name if path else None}: {short(told.splitlines()[-1])}"


@case("B7 SIGINT twice", "the first waits for the step, the second ends at once")
def _sigint_twice() -> str:
    def slow() -> None:
        send(signal.SIGINT)()
        time.sleep(1)  # a step that is under way
        send(signal.SIGINT)()
        time.sleep(30)

    (one,) = Ranks(Path("one"), lambda: plain_fit(Line(2, slow), ours=True), count=1).ended(20)
    assert one.code == -signal.SIGINT, f"exit status {one.code}: {one.told[-300:]}"
    assert one.seconds < 10
    return f"ended by the second after {one.seconds:.1f} s: {short(one.told.strip().splitlines()[-1])}"


@case("B7 SIGUSR1 under SLURM", "saved, then requeued once by its job's number, exit status 138")
def _slurm() -> str:
    shards()
    Path("bin").mkdir()
    script = Path("bin", "scontrol")
    script.write_text(f"#!/bin/sh\necho $* with $(ls {Path.cwd()}/kept/{SAVED}) >> {Path.cwd()}/called\n")
    script.chmod(0o755)
    job = {"NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train", "JOB_ID": "17"}
    os.environ |= {f"SLURM_{name}": value for name, value in job.items()}
    os.environ["PATH"] = f"{Path.cwd()}/bin:{os.environ['PATH']}"
    status, told = run(*fit(*shot(1, signal.SIGUSR1), steps=8))
    assert status == 128 + signal.SIGUSR1, f"exit status {status}: {told[-300:]}"
    called = Path("called").read_text()
    assert called == f"requeue 17 with {Path.cwd()}/kept/{SAVED}\n", called
    assert not list(Path().rglob("hpc_ckpt*")), "Lightning saved too"
    goes(*fit("--resume=auto", steps=8))
    return f"scontrol {called.split(' with')[0]} after the save; the requeued run went on"


# --- two ranks ---


def status_of(call: Callable[[], object]) -> int:
    """The exit status of a process that does this."""
    (one,) = Ranks(Path("one"), call, count=1).ended(30)
    assert one.code is not None, "hung"
    return one.code


def _signal_to(whom: tuple[int, ...], ours: bool) -> str:
    ranks = two(Line(3, send(signal.SIGTERM), whom), ours=ours)
    codes = [rank.code for rank in ranks]
    assert codes == [143, 143], f"exit statuses {codes}"
    if ours:
        assert at_the_end("kept")["global_step"] == 4
    return f"143 and 143 after {max(rank.seconds for rank in ranks):.1f} s"


for ranks, words in {(0,): "rank 0 of two alone", (1,): "rank 1 of two alone", (0, 1): "both of two ranks"}.items():
    name = f"B5 SIGTERM to {words}"
    case(name, "both agree at the step: one valid checkpoint, both 143, within 10 s")(partial(_signal_to, ranks, True))
    stock(name)(partial(_signal_to, ranks, False))
