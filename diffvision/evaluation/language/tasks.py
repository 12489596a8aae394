"""The table of language evaluations: what each reads, and how it is called with the options of the command."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from diffvision.data.datasets.needle_text import FORMS
from diffvision.evaluation.language.attention_mass import attention_mass
from diffvision.evaluation.language.cache_pruning import cache_pruning, repeat_question
from diffvision.evaluation.language.language_options import LanguageOptions, needle_pair
from diffvision.evaluation.language.low_bit import SCHEMES, low_bit
from diffvision.evaluation.language.many_shot import label_mapping_tasks, many_shot, order_robustness
from diffvision.evaluation.language.mathematics import Question, mathematics
from diffvision.evaluation.language.needle import needle, needle_samples
from diffvision.evaluation.language.outliers import outliers
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.position_nll import position_nll
from diffvision.evaluation.language.read_documents import cut_rows
from diffvision.evaluation.language.recall_errors import recall_errors
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.evaluation.per_sample import PerSample
from diffvision.opening import Model
from diffvision.plugins import PluginTable

LENGTHS = (512, 1024, 2048, 4096)


@dataclass
class Work:
    """A model, and what it is evaluated on and how.

    Attributes:
        model: the model, with its tokenizer where a task needs one.
        options: the settings.
        documents: int64 [N] each.
        num_bytes: of the documents' text.
        files: the data of a task that reads neither documents nor questions, as the user named them.
        questions: of math.
        progress: wraps what takes long.
        folder: of what a task writes besides its numbers; None for nothing.
    """

    model: Model
    options: LanguageOptions = field(default_factory=LanguageOptions)
    documents: Sequence[Tensor] = ()
    num_bytes: int | None = None
    files: Sequence[str] = ()
    questions: Sequence[Question] = ()
    progress: Progress = silent
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
    def batches(self) -> dict[str, Any]:
        """The arguments that most evaluations share."""
        return {"batch_size": self.options.batch_size, "progress": self.progress}

    @property
    def contexts(self) -> dict[str, Any]:
        """The arguments that all evaluations on contexts with needles or facts share."""
        options = self.options
        return {
            "depths": options.depths,
            "samples": options.samples,
            "form": FORMS[options.form],
            "seed": options.seed,
        }


class LanguageEvaluation(NamedTuple):
    """One evaluation in the table `LANGUAGE_EVALUATIONS`.

    Attributes:
        function: returns the metrics, sample by sample or as a number where a metric is not a mean over samples.
        reads: "documents" (text, as tokens), "questions" (of math), "files" (data that it reads itself) or "tokenizer"
            (no data).
        data: the error's words where data is missing: what the task needs, a colon, and what to give.
    """

    function: Callable[[Work], Mapping[str, PerSample | float]]
    reads: str
    data: str = "text: give data, files or folders of .txt or .jsonl, or shards"


def _perplexity(work: Work) -> dict[str, float]:
    return perplexity(work.model.module, work.documents, window=work.window, num_bytes=work.num_bytes, **work.batches)


def _position_nll(work: Work) -> dict[str, float]:
    return position_nll(work.model.module, work.documents, length=work.window, **work.batches)


def needles(work: Work) -> dict[str, float]:
    """Return the metrics of `needle` for each number of needles of the options."""
    model, metrics = work.model, dict[str, float]()
    for pair in work.options.needles:
        count, queries = needle_pair(pair)
        settings = {"lengths": work.lengths, "needles": count, "queries": queries, **work.batches, **work.contexts}
        accuracy = needle(model.module, model.tokenizer, **settings)
        metrics |= {f"{pair}/{metric}": value for metric, value in accuracy.items()}
    return metrics


def _recall_errors(work: Work) -> dict[str, PerSample]:
    settings = {"facts": work.options.facts, "lengths": work.lengths, **work.batches, **work.contexts}
    return recall_errors(work.model, **settings)


def _math(work: Work) -> dict[str, PerSample | float]:
    return mathematics(
        work.model,
        work.questions,
        template=work.options.template,
        new_tokens=work.options.new_tokens,
        file=None if work.folder is None else work.folder / "math" / work.model.name / "answers.jsonl",
        **work.batches,
    )


def _attention_mass(work: Work) -> dict[str, float]:
    model, length = work.model, min(work.lengths)
    count, queries = needle_pair(work.options.needles[-1])
    settings = {"length": length, "needles": count, "queries": queries, **work.contexts}
    return attention_mass(model.module, model.tokenizer, progress=work.progress, **settings)


def _many_shot(work: Work) -> dict[str, float]:
    """Return accuracies by number of demonstrations, and how they vary with the demonstrations' order."""
    options, model = work.options, work.model
    tasks = label_mapping_tasks(options.mappings, seed=options.seed)
    shared: dict[str, Any] = {"max_length": model.max_length, "seed": options.seed, **work.batches}
    metrics = many_shot(model.module, model.tokenizer, tasks, shots=options.shots, **shared)
    shots, permutations = max(options.shots), options.permutations
    orders = order_robustness(model.module, model.tokenizer, tasks, shots=shots, permutations=permutations, **shared)
    return metrics | {f"order/{metric}": value for metric, value in orders.items()}


