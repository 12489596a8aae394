"""Many-shot in-context learning: accuracy by the number of demonstrations, and how much their order matters.

arXiv 2410.05258 section 3.5: classification by a context of (text, label) pairs, decoding constrained to the labels
(the protocol of Bertsch et al., arXiv 2405.00200), and best minus worst accuracy over 10 orders of the same
demonstrations, arranged at random or alternately by class.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from diffvision.data.datasets.mapping_text import KINDS, TEMPLATE, draw_mapping
from diffvision.evaluation.language.needle import start_tokens
from diffvision.evaluation.language.scoring import Progress, logits_at, padded_batches, silent
from diffvision.models.modes import evaluating

_DEMONSTRATIONS = 256  # of a synthetic task


class Example(NamedTuple):
    """A text and its class."""

    text: str
    label: str


@dataclass(frozen=True)
class Task:
    """Demonstrations to draw from, and the queries.

    Raises:
        ValueError: fewer than two classes; a query of a class without demonstrations.
    """

    demonstrations: Sequence[Example]
    queries: Sequence[Example]
    template: str = "Text: {text}\nLabel: {label}\n\n"  # the label after a space, then a line's end
    name: str = "task"

    def __post_init__(self) -> None:
        if len(self.labels) < 2:
            raise ValueError(f"{self.name} must have two classes or more, got {self.labels}")
        if strange := sorted({query.label for query in self.queries} - set(self.labels)):
            raise ValueError(f"{self.name} asks for {', '.join(strange[:5])} without a demonstration: add one")

    @property
    def labels(self) -> list[str]:
        """The classes, sorted."""
        return sorted({example.label for example in self.demonstrations})

    def prompt(self, demonstrations: Sequence[Example], query: Example) -> str:
        """Return demonstrations and a query, up to where its label would come."""
        before = self.template.partition(" {label}")[0]
        return "".join(self.template.format(text=text, label=label) for text, label in demonstrations) + before.format(
            text=query.text
        )


def many_shot(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    shots: Sequence[int] = (1, 4, 16, 64),
    max_length: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the accuracy over all queries of all tasks, by the number of demonstrations before each.

    Demonstrations are sampled once per task, class-balanced where possible, and shuffled. Smaller shot counts are
    prefixes of larger ones.

    Args:
        model: see `scoring`.
        tokenizer: encode(text) -> list[int], and a start_id or eos_id to begin with.
        shots: numbers of demonstrations.
        max_length: what the model can read; a prompt over it is refused before anything runs.

    Returns:
        {"accuracy/<shots>": ...}, and chance, the mean of 1 / classes.

    Raises:
        ValueError: a task with fewer demonstrations than shots; a prompt that is too long; labels that the tokenizer
            does not set apart.
    """
    drawn = [(task, draw_demonstrations(task, max(shots), seed)) for task in tasks]
    prompts = {
        count: [(task, encode_prompts(task, examples[:count], tokenizer, max_length)) for task, examples in drawn]
        for count in shots
    }
    metrics = {}
    for count in progress(list(shots), "many-shot"):
        is_right = [judge_answers(model, task, rows, tokenizer, batch_size) for task, rows in prompts[count]]
        metrics[f"accuracy/{count}"] = _mean([right for of_task in is_right for right in of_task])
    return metrics | {"chance": _mean([1 / len(task.labels) for task in tasks])}


