"""The token that ends a document, by tokenizer_config.json or by its usual names, and the chat template next to it.

`diffvision.data.text.tokenizers` has the same rule for training; `data` and `models` do not import each other.
"""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = "chat_template.jinja"  # as transformers 5 writes it
USUAL_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")  # as in data.text.tokenizers


def end_token(tokenizer: Path, vocabulary: Container[str]) -> str | None:
    """Return the token that ends a document, or None if the vocabulary has none of the usual names.

    Args:
        tokenizer: tokenizer.json; the `eos_token` of a tokenizer_config.json next to it comes first.
        vocabulary: the tokens of the tokenizer.

    Raises:
        ValueError: tokenizer_config.json is not JSON.
    """
    token = _content(_settings(tokenizer).get("eos_token"))
    return token or next((name for name in USUAL_NAMES if name in vocabulary), None)


def text_settings(tokenizer: Path) -> dict[str, Any]:
    """Return transformers' settings of a tokenizer's text: its chat template and first token, if it has them.

    Without a template text is only text, as in our tokenizers. With one, transformers writes the names of special
    tokens into the text, and must read them as such.

    Args:
        tokenizer: tokenizer.json, with a tokenizer_config.json and a chat_template.jinja next to it or none.

    Raises:
        ValueError: tokenizer_config.json is not JSON.
    """
    settings, file = _settings(tokenizer), tokenizer.with_name(CHAT_TEMPLATE)
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    text: dict[str, Any] = {"split_special_tokens": True} if template is None else {"chat_template": template}
    if (bos := _content(settings.get("bos_token"))) is not None:
        text["bos_token"] = bos
        if "add_bos_token" in settings:
            text["add_bos_token"] = settings["add_bos_token"]
    return text


def _content(token: Any) -> str | None:
    """Return the text of a token as tokenizer_config.json writes it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _settings(tokenizer: Path) -> dict[str, Any]:
    file = tokenizer.with_name("tokenizer_config.json")
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON, or nested too deeply: {error}") from None
    return values if isinstance(values, dict) else {}
