"""The progress line of a run: redrawn in a terminal or a notebook's cell; printed every few seconds in a file.

How a terminal is written to is in `terminal`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, Timer
from rich.cells import cell_len
from rich.text import Text

from diffvision.data.images.folders import EvaluationFolder
from diffvision.training.fault_tolerance import watch_signals
from diffvision.training.fault_tolerance.lightning_internals import (
    find_callbacks,
    is_logging_step,
    is_shared_step,
    may_read,
)
from diffvision.training.schedule import epoch_steps, run_steps
from diffvision.training.terminal import CellScreen, Screen

# Names of metrics on the line, the most important first. All others come last, under their full names.
ALIASES = {
    r"train/loss": "loss",
    r"train/data_wait": "wait",
    r"zero_shot/(?P<dataset>.+)/acc1": "acc1",
    r"val/acc1": "val acc1",
    r"val/loss": "val loss",
    r"retrieval/(?P<dataset>.+)/image_retrieval_recall@(?P<k>\d+)": "t2i R@{k}",
    r"retrieval/(?P<dataset>.+)/text_retrieval_recall@(?P<k>\d+)": "i2t R@{k}",
    r"composition/(?P<dataset>.+)/acc": "composition",
    r"pairs/(?P<dataset>.+)/group_score": "pairs",
    r"objects/(?P<dataset>.+)/auc": "objects",
    r"val/perplexity": "val ppl",
    r"train/samples_per_second": "img/s",
    r"train/tokens_per_second": "tok/s",
    r"train/lr": "lr",
    r"lambda": "lambda",
    r"train/logit_scale": "scale",
    r"val/acc5": "val acc5",
}
OF_STEP = ("train/loss", "train/logit_scale")  # on the line although Lightning does not read them for it at every step
SHORTEST_BAR, LONGEST_BAR = 5, 40  # columns
REDRAWN = 0.25  # seconds between two drawings
MEMORY = 100  # steps over which the time of a step is averaged


class ProgressLine(ProgressBar):
    """Epoch and step, counted from 1, of the whole run; the time left for all of it; and the metrics that fit.

    Metrics are those of the last logging step, and on a CPU of the last step: to read others would wait for the GPU.
    The time left is that of the remaining steps and validations, each as long as the recent ones of this process. In a
    terminal the line is redrawn in place, other output appears above it, and each epoch leaves a line there. In a
    notebook other output appears below it. Elsewhere a line is printed at most every `seconds` on logging steps and in
    evaluations, and after each validation and epoch.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        """Set how often a line is printed.

        Args:
            seconds: between two lines where the output is neither a terminal nor a notebook.
        """
        super().__init__()
        self.seconds, self.is_enabled = seconds, True
        self._screen: Screen | CellScreen | None = None
        self._clock = Clock()
        self._of_step: dict[str, Any] = {}
        self._parts: list[str] = []  # metrics, formatted
        self._doing, self._share_done = "", 0.0  # the current evaluation, and how much of it is done
        self._shown, self._step = 0.0, -1  # the time of the last line, and the step that a validation has shown

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        """Hide the line, as Lightning does on ranks other than the first."""
        self.is_enabled = False

    # --- training ---

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._clock = Clock()
        self._clock.start(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._clock.stepped(trainer.global_step)
        step = trainer.global_step
        logs, drawn = is_logging_step(trainer, step), self._screen is not None
        # The numbers of the next steps stay on the device, or are each rank's own, so these are shown now.
        last = drawn and logs and not (may_read(trainer, step + 1) and trainer.world_size == 1)
        if self.is_enabled and (last or (self._is_line_due() and (drawn or logs))):
            self._show(trainer, metrics=may_read(trainer, step) and is_shared_step(trainer, step))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the line, unless a validation has just shown it; leave one of the epoch above it in a terminal."""
        _ = trainer.callback_metrics  # computed at an epoch's end, in collectives, so every rank asks for them
        if self._screen is not None or self._step != trainer.global_step:
            self._show(trainer, metrics=True)
        if isinstance(self._screen, Screen) and not getattr(trainer, "overfit_batches", 0):  # else an epoch is a step
            head = describe_position(trainer, total_steps(trainer))
            print(format_line(head, None, None, self._parts, self._screen.width).plain)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    on_train_end = on_exception = teardown

    # --- evaluations ---

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._clock.validation_started()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show how much of the evaluation is done, if it is time."""
        batches = batches_of(trainer)
        total = sum(batches)
        self._doing = "evaluating"
        if isinstance(batch, EvaluationFolder):
            self._doing += f" {batch.task}/{batch.name}"
            self._share_done = 0.0
        else:
            self._share_done = (sum(batches[:dataloader_idx]) + batch_idx) / total if math.isfinite(total) else 0.0
        if self._is_line_due():
            self._show(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._doing, self._share_done = "", 0.0
        if not trainer.sanity_checking:
            self._clock.validation_ended()
            if trainer.state.fn == "fit":
                self._show(trainer, metrics=True)
                self._step = trainer.global_step

    def show_evaluation(self, share: float, what: str) -> None:
        """Show how much of the current evaluation is done, in a line that is drawn at most every few seconds.

        Args:
            share: of the evaluation, from 0 to 1.
            what: what is encoded; "classes" for the prompts of a zero-shot evaluation, which come before its images.
        """
        doing = self._doing.removesuffix(" classes")
        self._doing, self._share_done = (f"{doing} classes" if what == "classes" else doing), share
        if self._is_line_due():
            self._show(self.trainer)

    # --- the line ---

    def _begin(self) -> None:
        if self.is_enabled and self._screen is None:
            self._screen = Screen.opened() or CellScreen.opened()
        if self._screen is None:
            self._shown = time.monotonic()  # a short evaluation needs no line

    def _is_line_due(self) -> bool:
        return time.monotonic() - self._shown >= (self.seconds if self._screen is None else REDRAWN)

    def _show(self, trainer: pl.Trainer, metrics: bool = False) -> None:
        """Draw the line, with new metrics where they may be read without waiting for the device."""
        if not self.is_enabled:
            return
        self._shown = time.monotonic()
        if metrics:
            logged = trainer.callback_metrics
            if is_shared_step(trainer, trainer.global_step):
                self._of_step = {name: logged[name] for name in OF_STEP if name in logged}
            self._parts = format_metrics(self._of_step | trainer.progress_bar_metrics)
        whole = trainer.state.fn == "fit" and not trainer.sanity_checking
        if whole:
            total = total_steps(trainer)
            head = describe_position(trainer, total)
            share = None if total is None else trainer.global_step / max(total, 1)
            left = self._seconds_left(trainer, total)
            parts = [f"{self._doing} {self._share_done:.0%}", *self._parts] if self._doing else self._parts
        else:
            head, share, left, parts = self._doing or "evaluating", self._share_done, None, []
        if self._screen is None:
            print(format_line(head, share, left, parts).plain, flush=True)
        else:
            self._screen.draw(format_line(head, share, left, parts, self._screen.width, self._screen.bar))

    def _seconds_left(self, trainer: pl.Trainer, total: int | None) -> float | None:
        limits = [] if total is None else [self._clock.left(total, validations_per_step(trainer), self._share_done)]
        limits += [timer.time_remaining() for timer in find_callbacks(trainer, Timer)]
        return min((limit for limit in limits if limit is not None), default=None)


def follow(trainer: pl.Trainer) -> Callable[[Any, str], Iterator[Any]]:
    """Return the function through which an evaluation in a run passes its batches.

    Between two of them the run acts on signals, and its line shows how many are done.
    """
    bar = trainer.progress_bar_callback

    def through(batches: Any, description: str) -> Iterator[Any]:
        for number, batch in enumerate(watch_signals(trainer, batches)):
            yield batch
            if isinstance(bar, ProgressLine):
                bar.show_evaluation((number + 1) / len(batches), description)

    return through


class Clock:
    """The time that a run still takes, estimated from its recent steps and its last validation."""

    def __init__(self, now: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.now = now
        self._mean, self._weight = 0.0, 0.0  # seconds per step, exponentially weighted
        self._validation: float | None = None  # seconds
        self._began: float | None = None  # when the current validation began
        self.start(0)

    def start(self, step: int) -> None:
        self._step, self._mark, self._first = step, self.now(), True

    def stepped(self, step: int) -> None:
        """Note that a batch was trained on; the first step also compiles and fills queues, and does not count."""
        steps, now = step - self._step, self.now()
        if steps <= 0:
            return
        if not self._first:
            kept = (1 - 1 / MEMORY) ** steps
            self._mean = kept * self._mean + (1 - kept) * (now - self._mark) / steps
            self._weight = kept * self._weight + (1 - kept)
        self._step, self._mark, self._first = step, now, False

    def validation_started(self) -> None:
        self._began = self.now()

    def validation_ended(self) -> None:
        assert self._began is not None
        self._validation = self.now() - self._began
        self._began = None
        self._mark += self._validation

    def left(self, total: int, validations: float, within: float = 0.0) -> float | None:
        """Return the seconds to the last of `total` steps and its validation; None before the second step.

        Args:
            total: steps of the run.
            validations: per step, on average.
            within: share of the current validation that is done.
        """
        if not self._weight:
            return None
        steps = max(0, total - self._step)
        seconds = steps * self._mean / self._weight + steps * validations * (self._validation or 0.0)
        if self._began is not None:
            passed = self.now() - self._began
            seconds += max(0.0, self._validation - passed) if self._validation else passed * (1 / max(within, 0.1) - 1)
        return seconds


def format_line(
    head: str,
    share: float | None,
    left: float | None,
    parts: Sequence[str],
    width: int | None = None,
    bar: tuple[str, str] = ("━", "─"),
) -> Text:
    """Return the line, never wider than `width`.

    Args:
        head: how far the run is.
        share: of the run that is done, if it is known.
        left: seconds that the run still takes.
        parts: metrics, the most important first; those that do not fit are left out as a whole.
        width: columns; None for all parts and no bar.
        bar: characters for the part that is done, and for the rest.
    """
    numbers = ([] if share is None else [f"{math.floor(100 * min(share, 1))}%"]) + (
        [] if left is None else [f"{format_duration(left)} left"]
    )
    tail = "".join(f" {number}" for number in numbers)
    if width is None:
        return Text(head + tail + "".join(f"  {part}" for part in parts))
    room = width - cell_len(head) - cell_len(tail)
    least = 0 if share is None else 1 + SHORTEST_BAR
    metrics = ""
    for part in parts:
        if least + cell_len(metrics) + 2 + cell_len(part) > room:
            break
        metrics += f"  {part}"
    text = Text(head)
    columns = min(room - cell_len(metrics) - 1, LONGEST_BAR)
    if share is not None and columns >= SHORTEST_BAR:
        done = round(columns * min(share, 1))
        text.append(" ").append(bar[0] * done, "green").append(bar[1] * (columns - done), "bright_black")
    text.append(tail + metrics)
    text.truncate(width)
    return text


def format_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Return metrics in short, the most important first: "loss 2.41", "digits acc1 0.953", "812 img/s".

    A data set's name comes before the alias where there are metrics of several.
    """
    named = []
    for order, (key, value) in enumerate(metrics.items()):
        rank, alias, dataset = len(ALIASES) + order, key, None
        for position, (pattern, short) in enumerate(ALIASES.items()):
            if match := re.fullmatch(pattern, key):
                rank, alias, dataset = position, short.format(**match.groupdict()), match.groupdict().get("dataset")
        named.append((rank, alias, dataset, format_number(float(value))))
    several = len({dataset for _, _, dataset, _ in named if dataset}) > 1
    texts = []
    for _, alias, dataset, value in sorted(named, key=lambda one: one[0]):
        name = f"{dataset} {alias}" if several and dataset else alias
        texts.append(f"{value} {name}" if name.endswith("/s") else f"{name} {value}")
    return texts


def format_number(value: float) -> str:
    """Return a number with three digits, or all before the point, in few characters."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 0.01:
        return f"{value:#.3g}"
    return f"{value:.1e}".replace("e-0", "e-")


def format_duration(seconds: float) -> str:
    """Return a duration such as 0:42, 1:02:03 or 2d 03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def describe_position(trainer: pl.Trainer, total: int | None) -> str:
    """Return how far a fit is: "epoch 2/6 step 120/786", without the totals where they are not known."""
    steps = epoch_steps(trainer, trainer.current_epoch)
    epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
    if steps and total is not None:
        epochs = math.ceil(total / steps)
    epoch = f"epoch {trainer.current_epoch + 1}" + (f"/{epochs}" if epochs else "")
    return f"{epoch} step {trainer.global_step}" + (f"/{total}" if total is not None else "")


def total_steps(trainer: pl.Trainer) -> int | None:
    """Return the steps of the whole run, in all its processes; None where neither steps nor epochs are limited."""
    return run_steps(trainer, trainer.max_steps, trainer.max_epochs)


def batches_of(trainer: pl.Trainer) -> Sequence[int | float]:
    """Return the numbers of batches of the current evaluation, by loader."""
    if trainer.testing:
        return trainer.num_test_batches
    if trainer.predicting:
        return trainer.num_predict_batches
    return trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches


def validations_per_step(trainer: pl.Trainer) -> float:
    """Return the number of validations for each optimizer step, on average."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if every is None or not math.isfinite(every) or not trainer.enable_validation:
        return 0.0  # by the clock, or at an epoch's end that is not known
    batches = trainer.num_training_batches
    per_batch = 1 / every if epochs is None else batches // every / batches / epochs
    return per_batch * trainer.accumulate_grad_batches
