"""Rows of conversations -> token ids and a bit for each: is it learned. A Jinja template says how they are written.

Rows are read by `documents`, and written as token files by `tokenize`.
"""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from diffvision.data.shards.sample import BadSample
from diffvision.data.text.documents import RowMember, read_json
from diffvision.data.text.templates import compile_template, render
from diffvision.data.text.tokenizers import Tokenizer
from diffvision.files import decoded
from diffvision.tokenizer_settings import read_config, read_special_token, read_template

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PLAIN = """\
{%- for message in messages %}{{ message.content or '' }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}"""
QUESTION = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'Question: ' + (message.content or '') + '\n' + 'Answer:' }}
{%- elif message.role == 'assistant' %}{{ ' ' + (message.content or '') + eos_token }}
{%- else %}{{ (message.content or '') + '\n\n' }}{% endif %}
{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "question": QUESTION, "plain": PLAIN}
"""ChatML; and for models of plain text, with the end of a document after each answer, "Question: ...", a line "Answer:"
and the answer, or contents one directly after another."""

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}
_LAYOUTS = "messages, conversations, or prompt and response (or completion)"
_NOT_READ = ("tools", "documents", "functions", "chat_template_kwargs")
"""The keys of a row that other trainers give to templates."""
_OF_ANSWERS = ("reasoning_content", "reasoning", "thinking", "tool_calls")
_OF_PROMPTS = ("input", "instruction", "context", "history")  # which may be parts of the prompt
_LINKS = ("name", "tool_call_id")  # of a tool's message, which a template may leave out
_NO_SPACE = {"prepend_scheme": "never", "add_prefix_space": False, "prepend": ""}  # as tokenizer.json says it
_NOT_TEXT = "a message whose role or content is not text"
_NO_ANSWER = "no learned token: the row has no answer of the assistant's"
_QUESTION, _ANSWER = "1 + 1?", "It is 2."
_MARK = "\ufdd0"  # Unicode's noncharacter: put into names of special tokens that a row has written out

Messages = list[dict[str, Any]]
"""Of role and content: a text, or for models of images a list of parts, {"type": "image"} and {"type": "text", "text":
...}, as chat templates of transformers take them."""