def order_robustness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    shots: int = 64,
    permutations: int = 10,
    max_length: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, float]:
    """Return the best minus the worst accuracy over orders of the same demonstrations, the mean over tasks.

    Args:
        permutations: orders of each arrangement, "random" and "alternating" (one of each class in turn, the classes and
            the demonstrations within them in a new order each time).
        others: as `many_shot`.

    Returns:
        For each arrangement "<arrangement>/spread", "/mean", "/best", "/worst" (each the mean over tasks).
    """
    if permutations < 2:
        raise ValueError(f"permutations must be at least 2 for a spread, got {permutations}")
    metrics: dict[str, float] = {}
    drawn = [(task, draw_demonstrations(task, shots, seed)) for task in tasks]
    for arrangement, arrange in ARRANGEMENTS.items():
        by_order = []  # of each order, the accuracy of each task
        for number in progress(range(permutations), f"{arrangement} orders"):
            accuracies = []
            for task, examples in drawn:
                order = arrange(examples, random.Random(f"order {seed} {number}"))
                prompts = encode_prompts(task, order, tokenizer, max_length)
                accuracies.append(_mean(judge_answers(model, task, prompts, tokenizer, batch_size)))
            by_order.append(accuracies)
        by_task = list(zip(*by_order, strict=True))
        metrics |= {
            f"{arrangement}/spread": _mean([max(values) - min(values) for values in by_task]),
            f"{arrangement}/mean": _mean([_mean(values) for values in by_task]),
            f"{arrangement}/best": _mean([max(values) for values in by_task]),
            f"{arrangement}/worst": _mean([min(values) for values in by_task]),
        }
    return metrics


def shuffle(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Return the examples in random order."""
    return draw.sample(list(examples), len(examples))


def alternate(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Return one example of each class in turn while they last; classes, and examples of a class, in random order."""
    classes: dict[str, list[Example]] = defaultdict(list)
    for example in shuffle(examples, draw):
        classes[example.label].append(example)
    rounds = max(len(members) for members in classes.values())
    return [members[turn] for turn in range(rounds) for members in classes.values() if turn < len(members)]


ARRANGEMENTS: dict[str, Callable[[Sequence[Example], random.Random], list[Example]]] = {
    "random": shuffle,
    "alternating": alternate,
}


def draw_demonstrations(task: Task, shots: int, seed: int) -> list[Example]:
    """Return `shots` of the task's demonstrations, as even among its classes as they are, in random order."""
    if not 1 <= shots <= len(task.demonstrations):
        raise ValueError(
            f"{shots} shots of {task.name}, which has {len(task.demonstrations)} demonstrations: ask for 1 to as many"
        )
    draw = random.Random(f"demonstrations {seed} {task.name}")
    return shuffle(alternate(task.demonstrations, draw)[:shots], draw)


def encode_prompts(
    task: Task, demonstrations: Sequence[Example], tokenizer: Any, max_length: int | None = None
) -> list[list[int]]:
    """Return tokens of the demonstrations and each query, checked to leave room for a label in the context."""
    start = start_tokens(tokenizer)
    prompts = [[*start, *tokenizer.encode(task.prompt(demonstrations, query))] for query in task.queries]
    longest = max(map(len, prompts)) + max(map(len, label_tokens(task, tokenizer)))
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"{len(demonstrations)} shots of {task.name} with a label are {longest} tokens, over the model's "
            f"{max_length}: ask for fewer shots"
        )
    return prompts


def judge_answers(
    model: Any, task: Task, prompts: Sequence[Sequence[int]], tokenizer: Any, batch_size: int = 8
) -> list[bool]:
    """Return whether the label that constrained greedy decoding writes after each query's prompt is the right one."""
    picked = constrained_choices(model, prompts, label_tokens(task, tokenizer), batch_size=batch_size)
    return [task.labels[choice] == query.label for choice, query in zip(picked, task.queries, strict=True)]


