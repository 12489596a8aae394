"""The table of language evaluations: what each reads, and how it is called with the options of the command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from diffvision.analysis.figures import language as figures
from diffvision.data.datasets.needle_text import FORMS, Form, sentences_of
from diffvision.data.shards.report import Limits
from diffvision.evaluation.cache import model_digest
from diffvision.evaluation.language.documents import Reading, read_texts
from diffvision.evaluation.language.needle import needle, start_tokens
from diffvision.evaluation.language.options import LanguageOptions, needle_pair
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.position_nll import position_nll
from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.samples import PerSample
from diffvision.opening import Model
from diffvision.plugins import PluginTable

PROBE = "Probe, 1 2 3: Ein großer Hund. 你好 🙂\n\tdef f(x):"  # distinguishes tokenizers
LENGTHS = (512, 1024, 2048, 4096)


@dataclass
class Work:
    """A model, and what it is evaluated on and how.

    Attributes:
        model: the model, with its tokenizer where a task needs one.
        options: the settings.
        documents: int64 [N] each.
        num_bytes: of the documents' text.
        inputs: task -> what its `prepare` returned.
        progress: wraps what takes long.
        folder: of what a task writes besides its numbers and picture; None for nothing.
    """

    model: Model
    options: LanguageOptions = field(default_factory=LanguageOptions)
    documents: Sequence[Tensor] = ()
    num_bytes: int | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = unseen
    folder: Path | None = None

    @property
    def window(self) -> int:
        """Tokens that the model reads at a time.

        Raises:
            ValueError: options.window is over what it can read.
        """
        longest = self.model.max_length
        if self.options.window is None:
            return min(longest or 2048, 2048)
        if longest is not None and self.options.window > longest:
            raise ValueError(
                f"window is {self.options.window}, over the {longest} tokens that {self.model.name} reads: give less"
            )
        return self.options.window

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of contexts with needles.

        Raises:
            ValueError: options.lengths has one over what the model can read.
        """
        longest = self.model.max_length or max(LENGTHS)
        if self.options.lengths is None:
            return tuple(length for length in LENGTHS if length <= longest) or (longest,)
        if over := [length for length in self.options.lengths if length > longest]:
            raise ValueError(
                f"lengths has {over[0]}, over the {longest} tokens that {self.model.name} reads: give smaller ones"
            )
        return self.options.lengths

    @property
    def form(self) -> Form:
        """How needles are written, in the user's haystack if there is one."""
        form = FORMS[self.options.form]
        if self.options.haystack is None:
            return form
        texts = read_texts([self.options.haystack], reading_of(self.options))
        return dataclasses.replace(form, haystack=sentences_of("\n".join(texts)))

    @property
    def contexts(self) -> dict[str, Any]:
        """The arguments that all evaluations on contexts with needles or facts share."""
        options = self.options
        return {
            "depths": options.depths,
            "samples": options.samples,
            "form": self.form,
            "seed": options.seed,
            "progress": self.progress,
        }


class Request(NamedTuple):
    """What a task prepares its inputs from, before a model is loaded.

    Attributes:
        data: files or folders; None where none are given.
        options: the evaluations' settings.
        settings: the task's own settings, by name.
        device: where models are evaluated.
        cache: folder of finished results; None where none are kept.
    """

    data: list[str] | None
    options: LanguageOptions
    settings: Mapping[str, Any]
    device: str
    cache: Path | None


class LanguageEvaluation(NamedTuple):
    """One evaluation in the table `LANGUAGE_EVALUATIONS`.

    Attributes:
        function: returns the metrics, sample by sample or as a number where a metric is not a mean over samples.
        draw: returns a matplotlib figure of the metrics by model.
        reads: "documents" (text, as tokens), "tokenizer" (no data), or a name of its own for data that `prepare` reads.
        data: the error's words where data is missing: what the task needs, a colon, and what to give.
        prepare: reads and checks what the task needs besides documents; `Work.inputs` has what it returns.
        identity: what the metrics depend on besides the model, the documents and the options, as plain values.
        recorded: the names of the task's own settings that are written with its metrics.
    """

    function: Callable[[Work], Mapping[str, PerSample | float]]
    draw: Callable[[figures.Results], Any]
    reads: str
    data: str = "text: give data, files or folders of .txt or .jsonl, or shards"
    prepare: Callable[[Request], Any] | None = None
    identity: Callable[[Work], dict[str, Any]] | None = None
    recorded: tuple[str, ...] = ()


def _perplexity(work: Work) -> dict[str, float]:
    return perplexity(
        work.model.module,
        work.documents,
        window=work.window,
        stride=work.options.stride,
        num_bytes=work.num_bytes,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _position_nll(work: Work) -> dict[str, float]:
    return position_nll(
        work.model.module,
        work.documents,
        length=work.window,
        points=work.options.points,
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def needles(work: Work) -> dict[str, float]:
    """Return the metrics of `needle` for each number of needles of the options."""
    metrics: dict[str, float] = {}
    for pair in work.options.needles:
        count, queries = needle_pair(pair)
        accuracy = needle(
            work.model.module,
            work.model.tokenizer,
            lengths=work.lengths,
            needles=count,
            queries=queries,
            batch_size=work.options.batch_size,
            **work.contexts,
        )
        metrics |= {f"{pair}/{metric}": value for metric, value in accuracy.items()}
    return metrics


_EVALUATIONS = {
    "perplexity": LanguageEvaluation(_perplexity, figures.perplexity_bars, "documents"),
    "position_nll": LanguageEvaluation(_position_nll, figures.position_curves, "documents"),
    "needle": LanguageEvaluation(needles, figures.needle_maps, "tokenizer"),
}
LANGUAGE_EVALUATIONS = PluginTable("diffvision.language_tasks", _EVALUATIONS, LanguageEvaluation)
"""Task -> its evaluation, of this package and of plugins (`diffvision.plugins`)."""


def reading_of(options: LanguageOptions) -> Reading:
    """Return how files of text are read."""
    return Reading(options.text_key, Limits(options.max_bad_fraction))


def model_identity(model: Model) -> dict[str, Any]:
    """Return what outputs of a model depend on besides its input."""
    tokenizer = model.tokenizer
    return {
        "model": model_digest(model.module),
        "tokenizer": None
        if tokenizer is None
        else [tokenizer.vocab_size, tokenizer.encode(PROBE), start_tokens(tokenizer)],
        "max_length": model.max_length,
    }
