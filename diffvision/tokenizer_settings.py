"""What lies next to a tokenizer.json: which tokens begin and end a text, and the template of its chats."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from diffvision.files import decoded

CONFIG = "tokenizer_config.json"  # where Hugging Face says which of the special tokens ends a text
CHAT_TEMPLATE = "chat_template.jinja"  # as transformers 5 writes it
USUAL_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


def read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json in a folder, empty where there is none.

    Raises:
        ValueError: it is not JSON.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON, or nested too deeply: {error}") from None
    return config if isinstance(config, dict) else {}


def read_special_token(config: dict[str, Any], name: str) -> str | None:
    """Return a special token such as bos_token of `read_config`; None where it is not a text."""
    value = config.get(name)
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def read_template(folder: Path, config: dict[str, Any]) -> Any:
    """Return a tokenizer's chat template, a list of dictionaries if there are several by name; None without one."""
    file = folder / CHAT_TEMPLATE
    return decoded(file.read_bytes(), file) if file.is_file() else config.get("chat_template")


def find_end(vocabulary: Container[str], config: dict[str, Any]) -> str | None:
    """Return the token that ends a document: the one that the settings name, or one with a usual name, or None."""
    named = read_special_token(config, "eos_token")
    return named or next((name for name in USUAL_ENDS if name in vocabulary), None)


def text_settings(folder: Path) -> dict[str, Any]:
    """Return transformers' settings of a tokenizer's text: its chat template and first token, if it has them.

    Without a template text is only text, as in our tokenizers. With one, transformers writes the names of special
    tokens into the text, and must read them as such.

    Raises:
        ValueError: tokenizer_config.json is not JSON.
    """
    config = read_config(folder)
    template = read_template(folder, config)
    text: dict[str, Any] = {"split_special_tokens": True} if template is None else {"chat_template": template}
    if (bos := read_special_token(config, "bos_token")) is not None:
        text["bos_token"] = bos
        if "add_bos_token" in config:
            text["add_bos_token"] = config["add_bos_token"]
    return text
