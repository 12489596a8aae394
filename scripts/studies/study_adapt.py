"""What a pretrained model gains when it is made differential and trained on, as docs/results/adapt.md reports it.

    python scripts/studies/study_adapt.py data   --output runs/adapt
    python scripts/studies/study_adapt.py train  --output runs/adapt --seeds 0 1 2
    python scripts/studies/study_adapt.py report --output runs/adapt --results docs/results

A small Transformer is trained on the standard library's text, and a small plain ViT on made digits. Each is adapted in
every way of `WAYS`, and trained on for the same steps over the same data, as the one that was not adapted is. Every run
is `diffvision fit` with a recipe of configs/, a step 0 `diffvision validate`. `train` leaves out what is done already.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diffvision.analysis.curves import read_metrics
from diffvision.data.make import make, tokenize, tokenizer
from diffvision.training.fit import FitCLI, fit

ROOT = Path(__file__).parents[2]
LENGTH, BATCH = 128, 8


@dataclass(frozen=True)
class Way:
    """One way to continue: how the pretrained model is adapted, and with what callbacks it is trained."""

    title: str
    # Arguments of `diffvision adapt`; without any the model is not adapted.
    adapted: tuple[str, ...] = ()
    # Class and arguments; {half} is half of the steps.
    callbacks: tuple[str, ...] = ()


_ANNEALED = "LambdaAnnealing steps={half}"
_DEX = ("--method=dex", "--heads=entropy:0.5")
WAYS = {
    "plain": Way("not adapted"),
    "v2": Way("v2", ("--method=v2",)),
    "dex": Way("dex, annealed (paper)", _DEX, (_ANNEALED,)),
    "dex_kept": Way("dex, lambda kept (ours)", _DEX, ("LambdaWarmup steps={half}",)),
    "dex_new": Way("dex, lambda kept, only new", _DEX, ("LambdaWarmup steps={half}", "TrainOnlyNew")),
    "v1": Way("v1", ("--method=v1",)),
}


@dataclass(frozen=True)
class Task:
    """A recipe of configs/, the plain model and the settings of its runs; `{output}` is the study's folder."""

    recipe: str
    model: str
    loss: str
    # Steps: of pretraining, after it, and between validations.
    pretraining: int
    steps: int
    every: int
    arguments: tuple[str, ...]
    # What heads are chosen by.
    samples: str


TASKS = {
    "language": Task(
        "language/recall.yaml",
        "transformer-debug",
        "val/loss",
        800,
        600,
        100,
        (
            "--model.init_args.tokenizer=null",
            "--data.init_args.train={output}/tokens/stdlib",
            "--data.init_args.evaluation={output}/tokens/validation",
            f"--data.init_args.length={LENGTH}",
            f"--data.init_args.batch_size={BATCH}",
            "--trainer.limit_val_batches=8",
        ),
        "{output}/tokens/stdlib",
    ),
    "vision": Task(
        "vision/debug.yaml",
        "plain_vit_debug",
        "val/loss",
        300,
        100,
        25,
        (
            "--model.init_args.model_args.drop_path_rate=0",
            "--data.init_args.train={output}/digits/train",
            "--data.init_args.evaluation={output}/digits/zero_shot",
            "--trainer.max_epochs=-1",
        ),
        "{output}/digits/train",
    ),
}
# Learning rates of pretraining and of what follows.
RATES = {"language": (3e-3, 1e-3), "vision": (2e-3, 5e-4)}


def data(output: Path) -> None:
    """Make the text with its tokenizer as token shards, and the digits."""
    make("stdlib", str(output / "text"))
    tokenizer([str(output / "text/train")], str(output / "tokenizer.json"), 4096)
    for name, part in (("stdlib", "train"), ("validation", "validation")):
        tokenize(str(output / "text" / part), str(output / "tokens" / name), str(output / "tokenizer.json"))
    make("digits", str(output / "digits"))


def train(output: Path, tasks: Sequence[str], seeds: Sequence[int]) -> None:
    for name in tasks:
        base = pretrained(output, name)
        for seed in seeds:
            for way in WAYS:
                directory = output / "runs" / name / f"{way}-{seed}"
                if not (directory / "result.json").is_file():
                    shutil.rmtree(directory, ignore_errors=True)
                    result = continued(output, name, way, seed, base, directory)
                    (directory / "result.json").write_text(json.dumps(result) + "\n")


