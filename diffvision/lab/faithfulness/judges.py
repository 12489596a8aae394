"""The judges of faithfulness by name: rules, an entailment classifier, and language models here or at a server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

import torch

from diffvision.data.shards.remote import Patience
from diffvision.evaluation.cache import model_digest
from diffvision.lab.faithfulness.options import JudgeOptions
from diffvision.lab.faithfulness.rows import Row
from diffvision.lab.faithfulness.rules import Judgement, contains, grounded, normalised
from diffvision.lab.faithfulness.server import SYSTEM, ChatServer, NoReply
from diffvision.lab.faithfulness.verdicts import prompt_of, read_prompt, spans_of, verdict_of
from diffvision.lab.language.chats import asking, chat_of, has_template, template_text
from diffvision.lab.language.generations import continued, room_for
from diffvision.models.modes import evaluating
from diffvision.opening import Model, open_model
from diffvision.opening.texts import open_classifier

Pair = tuple[Row, str]
CHUNK, OVERLAP = 400, 50  # tokens of a document that an entailment classifier reads at a time
SPARE = 8  # tokens by which a chunk that is decoded and encoded again may grow
ENTAILED = 0.5


class Judge(Protocol):
    """Decides whether outputs are faithful.

    Attributes:
        name: in `JUDGES`.
        identity: plain values that its judgements depend on.
        batch: pairs that it takes at a time.
    """

    name: str
    identity: Any
    batch: int

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Judgement]]:
        """Yield the index and the judgement of each pair of row and output, in any order."""


class Rule:
    """A judge that needs no model."""

    batch = 64

    def __init__(self, name: str, rule: Callable[[Row, str], Judgement]) -> None:
        self.name, self.identity, self.rule = name, name, rule

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Judgement]]:
        """Apply the rule to each pair."""
        yield from ((index, self.rule(row, output)) for index, (row, output) in enumerate(pairs))


class Entailment:
    """A classifier of premise and hypothesis: the least entailed sentence by its best chunk of the document.

    Source: SummaC's zero-shot model (Laban et al. 2022, arXiv 2111.09525).

    Raises:
        ValueError: no classifier of sequences there, or one without a single label for entailment.
    """

    name, batch = "nli", 1

    def __init__(self, path: str, device: str) -> None:
        module, self.tokenizer = open_classifier(path)
        self.module, self.device = module.to(device).eval(), device
        labels = {int(number): label for number, label in module.config.id2label.items()}
        entailing = [number for number, label in labels.items() if label.lower().startswith("entail")]
        if len(entailing) != 1:
            raise ValueError(
                f"judge.nli is {path}, whose labels are {', '.join(labels.values())}: give a classifier with one label "
                "that begins with 'entail'"
            )
        self.label = entailing[0]
        limits = (self.tokenizer.model_max_length, getattr(module.config, "max_position_embeddings", None), 512)
        self.limit = min(limit for limit in limits if limit)
        self.identity = ["nli", model_digest(module), CHUNK, OVERLAP, SPARE]

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Judgement]]:
        """Score the sentences of each output against the chunks of its document."""
        for index, (row, output) in enumerate(pairs):
            sentences = [sentence for sentence in re.split(r"(?<=[.!?])\s+|\n+", output) if sentence.strip()]
            ids = self.tokenizer.encode(row.document, add_special_tokens=False)
            scores = [
                max(self._entailed(chunk, sentence) for chunk in self._chunks(ids, sentence)) for sentence in sentences
            ]
            least = min(range(len(scores)), key=scores.__getitem__)
            low = tuple(sentence for sentence, score in zip(sentences, scores, strict=True) if score < ENTAILED)
            yield index, Judgement(scores[least] >= ENTAILED, f"P(entail) is at least {scores[least]:.3f}", low)

    def _chunks(self, ids: list[int], sentence: str) -> list[str]:
        """Return parts of a document's tokens that the classifier can read with a sentence behind them."""
        size = min(CHUNK, max(self.limit // 2, self.limit - len(self.tokenizer.encode("", sentence)) - SPARE))
        overlap = min(OVERLAP, size // 2)
        starts = range(0, max(1, len(ids) - overlap), size - overlap)
        return [self.tokenizer.decode(ids[start : start + size]) for start in starts]

    def _entailed(self, premise: str, hypothesis: str) -> float:
        # Only the sentence is ever cut: one beyond half of what the classifier reads.
        cut = {"truncation": "only_second", "max_length": self.limit}
        inputs = self.tokenizer(premise, hypothesis, **cut, return_tensors="pt")
        with torch.no_grad():
            logits = self.module(**inputs.to(self.device)).logits[0]
        return logits.float().softmax(-1)[self.label].item()


class Server:
    """A language model at a server."""

    name = "llm"

    def __init__(self, server: ChatServer, parallel: int, template: str | None = None) -> None:
        self.server, self.batch, self.template = server, parallel, template
        self.identity = ["llm", server.url, server.model, template]

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Judgement]]:
        """Ask about all pairs at once; what was answered is yielded before a failure is raised."""
        failure: NoReply | None = None
        with ThreadPoolExecutor(max(1, len(pairs))) as pool:
            asked = {
                pool.submit(self.server.reply, prompt_of(row, output, self.template), f"row {row.id!r}"): index
                for index, (row, output) in enumerate(pairs)
            }
            for answer in as_completed(asked):
                try:
                    yield asked[answer], _judgement(answer.result())
                except NoReply as error:
                    failure = error
        if failure is not None:
            raise failure


class InProcess:
    """A language model on this machine, asked through its chat template where it has one."""

    name, batch = "hf", 4

    def __init__(self, model: Model, new_tokens: int, template: str | None = None) -> None:
        if model.tokenizer is None:
            raise ValueError(f"judge.hf is {model.name}, which came without a tokenizer: put its files next to it")
        room_for(model, new_tokens)
        self.model, self.new_tokens, self.template = model, new_tokens, template
        self.identity = ["hf", model_digest(model.module), new_tokens, template, template_text(model, "tokenizer")]
        self._chat = chat_of(model, "tokenizer") if has_template(model) else None

    def judge(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Judgement]]:
        """Generate a reply about each pair; one that is too long for the model is undecided."""
        prompts = {index: self._tokens(prompt_of(row, output, self.template)) for index, (row, output) in
                   enumerate(pairs)}  # fmt: skip
        for index, tokens in list(prompts.items()):
            if self.model.max_length is not None and len(tokens) + self.new_tokens > self.model.max_length:
                reads = f"{self.model.name} reads {self.model.max_length} tokens, reply included"
                yield index, Judgement(None, f"the question has {len(tokens)} tokens, and {reads}")
                del prompts[index]
        if prompts:
            with evaluating(self.model.module):
                replies = continued(self.model, list(prompts.values()), max_new_tokens=self.new_tokens)
            for index, reply in zip(prompts, replies, strict=True):
                yield index, _judgement(self.model.tokenizer.decode(reply))

    def _tokens(self, prompt: str) -> list[int]:
        if self._chat is None:
            return asking(self.model, None)(prompt)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        try:
            return self._chat(messages)
        except ValueError:  # as some have no role of a system
            return self._chat(messages[1:])


