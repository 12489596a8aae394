"""What checks, accounts, agreement on signals and checkpoints cost a training step, against plain Lightning.

    python scripts/benchmarks/bench_step.py [--model DiffCLIP-debug] [--batch 256] [--steps 60] [--every 20]

`diffvision fit` as the recipes have it (the guard against steps that are not finite, DataReport, signals agreed upon, a
durable checkpoint every `--every` steps) takes turns with a bare Trainer that fits the same module on the same batches,
without callbacks, guard or checkpoints. Steps that end with a save are counted apart, so
that the cost of saving can be given for the recipes' one in 500 steps; the median of a step is not moved by them.

The processor's time of the training process is given too: what is added to a step hardly depends on the batch, and with
`--batch 8` it is not lost in the noise of the machine.
"""

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import yaml

from diffvision import cli
from diffvision.data.images.image_data import ImageTextData
from diffvision.data.make import make
from diffvision.training.clip import ContrastiveModule
from diffvision.training.optim import OptimizerSettings

WARM = 5  # steps that are not timed
RECIPES_SAVE = 500  # steps between two saves of configs/clip


class Clock(pl.Callback):
    """Records when each step ended: seconds of the clock, and of the processor for this process."""

    # Of the class, since LightningCLI makes the object.
    ends: list[tuple[float, float]] = []  # noqa: RUF012

    def on_train_batch_end(self, *args: object) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


class Took(NamedTuple):
    """Seconds of a step without a save, what a save adds to one, and the processor's seconds of a step."""

    step: float
    save: float
    processor: float


class Bare(ContrastiveModule):
    """The same module without the guard."""

    def configure_callbacks(self) -> list:
        return []


def seconds_a_step(every: int = 0) -> Took:
    """Return the medians of the steps behind the first ones."""
    pairs = list(zip(Clock.ends, Clock.ends[1:], strict=False))[WARM:]
    numbered = list(enumerate(pairs, start=WARM + 2))
    # ModelCheckpoint saves after the clock has noted the step's end, so a save lies in the step behind it.
    plain = [pair for number, pair in numbered if not every or number % every != 1]
    step, processor = (statistics.median(after[n] - before[n] for before, after in plain) for n in (0, 1))
    saves = [after[0] - before[0] - step for number, (before, after) in numbered if every and number % every == 1]
    return Took(step, statistics.median(saves) if saves else 0.0, processor)


def checked(arguments: argparse.Namespace, data: Path, scratch: Path) -> Took:
    """Return what a step of `diffvision fit` took, and a save."""
    config = {
        "model": {
            "class_path": "ContrastiveModule",
            "init_args": {"model": arguments.model, "optimizer": {"warmup_steps": 2}},
        },
        "data": {"class_path": "ImageTextData", "init_args": _data(arguments, data)},
        "trainer": {
            **_trainer(arguments),
            "default_root_dir": str(scratch / "run"),
            "callbacks": [
                {"class_path": "DataReport"},
                {
                    "class_path": "ModelCheckpoint",
                    "init_args": {"every_n_train_steps": arguments.every, "dirpath": str(scratch / "kept")},
                },
                {"class_path": "bench_step.Clock"},
            ],
        },
    }
    (scratch / "config.yaml").write_text(yaml.safe_dump(config))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = cli.main(["fit", "--config", str(scratch / "config.yaml"), "--allow", "bench_step"])
    if status:
        raise RuntimeError(output.getvalue()[-2000:])
    if not list((scratch / "kept").glob("*.ckpt")):
        raise RuntimeError(f"no checkpoint was written\n{output.getvalue()[-2000:]}")
    return seconds_a_step(arguments.every)


def bare(arguments: argparse.Namespace, data: Path) -> Took:
    """Return what a step of a plain Trainer took."""
    pl.seed_everything(0, verbose=False)
    module = Bare(arguments.model, optimizer=OptimizerSettings(warmup_steps=2))
    module_data = ImageTextData(**_data(arguments, data), transform=module.transform, tokenizer=module.tokenizer)
    settings = {"logger": False, "enable_checkpointing": False, "callbacks": [Clock()]}
    pl.Trainer(**_trainer(arguments), **settings).fit(module, module_data)
    return seconds_a_step()


def _data(arguments: argparse.Namespace, data: Path) -> dict:
    return {"train": str(data), "batch_size": arguments.batch, "num_workers": 1}


def _trainer(arguments: argparse.Namespace) -> dict:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return {"max_steps": arguments.steps, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 20, **quiet}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="DiffCLIP-debug")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "digits")
        with contextlib.redirect_stdout(io.StringIO()):
            make("digits", str(data))
        for number in range(arguments.rounds + 1):
            scratch = Path(directory, str(number))
            scratch.mkdir()
            pair = []
            # They take turns in going first, since the machine may differ.
            for way in ((0, 1), (1, 0))[number % 2]:
                Clock.ends = []
                times = bare(arguments, data / "train") if way else checked(arguments, data / "train", scratch)
                pair.append((way, times))
            ours, other = (times for _, times in sorted(pair))
            compared = f"{ours.step:.4f} s a step, bare {other.step:.4f} s, {ours.step / other.step - 1:+.2%}"
            print(f"round {number}: {compared}; save {ours.save:.2f} s", flush=True)
            rounds.append((ours, other))
    rounds = rounds[1:]
    step, bare_step, save = (
        statistics.median(each) for each in zip(*((a.step, b.step, a.save) for a, b in rounds), strict=True)
    )
    checks = statistics.median(ours.step / other.step - 1 for ours, other in rounds)
    added = sorted(1000 * (ours.processor - other.processor) for ours, other in rounds)
    print(f"\n{arguments.model}, batches of {arguments.batch}, torch {torch.__version__}, one thread")
    print(f"{step:.4f} s a step, bare {bare_step:.4f} s; median of {len(rounds)} rounds {checks:+.2%}")
    print(f"of the processor {statistics.median(added):+.2f} ms a step, {added[0]:+.2f} to {added[-1]:+.2f}")
    print(f"a save takes {save:.2f} s: {save / (RECIPES_SAVE * bare_step):.2%} of {RECIPES_SAVE} steps")


if __name__ == "__main__":
    # The configuration names the clock by this module, which as a script is __main__.
    import bench_step

    bench_step.main()