class Chat:
    """Turns a row of JSON into the tokens of its conversation, up to the end of the assistant's last turn.

    A turn of the assistant is learned: what the template adds to the conversation before it, written with the prompt
    for an answer, when the turn is written too; without white space at its end. Names of special tokens are those
    tokens where the template writes them, and letters in the contents. An answer is encoded as it would be generated:
    after the tokens of its prompt, which never join with it.

    A row whose messages have more than a role and a content, such as tool_calls, is a bad sample; of a tool's result
    the template gets name and tool_call_id too.

    Args:
        tokenizer: of the model.
        template: Jinja, as for transformers' `apply_chat_template`; it can use `bos_token` and `eos_token`.
        name: of the template, in messages.
        bos_token: the token that begins a text, where the template asks for one.

    Raises:
        ValueError: the template is not Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, name: str, bos_token: str = "") -> None:
        compile_template(template, name)
        self.tokenizer, self.template, self.name = tokenizer, template, name
        self._variables = {"tools": None, "documents": None, "bos_token": bos_token, "eos_token": tokenizer.eos}
        tokens = sorted(tokenizer.special_tokens().items(), key=lambda item: -len(item[1].content))
        self._special = {token.content: number for number, token in tokens}
        self._names = re.compile("|".join(re.escape(token.content) for _, token in tokens))
        spaced = [r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip for _, token in tokens]
        self._pattern = re.compile(f"({'|'.join(spaced)})")
        self._after_special = _without_space(tokenizer, "first")
        self._after_text = _without_space(tokenizer, "first", "always")

    def check_training(self, question: Any = _QUESTION, answer: Any = _ANSWER) -> list[int]:
        """Return the ids of a question with its answer, the contents of two messages.

        Raises:
            ValueError: the template does not extend its prefix, so that no token is known to be learned.
        """
        messages = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
        try:
            return self.encode_messages(messages)[0]
        except BadSample as reason:
            raise ValueError(
                f"chat template {self.name} cannot be used ({reason}): give {', '.join(TEMPLATES)} or a file of Jinja"
            ) from None

    def turn_end(self) -> int | None:
        """Return the special token that the template writes after an answer; None if it fails or writes other text."""
        messages = [{"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": _ANSWER}]
        try:
            written = self._render(messages, prompt=False)
        except BadSample:
            return None
        name = self._pattern.match(written.rpartition(_ANSWER)[2].lstrip())
        return None if name is None else self._special[name[0].strip()]

    def encode(self, row: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a row's conversation, and whether each is learned.

        Raises:
            BadSample: the row has none of the layouts, or nothing to learn; the template fails, or does not extend its
                prefix with it.
            BadText: a text that cannot be tokenised.
        """
        return self.encode_messages(read_messages(read_json(row)))

    def encode_messages(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Return what `encode` does, of a conversation in messages."""
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers:
            raise BadSample(_NO_ANSWER)
        marked = self._mark(messages[: answers[-1] + 1])
        ids: list[int] = []
        learned: list[bool] = []
        written = ""
        for number in answers:
            prompt = self._render(marked[:number], prompt=True)
            whole = self._render(marked[: number + 1], prompt=False)
            if not (prompt.startswith(written) and whole.startswith(prompt)):
                raise BadSample(f"the chat template does not extend its prefix at message {number + 1}")
            turn = whole[len(prompt) :].rstrip()
            for text, is_learned in ((prompt, False), (prompt + turn, True)):
                new = self._encode_after(written, text[len(written) :])
                ids += new
                learned += [is_learned] * len(new)
                written = text
        if not any(learned[1:]):
            raise BadSample(_NO_ANSWER)
        return ids, learned

    def _render(self, messages: Messages, *, prompt: bool) -> str:
        return render(self.template, {**self._variables, "messages": messages, "add_generation_prompt": prompt})

    def _mark(self, value: Any) -> Any:
        """Return messages, or a part of them, with `_mark_names` of each text."""
        if isinstance(value, dict):
            return {self._mark_names(key): self._mark(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._mark(one) for one in value]
        return self._mark_names(value) if isinstance(value, str) else value

    def _mark_names(self, text: str) -> str:
        """Return the text with a mark inside each name of a special token."""
        if _MARK in text:
            raise BadSample("text with the noncharacter U+FDD0")
        return self._names.sub(lambda name: name[0][:1] + _MARK + name[0][1:], text)

    def _encode_after(self, written: str, text: str) -> list[int]:
        """Return the ids of a text after another, as the two are encoded together where they do not join.

        Some tokenizers put a space before a text that stands alone, which a continuation must not have; and some
        special tokens have the white space after them.
        """
        since = written[max((name.start() for name in self._pattern.finditer(written)), default=0) :]
        before, both = self._encode(since), self._encode(since + text)
        return both[len(before) :] if both[: len(before)] == before else self._encode(text, self._after_text)

    def _encode(self, text: str, first: Tokenizer | None = None) -> list[int]:
        """Return the ids of a rendered text: special tokens by their names, all else as text.

        Args:
            first: the tokenizer of what is before the first special token; by default that of a whole text.
        """
        ids: list[int] = []
        for number, part in enumerate(self._pattern.split(text)):
            if number % 2:
                ids.append(self._special[part if part in self._special else part.strip()])
            elif part:
                tokenizer = self._after_special if number else first or self.tokenizer
                ids += tokenizer.encode(part.replace(_MARK, ""))
        return ids


class MessageMember(RowMember):
    """Reads the texts of a row's messages as one document, a line for each: text to train a tokenizer on."""

    def _document(self, text: str) -> str:
        messages = read_messages(read_json(text))
        return "\n".join(value for message in messages for key, value in message.items() if key != "role")


def open_chat(chosen: str, tokenizer: Tokenizer, source: str | Path) -> Chat:
    """Return the chat of a template's name or file.

    Args:
        chosen: a key of `TEMPLATES`; "tokenizer", the one that came with it; or a file of Jinja.
        tokenizer: of the model.
        source: where it was loaded from.

    Raises:
        ValueError: there is no such template; see `Chat`.
    """
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    config, names = read_config(folder), ", ".join(TEMPLATES)
    if chosen in TEMPLATES:
        template = TEMPLATES[chosen]
    elif chosen == "tokenizer":
        own = _find_template(folder, config)
        if own is None:
            raise ValueError(f"the tokenizer {source} has no chat template: give {names} or a Jinja file")
        template = own
    elif Path(chosen).is_file():
        template = decoded(Path(chosen).read_bytes(), chosen)
    else:
        raise ValueError(f"chat must be {names}, tokenizer (the one next to it) or a file of Jinja, got {chosen!r}")
    return Chat(tokenizer, template, Path(chosen).name, read_special_token(config, "bos_token") or "")


def find_turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that ends a turn by the chat template next to a loaded tokenizer; None without one."""
    if tokenizer.source is None:
        return None
    try:
        return open_chat("tokenizer", tokenizer, tokenizer.source).turn_end()
    except ValueError:  # it has no template, or none that is Jinja
        return None


def read_messages(record: Any) -> Messages:
    """Return the messages of a row: the first of the layouts that it has.

    The layouts are `messages` of role and content (TRL, axolotl); `conversations` of from and value (ShareGPT,
    OpenThoughts); and `prompt` with `response` or `completion`. A `system` or `system_prompt` next to them is the first
    message.

    Raises:
        BadSample: it has none of them, or a message is not text.
    """
    turns = read_turns(record)
    if not all(isinstance(value, str) for turn in turns for value in turn.values()):
        raise BadSample(_NOT_TEXT)
    return turns


def read_turns(record: Any) -> Messages:
    """Return the messages of a row as `read_messages` does, with contents of any kind.

    Raises:
        BadSample: it has none of the layouts, or more than roles and contents for a template.
    """
    row = record if isinstance(record, dict) else {}
    if unread := next((key for key in _NOT_READ if row.get(key) not in (None, "", "[]", [], {})), None):
        raise BadSample(f"{unread!r} in a row, which is not read: write it into the messages")
    answer_key = next((key for key in ("response", "completion") if key in row), None)
    if isinstance(row.get("messages"), list):
        turns = [_turn(message, "role", "content") for message in row["messages"]]
    elif isinstance(row.get("conversations"), list):
        turns = [_turn(message, "from", "value") for message in row["conversations"]]
    elif "prompt" in row and answer_key is not None:
        if unread := next((key for key in (*_OF_PROMPTS, *_OF_ANSWERS) if row.get(key)), None):
            raise BadSample(f"{unread!r} next to a prompt, which is not read: write the row as messages")
        turns = [{"role": "user", "content": row["prompt"]}, {"role": ASSISTANT, "content": row[answer_key]}]
    else:
        raise BadSample(f"a row of another layout: it needs {_LAYOUTS}")
    system = {"role": "system", "content": row.get("system") or row.get("system_prompt")}
    return [system, *turns] if system["content"] and system not in turns else turns


def _turn(message: Any, role: str, content: str) -> dict[str, Any]:
    """Return a message of role and content; raise BadSample where it has something else that is not empty."""
    if not (isinstance(message, dict) and isinstance(message.get(role), str)):
        raise BadSample(_NOT_TEXT)
    speaker = message[role]
    own = (role, content)
    others = {key: value for key, value in message.items() if key not in own and value not in (None, "", [], {})}
    if unread := next((key for key in others if speaker != "tool" or key not in _LINKS), None):
        raise BadSample(f"{unread[:40]!r} in a message, which is not read: write it into the content")
    return {"role": _ROLES.get(speaker, speaker), "content": message.get(content), **others}


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return a tokenizer's chat template, the default one if there are several; None if there is none."""
    template = read_template(folder, config)
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _without_space(tokenizer: Tokenizer, *schemes: str) -> Tokenizer:
    """Return the tokenizer without the space that it puts before a text, where it does so by one of the schemes."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        scheme = part.get("prepend_scheme", "always")
        return part | {key: value for key, value in _NO_SPACE.items() if key in part and scheme in schemes}

    settings = tokenizer.settings()
    parts = {name: settings.get(name) for name in ("normalizer", "pre_tokenizer")}
    edited = json.loads(json.dumps(parts), object_hook=changed)
    if edited == parts:
        return tokenizer
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(settings | edited)), tokenizer.eos)
