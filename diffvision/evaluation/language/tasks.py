"""The table of language evaluations: what each reads, and how it is called with the options of the command."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision.analysis.figures import language as figures
from diffvision.data.made.needle_text import FORMS, Form, sentences_of
from diffvision.data.shards.report import Limits
from diffvision.evaluation.cache import model_digest
from diffvision.evaluation.language.documents import Reading, read_documents, read_texts, rows_of
from diffvision.evaluation.language.needle import needle, needle_samples, start_tokens
from diffvision.evaluation.language.options import LanguageOptions, needle_pair
from diffvision.evaluation.language.perplexity import perplexity
from diffvision.evaluation.language.position_nll import position_nll
from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.samples import PerSample
from diffvision.lab.faithfulness.judges import Judge
from diffvision.lab.faithfulness.prompts import read_templates
from diffvision.lab.faithfulness.rows import Row
from diffvision.lab.faithfulness.task import faithfulness
from diffvision.lab.language import figures as lab_figures
from diffvision.lab.language.associative_recall import associative_recall, frequent_bigrams
from diffvision.lab.language.attention_mass import attention_mass
from diffvision.lab.language.cache_pruning import asked_twice, cache_pruning
from diffvision.lab.language.label_mapping import label_mapping_tasks
from diffvision.lab.language.lookback import lookback
from diffvision.lab.language.low_bit import SCHEMES, Settings, check_schemes, low_bit
from diffvision.lab.language.many_shot import Task, many_shot, order_robustness
from diffvision.lab.language.outliers import outliers
from diffvision.lab.language.quantization import quantization
from diffvision.lab.language.recall_errors import recall_errors
from diffvision.lab.mathematics.sets import Question, read_questions
from diffvision.lab.mathematics.task import Prompting, mathematics
from diffvision.opening import Model

PROBE = "Probe, 1 2 3: Ein großer Hund. 你好 🙂\n\tdef f(x):"  # distinguishes tokenizers
LENGTHS = (512, 1024, 2048, 4096)


@dataclass
class Work:
    """A model, and what it is evaluated on and how."""

    model: Model
    options: LanguageOptions = field(default_factory=LanguageOptions)
    documents: Sequence[Tensor] = ()  # int64 [N] each
    num_bytes: int | None = None  # of their text
    tasks: Sequence[Task] = ()  # of many-shot learning; none for the synthetic ones
    progress: Progress = unseen
    rows: Sequence[Row] = ()  # of faithfulness
    judges: Sequence[Judge] = ()
    questions: Sequence[Question] = ()  # of math
    folder: Path | None = None  # for what a task writes besides its numbers and picture

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
        """Lengths of contexts with needles; ValueError for one over what the model can read."""
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
        return dataclasses.replace(
            form, haystack=sentences_of("\n".join(read_texts([self.options.haystack], reading_of(self.options))))
        )

    @property
    def contexts(self) -> dict[str, Any]:
        """What all evaluations on contexts with needles or facts are called with."""
        options = self.options
        return {
            "depths": options.depths,
            "samples": options.samples,
            "form": self.form,
            "seed": options.seed,
            "progress": self.progress,
        }


class LanguageEvaluation(NamedTuple):
    """One evaluation in the table `LANGUAGE_EVALUATIONS`."""

    function: Callable[[Work], Mapping[str, PerSample | float]]
    draw: Callable[[figures.Results], Any]  # a matplotlib Figure
    reads: str  # "documents" (text and a tokenizer), "rows" (of faithfulness), "questions" (of math), or "tokenizer"


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


def _associative_recall(work: Work) -> dict[str, float]:
    options = work.options
    frequent = None
    if options.frequent_text is not None:
        tokenizer: Any = work.model.tokenizer
        texts = read_documents([options.frequent_text], tokenizer, reading_of(options))
        token_ids = (tokenizer.encode(text) if isinstance(text, str) else text for text in texts)
        frequent = frequent_bigrams(map(torch.tensor, token_ids), options.frequent_count)
    return associative_recall(
        work.model.module,
        work.documents,
        window=work.window,
        frequent=frequent,
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _needle(work: Work) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for pair in work.options.needles:
        needles, queries = needle_pair(pair)
        accuracy = needle(
            work.model.module,
            work.model.tokenizer,
            lengths=work.lengths,
            needles=needles,
            queries=queries,
            batch_size=work.options.batch_size,
            **work.contexts,
        )
        metrics |= {f"{pair}/{metric}": value for metric, value in accuracy.items()}
    return metrics


def _recall_errors(work: Work) -> dict[str, PerSample]:
    return recall_errors(
        work.model,
        facts=work.options.facts,
        lengths=work.lengths,
        batch_size=work.options.batch_size,
        **work.contexts,
    )


def _lookback(work: Work) -> dict[str, float]:
    return lookback(
        work.model,
        facts=work.options.facts,
        length=min(work.lengths),
        batch_size=work.options.batch_size,
        **work.contexts,
    )


def _faithfulness(work: Work) -> dict[str, PerSample | float]:
    options = work.options
    return faithfulness(
        work.model,
        work.rows,
        work.judges,
        new_tokens=options.new_tokens,
        templates=None if options.prompts is None else read_templates(options.prompts, work.rows),
        chat=options.chat,
        folder=None if work.folder is None else work.folder / "faithfulness" / work.model.name,
        settings=model_identity(work.model),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def _math(work: Work) -> dict[str, PerSample | float]:
    options = work.options
    return mathematics(
        work.model,
        work.questions,
        prompting(options),
        new_tokens=options.new_tokens,
        chat=options.chat,
        folder=None if work.folder is None else work.folder / "math" / work.model.name,
        settings=model_identity(work.model),
        batch_size=options.batch_size,
        progress=work.progress,
    )


def prompting(options: LanguageOptions) -> Prompting:
    """Return how math asks; raise what `read_questions` raises of the examples."""
    examples = () if options.examples is None else read_questions([options.examples])[: options.shown]
    return Prompting(options.template, examples)


def _attention_mass(work: Work) -> dict[str, float]:
    needles, queries = needle_pair(work.options.needles[-1])
    return attention_mass(
        work.model.module,
        work.model.tokenizer,
        length=min(work.lengths),
        needles=needles,
        queries=queries,
        **work.contexts,
    )


def _many_shot(work: Work) -> dict[str, float]:
    options, model = work.options, work.model
    tasks = work.tasks or synthetic_mappings(options)
    shared: dict[str, Any] = {
        "max_length": model.max_length,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "progress": work.progress,
    }
    metrics = many_shot(model.module, model.tokenizer, tasks, shots=options.shots, **shared)
    orders = order_robustness(
        model.module,
        model.tokenizer,
        tasks,
        shots=options.order_shots,
        permutations=options.permutations,
        **shared,
    )
    return metrics | {f"order/{metric}": value for metric, value in orders.items()}


def synthetic_mappings(options: LanguageOptions) -> list[Task]:
    """Return the synthetic tasks of many-shot learning; ValueError if there are too few words for the options."""
    return label_mapping_tasks(options.mappings, classes=options.classes, queries=options.queries, seed=options.seed)


def _outliers(work: Work) -> dict[str, float]:
    return outliers(work.model.module, rows_of(work.documents, work.window), progress=work.progress)


def _needle_accuracy(work: Work) -> dict[str, Callable[[Any], float]] | None:
    """Return what is taken of a model in few bits besides its loss."""
    if not work.options.quantised_needles:
        return None

    def accuracy(model: Any) -> float:
        options = dataclasses.replace(work.options, batch_size=1)  # unequal rows would share a scale with padding
        metrics = _needle(dataclasses.replace(work, options=options, progress=unseen))
        return statistics.fmean([value for key, value in metrics.items() if key.endswith("/accuracy")])

    return {"needle_accuracy": accuracy}


def _quantization(work: Work) -> dict[str, float]:
    return quantization(
        work.model.module,
        rows_of(work.documents, work.window),
        bits=work.options.bits,
        granularity=work.options.granularity,
        also=_needle_accuracy(work),
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def low_bit_settings(options: LanguageOptions) -> Settings:
    """Return the settings of low_bit; ValueError for an unknown scheme or a negative number of tokens."""
    check_schemes(options.schemes or ())
    return Settings(options.granularity, options.recent)


def _low_bit(work: Work) -> dict[str, PerSample | float]:
    return low_bit(
        work.model.module,
        rows_of(work.documents, work.window),
        schemes=work.options.schemes or tuple(SCHEMES),
        settings=low_bit_settings(work.options),
        also=_needle_accuracy(work),
        batch_size=work.options.batch_size,
        progress=work.progress,
    )


def _cache_pruning(work: Work) -> dict[str, PerSample | float]:
    options, longest = work.options, work.model.max_length
    # By default there is room for a question that is asked twice.
    lengths = work.lengths if options.lengths else [length * 7 // 8 for length in work.lengths]
    cells = itertools.product(map(needle_pair, options.needles), lengths, options.depths)
    samples = [
        sample
        for (needles, queries), length, depth in cells
        for sample in needle_samples(
            work.model.tokenizer,
            length=length,
            depth=depth,
            needles=needles,
            queries=queries,
            samples=options.samples,
            form=work.form,
            seed=options.seed,
        )
    ]
    needed = max(len(asked_twice(sample).tokens) for sample in samples)
    if longest is not None and needed > longest:
        raise ValueError(
            f"lengths has {max(lengths)}, and a question that is asked twice makes it {needed}, over the {longest} "
            f"tokens that {work.model.name} reads: give smaller ones"
        )
    return cache_pruning(
        work.model.module,
        rows_of(work.documents, work.window + 1),
        samples,
        continuation=options.continuation,
        methods=options.pruning_methods,
        ratios=options.pruning_ratios,
        window=options.pruning_window,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=work.progress,
    )


LANGUAGE_EVALUATIONS = {
    "perplexity": LanguageEvaluation(_perplexity, figures.perplexity_bars, "documents"),
    "position_nll": LanguageEvaluation(_position_nll, figures.position_curves, "documents"),
    "associative_recall": LanguageEvaluation(_associative_recall, lab_figures.recall_bars, "documents"),
    "needle": LanguageEvaluation(_needle, figures.needle_maps, "tokenizer"),
    "recall_errors": LanguageEvaluation(_recall_errors, lab_figures.error_curves, "tokenizer"),
    "lookback": LanguageEvaluation(_lookback, lab_figures.lookback_bars, "tokenizer"),
    "faithfulness": LanguageEvaluation(_faithfulness, lab_figures.faithfulness_bars, "rows"),
    "math": LanguageEvaluation(_math, lab_figures.math_panels, "questions"),
    "attention_mass": LanguageEvaluation(_attention_mass, lab_figures.attention_bars, "tokenizer"),
    "many_shot": LanguageEvaluation(_many_shot, lab_figures.many_shot_panels, "tokenizer"),
    "outliers": LanguageEvaluation(_outliers, lab_figures.outlier_bars, "documents"),
    "quantization": LanguageEvaluation(_quantization, lab_figures.quantization_curves, "documents"),
    "cache_pruning": LanguageEvaluation(_cache_pruning, lab_figures.pruning_curves, "documents"),
    "low_bit": LanguageEvaluation(_low_bit, lab_figures.low_bit_panels, "documents"),
}


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
