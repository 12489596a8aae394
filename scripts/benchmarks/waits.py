"""How often a training step of each module waits for the GPU, and `generate` for a token.

    python scripts/benchmarks/waits.py [--steps 40] [--every 10] [--stub] [--output DIR]

Torch counts the calls in which the processor waits for the GPU (`torch.cuda.set_sync_debug_mode`): a number read from
it, a copy from memory that is not pinned. Each module is fitted on random batches with the callbacks of a recipe (the
guard, the progress line, averages of weights, throughput). Waits between two logged steps, in logged steps and in
checkpoints are counted apart, with the lines of code that wait.

It needs a CUDA build of torch and a card, or a stub of one (`--stub`): waits are counted and not timed, so what the
device computes makes no difference.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.nn.attention import varlen
from torch.utils.data import DataLoader, Dataset

from diffvision.models import language
from diffvision.models.language.generation import generate
from diffvision.training import progress
from diffvision.training.callbacks import Throughput
from diffvision.training.classification import ClassificationModule
from diffvision.training.clip import ContrastiveModule
from diffvision.training.ema import EMA
from diffvision.training.language import LanguageModule

PACKAGE = Path(__file__).resolve().parents[2]
BATCH = 8
# A run of rubbish numbers, as a stub returns them, goes on.
OPTIMIZER = {"lr": 1e-3, "warmup_steps": 0, "clip_norm": 1.0, "max_skipped": 10**9}
SMALL = {"vocab_size": 512, "dim": 64, "num_heads": 2, "head_dim": 16, "mlp_dim": 128, "depth": 2, "max_length": 64}


class Terminal(io.StringIO):
    """A terminal, in which the progress line is redrawn."""

    def isatty(self) -> bool:
        return True


class Rows(Dataset):
    """The same sample again and again."""

    def __init__(self, row: dict[str, torch.Tensor], samples: int) -> None:
        self.row, self.samples = row, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.row


def cases() -> dict[str, tuple[pl.LightningModule, dict[str, torch.Tensor]]]:
    """Return each module with one of its samples."""
    clip = ContrastiveModule("DiffCLIP-debug", optimizer=OPTIMIZER)
    size = clip.model.visual.image_size
    size = size if isinstance(size, int) else size[0]
    text = torch.ones(clip.model.context_length, dtype=torch.int64)
    vit = ClassificationModule("diff_vit_debug", num_classes=10, optimizer=OPTIMIZER)
    tokens = torch.ones(SMALL["max_length"] + 1, dtype=torch.int64)
    documents = torch.arange(len(tokens)) // 16
    return {
        "contrastive": (clip, {"image": torch.zeros(3, size, size), "text": text}),
        "classification": (vit, {"image": torch.zeros(3, 32, 32), "label": torch.tensor(1)}),
        "language": (LanguageModule("diff-3m", model_args=SMALL, optimizer=OPTIMIZER), {"tokens": tokens}),
        "language, documents": (
            LanguageModule("diff-3m", model_args=SMALL, optimizer=OPTIMIZER),
            {"tokens": tokens, "documents": documents},
        ),
    }


class Waits:
    """Counts the waits of a block by the line of code that waits: ours where one of ours is on the stack."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._show: Any = None

    def note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack()[:-1] if Path(frame.filename).name != "warnings.py"]
        ours = [frame for frame in frames if PACKAGE / "diffvision" in Path(frame.filename).parents]
        frame = (ours or frames)[-1]
        self.lines[f"{Path(frame.filename).name}: {frame.name}"] += 1

    def __enter__(self) -> "Waits":
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self.note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)


class PerStep(pl.Callback):
    """Notes the waits from one batch to the next."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.steps = waits, []

    def on_train_batch_start(self, *args: object) -> None:
        self.steps.append(self.waits.lines.copy())


def waits_of_fit(
    module: pl.LightningModule, row: dict[str, torch.Tensor], *, steps: int, every: int, averages: bool
) -> dict[str, Any]:
    """Return the waits of a step between logged ones, and of a logged one, behind the first `every` steps."""
    loader = DataLoader(Rows(row, BATCH * steps), batch_size=BATCH, pin_memory=True)
    with tempfile.TemporaryDirectory() as scratch, Waits() as waits:
        per_step = PerStep(waits)
        callbacks = [per_step, progress.ProgressLine(), Throughput(), *([EMA()] if averages else [])]
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=steps,
            log_every_n_steps=every,
            logger=CSVLogger(scratch),
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        with contextlib.redirect_stdout(Terminal()):
            trainer.fit(module, loader)
    taken = [after - before for before, after in zip(per_step.steps, per_step.steps[1:], strict=False)]
    logged = [step for number, step in enumerate(taken, 1) if number > every and number % every == 0]
    between = [step for number, step in enumerate(taken, 1) if number > every and number % every]
    return {"between logged steps": mean(between), "logged step": mean(logged)}


def mean(steps: list[Counter[str]]) -> dict[str, Any]:
    """Return the mean number of waits of a step, and by line."""
    total: Counter[str] = sum(steps, Counter())
    return {
        "waits a step": round(total.total() / len(steps), 2),
        "lines": {line: round(count / len(steps), 2) for line, count in total.most_common()},
    }


def waits_of_generate(tokens: int, **settings: Any) -> dict[str, Any]:
    """Return the waits of `generate` for each new token, its prompts and the model's start included."""
    model = language.create("diff-3m", **SMALL).to("cuda").eval()
    # One row; the end token is one that is never generated, as its logit is never the largest.
    with Waits() as waits:
        generate(model, [[1, 2, 3]], max_new_tokens=tokens, stop=(SMALL["vocab_size"],), **settings)
    lines = {line: round(count / tokens, 2) for line, count in waits.lines.most_common()}
    return {"waits a token": round(waits.lines.total() / tokens, 2), "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="log_every_n_steps")
    parser.add_argument("--stub", action="store_true", help="the device is a stub, which computes nothing")
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: run it on a GPU")
    if args.stub:  # kernels that need a device before they are launched
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        varlen.varlen_attn = lambda q, k, v, *lengths, **settings: q + k.mean() + v.mean()
    progress.BAR_INTERVAL = 0.0  # at every step, as in a run whose steps are longer
    os.environ["TERM"] = "xterm"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report: dict[str, Any] = {
        "command": f"python scripts/benchmarks/waits.py --steps {args.steps} --every {args.every}"
        + (" --stub" if args.stub else ""),
        "device": "a stub of a CUDA device, which computes nothing" if args.stub else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "fit": {},
        "generate": {},
    }
    for name, (module, row) in cases().items():
        averages = not name.startswith("language,")
        report["fit"][name] = waits_of_fit(module, row, steps=args.steps, every=args.every, averages=averages)
        print(name, json.dumps(report["fit"][name], indent=1))
    report["generate"] = {
        "greedy": waits_of_generate(32),
        "sampled": waits_of_generate(32, temperature=1.0),
    }
    print("generate", json.dumps(report["generate"], indent=1))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "waits.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