def _judgement(reply: str) -> Judgement:
    return Judgement(verdict_of(reply), reply, tuple(spans_of(reply)))


# ---- the table -----------------------------------------------------------------------------------------------------


def _nli(options: JudgeOptions, device: str, replies: Path | None) -> Judge:
    return Entailment(_require_option(options, "nli", "a transformers classifier, such as a folder"), device)


def _llm(options: JudgeOptions, device: str, replies: Path | None) -> Judge:
    model = _require_option(options, "llm", "the model's name at the server")
    url = options.url or os.environ.get("OPENAI_BASE_URL")
    if not url:
        raise ValueError("judge.by has llm, and there is no server: give judge.url, or set OPENAI_BASE_URL")
    patience = Patience(read=options.timeout, tries=options.tries, total=options.tries * (options.timeout + 60.0))
    server = ChatServer(url, model, os.environ.get(options.key_env), patience, replies)
    return Server(server, options.parallel, _template(options))


def _hf(options: JudgeOptions, device: str, replies: Path | None) -> Judge:
    model = open_model(_require_option(options, "hf", "a language model"), device=device).for_text()
    return InProcess(model, options.new_tokens, _template(options))


JUDGES: dict[str, Callable[[JudgeOptions, str, Path | None], Judge]] = {
    "contains": lambda options, device, replies: Rule("contains", contains),
    "grounded": lambda options, device, replies: Rule("grounded", grounded),
    "nli": _nli,
    "llm": _llm,
    "hf": _hf,
}


def open_judges(options: JudgeOptions, rows: Sequence[Row], device: str, replies: Path | None = None) -> list[Judge]:
    """Return the judges of the options.

    Args:
        options: which, and how they are asked.
        rows: what they will judge.
        device: of those with a model here.
        replies: folder of the replies of a server; None keeps none.

    Raises:
        ValueError: an unknown judge, one without what it needs, or rows that it cannot judge.
    """
    for name in options.names:
        if name not in JUDGES:
            raise ValueError(f"judge.by has {name!r}: choose among {', '.join(JUDGES)}")
    if "contains" in options.names and (
        bare := next((row for row in rows if not any(map(normalised, row.answers))), None)
    ):
        raise ValueError(
            f"row {bare.id!r} has no answers for the judge contains (articles and punctuation do not count): give "
            "some, or another judge"
        )
    return [JUDGES[name](options, device, replies) for name in options.names]


def _require_option(options: JudgeOptions, name: str, what: str) -> str:
    value = getattr(options, name)
    if value is None:
        raise ValueError(f"judge.by has {name}, and judge.{name} is missing: give {what}")
    return value


def _template(options: JudgeOptions) -> str | None:
    return None if options.prompt is None else read_prompt(options.prompt)
