"""The command `diffvision study`: its options and checks, the plan, and the comparison in the end."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NoReturn

from diffvision.errors import Mistake, see_help
from diffvision.study.runs import RATE, TUNING_SEED, Run, Study, count_runs

_OF_THE_STUDY = {  # settings of `fit` -> what sets them
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
_OF_FIT = ("--print_config", "--trainer.fast_dev_run")  # which train no whole run


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
    rates = sorted(set(options.rates or ()))
    settings = _settings(rest, has_rates=bool(rates))
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise Mistake(f"{name} must be at least 1, got {getattr(options, name)}")
    if wrong := [rate for rate in rates if not 0 < rate < math.inf]:
        raise Mistake(f"rates must be finite and above 0, got {wrong[0]}")
    models = _models(options.models, options.twin)
    study = Study(options.config, options.output, settings, options.jobs)
    if rates:
        _check_separate(study, Run(models[0], TUNING_SEED, rates[0]), options.test or ())
    _check_test(models[0], options.test or ())
    with study.claim(rates=True if rates else None):  # more of them may be tried
        _run(study, models, rates, options)


def _run(study: Study, models: Sequence[str], rates: Sequence[float], options: argparse.Namespace) -> None:
    """Print the plan, then train and compare the runs, or print their commands."""
    tuning = [Run(model, TUNING_SEED, rate) for rate in rates for model in models]
    runs = [Run(model, seed) for seed in range(options.seeds) for model in models]
    study.check_alike([*tuning, *runs])
    left = [run for run in (*tuning, *runs) if not study.is_done(run)]
    lines = [
        f"{count_runs(len(tuning) + len(runs))} by {' and '.join(options.config)}, in {options.output}",
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
    study.check_alike(runs)
    compare(study, runs, options.test)


def compare(study: Study, runs: Sequence[Run], test: list[str] | None) -> None:
    """Compare the runs; write report.html and report.json."""
    from diffvision.comparison import compare as compare_models

    models = dict.fromkeys(run.model for run in runs)
    specs = [str(study.folder(run)) for model in models for run in runs if run.model == model]
    compare_models(specs, data=test, output=[str(study.output / f"report.{kind}") for kind in ("html", "json")])


def _settings(words: Sequence[str], *, has_rates: bool) -> list[str]:
    """Return settings of `fit` as NAME=VALUE each; refuse what the study itself sets."""
    settings: list[str] = []
    for word in words:
        if word.startswith("--"):
            settings.append(word)
        elif settings and "=" not in settings[-1]:
            settings[-1] += f"={word}"
        else:
            raise Mistake(see_help(f"{word!r} belongs to no option", "diffvision study"))
    setters = _OF_THE_STUDY | (
        {f"--{RATE}": "--rates", f"--{RATE.replace('.init_args', '')}": "--rates"} if has_rates else {}
    )
    for setting in settings:
        name = setting.partition("=")[0]
        if name in _OF_FIT:
            raise Mistake(f"{name} trains no whole run: leave it out, or give it to `diffvision fit`")
        for known, by in setters.items():  # or an abbreviation of it
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
    libraries = {_library_of(name): name for name in models}
    if len(libraries) > 1:
        raise Mistake(f"models must be of one library, got {' and '.join(libraries.values())}: study each by itself")
    return models


def _library_of(model: str) -> str:
    from diffvision.models.names import names_by_library

    return next((library for library, names in names_by_library().items() if model in names), "open_clip")


def _check_test(model: str, tests: Sequence[str]) -> None:
    """Refuse data that the models cannot be compared on, by the functions that open it for the comparison."""
    from diffvision.comparison.measuring import image_plan
    from diffvision.evaluation.language.read_documents import check_sources
    from diffvision.evaluation.options import Options

    library = _library_of(model)
    for test in tests:
        try:
            if library == "language":
                check_sources([test])
            else:
                image_plan([test], None, library, Options())
        except (ValueError, OSError) as error:
            raise Mistake(f"--test {test}: {error}") from error


def _check_separate(study: Study, run: Run, tests: Sequence[str]) -> None:
    """Refuse test data that rates are chosen on, by a run's settings."""
    data = study.configuration(run)["data"].get("init_args", {})
    given = data.get("evaluation") or data.get("evaluations") or []
    chosen_on = [given] if isinstance(given, str) else given
    if not chosen_on or not tests:
        raise Mistake(f"--rates chooses on data.evaluation, here {given}: name other data to compare on with --test")
    for path, test in product(chosen_on, tests):
        if _is_shared(_location(path), data.get("split", "test"), _location(test)):
            raise Mistake(f"--test must be data that no rate is chosen on, got {test}: rates are chosen on {path}")


def _location(path: str) -> Path:
    """Return the path of an evaluation, which may be given as NAME=PATH."""
    return (Path(path) if Path(path).exists() else Path(path.rpartition("=")[2])).resolve()


def _is_shared(chosen_on: Path, split: str, test: Path) -> bool:
    """Return whether a split of one source may share samples with the test split of another, or of itself."""
    from diffvision.data.images.folders import find_folders

    if chosen_on == test and split != "test":
        return any(folder.stand_in == split for folder in find_folders(test))
    first, second = _folder_of_split(chosen_on, split), _folder_of_split(test, "test")
    return first == second or first in second.parents or second in first.parents


def _folder_of_split(source: Path, split: str) -> Path:
    """Return the folder of a source's split, or the source where its splits are no folders."""
    from diffvision.data.splits import splits_in

    folders = [path for path in source.iterdir() if splits_in(path.name) == {split}] if source.is_dir() else []
    return folders[0] if len(folders) == 1 else source


def _print(study: Study, runs: Sequence[Run]) -> None:
    for run in runs:
        print(shlex.join(["diffvision", *study.command(run)]))
