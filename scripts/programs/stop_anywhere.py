"""Stops runs of 200 batches of every module at random moments, resumes them, and compares them with runs left alone.

    python scripts/programs/stop_anywhere.py FOLDER            # runs what FOLDER/cases has not, prints a table
    python scripts/programs/stop_anywhere.py FOLDER --only vision --cases 5

Runs are those of the debug recipes, through `diffvision fit --resume auto`, in forked processes that have everything
imported. A signal comes in a step, in a validation, while a checkpoint is written, at an epoch's end or in the middle
of an accumulation; on two ranks one of them receives it. The run is resumed with another number of workers. Compared
bit by bit: every sample as the model saw it and every loss, also of batches that were trained twice; every logged
value but those of time; the counts of samples; weights, averages, optimizer and random generators at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tarfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from torch.optim.swa_utils import AveragedModel

from diffvision.data.shards.writer import write_evaluation_split
from diffvision.training.fit import fit

BATCHES = 200
CASES = 20  # of a module
OF_TIME = ("train/samples_per_second", "train/tokens_per_second", "train/data_wait", "time")
PATIENCE = 240.0  # seconds of one part of a run
GRACE = 12.0  # seconds until launchers kill the ranks that are left
SIZES = {
    "clip": [
        *(
            "--config=clip/debug.yaml",
            "--data.batch_size=8",
            "--data.evaluations=[data/few]",
            "--trainer.callbacks+=EMA",
        ),
        *("--trainer.limit_train_batches=60", "--trainer.max_epochs=-1"),
    ],
    "vision": [
        *("--config=vision/debug.yaml", "--data.batch_size=8", "--data.evaluation=data/few"),
        *("--trainer.val_check_interval=30", "--trainer.limit_train_batches=60", "--trainer.max_epochs=-1"),
    ],
    "language": [
        *("--config=language/debug.yaml", "--model.model=diff-debug", "--data.batch_size=4", "--data.length=32"),
        *("--trainer.val_check_interval=20", "--trainer.limit_val_batches=3"),
        "--trainer.limit_train_batches=60",
    ],
    "vlm": [
        *("--config=vlm/debug.yaml", "--model.pretrained=null", "--data.batch_size=4", "--trainer.limit_val_batches=2"),
        *("--trainer.max_epochs=-1", "--trainer.limit_train_batches=60", "--trainer.callbacks+=EMA"),
    ],
}
"""Module -> options of its debug recipe that make it small."""
ACCUMULATING = {"clip": "--model.accum_freq=2", "vision": "--trainer.accumulate_grad_batches=3"}
ACCUMULATING |= {"language": ACCUMULATING["vision"], "vlm": ACCUMULATING["vision"]}
HOOKS = {
    "step": ["on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end"],
    "validation": ["on_validation_start", "on_validation_batch_end", "on_validation_end"],
    "epoch's end": ["on_train_epoch_end", "on_train_epoch_start"],
    "accumulation": ["on_train_batch_start", "on_after_backward", "on_train_batch_end"],
    "save": [],
}


@dataclass(frozen=True)
class Case:
    """A run that is stopped once.

    Attributes:
        module: key of SIZES.
        place: key of HOOKS.
        hook: where the signal is sent; empty while a checkpoint is written.
        share: of the run's batches, or of its calls of fsync, after which the next such place is taken.
        signal: its name.
        accumulate: whether a step takes several passes.
        ranks: number of processes.
        to: the rank that receives it.
        workers: number of workers before and after.
    """

    module: str
    place: str = ""
    hook: str = ""
    share: float = 0.0
    signal: str = ""
    accumulate: bool = False
    ranks: int = 1
    to: int = 0
    workers: tuple[int, int] = (0, 0)

    @property
    def whole(self) -> Case:
        """The same run, left alone."""
        return Case(self.module, accumulate=self.accumulate, ranks=self.ranks)


def cases(module: str, count: int) -> list[Case]:
    """Return random cases of a module in which every place, signal and number of ranks occurs."""
    chance, chosen = random.Random(module), []
    for number in range(count):
        place = [*HOOKS][number % len(HOOKS)]
        ranks = 2 if number % 7 in (2, 5) else 1
        chosen.append(
            Case(
                module,
                place,
                chance.choice(HOOKS[place] or [""]),
                round(chance.uniform(0.03, 0.97), 3),
                ("SIGTERM", "SIGKILL")[number // len(HOOKS) % 2],
                place == "accumulation" or number % 4 == 3,
                ranks,
                chance.randrange(ranks) if place != "save" else 0,  # the first rank saves
                chance.choice([(0, 1), (1, 0), (2, 0), (0, 2), (1, 2)]),
            )
        )
    return chosen


class Recorder(pl.Callback):
    """Writes down what a run does, batch by batch, and sends a signal where it is to be stopped."""

    def __init__(self, case: Case, part: int, folder: Path, calls: int) -> None:
        rank = os.environ.get("LOCAL_RANK", "0")
        self.file = (folder / f"trace-{part}-{rank}.jsonl").open("w")
        self.case, self.batch, self.calls = case, 0, 0
        self.end: dict[str, Any] = {}
        self.armed = bool(case.place) and not part and int(rank) == case.to
        self.at = int(case.share * (calls if case.place == "save" else BATCHES))
        if self.armed and case.hook:
            setattr(self, case.hook, self._wrap(getattr(self, case.hook)))
        self._count_saves()

    def _wrap(self, hook: Any) -> Any:
        def stopping(trainer: pl.Trainer, *args: Any) -> None:
            hook(trainer, *args)
            middle = not self.case.accumulate or self.case.module == "clip" or (self.batch + 1) % 3
            if self.batch >= self.at and (self.case.place != "accumulation" or middle):
                self._stop()

        return stopping

    def _stop(self) -> None:
        if self.armed:
            self.armed = False
            self._write("stopped", self.batch)
            os.kill(os.getpid(), getattr(signal, self.case.signal))

    def _count_saves(self) -> None:
        sync = os.fsync

        def counted(fd: Any) -> None:
            self.calls += 1
            if self.case.place == "save" and self.calls > self.at:
                self._stop()
            sync(fd)

        os.fsync = counted

    def _write(self, kind: str, batch: int, *values: Any) -> None:
        self.file.write(json.dumps([kind, batch, *values]) + "\n")
        self.file.flush()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = trainer.fit_loop.total_batch_idx
        self._write("samples", self.batch, digest(batch))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self._write("loss", self.batch, float(loss).hex())

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        state = random.getstate(), np.random.get_state()  # noqa: NPY002
        self.end = {"generators": [digest(repr(state)), digest(torch.get_rng_state())]}


def digest(value: Any) -> str:
    """Return a digest of nested tensors."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            total.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif isinstance(part, dict):
            for key in sorted(part, key=str):
                total.update(str(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        else:
            total.update(repr(part).encode())

    add(value.reshape(1) if isinstance(value, torch.Tensor) and not value.ndim else value)
    return total.hexdigest()[:16]


def flat(value: Any) -> Any:
    """Return nested values with tensors of one dimension."""
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return value.detach().reshape(-1) if isinstance(value, torch.Tensor) else value


def train(case: Case, part: int, folder: Path, calls: int) -> None:
    """Train in this process as one rank, and write down its end."""
    torch.set_num_threads(1)
    recorder = Recorder(case, part, folder, calls)
    steps = BATCHES // 3 if case.accumulate and case.module != "clip" else BATCHES
    words = ["fit", *SIZES[case.module], f"--trainer.max_steps={steps}", "--trainer.accelerator=cpu", "--resume=auto"]
    words += [f"--trainer.default_root_dir={folder / 'runs'}", "--trainer.log_every_n_steps=7"]
    words += [f"--data.num_workers={case.workers[part]}", f"--trainer.devices={case.ranks}"]
    words += [ACCUMULATING[case.module]] if case.accumulate else []
    words += ["--trainer.strategy=ddp"] if case.ranks > 1 else []
    done = fit(words, [recorder])
    callbacks = vars(done.trainer)["callbacks"]
    averages = [v for callback in callbacks for v in vars(callback).values() if isinstance(v, AveragedModel)]
    end = recorder.end | {
        "weights": digest(flat(done.model.state_dict())),
        "averages": [digest(flat(model.module.state_dict())) for model in averages],
        "optimizer": digest(flat([optimizer.state_dict() for optimizer in done.trainer.optimizers])),
        "steps": done.trainer.global_step,
        "fsync": recorder.calls if part == 0 else 0,
    }
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"end-{rank}.json").write_text(json.dumps(end))


def fork(case: Case, part: int, folder: Path, calls: int) -> list[int | None]:
    """Run a part in forked processes, one a rank; return their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def rank(number: int) -> None:
        if case.ranks > 1:
            names = {"LOCAL_RANK": str(number), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update(names, WORLD_SIZE=str(case.ranks))
        output = os.open(folder / f"output-{part}-{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code: Any = 0
        try:
            train(case, part, folder, calls)
        except SystemExit as end:
            code = end.code
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(number,)) for number in range(case.ranks)]
    for process in processes:
        process.start()
    until = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        time.sleep(0.1)
        if any(process.exitcode not in (None, 0) for process in processes):  # as torchrun and srun do
            until = min(until, time.monotonic() + GRACE)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


# --- comparing ---


def traces(folder: Path, rank: int) -> tuple[dict[str, set[str]], list[list[int]]]:
    """Return what a rank did: "kind batch" -> all that was written of it; and the batches of each part."""
    seen: dict[str, set[str]] = {}
    parts = []
    for path in sorted(folder.glob(f"trace-*-{rank}.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for kind, batch, *values in lines:
            if kind != "stopped":
                seen.setdefault(f"{kind} {batch}", set()).add(str(values))
        parts.append([batch for kind, batch, *_ in lines if kind == "samples"])
    return seen, parts


def logged(folder: Path) -> dict[str, set[float]]:
    """Return "step name" -> every value that the loggers wrote, in all parts of a run."""
    rows: dict[str, set[float]] = {}
    for path in sorted(folder.glob("runs/**/metrics*.csv")):
        table = pd.read_csv(path)
        for _, row in table.iterrows():
            for name, value in row.items():
                if name not in ("step", "epoch") and not pd.isna(value) and not str(name).startswith(OF_TIME):
                    rows.setdefault(f"{int(row['step'])} {name}", set()).add(float(value))
    return rows


def compare(folder: Path, whole: Path, ranks: int) -> dict[str, list[str]]:
    """Return what differs between a run that was stopped and one left alone."""
    differing: dict[str, list[str]] = {}
    for rank in range(ranks):
        one, other = (traces(path, rank)[0] for path in (folder, whole))
        names = sorted({*one, *other})
        differing.setdefault("batches", []).extend(n for n in names if one.get(n) != other.get(n))
        ends = [json.loads((path / f"end-{rank}.json").read_text()) for path in (folder, whole)]
        differing.setdefault("end", []).extend(n for n in ends[0] if n != "fsync" and ends[0][n] != ends[1][n])
    one_row, other_row = logged(folder), logged(whole)
    names = sorted({*one_row, *other_row})
    differing["logged"] = [n for n in names if one_row.get(n) != other_row.get(n)]
    return {name: found for name, found in differing.items() if found}


def run(case: Case, folder: Path, data: Path) -> dict[str, Any]:
    """Run a case, and before it the run that it is compared with, where that was not run yet."""
    whole = folder / "whole" / "-".join(map(str, (case.module, case.accumulate, case.ranks)))
    if not (whole / "end-0.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        begin(whole, data)
        assert fork(case.whole, 0, whole, 0) == [0] * case.ranks, f"see {whole}"
    calls = json.loads((whole / "end-0.json").read_text())["fsync"]
    begin(place := folder / "stopped" / key(case), data)
    codes = [fork(case, part, place, calls) for part in range(2)]
    result = asdict(case) | {"codes": codes}
    if codes[1] != [0] * case.ranks:
        output = (place / "output-1-0").read_text()[-600:]
        return result | {"equal": False, "differing": {"not resumed": [output]}}
    differing = compare(place, whole, case.ranks)
    parts = traces(place, 0)[1]
    reached, again = (parts[0] or [-1])[-1], min(parts[1], default=BATCHES)
    short = {name: found[:8] for name, found in differing.items()}
    return result | {"equal": not differing, "differing": short, "reached": reached, "resumed at": again}


def write_few(source: Path, folder: Path) -> None:
    """Write an evaluation of 24 samples from one of many."""
    samples: dict[str, dict[str, Any]] = {}
    with tarfile.open(source / "test" / "0.tar") as members:
        for member in members:
            name, _, kind = member.name.partition(".")
            content = members.extractfile(member)
            assert content is not None
            samples.setdefault(name, {"__key__": name})[kind] = content.read()
    write_evaluation_split(folder / "test", list(samples.values())[:24])
    for text in source.glob("*.txt"):
        shutil.copy(text, folder)


def begin(folder: Path, data: Path) -> None:
    """Make a new folder in which the recipes find their data, and go there."""
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(data)
    os.chdir(folder)


def key(case: Case) -> str:
    """Return a name of a case."""
    return hashlib.sha256(json.dumps(asdict(case)).encode()).hexdigest()[:12]


def table(results: list[dict[str, Any]]) -> str:
    """Return results as a table: how many runs were equal, and how many batches were trained twice."""
    frame = pd.DataFrame(results)
    frame["again"] = (frame["reached"] + 1 - frame["resumed at"]).clip(lower=0)
    rows = frame.groupby(["module", "place", "signal"])
    summary = rows.agg(runs=("equal", "size"), equal=("equal", "sum"), again=("again", "max")).reset_index()
    lines = [summary.to_string(index=False), f"{frame['equal'].sum()} of {len(frame)} runs equal the run left alone"]
    unequal = frame[~frame["equal"]]
    lines += [f"  not equal: {json.dumps(row)}" for row in unequal.to_dict("records")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="has data/digits, data/stdlib and data/scenes-vqa, of `data make`")
    parser.add_argument("--only", choices=SIZES, help="one module")
    parser.add_argument("--cases", type=int, default=CASES, help="of a module")
    parser.add_argument("--results", type=Path, help="a JSON file to write besides")
    options = parser.parse_args()
    folder = options.folder.resolve()
    (folder / "cases").mkdir(exist_ok=True)
    if not (few := folder / "data" / "few").exists():
        write_few(folder / "data" / "digits" / "zero_shot", few)
    results = []
    chosen = [cases(module, options.cases) for module in ([options.only] if options.only else SIZES)]
    for case in (case for cases_of_modules in zip(*chosen, strict=True) for case in cases_of_modules):
        kept = folder / "cases" / f"{key(case)}.json"
        if not kept.exists():
            shutil.rmtree(folder / "stopped" / key(case), ignore_errors=True)  # of a script that was killed
            kept.write_text(json.dumps(run(case, folder, folder / "data")))
        results.append(json.loads(kept.read_text()))
        print(case.module, case.place, case.hook, case.signal, results[-1]["equal"], results[-1]["codes"], flush=True)
    report = table(results)
    print(report)
    if options.results:
        options.results.write_text(json.dumps({"table": report.splitlines(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
