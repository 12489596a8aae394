"""`diffvision study`: models trained by one recipe with several seeds, each by `diffvision fit`, and then compared.

A study's folder has study.json, with its settings, and MODEL/seedN or MODEL/rateX for each run, as `fit` writes it. A
run is finished once it has final.ckpt, wherever it was trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from diffvision.errors import Mistake, see_help
from diffvision.files import lock_of, locked_if_free

SETTINGS, LOG = "study.json", "study.log"
TUNING_SEED = 1000  # of the runs that choose a learning rate
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
_RATE = "model.init_args.optimizer.lr"


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
            *([] if run.rate is None else [f"--{_RATE}={run.rate}"]),
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
        print(f"{run}: done" + (f"; {self.estimate(left)}" if left else ""), flush=True)

    def estimate(self, left: int) -> str:
        """Return the time and the disk that runs will take, by the first that was not resumed, in words."""
        first = read_json(self.output / SETTINGS)
        if "seconds" not in first:
            return f"{_count(left)} left; their time and disk are known once one has run without a stop"
        size, duration = first["bytes"] * left, timedelta(seconds=math.ceil(first["seconds"] * left / self.jobs))
        return f"{_count(left)} left: about {duration} and {megabytes(size)} of {megabytes(self.free())}"

    def free(self) -> int:
        """Return the free bytes of the disk."""
        return shutil.disk_usage(self.output).free

    def check_disk(self, left: int) -> None:
        """Refuse to begin a run where the disk has no room for all that are left, by the size of the first."""
        needed = read_json(self.output / SETTINGS).get("bytes", 0) * left
        if self.free() < needed:
            raise OSError(
                f"{_count(left)} need {megabytes(needed)}, but {self.output} has {megabytes(self.free())} free: make "
                "room, then give the same command"
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

    def check_rates(self, runs: Sequence[Run]) -> None:
        """Refuse runs that were trained at another rate than the one that is chosen now."""
        from diffvision.opening.run_folders import run_config, setting

        for run in runs:
            folder = self.folder(run)
            rate = setting(run_config(folder), _RATE)
            if any((folder / "checkpoints").glob("*.ckpt")) and str(rate) != str(run.rate):
                raise ValueError(f"{folder} was trained at the rate {rate}, and {run.rate} is chosen now: delete it")


def megabytes(size: float) -> str:
    """Return a number of bytes in MB, or from 1 GB on in GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


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
    add("--rates", type=float, nargs="+", help="choose each model's learning rate of these, on the recipe's evaluation")
    add("--test", type=str, nargs="+", help="evaluation folders to compare on; by default the recipe's evaluation")
    add("--jobs", type=int, default=1, help="how many runs at once")
    add("--print", action="store_true", help="print the commands of the runs that are not finished, and train none")
    return made


def main(argv: Sequence[str]) -> None:
    """Run `diffvision study` with these arguments.

    Raises:
        ValueError: a model without a plain twin, runs with other settings or at another rate, a run that failed.
        OSError: the disk is too small.
    """
    options, rest = parser().parse_known_args(argv)
    settings = _settings(rest)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise Mistake(f"{name} must be at least 1, got {getattr(options, name)}")
    if wrong := [rate for rate in options.rates or () if not 0 < rate < math.inf]:
        raise Mistake(f"rates must be finite and above 0, got {wrong[0]}")
    rates = sorted(set(options.rates or ()))
    models = _models(options.models, options.twin)
    study = Study(options.config, options.output, settings, options.jobs)
    if rates:
        _check_separate(options, settings)
    _check_test(models[0], options.test or ())
    with study.claim(rates=True if rates else None):  # more of them may be tried
        _run(study, models, rates, options)


def _run(study: Study, models: Sequence[str], rates: Sequence[float], options: argparse.Namespace) -> None:
    """Print the plan, then train and compare the runs, or print their commands."""
    tuning = [Run(model, TUNING_SEED, rate) for rate in rates for model in models]
    runs = [Run(model, seed) for seed in range(options.seeds) for model in models]
    left = [run for run in (*tuning, *runs) if not study.is_done(run)]
    lines = [
        f"{_count(len(tuning) + len(runs))} by {' and '.join(options.config)}, in {options.output}",
        f"{', '.join(models)}: seeds 0 to {options.seeds - 1}" + (f", rates {rates}" if rates else ""),
        study.estimate(len(left)) if left else "all are finished",
    ]
    print("\n".join(f"# {line}" if options.print else line for line in lines), flush=True)
    if options.print and any(run in tuning for run in left):
        _print(study, [run for run in tuning if run in left])
        print("# then the same command prints the runs at the chosen rates")
        return
    if not options.print:
        study.train(tuning, later=sum(run in runs for run in left))
    if tuning:
        chosen = {model: study.rate_of(model, rates) for model in models}
        runs = [replace(run, rate=chosen[run.model]) for run in runs]
        study.check_rates(runs)
    if options.print:
        _print(study, [run for run in runs if not study.is_done(run)])
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


def _check_test(model: str, tests: Sequence[str]) -> None:
    """Refuse data that the models cannot be compared on, by the functions that open it for the comparison."""
    from diffvision.comparison.measuring import image_plan
    from diffvision.evaluation.language.read_documents import check_sources
    from diffvision.evaluation.options import Options
    from diffvision.models.names import names_by_library

    library = next((library for library, names in names_by_library().items() if model in names), "open_clip")
    for test in tests:
        try:
            if library == "language":
                check_sources([test])
            else:
                image_plan([test], None, library, Options())
        except (ValueError, OSError) as error:
            raise Mistake(f"--test {test}: {error}") from error


def _check_separate(options: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse test data that rates are chosen on."""
    import yaml

    from diffvision.data.images.folders import find_folders
    from diffvision.training.recipes import find_configuration, read_mapping

    data: dict[str, Any] = {}
    for config in options.config:
        data |= read_mapping(find_configuration(config)).get("data", {}).get("init_args", {})
    for setting in settings:
        name, _, value = setting.partition("=")
        if name.startswith("--data."):
            data[name.removeprefix("--data.").removeprefix("init_args.")] = yaml.safe_load(value)
    chosen_on = data.get("evaluation") or data.get("evaluations")
    if not chosen_on or not options.test:
        raise Mistake(
            f"--rates chooses on data.evaluation, here {chosen_on}: name other data to compare on with --test"
        )
    split = data.get("split", "test")
    for path in [chosen_on] if isinstance(chosen_on, str) else chosen_on:
        for test in options.test:
            location = test if Path(test).exists() else test.rpartition("=")[2]  # of NAME=PATH
            first, second = Path(path).resolve(), Path(location).resolve()
            is_same = first == second or first in second.parents or second in first.parents
            if is_same and (split == "test" or any(folder.stand_in == split for folder in find_folders(test))):
                raise Mistake(f"--test must be data that no rate is chosen on, got {test}: rates are chosen on {path}")


def _print(study: Study, runs: Sequence[Run]) -> None:
    for run in runs:
        print(shlex.join(["diffvision", *study.command(run)]))


def _count(runs: int) -> str:
    return f"{runs} run{'s' * (runs != 1)}"
