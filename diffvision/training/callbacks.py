"""Callbacks that log lambda, samples or tokens per second and what became of every sample, and that schedule lambda.

Weight averaging is in `ema`, the progress line in `progress`, fault tolerance in `fault_tolerance`. timm and
OpenCLIP are imported when a callback runs: they take seconds, and the help of `fit` imports this module.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.data.images.caption_tokenizer import LARGE_CUT
from diffvision.data.shards.report import Report
from diffvision.training.fault_tolerance import gather_from_ranks
from diffvision.training.fault_tolerance.lightning_internals import is_logging_step

COUNTED = "data_report"  # key in a checkpoint: what DataReport has counted of the epoch
LARGE_TAIL = 0.05  # share of an epoch's samples; where the incomplete last batch has more, a run says so
CUT_SAMPLES = 1000  # the first ones, of which the share of captions that are cut is judged
LAMBDA_SAMPLES = 16  # of a batch, over which the mean of lambda is where it depends on the token
SAVED_FIELDS = ("total", "epoch", "seen", "skipped", "substituted", "cut", "examples")  # of a report


class LambdaMonitor(pl.Callback):
    """Logs `lambda/<layer>` for every differential layer, and their mean as `lambda`, on logging steps.

    Where lambda depends on the token (V2) it is the mean over the first few samples of the step's batch on this rank.
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the lambdas of the batch's first samples."""
        if not is_logging_step(trainer, trainer.global_step):
            return
        from diffvision.analysis.lambdas import layer_lambdas

        model: Any = pl_module.model
        inputs = {key: batch[key][:LAMBDA_SAMPLES] for key in ("image", "text") if key in batch}
        if "tokens" in batch:
            inputs["tokens"] = batch["tokens"][:1, :-1]  # one packed sequence has as many tokens as many captions
            if "image" in batch:  # a vision-language model's, whose images are in the tokens
                inputs = {"image": batch["image"], "tokens": batch["tokens"][:, :-1]}
        # A layer's dropout must not advance the run's random numbers, and its hooks must not compile a layer again.
        with (
            torch.random.fork_rng([pl_module.device] if pl_module.device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
        ):
            lambdas = layer_lambdas(model, inputs)
        if lambdas:
            pl_module.log_dict({f"lambda/{name}": value for name, value in lambdas.items()})
            # On the CPU, as Lightning reads what is logged for a progress bar at every step from then on.
            pl_module.log("lambda", torch.tensor(sum(lambdas.values()) / len(lambdas)), prog_bar=True)


class LambdaAnnealing(pl.Callback):
    """Schedules the lambda of DEX layers (`diffvision.adapt(..., "dex")`) as in their paper.

    At step t of the first T

        lambda = (1 - t / T) (t / T) lambda_init + (t / T) lambda_learned

    and the learned part alone from then on. It is above 0 from the first step on. It depends on the step alone, so a
    resumed run continues it. The learned part starts at 0: if it is still 0 at step T, the layer ends as plain
    attention. With `LambdaWarmup`, lambda_init stays.

    Source: arXiv 2505.16333 equation 4.
    """

    least = 2  # steps: with T = 1 lambda would be the untrained learned part, 0, from the first step on

    def __init__(self, steps: int) -> None:
        """Set the length of the schedule.

        Args:
            steps: T, in optimizer steps; half of the run or less leaves steps in which lambda is learned.
        """
        if steps < self.least:
            raise ValueError(
                f"steps must be {self.least} or more, so that lambda is above 0 at the first step, got {steps}"
            )
        self.steps = steps

    def shares(self, done: float) -> tuple[float, float]:
        """Return the factors of lambda_init and of the learned part after the fraction `done` of the T steps."""
        return (1 - done) * done, done

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        from diffvision.models.adapt import set_dex_schedule

        set_dex_schedule(pl_module, *self.shares(min(1.0, (trainer.global_step + 1) / self.steps)))


class LambdaWarmup(LambdaAnnealing):
    """Raises DEX's lambda linearly to lambda_init plus the learned part, where it stays; not from the paper."""

    least = 1

    def shares(self, done: float) -> tuple[float, float]:
        """Return the factors of lambda_init and of the learned part after the fraction `done` of the T steps."""
        return done, done


class TrainOnlyNew(pl.Callback):
    """Freezes everything in an adapted model except its new parameters, from the start of `fit` on."""

    def __init__(self, also: list[str] | None = None) -> None:
        """Set which other parameters are trained.

        Args:
            also: other submodules of the attention layers to train; DEX's paper trains [k_proj, v_proj, proj].
        """
        self.also = also or []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            from diffvision.models.adapt import freeze_but_new

            freeze_but_new(pl_module, self.also)


class Throughput(pl.Callback):
    """Logs `train/samples_per_second` over all ranks, for text `train/tokens_per_second` too, and `train/memory_gib`.

    The rate is the samples consumed over the wall time since the last logging step. The time includes waiting for data,
    but not validation and the ends of epochs. `train/data_wait` is the share of it for which this rank's process waited
    for our loaders; a GPU may still be busy with earlier steps then.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.samples, self.tokens, self.seconds, self.mark = 0, 0, 0.0, time.perf_counter()
        self.waited = getattr(trainer.train_dataloader, "waited", None)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out the time since the last batch."""
        self.mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the rates since they were last logged, and the share of time that waited for data."""
        now = time.perf_counter()
        self.seconds, self.mark = self.seconds + now - self.mark, now
        data: torch.Tensor = batch["tokens"] if "tokens" in batch else batch["image"]
        self.samples += len(data) * trainer.world_size  # every rank has the same number
        if "tokens" in batch:
            self.tokens += len(data) * (data.shape[1] - 1) * trainer.world_size  # that the model reads
        if is_logging_step(trainer, trainer.global_step):
            rates = torch.tensor([self.samples, self.tokens]) / self.seconds  # on the CPU, as above
            pl_module.log("train/samples_per_second", rates[0], prog_bar=not self.tokens)
            if self.tokens:
                pl_module.log("train/tokens_per_second", rates[1], prog_bar=True)
            if self.waited is not None:
                loader: Any = trainer.train_dataloader
                share = torch.tensor((loader.waited - self.waited) / self.seconds)
                pl_module.log("train/data_wait", share, prog_bar=True)
                self.waited = loader.waited
            pl_module.log("train/memory_gib", torch.tensor(_peak_memory(pl_module.device) / 2**30))
            self.samples, self.tokens, self.seconds = 0, 0, 0.0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out the time of the validation, which runs after on_train_batch_end."""
        self.mark = time.perf_counter()


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on its GPU, or in all on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class DataReport(pl.Callback):
    """Reports after each epoch how many samples were seen, skipped and dropped, and checks that the sum is right.

    Counts are summed over ranks: seen + skipped + tail = total. A run that was cut short adds the samples that it did
    not reach. A run that is resumed within an epoch continues the counts of its checkpoint. A new run reports first if
    the tail, the incomplete last batch, is large. It warns once if more than 5% of the first captions are cut.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self.earlier: Report | None = None  # over all ranks, before the run was resumed
        self.trained: Report | None = None  # on this rank, without a batch that is loaded and not yet trained

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        report: Report | None = getattr(trainer.train_dataloader, "report", None)
        trained = [] if self.trained is None else gather_from_ranks(trainer, self.trained)
        if report is not None and (reports := [*self._reports_before_resume(report.epoch), *trained]):
            total = add_reports(reports)
            fields = {name: getattr(total, name) for name in SAVED_FIELDS}
            checkpoint[COUNTED] = fields | {"skipped": dict(total.skipped)}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        if COUNTED in checkpoint:
            fields = checkpoint[COUNTED]
            self.earlier = Report(**fields | {"skipped": Counter(fields["skipped"])})

    def _reports_before_resume(self, epoch: int) -> list[Report]:
        """Return the counts that the resumed checkpoint has of this epoch, if it has any."""
        return [self.earlier] if self.earlier is not None and self.earlier.epoch == epoch else []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting batches; print how many samples each epoch drops, if they are many."""
        self.batches, self.trained = 0, None
        loader: Any = trainer.train_dataloader
        report: Report | None = getattr(loader, "report", None)
        if report is not None and not trainer.global_step and report.tail > LARGE_TAIL * report.total:
            used = f"{report.total - report.tail:,}/{report.total:,} samples used in each epoch"
            pl_module.print(f"{used} (incomplete last batch of {loader.batch_size:,} dropped)")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        report: Report | None = getattr(trainer.train_dataloader, "report", None)
        if report is not None:
            examples = {reason: [*found] for reason, found in report.examples.items()}
            self.trained = replace(report, skipped=report.skipped.copy(), examples=examples)
            if report.seen >= CUT_SAMPLES:
                self._warn_of_cut(report)

    def _warn_of_cut(self, report: Report) -> None:
        if not self.has_warned and (share := report.cut / max(report.seen, 1)) > LARGE_CUT:
            rank_zero_warn(f"{share:.0%} of captions are cut to the model's tokens: raise model.context_length")
            self.has_warned = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log and print the counts; raise RuntimeError if they do not add up."""
        loader: Any = trainer.train_dataloader
        batches, self.batches, self.trained = self.batches, 0, None
        if not (reports := _reports(trainer)):
            return  # an ordinary loader does not count samples
        earlier = self._reports_before_resume(reports[0].epoch)
        self._warn_of_cut(add_reports([*earlier, *reports]))
        self.earlier = None
        text, counts = describe_epoch(reports, consumed=batches * loader.batch_size, earlier=earlier)
        # All ranks have the same counts; Lightning requires a way to combine them nevertheless.
        pl_module.log_dict({f"data/{k}": float(v) for k, v in counts.items()}, reduce_fx="max", sync_dist=True)
        if not getattr(trainer, "overfit_batches", 0):  # else an epoch is a step
            pl_module.print(text)


def _reports(trainer: pl.Trainer) -> list[Report]:
    """Return each rank's report of the current epoch; an empty list for a loader without reports."""
    report = getattr(trainer.train_dataloader, "report", None)
    return [] if report is None else gather_from_ranks(trainer, report)


def add_reports(reports: Sequence[Report]) -> Report:
    """Sum the reports of one epoch, in chronological order."""
    skipped: Counter[str] = sum((r.skipped for r in reports), Counter())
    examples = {reason: [e for r in reports for e in r.examples.get(reason, [])][:3] for reason in skipped}
    sums = {name: sum(getattr(r, name) for r in reports) for name in ("seen", "substituted", "cut")}
    return replace(reports[-1], skipped=skipped, examples=examples, **sums)


def describe_epoch(
    reports: Sequence[Report], consumed: int, earlier: Sequence[Report] = ()
) -> tuple[str, dict[str, int]]:
    """Return one epoch's counts from the reports of all ranks.

    Args:
        reports: one per rank, of the same epoch.
        consumed: samples that the training loop read, summed over ranks.
        earlier: reports of this epoch from before the run was resumed.

    Returns:
        A text, in which epochs are counted from 1, and the counts by name.

    Raises:
        RuntimeError: the loaders' counts and the loop's differ.
    """
    first, whole = reports[0], add_reports([*earlier, *reports])
    seen, bad = whole.seen, whole.bad
    counts = {"seen": seen, "skipped": bad, "substituted": whole.substituted, "tail": first.tail}
    counts |= {"cut": whole.cut} if whole.cut else {}
    counted = sum(r.seen + r.bad for r in earlier)
    before, consumed = first.before - counted, consumed + counted
    ahead = first.total - first.tail - before - consumed
    rest = {"before the run was resumed": before, "not reached": ahead}
    if seen + bad != consumed or ahead < 0:
        raise RuntimeError(
            f"epoch {first.epoch + 1}: trained on {consumed:,} samples, but the loader has {seen:,} seen, {bad:,} "
            f"skipped of {first.total:,}, {first.tail:,} left: report this"
        )
    parts = [f"{seen:,} seen", f"{bad:,} skipped"]
    parts += [f"{n:,} {what}" for what, n in rest.items() if n]
    text = f"epoch {first.epoch + 1}: {' + '.join(parts)} = {first.total - first.tail:,} of {first.total:,} samples"
    return "\n".join([text, *whole.details()]), counts
