"""The runs of a study: each is trained by `diffvision fit` in its folder, several at once, and resumed.

A study's folder has study.json, with its settings, and MODEL/seedN or MODEL/rateX for each run, as `fit` writes it. A
run is finished once it has final.ckpt, wherever it was trained.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from diffvision.files import lock_of, locked_if_free

SETTINGS, LOG = "study.json", "study.log"
TUNING_SEED = 1000  # of the runs that choose a learning rate
RATE = "model.init_args.optimizer.lr"
_OWN = ("model.init_args.model", "data.init_args.seed")  # settings in which runs differ
_SHARED = ("model", "data", "trainer.max_epochs", "trainer.max_steps")
_WARNING = re.compile(r"^.*Warning: (.*)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One training: of a model with a seed, or for choosing its learning rate."""

    model: str
    seed: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.model}, " + (f"rate {self.rate}" if self.is_tuning else f"seed {self.seed}")

    @property
    def is_tuning(self) -> bool:
        """Whether the run is for choosing a rate."""
        return self.seed == TUNING_SEED

    @property
    def version(self) -> str:
        """The name of its folder, in that of its model."""
        return f"rate{self.rate}" if self.is_tuning else f"seed{self.seed}"


@dataclass
class Study:
    """The runs of a study's folder.

    Attributes:
        configs: configuration files or recipes, of all runs.
        output: the study's folder.
        settings: further arguments of `diffvision fit`.
        jobs: how many runs are trained at once.
        every: seconds between two lines about a run.
        starts: when runs were begun, without those that were resumed.
        shown: when a run's last line was printed, and its text.
    """

    configs: Sequence[str]
    output: Path
    settings: Sequence[str] = ()
    jobs: int = 1
    every: float = 30.0
    starts: dict[Run, float] = field(default_factory=dict, init=False)
    shown: dict[Run, tuple[float, str]] = field(default_factory=dict, init=False)

    def folder(self, run: Run) -> Path:
        """Return the directory of a run."""
        return self.output / run.model.replace("/", "_") / run.version

    def command(self, run: Run) -> list[str]:
        """Return the arguments of `diffvision` that train a run, or resume it."""
        return [
            "fit",
            *(f"--config={config}" for config in self.configs),
            *self.settings,
            f"--model.init_args.model={run.model}",
            *([] if run.rate is None else [f"--{RATE}={run.rate}"]),
            f"--seed_everything={run.seed}",
            f"--data.init_args.seed={run.seed}",
            "--resume=auto",
            f"--trainer.default_root_dir={self.output}",
            "--trainer.logger=CSVLogger",
            f"--trainer.logger.init_args.save_dir={self.output}",
            f"--trainer.logger.init_args.name={self.folder(run).parent.name}",
            f"--trainer.logger.init_args.version={run.version}",
        ]

    def is_done(self, run: Run) -> bool:
        """Return whether a run was trained to its end, or diverged at the rate that it tried."""
        folder = self.folder(run)
        return (folder / "checkpoints" / "final.ckpt").is_file() or (folder / "diverged").is_file()

    @contextmanager
    def claim(self, **more: Any) -> Iterator[None]:
        """Keep other studies out of the folder in the context; write what all runs share to it.

        Raises:
            ValueError: another process holds the folder, or it has runs of other settings, or of no study.
        """
        import diffvision
        from diffvision.evaluation.output_files import check_folder, write_json
        from diffvision.training.recipes import find_configuration, read_mapping

        check_folder(self.output)
        settings = {
            "diffvision": diffvision.__version__,
            "recipe": [read_mapping(find_configuration(config)) for config in self.configs],
            "settings": list(self.settings),
            **more,
        }
        file = self.output / SETTINGS
        self.output.mkdir(parents=True, exist_ok=True)
        with locked_if_free(lock_of(file)) as is_free:
            if not is_free:
                raise ValueError(f"a study is running in {self.output}: wait for it, or name another --output")
            if not file.is_file() and (found := next(self.output.glob("*/*/config.yaml"), None)):
                raise ValueError(f"{found.parent} is not a run of a study: name another folder with --output")
            trained = ("*/*/checkpoints/*.ckpt", "*/*/diverged")
            if not file.is_file() or not any(any(self.output.glob(pattern)) for pattern in trained):
                write_json(file, settings)
            earlier = read_json(file)
            other = [name for name in settings if settings[name] != earlier.get(name)]
            if other == ["settings"]:
                other = sorted({*settings["settings"]} ^ {*earlier.get("settings", ())}) or other
            if other:
                raise ValueError(
                    f"{self.output} holds runs with other settings ({', '.join(other)}): delete the folder, or name "
                    "another one with --output"
                )
            yield

    def train(self, runs: Sequence[Run], later: int = 0) -> None:
        """Train the runs that are not finished, several at once; stopped runs are resumed.

        Args:
            runs: in their order.
            later: how many runs follow these, for the time and the disk that are left.

        Raises:
            ValueError: a run failed; the message has its error.
            OSError: the disk has no room for the runs that are left, by the size of a finished one.
        """
        waiting = [run for run in runs if not self.is_done(run)]
        active: dict[Run, subprocess.Popen[bytes]] = {}
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the runs are told
        try:
            while waiting or active:
                while waiting and len(active) < self.jobs:
                    self.check_disk(len(waiting) + len(active) + later)
                    run = waiting.pop(0)
                    active[run] = self._start(run)
                time.sleep(0.5)
                for run, process in list(active.items()):
                    self._show(run)
                    if process.poll() is not None:
                        del active[run]
                        self._finish(run, process.returncode, len(waiting) + len(active) + later)
        finally:
            for process in active.values():
                process.terminate()
            for process in active.values():
                process.wait()
            signal.signal(signal.SIGTERM, before)

    def _start(self, run: Run) -> subprocess.Popen[bytes]:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        if not any((folder / "checkpoints").glob("*.ckpt")):
            self.starts[run] = time.time()
        threads = {"OMP_NUM_THREADS": "1"} if self.jobs > 1 else {}
        command = [sys.executable, "-m", "diffvision", *self.command(run)]
        (folder / LOG).unlink(missing_ok=True)  # not emptied: a run that outlived another study writes to it
        with (folder / LOG).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | threads)

    def _show(self, run: Run) -> None:
        """Print a run's last logged step and loss, where they are new and not too soon."""
        from diffvision.analysis.curves import read_metrics

        before, text = self.shown.get(run, (0.0, ""))
        if time.monotonic() - before < self.every or not (self.folder(run) / "metrics.csv").is_file():
            return
        curve = read_metrics(self.folder(run)).get("train/loss")
        latest = f"step {curve.steps[-1] + 1:.0f}, loss {curve.values[-1]:.2f}" if curve else ""
        if latest and latest != text:
            self.shown[run] = time.monotonic(), latest
            print(f"{run}: {latest}", flush=True)

    def _finish(self, run: Run, status: int, left: int) -> None:
        """Record a run that has ended, and say what is left; raise a ValueError for one that failed."""
        from diffvision.evaluation.output_files import write_json

        log = self.folder(run) / LOG
        if status or not self.is_done(run):
            ended = f"ended with status {status}" if status else "wrote no checkpoints/final.ckpt: leave dirpath out"
            output = log.read_text(errors="replace")
            error = [ended, *re.findall(r"diffvision: error: (.*)", output)][-1]  # also after a progress bar
            if run.is_tuning and "were not finite" in error:
                (self.folder(run) / "diverged").write_text(f"{error}\n")
                print(f"{run}: diverged", flush=True)
                return
            raise ValueError(f"{run}: {error} (all of its output: {log})")
        settings = read_json(self.output / SETTINGS)
        if "seconds" not in settings:
            size = sum(file.stat().st_size for file in self.folder(run).rglob("*") if file.is_file())
            seconds = {"seconds": time.time() - self.starts[run]} if run in self.starts else {}
            write_json(self.output / SETTINGS, settings | {"bytes": size} | seconds)
        for warning in dict.fromkeys(_WARNING.findall(log.read_text(errors="replace"))):
            print(f"{run}: {warning}", flush=True)
        print(f"{run}: done" + (f"; {self.estimate(left)}" if left else ""), flush=True)

    def estimate(self, left: int) -> str:
        """Return the time and the disk that runs will take, by the first that was not resumed, in words."""
        first = read_json(self.output / SETTINGS)
        if "seconds" not in first:
            return f"{count_runs(left)} left; their time and disk are known once one has run without a stop"
        size, duration = first["bytes"] * left, timedelta(seconds=math.ceil(first["seconds"] * left / self.jobs))
        return f"{count_runs(left)} left: about {duration} and {megabytes(size)} of {megabytes(self.free())}"

    def free(self) -> int:
        """Return the free bytes of the disk."""
        return shutil.disk_usage(self.output).free

    def check_disk(self, left: int) -> None:
        """Refuse to begin a run where the disk has no room for all that are left, by the size of the first."""
        needed = read_json(self.output / SETTINGS).get("bytes", 0) * left
        if self.free() < needed:
            raise OSError(
                f"{count_runs(left)} need {megabytes(needed)}, but {self.output} has {megabytes(self.free())} free: "
                "make room, then give the same command"
            )

    def rate_of(self, model: str, rates: Sequence[float]) -> float:
        """Return the rate with the best value of the metric that the recipe monitors."""
        from diffvision.opening.run_folders import best_score

        folders = {rate: self.folder(Run(model, TUNING_SEED, rate)) for rate in rates}
        scores = {
            rate: -math.inf if (folder / "diverged").is_file() else best_score(folder)
            for rate, folder in folders.items()
        }
        best = max(scores, key=lambda rate: scores[rate])
        if not math.isfinite(scores[best]):
            raise ValueError(f"{model} diverged at each of the rates {', '.join(map(str, rates))}: lower them")
        edge = " (at the edge: try more)" if len(rates) > 2 and best in (min(rates), max(rates)) else ""
        print(f"{model}: learning rate {best}{edge}", flush=True)
        return best

    def configuration(self, run: Run) -> dict[str, Any]:
        """Return the settings that `diffvision fit` makes of a run's command, without training it.

        Raises:
            ValueError: `fit` refuses them.
        """
        from diffvision.training.fit import fit

        printed = StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            fit([*self.command(run), "--print_config"])
        return dict(yaml.safe_load(printed.getvalue()))

    def check_alike(self, runs: Sequence[Run]) -> None:
        """Refuse runs that differ in more than model, rate and seed, such as those of another `--print`."""
        from diffvision.opening.run_folders import run_config

        folders = [self.folder(run) for run in runs if any((self.folder(run) / "checkpoints").glob("*.ckpt"))]
        own = {*_OWN, *([RATE] if any(run.rate for run in runs) else [])}
        settings = {folder: _shared_settings(run_config(folder)) for folder in folders}
        for folder, of_run in settings.items():
            first = settings[folders[0]]
            names = {name for name in {*first, *of_run} if first.get(name) != of_run.get(name)}
            if other := sorted(names - own):
                raise ValueError(
                    f"{folder} and {folders[0]} were trained with different settings ({', '.join(other)}): delete one"
                )

    def check_rates(self, runs: Sequence[Run]) -> None:
        """Refuse runs that were trained at another rate than the one that is chosen now."""
        from diffvision.opening.run_folders import run_config, setting

        for run in runs:
            folder = self.folder(run)
            rate = setting(run_config(folder), RATE)
            if any((folder / "checkpoints").glob("*.ckpt")) and str(rate) != str(run.rate):
                raise ValueError(f"{folder} was trained at the rate {rate}, and {run.rate} is chosen now: delete it")


def _shared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a run's configuration that all runs of a study share, by dotted names."""
    from diffvision.models.architecture import flatten
    from diffvision.opening.run_folders import setting

    shared = flatten({name: setting(config, name) for name in _SHARED})
    return {".".join(name): value for name, value in shared}


def count_runs(runs: int) -> str:
    """Return "1 run", "2 runs", ..."""
    return f"{runs} run{'s' * (runs != 1)}"


def megabytes(size: float) -> str:
    """Return a number of bytes in MB, or from 1 GB on in GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a study's file of settings."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError):  # not JSON, or not an object
        raise ValueError(f"{file} is damaged: delete {file.parent}, or name another folder with --output") from None
