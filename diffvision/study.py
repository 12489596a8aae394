"""`diffvision study`: models trained by one recipe with several seeds, each by `diffvision fit`, and then compared.

A study's folder has study.json, with its settings, and MODEL/seedN for each run, as `fit` writes it. A run is finished
once it has final.ckpt, wherever it was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from diffvision.errors import Mistake, see_help
from diffvision.files import lock_of, locked_if_free

SETTINGS, LOG = "study.json", "study.log"
OF_THE_STUDY = {  # settings of `fit` -> what sets them
    "--model.model": "--models",
    "--model.init_args.model": "--models",
    "--seed_everything": "--seeds",
    "--data.seed": "--seeds",
    "--data.init_args.seed": "--seeds",
    "--trainer.logger": "--output",
    "--trainer.default_root_dir": "--output",
    "--resume": "the study",
    "--ckpt_path": "the study",
}


class Run(NamedTuple):
    """One training of a model."""

    model: str
    seed: int

    def __str__(self) -> str:
        return f"{self.model}, seed {self.seed}"


@dataclass
class Study:
    """The runs of a study's folder.

    Attributes:
        configs: configuration files or recipes, of all runs.
        output: the study's folder.
        settings: further arguments of `diffvision fit`.
        jobs: how many runs are trained at once.
        every: seconds between two lines about a run.
        shown: when a run's last line was printed, and its text.
    """

    configs: Sequence[str]
    output: Path
    settings: Sequence[str] = ()
    jobs: int = 1
    every: float = 30.0
    shown: dict[Run, tuple[float, str]] = field(default_factory=dict, init=False)

    def folder(self, run: Run) -> Path:
        """Return the directory of a run."""
        return self.output / run.model.replace("/", "_") / f"seed{run.seed}"

    def command(self, run: Run) -> list[str]:
        """Return the arguments of `diffvision` that train a run, or resume it."""
        folder = self.folder(run)
        return [
            "fit",
            *(f"--config={config}" for config in self.configs),
            *self.settings,
            f"--model.init_args.model={run.model}",
            f"--seed_everything={run.seed}",
            f"--data.init_args.seed={run.seed}",
            "--resume=auto",
            f"--trainer.default_root_dir={self.output}",
            "--trainer.logger=CSVLogger",
            f"--trainer.logger.init_args.save_dir={self.output}",
            f"--trainer.logger.init_args.name={folder.parent.name}",
            f"--trainer.logger.init_args.version={folder.name}",
        ]

    def is_done(self, run: Run) -> bool:
        """Return whether a run was trained to its end."""
        return (self.folder(run) / "checkpoints" / "final.ckpt").is_file()

    @contextmanager
    def claim(self) -> Iterator[None]:
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
        }
        file = self.output / SETTINGS
        self.output.mkdir(parents=True, exist_ok=True)
        with locked_if_free(lock_of(file)) as is_free:
            if not is_free:
                raise ValueError(f"a study is running in {self.output}: wait for it, or name another --output")
            if not file.is_file() and (found := next(self.output.glob("*/*/config.yaml"), None)):
                raise ValueError(f"{found.parent} is not a run of a study: name another folder with --output")
            if not file.is_file() or not any(self.output.glob("*/*/checkpoints/*.ckpt")):
                write_json(file, settings)
            earlier = read_json(file)
            if other := [name for name in settings if settings[name] != earlier.get(name)]:
                raise ValueError(
                    f"{self.output} holds runs with other settings ({', '.join(other)}): delete the folder, or name "
                    "another one with --output"
                )
            yield

    def train(self, runs: Sequence[Run]) -> None:
        """Train the runs that are not finished, several at once, in their order; stopped runs are resumed.

        Raises:
            ValueError: a run failed; the message has its error.
        """
        waiting = [run for run in runs if not self.is_done(run)]
        active: dict[Run, subprocess.Popen[bytes]] = {}
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the runs are told
        try:
            while waiting or active:
                while waiting and len(active) < self.jobs:
                    run = waiting.pop(0)
                    active[run] = self._start(run)
                time.sleep(0.5)
                for run, process in list(active.items()):
                    self._show(run)
                    if process.poll() is not None:
                        del active[run]
                        self._finish(run, process.returncode, len(waiting) + len(active))
        finally:
            for process in active.values():
                process.terminate()
            for process in active.values():
                process.wait()
            signal.signal(signal.SIGTERM, before)

    def _start(self, run: Run) -> subprocess.Popen[bytes]:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
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
        """Say that a run has ended, and how many are left; raise a ValueError for one that failed."""
        log = self.folder(run) / LOG
        if status or not self.is_done(run):
            ended = f"ended with status {status}" if status else "wrote no checkpoints/final.ckpt: leave dirpath out"
            output = log.read_text(errors="replace")
            error = [ended, *re.findall(r"diffvision: error: (.*)", output)][-1]  # also after a progress bar
            raise ValueError(f"{run}: {error} (all of its output: {log})")
        print(f"{run}: done" + (f"; {_count(left)} left" if left else ""), flush=True)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a study's file of settings."""
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError):  # not JSON, or not an object
        raise ValueError(f"{file} is damaged: delete {file.parent}, or name another folder with --output") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(see_help(message, "diffvision study"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the study's own options; all others are settings of `fit`."""
    made = _Parser(
        prog="diffvision study",
        description="Train models by one recipe with several seeds, and compare them. The same command resumes.",
        epilog="All other options are settings of `diffvision fit`, and hold for every run.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--config", "-c", action="append", required=True, help="recipe or file of settings; may be repeated")
    add("--models", type=str, nargs="+", required=True, help="names; differences are from the first")
    add("--twin", action="store_true", help="compare each with its plain twin, which comes first")
    add("--seeds", type=int, required=True, help="how many: 0, 1, ...")
    add("--output", type=Path, required=True, help="folder of the study; may hold an unfinished one")
    add("--test", type=str, nargs="+", help="evaluation folders to compare on; by default the recipe's evaluation")
    add("--jobs", type=int, default=1, help="how many runs at once")
    add("--print", action="store_true", help="print the commands of the runs that are not finished, and train none")
    return made


def main(argv: Sequence[str]) -> None:
    """Run `diffvision study` with these arguments.

    Raises:
        ValueError: a model without a plain twin, runs with other settings, a run that failed.
    """
    from diffvision.data.datasets import check_paths

    options, rest = parser().parse_known_args(argv)
    settings = _settings(rest)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise Mistake(f"{name} must be at least 1, got {getattr(options, name)}")
    models = _models(options.models, options.twin)
    check_paths({"test": options.test})
    study = Study(options.config, options.output, settings, options.jobs)
    runs = [Run(model, seed) for seed in range(options.seeds) for model in models]
    with study.claim():
        left = [run for run in runs if not study.is_done(run)]
        lines = [
            f"{_count(len(runs))} by {' and '.join(options.config)}, in {options.output}",
            f"{', '.join(models)}: seeds 0 to {options.seeds - 1}",
            f"{_count(len(left))} left" if left else "all are finished",
        ]
        print("\n".join(f"# {line}" if options.print else line for line in lines), flush=True)
        if options.print:
            for run in left:
                print(shlex.join(["diffvision", *study.command(run)]))
            print("# then the same command without --print compares them")
            return
        study.train(runs)
        compare(study, runs, options.test)


def compare(study: Study, runs: Sequence[Run], test: list[str] | None) -> None:
    """Compare the runs; write report.html and report.json."""
    from diffvision.comparison import compare as compare_models

    models = dict.fromkeys(run.model for run in runs)
    specs = [str(study.folder(run)) for model in models for run in runs if run.model == model]
    compare_models(specs, data=test, output=[str(study.output / f"report.{kind}") for kind in ("html", "json")])


def _settings(words: Sequence[str]) -> list[str]:
    """Return settings of `fit` as NAME=VALUE each; refuse what the study itself sets."""
    settings: list[str] = []
    for word in words:
        if word.startswith("--"):
            settings.append(word)
        elif settings and "=" not in settings[-1]:
            settings[-1] += f"={word}"
        else:
            raise Mistake(see_help(f"{word!r} belongs to no option", "diffvision study"))
    for setting in settings:
        name = setting.partition("=")[0]
        for known, by in OF_THE_STUDY.items():  # or an abbreviation of it
            if name.startswith(f"{known}.") or (known.startswith(name) and not known.startswith(f"{name}.")):
                raise Mistake(f"{name} sets {known}, which {by} sets in a study: leave it out")
    return settings


def _models(names: Sequence[str], twin: bool) -> list[str]:
    from diffvision.models.names import plain_twin
    from diffvision.opening.specs import find_model

    for name in names:
        if (spec := find_model(name)).kind != "name" or spec.tag:
            raise Mistake(f"models must be names without a tag, got {name}: a study trains them from the start")
    models = list(dict.fromkeys([*(plain_twin(name) for name in names), *names] if twin else names))
    if len(models) < 2:
        raise Mistake("a study compares two models or more: name another one, or add --twin")
    return models


def _count(runs: int) -> str:
    return f"{runs} run{'s' * (runs != 1)}"