def _outliers(work: Work) -> dict[str, float]:
    return outliers(work.model.module, cut_rows(work.documents, work.window), progress=work.progress)


def _low_bit(work: Work) -> dict[str, PerSample | float]:
    rows = cut_rows(work.documents, work.window)
    return low_bit(work.model.module, rows, schemes=work.options.schemes or tuple(SCHEMES), **work.batches)


def _cache_pruning(work: Work) -> dict[str, PerSample | float]:
    options, longest = work.options, work.model.max_length
    # By default there is room for a question that is asked twice.
    lengths = work.lengths if options.lengths else [length * 7 // 8 for length in work.lengths]
    drawing = {name: value for name, value in work.contexts.items() if name != "depths"}
    samples = [
        sample
        for (count, queries), length, depth in itertools.product(
            map(needle_pair, options.needles), lengths, options.depths
        )
        for sample in needle_samples(
            work.model.tokenizer, length=length, depth=depth, needles=count, queries=queries, **drawing
        )
    ]
    needed = max(len(repeat_question(sample).tokens) for sample in samples)
    if longest is not None and needed > longest:
        raise ValueError(
            f"lengths has {max(lengths)}, and a question that is asked twice makes it {needed}, over the {longest} "
            f"tokens that {work.model.name} reads: give smaller ones"
        )
    return cache_pruning(
        work.model.module,
        cut_rows(work.documents, work.window + 1),
        samples,
        continuation=options.continuation,
        methods=options.pruning_methods,
        ratios=options.pruning_ratios,
        seed=options.seed,
        **work.batches,
    )


_EVALUATIONS = {
    "perplexity": LanguageEvaluation(_perplexity, "documents"),
    "position_nll": LanguageEvaluation(_position_nll, "documents"),
    "needle": LanguageEvaluation(needles, "tokenizer"),
    "recall_errors": LanguageEvaluation(_recall_errors, "tokenizer"),
    "math": LanguageEvaluation(_math, "questions", "questions with answers: give data, JSON lines such as GSM8K's"),
    "attention_mass": LanguageEvaluation(_attention_mass, "tokenizer"),
    "many_shot": LanguageEvaluation(_many_shot, "tokenizer"),
    "outliers": LanguageEvaluation(_outliers, "documents"),
    "low_bit": LanguageEvaluation(_low_bit, "documents"),
    "cache_pruning": LanguageEvaluation(_cache_pruning, "documents"),
}
LANGUAGE_EVALUATIONS = PluginTable("language_tasks", _EVALUATIONS, LanguageEvaluation)
"""Task -> its evaluation, of this package and of plugins (`diffvision.plugins`)."""
