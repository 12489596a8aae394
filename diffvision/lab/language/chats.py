"""How a model is asked: by plain text that it continues, or as a chat, by a template that comes with its tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffvision.data.shards.sample import BadSample
from diffvision.data.text.chat import (
    TEMPLATES,
    Chat,
    Conversations,
    Messages,
    find_template,
    open_chat,
    read_template,
    refuse_unwritten,
    write_conversations,
)
from diffvision.evaluation.language.needle import start_tokens
from diffvision.lab.language.generations import tokenizer_of
from diffvision.opening import Model

_ANSWER = "an answer"
Ask = Callable[[str], list[int]]
"""Returns the tokens with which a model is asked about a text, up to its answer."""


def asking(model: Model, chat: str | None) -> Ask:
    """Return the function that makes a model's prompt of a text.

    Args:
        model: with its tokenizer.
        chat: None for plain text behind the token that begins one; else the text is a user's message, written by a
            template as `chat_of` takes it.

    Raises:
        ValueError: no tokenizer, or as `chat_of`.
    """
    tokenizer = tokenizer_of(model)
    if chat is None:
        return lambda text: [*start_tokens(tokenizer), *tokenizer.encode(text)]
    written = chat_of(model, chat)
    return lambda text: written([{"role": "user", "content": text}])


def has_template(model: Model) -> bool:
    """Return whether a chat template came with a model's tokenizer."""
    return template_text(model, "tokenizer") is not None


def template_text(model: Model, chosen: str | None) -> str | None:
    """Return the text of a template that `chat_of` takes; None where none is chosen, or none came with the tokenizer.

    Raises:
        ValueError: it is neither "tokenizer" nor a template's name or file.
    """
    if chosen is None or chosen in TEMPLATES:
        return None if chosen is None else TEMPLATES[chosen]
    if chosen != "tokenizer":
        if not Path(chosen).is_file():
            raise ValueError(f"no chat template {chosen!r}: give tokenizer, {', '.join(TEMPLATES)}, or a file of Jinja")
        return read_template(Path(chosen))
    if (theirs := _of_transformers(model)) is not None:
        return theirs.get_chat_template() if theirs.chat_template else None
    source = model.tokenizer.source
    return None if source is None else find_template(source)


def chat_of(model: Model, chosen: str) -> Callable[..., list[int]]:
    """Return the function that writes messages, up to the assistant's answer, by a model's chat template.

    It takes messages, and what `data.text.chat.read_context` returns for their row.

    Args:
        model: with its tokenizer.
        chosen: "tokenizer", the template that came with it; a name of `data.text.chat.TEMPLATES`, or a file of Jinja.

    Raises:
        ValueError: no tokenizer, no such template, or it fails; also of the function that is returned.
    """
    tokenizer_of(model)
    write: Callable[[Messages, Mapping[str, Any]], list[int]]
    if (theirs := _of_transformers(model)) is None:
        write = _ours(model, chosen).prompt
    elif (template := template_text(model, chosen)) is None:
        raise ValueError(
            f"the tokenizer of {model.name} has no chat template: give {', '.join(TEMPLATES)}, or a file of Jinja"
        )
    else:

        def write(messages: Messages, context: Mapping[str, Any]) -> list[int]:
            by_template = functools.partial(_write, theirs, template)
            refuse_unwritten(by_template, messages, context, template)
            (text,) = by_template([(messages, True)], context)
            return list(theirs(text, add_special_tokens=False)["input_ids"])

    def written(messages: Messages, context: Mapping[str, Any] = {}) -> list[int]:
        try:
            return write(messages, context)
        except BadSample as reason:
            raise ValueError(f"chat {chosen} cannot ask {model.name}: {reason}") from reason

    return written


def ends_of(model: Model, chosen: str | None) -> tuple[str, ...]:
    """Return what a template writes directly after an answer, such as "<|im_end|>", where a model's answer ends.

    Nothing, if the template ends answers with a new line at most, or refuses a question with its answer and nothing
    else, or none is chosen.
    """
    if chosen is None:
        return ()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    theirs = _of_transformers(model)
    try:
        if theirs is None:
            text = _ours(model, chosen).render(turns, prompt=False)
        else:
            (text,) = _write(theirs, template_text(model, chosen) or "", [(turns, False)], {})
    except BadSample:  # as where it wants a system's message
        return ()
    end = text.rpartition(_ANSWER)[2].strip().partition("\n")[0]
    return (end,) if end else ()


def _ours(model: Model, chosen: str) -> Chat:
    return open_chat(chosen, model.tokenizer, model.tokenizer.source or model.name)


def _write(theirs: Any, template: str, conversations: Conversations, context: Mapping[str, Any]) -> list[str]:
    """Return what `apply_chat_template` of transformers' tokenizer does, within the limits of `render`."""
    return write_conversations(template, conversations, theirs.special_tokens_map, context, clock=True)


def _of_transformers(model: Model) -> Any:
    """Return transformers' tokenizer; None for ours."""
    return getattr(model.tokenizer, "tokenizer", None)