def pretrained(output: Path, name: str) -> Path:
    """Return the checkpoint of the plain model, trained once; the runs' seeds are those of what follows."""
    task, directory = TASKS[name], output / "runs" / name / "pretrained"
    if not (directory / "last.ckpt").is_file():
        shutil.rmtree(directory, ignore_errors=True)
        cli = run("fit", output, name, directory, task.model, task.pretraining, RATES[name][0], seed=0)
        cli.trainer.save_checkpoint(directory / "last.ckpt")
    return directory / "last.ckpt"


def continued(output: Path, name: str, way: str, seed: int, base: Path, directory: Path) -> dict[str, Any]:
    """Return the loss at step 0 and along the run of a model that is adapted, if at all, and trained on."""
    task = TASKS[name]
    folder = adapted(output, name, way, base)
    more = [argument for text in WAYS[way].callbacks for argument in _callback(text.format(half=task.steps // 2))]
    start = run("validate", output, name, directory / "start", folder, task.steps, RATES[name][1], seed, more)
    cli = run("fit", output, name, directory, folder, task.steps, RATES[name][1], seed, more)
    log: Any = cli.trainer.logger
    curves = read_metrics(log.log_dir)
    kept = {key: [[0, *curve.steps], [None, *curve.values]] for key, curve in curves.items() if key.startswith("val/")}
    for key, (_, values) in kept.items():
        values[0] = start.trainer.callback_metrics[key].item()
    lambdas = {key: [list(c.steps), list(c.values)] for key, c in curves.items() if key.startswith("lambda")}
    module: Any = cli.model
    counted = [(p.numel(), p.requires_grad) for p in module.model.parameters()]
    return {
        "task": name,
        "way": way,
        "seed": seed,
        "parameters": sum(n for n, _ in counted),
        "trained": sum(n for n, trained in counted if trained),
        "curves": kept,
        "lambda": lambdas,
    }


def adapted(output: Path, name: str, way: str, base: Path) -> str:
    """Return what `diffvision fit` starts from: a folder that `diffvision adapt` or `diffvision export` wrote."""
    from diffvision.cli import main

    folder = output / "runs" / name / f"adapted_{way}"
    task = TASKS[name]
    if not folder.exists():
        source = folder.with_name("exported")
        if not source.exists():
            export(name, base, source)
        if not WAYS[way].adapted:
            return f"local-dir:{source}"
        chosen = (
            [f"--data={task.samples.format(output=output)}"] if any("entropy" in a for a in WAYS[way].adapted) else []
        )
        address = str(source) if name == "language" else f"local-dir:{source}"
        assert main(["adapt", address, str(folder), *WAYS[way].adapted, *chosen]) == 0
    return f"local-dir:{folder}"


def export(name: str, base: Path, folder: Path) -> None:
    from diffvision.cli import main
    from diffvision.models import language

    if name == "language":
        language.save(language.load(base), folder)
    else:
        assert main(["export", str(base), str(folder)]) == 0


def run(
    command: str,
    output: Path,
    name: str,
    directory: Path,
    model: str,
    steps: int,
    lr: float,
    seed: int,
    more: Sequence[str] = (),
) -> FitCLI:
    """Run `diffvision COMMAND` with the task's recipe."""
    task = TASKS[name]
    arguments = [
        command,
        f"--config={ROOT / 'configs' / task.recipe}",
        f"--seed_everything={seed}",
        f"--data.init_args.seed={seed}",
        f"--model.init_args.model={model}",
        f"--model.init_args.optimizer.lr={lr}",
        f"--model.init_args.optimizer.end_lr={lr / 20}",
        "--model.init_args.optimizer.warmup_steps=20",
        *(argument.format(output=output) for argument in task.arguments),
        f"--trainer.max_steps={steps}",
        f"--trainer.val_check_interval={task.every}",
        "--trainer.check_val_every_n_epoch=null",
        f"--trainer.default_root_dir={directory}",
        f"--trainer.logger.init_args.save_dir={directory}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.callbacks=[{class_path: LambdaMonitor}]",
        *more,
    ]
    torch.set_num_threads(1)
    return fit(arguments)


def _callback(text: str) -> list[str]:
    name, *arguments = text.split()
    given = [f"--trainer.callbacks.{argument}" for argument in arguments]
    return [f"--trainer.callbacks+={name}", *given]


def report(output: Path, results: Path) -> None:
    """Write adapt.json and adapt.png, and print the tables."""
    runs = [json.loads(path.read_text()) for path in sorted((output / "runs").glob("*/*/result.json"))]
    if not runs:
        raise SystemExit(f"no run is finished in {output}: train first")
    results.mkdir(parents=True, exist_ok=True)
    about = {"machine": f"{platform.machine()}, {os.cpu_count()} CPU(s)", "torch": torch.__version__}
    tasks = {name: {k: v for k, v in asdict(task).items() if k != "samples"} for name, task in TASKS.items()}
    (results / "adapt.json").write_text(json.dumps({**about, "tasks": tasks, "runs": runs}) + "\n")
    for name in dict.fromkeys(run["task"] for run in runs):
        print(f"\n{name}: {TASKS[name].model}, {TASKS[name].steps} steps after {TASKS[name].pretraining}\n")
        print("| | at step 0 | at the end | less than not adapted | trained parameters | lambda at the end |")
        print("|---|---:|---:|---:|---:|---:|")
        for way in WAYS:
            if chosen := [run for run in runs if (run["task"], run["way"]) == (name, way)]:
                plain = [run for run in runs if (run["task"], run["way"]) == (name, "plain")]
                print(_row(way, chosen, plain, TASKS[name]))
    draw(runs, results / "adapt.png")


def _row(way: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]], task: Task) -> str:
    values = [run["curves"][task.loss][1] for run in runs]
    last = {run["seed"]: run["curves"][task.loss][1][-1] for run in plain}
    gains = [last[run["seed"]] - run["curves"][task.loss][1][-1] for run in runs if run["seed"] in last]
    lambdas = [run["lambda"]["lambda"][1][-1] for run in runs if "lambda" in run["lambda"]]
    cells = [WAYS[way].title, f"{values[0][0]:.4f}", _spread([v[-1] for v in values]), _spread(gains)]
    return f"| {' | '.join(cells)} | {runs[0]['trained']:,} | {f'{statistics.mean(lambdas):.3f}' if lambdas else ''} |"


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw a column for each task: validation loss over steps, and below it the gain over the model not adapted.

    Lines are means over seeds, and bands reach from the lowest to the highest; gains are of the same seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(5.6 * len(names), 7), squeeze=False, sharex="col", layout="constrained"
    )
    for (above, below), name in zip(axes.T, names, strict=True):
        curves = {(run["way"], run["seed"]): run["curves"][TASKS[name].loss] for run in runs if run["task"] == name}
        for number, way in enumerate(WAYS):
            losses = {seed: values for (other, seed), (_, values) in curves.items() if other == way}
            if not losses:
                continue
            steps = next(iter(curves.values()))[0]
            style = {"color": f"C{number}" if number else "black", "linestyle": "--" if number else "-"}
            _band(above, steps, list(losses.values()), label=WAYS[way].title, linewidth=2 if number else 4, **style)
            if way in ("v2", "dex", "dex_kept"):
                plain = {seed: curves["plain", seed][1] for seed in losses}
                gains = [[p - v for p, v in zip(plain[s], losses[s], strict=True)] for s in losses]
                _band(below, steps, gains, label=WAYS[way].title, **style)
        above.set(title=f"{name}: {TASKS[name].model}", ylabel="validation loss")
        below.axhline(0, color="black")
        below.set(xlabel="steps after adapting", ylabel="loss less than not adapted")
    axes[0][-1].legend(frameon=False)
    axes[1][-1].legend(frameon=False)
    figure.savefig(path, dpi=100)


def _band(axis: Any, steps: list[int], curves: list[list[float]], **style: Any) -> None:
    columns = list(zip(*curves, strict=True))
    axis.plot(steps, [statistics.mean(column) for column in columns], **style)
    lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
    axis.fill_between(steps, lowest, highest, color=style["color"], alpha=0.1)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "train", "report"])
    parser.add_argument("--output", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    if options.what == "data":
        data(options.output)
    elif options.what == "train":
        train(options.output, options.tasks, options.seeds)
    else:
        report(options.output, options.results)


if __name__ == "__main__":
    main()