def label_tokens(task: Task, tokenizer: Any) -> list[list[int]]:
    """Return tokens of each label as written after a query, with the line's end ("sea" differs from "sea lion").

    Raises:
        ValueError: the tokenizer makes one token of a label and the text before it.
    """
    before = task.template.partition(" {label}")[0].rpartition("}")[2]  # such as "\nLabel:"
    prefix = tokenizer.encode(before)
    rows = []
    for label in task.labels:
        tokens = tokenizer.encode(f"{before} {label}\n")
        if tokens[: len(prefix)] != prefix:
            raise ValueError(
                f"the tokenizer joins {before!r} and a part of the label {label!r} into one token: use other labels"
            )
        rows.append(tokens[len(prefix) :])
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def label_mapping_tasks(count: int, *, classes: int = 4, queries: int = 16, seed: int = 0) -> list[Task]:
    """Return tasks that need no dataset: the made-up name that each kind of word has in a context.

    The words that are asked for are never among the 256 demonstrations, so the answer must come from the kind of the
    word.

    Args:
        count: how many tasks.
        classes: kinds of words in each, 2 to as many as there are.
        queries: words that are asked for in each, all different.

    Raises:
        ValueError: classes out of range; more queries than leave each kind a word for the demonstrations.
    """
    if not 2 <= classes <= len(KINDS):
        raise ValueError(f"classes must be 2 to {len(KINDS)}, the kinds of words there are, got {classes}")
    most = classes * (min(len(words.split()) for words in KINDS.values()) - 1)
    if queries > most:
        raise ValueError(f"queries must be at most {most} for {classes} classes, got {queries}")
    asked_of_each = -(-queries // classes)
    tasks = []
    for number in range(count):
        draw = random.Random(f"mapping {seed} {number}")
        names = draw_mapping(draw, classes)
        words = {kind: KINDS[kind].split() for kind in names}
        for of_kind in words.values():
            draw.shuffle(of_kind)
        in_turn = list(itertools.islice(itertools.cycle(names), _DEMONSTRATIONS))
        tasks.append(
            Task(
                [Example(draw.choice(words[kind][asked_of_each:]), names[kind]) for kind in in_turn],
                [Example(words[kind][index // classes], names[kind]) for index, kind in enumerate(in_turn[:queries])],
                TEMPLATE,
                f"mapping {seed}/{number}",
            )
        )
    return tasks


def constrained_choices(
    model: Any, prompts: Sequence[Sequence[int]], choices: Sequence[Sequence[int]], *, batch_size: int = 8
) -> list[int]:
    """Return the choice that constrained greedy decoding writes after each prompt.

    At every step it takes the likeliest of the tokens that still lead to a choice.

    Args:
        prompts: tokens, at least one each.
        choices: tokens of each choice.

    Raises:
        ValueError: two choices are equal, or one begins another, so that decoding could not tell them apart.
    """
    kept = sorted(tuple(choice) for choice in choices)
    for first, second in itertools.pairwise(kept):
        if second[: len(first)] == first:
            raise ValueError(
                f"the choice of tokens {list(first)} begins the choice {list(second)}: end each with a token that is "
                "in none of them, such as a line's end"
            )
    written: list[list[int]] = [[] for _ in prompts]
    left = [list(range(len(choices))) for _ in prompts]
    while pending := [number for number, choices_left in enumerate(left) if len(choices_left) > 1]:
        allowed = {n: sorted({choices[c][len(written[n])] for c in left[n]}) for n in pending}
        unsure = [n for n in pending if len(allowed[n]) > 1]
        picked = {n: allowed[n][0] for n in pending if len(allowed[n]) == 1}
        picked |= _likeliest(model, {n: [*prompts[n], *written[n]] for n in unsure}, allowed, batch_size)
        for n, token in picked.items():
            left[n] = [c for c in left[n] if choices[c][len(written[n])] == token]
            written[n].append(token)
    return [choices_left[0] for choices_left in left]


def _likeliest(
    model: Any, rows: dict[int, list[int]], allowed: dict[int, list[int]], batch_size: int
) -> dict[int, int]:
    """Return for each row the likeliest of its allowed tokens after its last token."""
    keys, picked = list(rows), {}
    with evaluating(model):
        for numbers, tokens, lengths in padded_batches([rows[key] for key in keys], batch_size):
            logits = logits_at(model, tokens, lengths[:, None] - 1)[:, 0].cpu()
            for row, number in enumerate(numbers):
                candidates = allowed[keys[number]]
                picked[keys[number]] = candidates[int(logits[row, candidates].argmax())]
    return picked
